"""Mixture of experts: the tiny policy, the names its weights travel under, and what engines say about routing."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from safetensors.torch import load_file  # noqa: E402

from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.engines.launch import EngineSpec, command  # noqa: E402
from miles_plugin.engines.routed_experts import Routing, check_routed_experts, decode, read_routing  # noqa: E402
from miles_plugin.engines.sglang import EngineError  # noqa: E402
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402
from miles_plugin.weight_transfer import sources  # noqa: E402
from miles_plugin.weight_transfer.sources import full_parameters  # noqa: E402
from mooncake_store.errors import ConfigError  # noqa: E402

ROUTING = Routing(num_layers=3, topk=2)


def response(experts: np.ndarray) -> dict[str, Any]:
    return {"id": "r1", "routed_experts": base64.b64encode(experts.tobytes()).decode()}


@pytest.mark.parametrize("num_experts", [0, 4])
def test_weights_leave_under_the_names_and_shapes_of_the_checkpoint(num_experts: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = build_model(32, 2, seed=0, num_experts=num_experts)
    made = {name: tensor.clone() for name, tensor in full_parameters(model, torch.bfloat16)}
    save_checkpoint(model, build_tokenizer(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for sent in (made, dict(full_parameters(loaded, torch.bfloat16))):
        assert set(sent) == set(stored)
        assert all(torch.equal(sent[name], stored[name]) for name in stored)
    assert ("model.layers.1.mlp.experts.3.gate_proj.weight" in made) == (num_experts == 4)
    assert not any(name.endswith("experts.gate_up_proj") for name in made)


def test_a_part_of_a_checkpoint_weight_is_not_sent_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_one_name(_model: object, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"fused.weight": next(iter(tensors.values()))}

    monkeypatch.setattr(sources, "revert_weight_conversion", all_of_one_name)
    with pytest.raises(NotImplementedError, match=r"only a part of checkpoint weight fused\.weight"):
        list(full_parameters(build_model(32, 1, seed=0), torch.bfloat16))


def test_every_layer_of_the_tiny_policy_routes_each_token_to_two_experts(tmp_path: Path) -> None:
    model = build_model(32, 3, seed=0, num_experts=4)
    routed = model(torch.arange(2, 9)[None], output_router_logits=True).router_logits
    assert [tuple(logits.shape) for logits in routed] == [(7, 4)] * 3
    save_checkpoint(model, build_tokenizer(), tmp_path)
    assert read_routing(tmp_path) == ROUTING


def test_one_expert_is_refused() -> None:
    with pytest.raises(ConfigError, match="tiny_num_experts=1"):
        build_model(32, 1, seed=0, num_experts=1)


def test_experts_of_a_dense_policy_are_refused_and_it_is_named(tmp_path: Path) -> None:
    save_checkpoint(build_model(32, 1, seed=0), build_tokenizer(), tmp_path / "dense")
    save_checkpoint(build_model(32, 1, seed=0, num_experts=2), build_tokenizer(), tmp_path / "moe")
    asked = ["--return-routed-experts", "--hf-checkpoint"]
    with pytest.raises(ConfigError, match=r"dense 'qwen3' \(its config\.json"):
        check_routed_experts(load_config([*asked, str(tmp_path / "dense")]))
    with pytest.raises(ConfigError, match="tiny_num_experts=0"):
        check_routed_experts(load_config(["--return-routed-experts"]))
    for allowed in (
        [*asked, str(tmp_path / "moe")],
        ["--return-routed-experts", "--tiny-num-experts", "2"],
        ["--hf-checkpoint", str(tmp_path / "dense")],
    ):
        check_routed_experts(load_config(allowed))


def test_the_job_that_is_shipped_trains_experts_and_returns_them() -> None:
    config = load_config(["--config", str(Path(__file__).parents[3] / "configs" / "moe.yaml")])
    assert config.tiny_num_experts > 2
    assert config.return_routed_experts
    check_routed_experts(config)


def test_routed_experts_are_decoded_in_their_shape() -> None:
    experts = np.random.default_rng(0).integers(0, 8, (5, 3, 2), dtype=np.int32)
    decoded = decode(response(experts), 6, ROUTING)
    assert decoded.dtype == np.int32
    assert np.array_equal(decoded, experts)
    assert decode(response(experts[:0]), 1, ROUTING).shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("meta_info", "expected"),
    [
        ({"id": "r1"}, "r1 has no routed_experts; the server needs --enable-return-routed-experts"),
        ({"id": "r1", "routed_experts": None}, "has no routed_experts"),
        (response(np.zeros((4, 3, 2), np.int32)), r"not int32 \[5, 3, 2\]"),
        (response(np.zeros((5, 3, 2), np.int64)), r"not int32 \[5, 3, 2\]"),
        ({"id": "r1", "routed_experts": "AAA"}, "not int32"),
        ({"id": "r1", "routed_experts": "AAAA"}, "not int32"),
        ({"id": "r1", "routed_experts": [[0]]}, "not int32"),
    ],
)
def test_routed_experts_of_another_shape_are_an_engine_error(meta_info: dict[str, Any], expected: str) -> None:
    with pytest.raises(EngineError, match=expected):
        decode(meta_info, 6, ROUTING)


@pytest.mark.parametrize("gpus", [(), (0, 1)])
def test_an_engine_records_experts_only_when_asked(gpus: tuple[int, ...]) -> None:
    flag = "--enable-return-routed-experts"
    spec = EngineSpec(Path("/m"), "127.0.0.1", gpus, seed=0, log=Path("log"))
    assert flag not in command(spec, (1, 2, 3))
    assert flag in command(
        EngineSpec(Path("/m"), "127.0.0.1", gpus, 0, Path("log"), return_routed_experts=True), (1, 2, 3)
    )
