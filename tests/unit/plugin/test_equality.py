"""Checksums that the trainer expects of engines: those of fused and cut weights, whatever order the weights come in."""

import gc
import hashlib
import random
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `train` is not installed")

from miles_plugin.weight_transfer.equality import Expected, WeightsDiffer, checksum_of, compare  # noqa: E402
from miles_plugin.weight_transfer.layout import ARCHITECTURES, Layout  # noqa: E402
from mooncake_store.errors import ConfigError  # noqa: E402
from tests.unit.plugin.test_layout import BF16, make_config  # noqa: E402


def random_weights(layout: Layout) -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(BF16) for name, shape in layout.weights.items()}


def expect(layout: Layout, weights: Iterable[tuple[str, Any]]) -> list[dict[str, str]]:
    expected = Expected(layout)
    for name, tensor in weights:
        expected.add(name, tensor)
    return expected.checksums()


def sha256(tensor: Any) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def test_a_rank_holds_its_rows_of_each_projection_and_zeros_for_padding() -> None:
    layout = Layout(make_config("Qwen2ForCausalLM", num_key_value_heads=1), 2, BF16)
    weights = random_weights(layout)
    expected = expect(layout, weights.items())
    block = "model.layers.1."
    q, k, v = (weights[f"{block}self_attn.{part}_proj.bias"] for part in "qkv")
    gate, up, down = (weights[f"{block}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    for rank, held in enumerate(expected):
        heads, rows = slice(24 * rank, 24 * rank + 24), slice(12 * rank, 12 * rank + 12)
        assert held[f"{block}self_attn.qkv_proj.bias"] == sha256(torch.cat([q[heads], k, v]))
        assert held[f"{block}mlp.gate_up_proj.weight"] == sha256(torch.cat([gate[rows], up[rows]]))
        assert held[f"{block}mlp.down_proj.weight"] == sha256(down[:, rows])
        assert held["model.norm.weight"] == sha256(weights["model.norm.weight"])
        padded = torch.zeros(128, 24, dtype=BF16)
        padded[:70] = weights["lm_head.weight"]
        assert held["lm_head.weight"] == sha256(padded[64 * rank : 64 * rank + 64])


def test_experts_are_stacked() -> None:
    layout = Layout(make_config("Qwen3MoeForCausalLM"), 2, BF16)
    weights = random_weights(layout)
    rows = slice(18, 36)
    experts = [f"model.layers.0.mlp.experts.{expert}" for expert in range(3)]
    w13 = torch.stack(
        [torch.cat([weights[f"{each}.{part}_proj.weight"][rows] for part in ("gate", "up")]) for each in experts]
    )
    w2 = torch.stack([weights[f"{each}.down_proj.weight"][:, rows] for each in experts])
    held = expect(layout, weights.items())[1]
    assert held["model.layers.0.mlp.experts.w13_weight"] == sha256(w13)
    assert held["model.layers.0.mlp.experts.w2_weight"] == sha256(w2)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("tp", [1, 2])
def test_the_order_of_weights_does_not_matter(architecture: str, tp: int) -> None:
    layout = Layout(make_config(architecture), tp, BF16)
    weights = list(random_weights(layout).items())
    expected = expect(layout, weights)
    assert [held.keys() for held in expected] == [layout.parameters.keys()] * tp
    random.Random(0).shuffle(weights)
    assert expect(layout, weights) == expected


def test_weights_are_not_kept_and_what_is_held_is_one_fused_parameter_at_most() -> None:
    layout = Layout(make_config("Qwen3MoeForCausalLM"), 2, BF16)
    bound = 2 * 2 * max(parameter.numel for parameter in layout.parameters.values())

    def tensors() -> list[Any]:
        return [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == BF16]

    others = {id(each): each for each in tensors()}  # of other tests; kept, so that no new one has the id of an old one

    def held() -> int:
        return sum(each.nbytes for each in tensors() if id(each) not in others)

    expected = Expected(layout)
    most = 0
    for name, shape in layout.weights.items():
        tensor = torch.zeros(shape, dtype=BF16)
        kept = weakref.ref(tensor)
        expected.add(name, tensor)
        del tensor
        assert kept() is None, name
        most = max(most, held())
    assert 0 < most <= bound
    assert held() == 0
    expected.checksums()


def test_an_update_that_is_no_whole_model_proves_nothing() -> None:
    layout = Layout(make_config("Qwen3ForCausalLM"), 2, BF16)
    weights = random_weights(layout)
    norm = weights.pop("model.norm.weight")
    with pytest.raises(ConfigError, match=r"1 weights .*the first is model\.norm\.weight"):
        expect(layout, weights.items())
    weights["model.norm.weight"] = norm
    with pytest.raises(ConfigError, match=r"model\.norm\.weight came twice"):
        expect(layout, [*weights.items(), ("model.norm.weight", norm)])
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is torch\.float32.*bfloat16"):
        expect(layout, [("model.norm.weight", norm.float())])
    with pytest.raises(ConfigError, match="no place for it"):
        expect(layout, [("model.visual.weight", norm)])


def test_a_tied_output_layer_may_come_and_is_nothing_of_the_engine() -> None:
    layout = Layout(make_config("LlamaForCausalLM", tie_word_embeddings=True), 2, BF16)
    weights = random_weights(layout)
    tied = ("lm_head.weight", weights["model.embed_tokens.weight"])
    assert expect(layout, [*weights.items(), tied]) == expect(layout, weights.items())


def test_equal_weights_are_counted_and_different_ones_named() -> None:
    expected = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert compare(expected, [{**held, "rotary_emb.cos_sin_cache": "9"} for held in expected], "http://e:1") == 4
    with pytest.raises(WeightsDiffer, match=r"http://e:1 .*1 of 4 tensors differ: b on rank 1 is 5, not 4"):
        compare(expected, [expected[0], {"a": "3", "b": "5"}], "http://e:1")
    with pytest.raises(WeightsDiffer, match="b on rank 0 is not reported, not 2"):
        compare(expected, [{"a": "1"}, expected[1]], "http://e:1")
    with pytest.raises(WeightsDiffer, match="a_scale on rank 0 is no parameter that the trainer knows"):
        compare(expected, [{**expected[0], "a_scale": "0"}, expected[1]], "http://e:1")
    with pytest.raises(WeightsDiffer, match="reports 1 ranks, where 2 are expected"):
        compare(expected, expected[:1], "http://e:1")
    many = {f"p{index}": "1" for index in range(9)}
    with pytest.raises(WeightsDiffer, match=r"9 of 9 tensors differ: p0 .*p4 on rank 0 is 2, not 1, and 4 more"):
        compare([many], [dict.fromkeys(many, "2")], "http://e:1")


def test_engines_on_cuda_need_the_hash_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.memory.gpu_tensor_hash", None)
    assert checksum_of("cpu")(torch.zeros(1)) == hashlib.sha256(bytes(4)).hexdigest()[:16]
    with pytest.raises(ConfigError, match="install sglang on the trainers"):
        checksum_of("cuda")
