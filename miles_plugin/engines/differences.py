"""What keeps a SGLang server that runs already from serving a job's policy, by what it says of itself."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of a model's config: the shapes of its weights, then what else decides what they compute.
_MODEL_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings", "attention_bias", "mlp_bias", "num_experts", "moe_intermediate_size",
    "decoder_sparse_step", "mlp_only_layers",
    "num_experts_per_tok", "norm_topk_prob", "hidden_act", "rms_norm_eps", "rope_parameters", "sliding_window",
    "quantization_config",
)  # fmt: skip
# Of a server's own settings: its memory is registered with the Transfer Engine.
SEED_FLAG = "remote_instance_weight_loader_start_seed_via_transfer_engine"
# SGLang's other names of a dtype.
_OTHERWISE = "use --update-weight-transfer-mode broadcast"
_DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class Expected:
    """What every engine must be.

    checkpoint: of the policy, a Hugging Face directory. ranks: tensor-parallel size. mode: of weight transfer.
    routed_experts: it must be able to return them. device: of the trainers, "cuda" or "cpu"; None when not known.
    """

    checkpoint: Path
    ranks: int
    mode: str = "broadcast"
    routed_experts: bool = False
    device: str | None = None


@dataclass(frozen=True)
class Answers:
    """What one server said of itself.

    server, model: of /server_info and /model_info. unregistered: ranks whose memory the Transfer Engine may not write.
    """

    server: dict[str, Any]
    model: dict[str, Any]
    unregistered: list[int]

    def lacking(self) -> list[str]:
        """What every SGLang server says, and this one does not."""
        lacking = [name for name in ("tp_size", "dtype", "version") if name not in self.server]
        return lacking + [name for name in ("model_path", "architectures") if name not in self.model]


def differences(answers: Answers, expected: Expected) -> Iterator[str]:
    """All that keeps an engine from being used: what it is, what is expected, by which setting, what to do."""
    server, model = answers.server, answers.model
    ours, theirs = _read_config(expected.checkpoint), model_config(answers)
    if (split := model.get("disaggregation_mode")) not in (None, "null"):
        yield (
            f"disaggregation_mode={split}, expected null: of a prefill/decode-split pair each engine does half of a "
            "request; restart it without --disaggregation-mode"
        )
    yield from _model_differences(answers, expected.checkpoint, ours, theirs)
    yield from _number_differences(answers, theirs or ours)
    if (ranks := server["tp_size"]) != expected.ranks:
        yield (
            f"tp_size={ranks}, expected {expected.ranks} (rollout_num_gpus_per_engine={expected.ranks}); restart it "
            f"with --tp-size {expected.ranks}, or set --rollout-num-gpus-per-engine to what all engines have"
        )
    for name in ("dp_size", "pp_size", *(["ep_size"] if expected.mode == "p2p" else [])):
        if (size := server.get(name, 1)) != 1:
            yield (
                f"{name}={size}, expected 1: update_weight_transfer_mode={expected.mode} reaches the ranks of plain "
                f"tensor parallelism only; restart it without --{name.replace('_', '-')}"
            )
    if expected.routed_experts and not server.get("enable_return_routed_experts"):
        yield (
            "enable_return_routed_experts=False, expected True (return_routed_experts=True); restart it with "
            "--enable-return-routed-experts"
        )
    device = server.get("device")
    if expected.mode == "broadcast" and expected.device is not None and device not in (None, expected.device):
        yield (
            f"device={device}, expected {expected.device}: trainers and engines form one process group, of NCCL with "
            "GPUs and of gloo without; run both on the same kind"
        )
    if expected.mode != "broadcast" and server.get("enable_lora"):
        yield (
            f"enable_lora=True, expected False (update_weight_transfer_mode={expected.mode}): with adapters they lie "
            f"under other names; restart it without --enable-lora, or {_OTHERWISE}"
        )
    if expected.mode == "p2p":
        yield from _p2p_differences(answers)


def _p2p_differences(answers: Answers) -> Iterator[str]:
    cause = "(update_weight_transfer_mode=p2p)"
    if not answers.server.get(SEED_FLAG):
        yield (
            f"{SEED_FLAG}=False, expected True {cause}: its memory is not registered; restart it with "
            f"--{SEED_FLAG.replace('_', '-')} and a free --engine-info-bootstrap-port, or {_OTHERWISE}"
        )
    for rank in answers.unregistered:
        yield (
            f"rank {rank} says no registered memory, expected {cause}; look in its log for the Transfer Engine (its "
            f"protocol is MOONCAKE_PROTOCOL there, its address SGLANG_HOST_IP), or {_OTHERWISE}"
        )


def _model_differences(answers: Answers, checkpoint: Path, ours: Any, theirs: Any) -> Iterator[str]:
    said = answers.model
    pairs = {
        "architectures": (said["architectures"], ours.architectures),
        "model_type": (said.get("model_type", ours.model_type), ours.model_type),
    }
    if theirs is not None and said["architectures"] == ours.architectures:
        pairs |= {name: (_field(theirs, name), _field(ours, name)) for name in _MODEL_FIELDS}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        yield (
            f"model {said['model_path']} has {_listed({name: has for name, (has, _) in differing.items()})}, expected "
            f"{_listed({name: wanted for name, (_, wanted) in differing.items()})} (hf_checkpoint="
            f"{checkpoint}); restart it with --model-path of that checkpoint, or name its checkpoint"
        )


def _number_differences(answers: Answers, config: Any) -> Iterator[str]:
    from miles_plugin.training.policy import WEIGHT_DTYPE

    wanted = str(WEIGHT_DTYPE).removeprefix("torch.")
    has = _dtype(answers, config)
    if has != wanted:
        shown = f"dtype={answers.server['dtype']}" + (f" ({has})" if answers.server["dtype"] == "auto" else "")
        yield f"{shown}, expected {wanted}, which the trainers send; restart it with --dtype {wanted}"
    if quantization := answers.server.get("quantization"):
        yield (
            f"quantization={quantization}, expected none: the trainers send {wanted}; restart it without --quantization"
        )


def _dtype(answers: Answers, config: Any) -> str:
    """The dtype that the engine serves. By "auto" SGLang means the checkpoint's, and float16 for float32."""
    given = str(answers.server["dtype"]).lower()
    if given != "auto":
        return _DTYPES.get(given, given)
    own = str(config.dtype or "float32").removeprefix("torch.")
    return "float16" if own == "float32" else own


def model_config(answers: Answers) -> Any:
    """The transformers config of the engine's model; None where its directory cannot be read here."""
    path = Path(str(answers.model["model_path"]))
    try:
        overrides = json.loads(answers.server.get("json_model_override_args") or "{}")
        return _read_config(path, **overrides) if (path / "config.json").is_file() else None
    except (OSError, TypeError, ValueError):
        return None


def _read_config(checkpoint: Path, **overrides: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(checkpoint, **overrides)


def _field(config: Any, name: str) -> Any:
    return getattr(config.get_text_config(), name, None)


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
