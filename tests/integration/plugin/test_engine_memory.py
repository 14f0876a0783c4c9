"""Real engines, tensor-parallel too, hold what the table of `layout.py` says, where it says, and prove it."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from miles_plugin.engines.launch import EngineSpec, start_engines
from miles_plugin.engines.sglang import SGLangEngine
from miles_plugin.training.tiny_policy import build_tokenizer, save_checkpoint
from miles_plugin.weight_transfer.equality import Expected, WeightsDiffer, compare
from miles_plugin.weight_transfer.layout import Layout, LayoutMismatch, check_registered, check_served
from miles_plugin.weight_transfer.sources import full_parameters
from tests.integration.plugin.test_sglang_cpu import GREEDY, PROMPTS, ROUNDING, hugging_face_gap

pytestmark = pytest.mark.integration
HOST = "127.0.0.2"  # what listens on the engine's own address only is found there, as between hosts
BF16 = torch.bfloat16
# No size is a multiple of 64 but the hidden one, and the vocabulary is padded; one key-value head is on both ranks.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 44, "moe_intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    architecture: str
    tp: int
    changes: dict[str, Any]

    def __str__(self) -> str:
        return "-".join(
            [self.architecture, f"tp{self.tp}", *(f"{name}={value}" for name, value in self.changes.items())]
        )


FAST = [Case("Qwen3Moe", 2, {})]
SLOW = [
    Case("Qwen3", 2, {"num_key_value_heads": 1, "attention_bias": True}),
    Case("Llama", 1, {"tie_word_embeddings": True}),
    Case("Llama", 2, {"attention_bias": True, "num_key_value_heads": 1}),
    Case("Qwen2", 1, {}),
    Case("Qwen2", 2, {"tie_word_embeddings": True}),
    Case("Qwen2", 2, {"num_key_value_heads": 1}),
    Case("Qwen3", 1, {"tie_word_embeddings": True}),
    Case("Qwen3Moe", 1, {"attention_bias": True}),
    Case("Qwen3Moe", 2, {"num_key_value_heads": 1}),
]


def make_model(case: Case, directory: Path, seed: int) -> Any:
    """A model none of whose weights are as initialised, the norms and biases neither, in `directory`."""
    tokenizer = build_tokenizer()
    ids = {"vocab_size": len(tokenizer) + 5, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = getattr(transformers, f"{case.architecture}Config")(**{**SIZES, **ids, **case.changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{case.architecture}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter), alpha=0.2)
    save_checkpoint(model, tokenizer, directory)
    return model


def expected_of(model: Any, layout: Layout) -> list[dict[str, str]]:
    expected = Expected(layout)
    for name, tensor in full_parameters(model, BF16):
        expected.add(name, tensor)
    return expected.checksums()


def write(engine: SGLangEngine, layout: Layout, model: Any, sender: Any) -> None:
    """Put every part of every weight where the table says, over the Transfer Engine."""
    targets = [engine.registered_memory(rank) for rank in range(layout.tp)]
    for name, tensor in full_parameters(model, BF16):
        for (session, memory), placed in zip(targets, layout.placements(name, tensor.shape), strict=True):
            for placement in placed:
                part = placement.part(tensor).contiguous()
                address, _, width = memory[placement.parameter]
                assert sender.register_memory(part.data_ptr(), part.nbytes) == 0
                target = address + placement.offset * width
                assert sender.batch_transfer_sync_write(session, [part.data_ptr()], [target], [part.nbytes]) == 0
                sender.unregister_memory(part.data_ptr())


@pytest.fixture(scope="module")
def sender() -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_FORCE_TCP", "1")
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_an_engine_proves_what_was_loaded_and_what_was_written(case: Case, tmp_path: Path, sender: Any) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    seed = zlib.crc32(str(case).encode()) % 1000
    models = [make_model(case, first, seed), make_model(case, second, seed + 1)]
    layout = Layout(transformers.AutoConfig.from_pretrained(first), case.tp, BF16)
    loaded, written = (expected_of(model, layout) for model in models)
    spec = EngineSpec(first, HOST, (), 0, tmp_path / "sglang.log", cpu_ranks=case.tp, p2p_protocol="tcp")
    (server,) = start_engines([spec])
    try:
        engine = server.engine
        check_served(layout, engine.server_info(), engine.url)
        for rank in range(case.tp):
            check_registered(layout, rank, engine.registered_memory(rank)[1])

        tensors = case.tp * len(layout.parameters)
        assert compare(loaded, engine.checksums(), engine.url) == tensors
        with pytest.raises(WeightsDiffer, match=f"{engine.url} .* of {tensors} tensors differ"):
            compare(written, engine.checksums(), engine.url)
        assert max(hugging_face_gap(first, engine.generate(PROMPTS, GREEDY))) < ROUNDING

        engine.pause("retract")
        engine.flush_cache()
        engine.begin_update()
        write(engine, layout, models[1], sender)
        engine.end_update()
        engine.resume()
        assert compare(written, engine.checksums(), engine.url) == tensors
        assert max(hugging_face_gap(second, engine.generate(PROMPTS, GREEDY))) < ROUNDING

        other = Layout(transformers.AutoConfig.from_pretrained(first), 3 - case.tp, BF16)
        with pytest.raises(LayoutMismatch, match=f"tp_size={case.tp}"):
            check_served(other, engine.server_info(), engine.url)
        with pytest.raises(LayoutMismatch, match=r"elements, where \d+ "):
            check_registered(other, 0, engine.registered_memory(0)[1])
    finally:
        server.stop()
