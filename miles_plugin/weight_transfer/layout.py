"""Where the weights of a checkpoint lie in the memory of a tensor-parallel SGLang engine.

Hugging Face has one tensor for each projection; SGLang 0.5.23 fuses those that read the same input into one parameter
and cuts it across its ranks. `ARCHITECTURES` says how, as a table: a `Rule` for each weight, whose shape is written in
`DIMENSIONS`, which know how ranks share them out (`dimensions.py`). To add an architecture is to add its rules:

    q_proj [query, hidden], k_proj [key_value, hidden], v_proj [key_value, hidden]  ->  qkv_proj
    o_proj [hidden, query]                                                          ->  o_proj

A rank's part of `qkv_proj` is its rows of q, then of k, then of v; its part of `o_proj` is its columns. Whatever a
rank takes of one weight is contiguous in its own memory, so one narrow of the source and one write place it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import torch

from miles_plugin.weight_transfer.dimensions import DIMENSIONS, Config, Dimension, Uneven
from mooncake_store.errors import ConfigError

USE_BROADCAST = "use --update-weight-transfer-mode broadcast, where the engine places weights itself"


class LayoutMismatch(ConfigError):
    """An engine's memory is not what the table says of its model: quantized, another model, another parallelism."""


@dataclass(frozen=True)
class Placement:
    """Which part of a weight lies where on one rank.

    parameter: SGLang's name. offset: of its first element, in elements. axis, start, length: the part of the weight,
    `length` of `axis` from `start`; all of it where axis is None. The part is contiguous in the parameter.
    """

    parameter: str
    offset: int
    axis: int | None
    start: int
    length: int

    def part(self, weight: torch.Tensor) -> torch.Tensor:
        """A view of what of `weight` belongs there; it need not be contiguous."""
        return weight if self.axis is None else weight.narrow(self.axis, self.start, self.length)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the engine, alike on every rank.

    shape: on one rank, padding included. weights: Hugging Face names of its parts, in the order of its memory.
    """

    shape: tuple[int, ...]
    weights: tuple[str, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def has_attention_bias(config: Config) -> bool:
    return bool(getattr(config, "attention_bias", False) or getattr(config, "bias", False))


def is_tied(config: Config) -> bool:
    return bool(config.tie_word_embeddings)


def is_untied(config: Config) -> bool:
    return not is_tied(config)


def always(_config: Config) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """One weight of a checkpoint, and the parameter it is the next part of.

    weight: its name, where `{layer}` and `{expert}` stand for every number of one. shape: names of `DIMENSIONS`.
    into: SGLang's name if it is another; with experts the parameter is [experts, ...], and an expert has its parts
    together. when: for which configs there is such a weight.
    """

    weight: str
    shape: tuple[str, ...]
    into: str = ""
    when: Callable[[Config], bool] = always


@dataclass(frozen=True)
class Unplaced:
    """Weights that checkpoints have and engines do not. pattern: as of a shell."""

    pattern: str
    why: str
    when: Callable[[Config], bool] = always


@dataclass(frozen=True)
class Architecture:
    """refused: what a config may say that SGLang's class of this architecture does not follow, and what it does."""

    rules: Sequence[Rule]
    refused: Sequence[tuple[Callable[[Config], bool], str]] = ()


UNPLACED = (
    Unplaced("*rotary_emb.inv_freq", "computed by the engine"),
    Unplaced("lm_head.weight", "the engine reads the embedding in its place", is_tied),
)

_LAYER = "model.layers.{layer}"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_EXPERT = f"{_MLP}.experts.{{expert}}"

_OUTSIDE = (
    Rule("model.embed_tokens.weight", ("vocabulary", "hidden")),
    Rule("model.norm.weight", ("hidden",)),
    Rule("lm_head.weight", ("vocabulary", "hidden"), when=is_untied),
    Rule(f"{_LAYER}.input_layernorm.weight", ("hidden",)),
    Rule(f"{_LAYER}.post_attention_layernorm.weight", ("hidden",)),
)
_PROJECTIONS = (
    Rule(f"{_ATTENTION}.q_proj.weight", ("query", "hidden"), f"{_ATTENTION}.qkv_proj.weight"),
    Rule(f"{_ATTENTION}.k_proj.weight", ("key_value", "hidden"), f"{_ATTENTION}.qkv_proj.weight"),
    Rule(f"{_ATTENTION}.v_proj.weight", ("key_value", "hidden"), f"{_ATTENTION}.qkv_proj.weight"),
    Rule(f"{_ATTENTION}.o_proj.weight", ("hidden", "query")),
)
_QKV_BIAS = (
    Rule(f"{_ATTENTION}.q_proj.bias", ("query",), f"{_ATTENTION}.qkv_proj.bias"),
    Rule(f"{_ATTENTION}.k_proj.bias", ("key_value",), f"{_ATTENTION}.qkv_proj.bias"),
    Rule(f"{_ATTENTION}.v_proj.bias", ("key_value",), f"{_ATTENTION}.qkv_proj.bias"),
)
_BIAS_IF_SAID = (
    *(replace(rule, when=has_attention_bias) for rule in _QKV_BIAS),
    # Ranks sum up their shares of the output, and the first one adds the bias: each holds all of it.
    Rule(f"{_ATTENTION}.o_proj.bias", ("hidden",), when=has_attention_bias),
)
_HEAD_NORMS = (Rule(f"{_ATTENTION}.q_norm.weight", ("head",)), Rule(f"{_ATTENTION}.k_norm.weight", ("head",)))
_DENSE = (
    Rule(f"{_MLP}.gate_proj.weight", ("mlp", "hidden"), f"{_MLP}.gate_up_proj.weight"),
    Rule(f"{_MLP}.up_proj.weight", ("mlp", "hidden"), f"{_MLP}.gate_up_proj.weight"),
    Rule(f"{_MLP}.down_proj.weight", ("hidden", "mlp")),
)
_EXPERTS = (
    Rule(f"{_MLP}.gate.weight", ("experts", "hidden")),
    Rule(f"{_EXPERT}.gate_proj.weight", ("expert_mlp", "hidden"), f"{_MLP}.experts.w13_weight"),
    Rule(f"{_EXPERT}.up_proj.weight", ("expert_mlp", "hidden"), f"{_MLP}.experts.w13_weight"),
    Rule(f"{_EXPERT}.down_proj.weight", ("hidden", "expert_mlp"), f"{_MLP}.experts.w2_weight"),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        (*_OUTSIDE, *_PROJECTIONS, *_BIAS_IF_SAID, *_DENSE),
        [(lambda config: config.mlp_bias, "mlp_bias=True: SGLang has no such bias and serves without it")],
    ),
    "Qwen2ForCausalLM": Architecture((*_OUTSIDE, *_PROJECTIONS, *_QKV_BIAS, *_DENSE)),
    "Qwen3ForCausalLM": Architecture((*_OUTSIDE, *_PROJECTIONS, *_BIAS_IF_SAID, *_HEAD_NORMS, *_DENSE)),
    "Qwen3MoeForCausalLM": Architecture(
        (*_OUTSIDE, *_PROJECTIONS, *_BIAS_IF_SAID, *_HEAD_NORMS, *_EXPERTS),
        [
            (is_tied, "tie_word_embeddings=True: SGLang keeps an output layer of its own, which nothing would fill"),
            (
                lambda config: config.mlp_only_layers or config.decoder_sparse_step != 1,
                "mlp_only_layers or decoder_sparse_step names layers without experts: SGLang gives all layers experts",
            ),
        ],
    ),
}


@dataclass(frozen=True)
class _Slot:
    """Where a weight lies, on every rank alike; which part of it, the dimensions say."""

    parameter: str
    offset: int
    shape: tuple[Dimension, ...]


class Layout:
    """The memory of one engine of `tp` ranks: plain tensor parallelism, unquantized.

    Args:
        config: the model's `PreTrainedConfig`, read from its checkpoint.
        tp: ranks of the engine.
        dtype: of all its parameters.

    Attributes:
        parameters: by SGLang's name.
        weights: shapes by Hugging Face name, all that an update has to bring.

    Raises:
        ConfigError: the architecture is not in the table, SGLang does not follow its config, or `tp` does not divide
            what is shared out.
    """

    def __init__(self, config: Config, tp: int, dtype: torch.dtype) -> None:
        self.tp, self.dtype = tp, dtype
        self._architecture, rules = _rules(config)
        self._unplaced = [entry.pattern for entry in UNPLACED if entry.when(config)]
        self.parameters: dict[str, Parameter] = {}
        self._slots: dict[str, _Slot] = {}
        names = {name for rule in rules for name in rule.shape}
        dimensions = {name: DIMENSIONS[name](config, tp) for name in sorted(names)}
        by_parameter: dict[str, list[Rule]] = {}
        for rule in rules:
            by_parameter.setdefault(rule.into or rule.weight, []).append(rule)
        for template, parts in by_parameter.items():
            for layer in range(config.num_hidden_layers if "{layer}" in template else 1):
                experts = config.num_experts if "{expert}" in parts[0].weight else None
                self._add(template.format(layer=layer), parts, layer, experts, dimensions)
        self.weights = {name: tuple(axis.size for axis in slot.shape) for name, slot in self._slots.items()}

    def _add(
        self, parameter: str, parts: list[Rule], layer: int, experts: int | None, dimensions: Mapping[str, Dimension]
    ) -> None:
        weights: list[str] = []
        offset = rows = 0
        for expert in range(experts or 1):
            rows = 0
            for rule in parts:
                name = rule.weight.format(layer=layer, expert=expert)
                shape = tuple(dimensions[axis] for axis in rule.shape)
                self._slots[name] = _Slot(parameter, offset, shape)
                weights.append(name)
                offset += prod(axis.held for axis in shape)
                rows += shape[0].held
        fused = (rows, *(axis.held for axis in shape[1:]))
        self.parameters[parameter] = Parameter(fused if experts is None else (experts, *fused), tuple(weights))

    def placements(self, weight: str, shape: Sequence[int]) -> list[tuple[Placement, ...]]:
        """By rank: where the weight's parts lie. Empty where a rank holds none of it, or no engine does.

        Raises:
            ConfigError: no such weight in the table, or it has another shape.
        """
        slot = self._slots.get(weight)
        if slot is None:
            if any(fnmatchcase(weight, pattern) for pattern in self._unplaced):
                return [()] * self.tp
            raise ConfigError(
                f"weight {weight}: {self._architecture} has no place for it in SGLang's memory; known are "
                f"{', '.join(sorted({rule.weight for rule in ARCHITECTURES[self._architecture].rules}))}; "
                f"{USE_BROADCAST}"
            )
        if tuple(shape) != self.weights[weight]:
            raise ConfigError(
                f"weight {weight} has shape {list(shape)}, where the model's config makes it "
                f"{list(self.weights[weight])}; the trainer's model is not the one that the engines serve"
            )
        cut = next((axis for axis, dimension in enumerate(slot.shape) if not dimension.is_whole), None)
        if cut is None:
            return [(Placement(slot.parameter, slot.offset, None, 0, slot.shape[0].size),)] * self.tp
        return [
            (Placement(slot.parameter, slot.offset, cut, start, length),) if length else ()
            for start, length in slot.shape[cut].spans
        ]


def check_registered(layout: Layout, rank: int, memory: Mapping[str, tuple[int, int, int]]) -> None:
    """Raise LayoutMismatch, naming the first difference, unless an engine's memory is what the table says.

    Args:
        rank: of the engine, for the message.
        memory: by SGLang's name (address, elements, bytes per element), as the engine registered it.
    """

    def mismatch(name: str, problem: str) -> LayoutMismatch:
        return LayoutMismatch(
            f"engine rank {rank}, parameter {name}: {problem}; the engine is quantized, serves another model or is "
            f"split in another way than {layout.tp} tensor-parallel ranks; {USE_BROADCAST}"
        )

    for name, parameter in layout.parameters.items():
        if name not in memory:
            raise mismatch(name, "the engine has not registered it")
        _, elements, width = memory[name]
        if elements != parameter.numel:
            raise mismatch(name, f"{elements} elements, where {parameter.numel} {list(parameter.shape)} are expected")
        if width != layout.dtype.itemsize:
            raise mismatch(name, f"{width} bytes per element, where {layout.dtype} has {layout.dtype.itemsize}")
    if unknown := sorted(memory.keys() - layout.parameters.keys()):
        raise mismatch(unknown[0], "no weight of the model lies there")


# Server settings under which memory is not what the table says, though names and sizes may agree. What only a server's
# environment says (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED, off by default, interleaves w13) only checksums can tell.
_SERVED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "pp_size": ((1,), "each stage of a pipeline holds some layers only"),
    "ep_size": ((1,), "with expert parallelism each rank holds some experts only, and may move them"),
    "dp_size": ((1,), "its copies register their memory under the same ranks"),
    "moe_dense_tp_size": ((None,), "dense layers are split in another way than the rest"),
    "enable_dp_attention": ((False,), "attention is not split as the rest is"),
    "enable_dp_lm_head": ((False,), "the output layer is not split as the rest is"),
    "quantization": ((None,), "weights are packed and have scales beside them"),
    "moe_runner_backend": (("auto", "triton"), "other kernels want their experts transposed, swapped or in blocks"),
}


def check_served(layout: Layout, server_info: Mapping[str, object], engine: str) -> None:
    """Raise LayoutMismatch, naming the setting, for an engine that was started in a way the table does not cover.

    Args:
        server_info: as `SGLangEngine.server_info` gives it.
        engine: its address, for the message.
    """
    wanted = {**_SERVED, "tp_size": ((layout.tp,), "the weights are cut for as many ranks as the job asks for")}
    for setting, (allowed, why) in wanted.items():
        value = server_info.get(setting, allowed[0])
        if value not in allowed:
            raise LayoutMismatch(
                f"engine {engine} was started with {setting}={value}: {why}; it may be "
                f"{' or '.join(map(str, allowed))}, or {USE_BROADCAST}"
            )


def check_ranks(config: Config, tp: int) -> None:
    """Raise Uneven unless SGLang can share out a model of `ARCHITECTURES` to `tp` ranks; of others nothing is known.

    The message has all that cannot be shared out, and how many ranks are allowed. On a CPU SGLang would pad most of it,
    by heads that compute nothing; that is refused, too.
    """
    if not (problems := _unshared(config, tp)):
        return
    allowed = [ranks for ranks in range(1, config.num_attention_heads + 1) if not _unshared(config, ranks)]
    raise Uneven(f"{'; '.join(problems)}: of this model {', '.join(map(str, allowed))} ranks are allowed")


def _unshared(config: Config, tp: int) -> list[str]:
    """What of the model cannot be shared out to `tp` ranks."""
    architecture = ARCHITECTURES.get(_name(config))
    names = {axis for rule in architecture.rules for axis in rule.shape} if architecture is not None else ()
    problems = []
    for name in sorted(names):
        try:
            DIMENSIONS[name](config, tp)
        except Uneven as error:
            problems.append(str(error))
    return problems


def _name(config: Config) -> str:
    return str(next(iter(config.architectures or ()), None))


def _rules(config: Config) -> tuple[str, list[Rule]]:
    """The architecture's name, and its rules that hold for this config."""
    name = _name(config)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {name}: where its weights lie in SGLang's memory is not known; known are "
            f"{', '.join(sorted(ARCHITECTURES))} (miles_plugin/weight_transfer/layout.py); {USE_BROADCAST}"
        )
    architecture = ARCHITECTURES[name]
    for refuses, why in architecture.refused:
        if refuses(config):
            raise ConfigError(f"{name} with {why}; {USE_BROADCAST}")
    return name, [rule for rule in architecture.rules if rule.when(config)]
