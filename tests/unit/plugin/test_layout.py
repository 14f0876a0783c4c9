"""The table from checkpoints to SGLang's memory: every element has one place, and what it does not cover is refused."""

from math import prod
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `train` is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from miles_plugin.weight_transfer.layout import (  # noqa: E402
    ARCHITECTURES,
    Layout,
    LayoutMismatch,
    Placement,
    check_ranks,
    check_registered,
    check_served,
)
from miles_plugin.weight_transfer.sources import full_parameters  # noqa: E402
from mooncake_store.errors import ConfigError  # noqa: E402

BF16 = torch.bfloat16


def make_config(architecture: str, **changes: Any) -> Any:
    """A config of 12 query and 6 key-value heads of 4 channels, and a vocabulary that is padded."""
    fields = {
        "architectures": [architecture],
        "vocab_size": 70,
        "hidden_size": 24,
        "intermediate_size": 24,
        "moe_intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 4,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    return getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**{**fields, **changes})


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Any, int]:
    architecture = draw(st.sampled_from(sorted(ARCHITECTURES)))
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    kv_heads = draw(st.sampled_from([heads for heads in (1, 2, 3, 4, 6, 8, 12) if heads % tp == 0 or tp % heads == 0]))
    heads = kv_heads * tp * draw(st.integers(1, 2))
    dense = architecture != "Qwen3MoeForCausalLM"
    config = make_config(
        architecture,
        vocab_size=draw(st.integers(1, 400)),
        hidden_size=heads * draw(st.integers(1, 3)),
        intermediate_size=tp * draw(st.integers(1, 5)),
        moe_intermediate_size=tp * draw(st.integers(1, 5)),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        num_experts=tp + draw(st.integers(0, 3)),
        attention_bias=draw(st.booleans()),
        tie_word_embeddings=dense and draw(st.booleans()),
    )
    return config, tp


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_every_element_of_every_parameter_is_written_once_and_padding_never(made: tuple[Any, int]) -> None:
    config, tp = made
    layout = Layout(config, tp, BF16)
    for rank in range(tp):
        written = {name: torch.zeros(parameter.numel, dtype=torch.int) for name, parameter in layout.parameters.items()}
        for weight, shape in layout.weights.items():
            for placement in layout.placements(weight, shape)[rank]:
                elements = placement.part(torch.empty(shape, device="meta")).numel()
                assert placement.offset + elements <= len(written[placement.parameter])
                written[placement.parameter][placement.offset : placement.offset + elements] += 1
        for name, counts in written.items():
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                rows = counts.view(layout.parameters[name].shape)
                held = int(rows[:, 0].sum())
                assert (rows[:held] == 1).all()
                assert (rows[held:] == 0).all()
            else:
                assert (counts == 1).all(), name


def sglang_serves(config: Any, tp: int) -> bool:
    """What SGLang 0.5.23 asserts of these architectures: of attention, of linear layers, of experts."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if heads % tp or (kv % tp if kv >= tp else tp % kv):
        return False
    if config.architectures == ["Qwen3MoeForCausalLM"]:
        return bool(tp <= config.num_experts and config.moe_intermediate_size % tp == 0)
    return bool(config.intermediate_size % tp == 0)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(ARCHITECTURES)), SIZES, st.integers(1, 3), SIZES, st.integers(1, 8))
def test_ranks_are_refused_to_which_sglang_cannot_share_a_model_out_and_no_others(
    architecture: str, kv_heads: int, heads_of_each: int, width: int, num_experts: int
) -> None:
    config = make_config(
        architecture, num_attention_heads=kv_heads * heads_of_each, num_key_value_heads=kv_heads,
        hidden_size=kv_heads * heads_of_each * 5, intermediate_size=width, moe_intermediate_size=width,
        num_experts=num_experts,
    )  # fmt: skip
    served = [tp for tp in range(1, 9) if sglang_serves(config, tp)]
    for tp in range(1, 9):
        if tp in served:
            check_ranks(config, tp)
            Layout(config, tp, BF16)
            continue
        with pytest.raises(ConfigError, match=f" {tp} ranks.*: of this model .* ranks are allowed$") as caught:
            check_ranks(config, tp)
        allowed = str(caught.value).rpartition(": of this model ")[2].removesuffix(" ranks are allowed").split(", ")
        assert [int(each) for each in allowed if int(each) < 9] == served
        with pytest.raises(ConfigError):
            Layout(config, tp, BF16)


def test_all_that_cannot_be_shared_out_is_named_with_its_number() -> None:
    config = make_config("Qwen3MoeForCausalLM")
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, 5)
    for said in (
        "num_attention_heads=12 cannot be shared out to 5 ranks evenly; allowed is a divisor of it",
        "num_key_value_heads=6 cannot", "moe_intermediate_size=36 cannot",
        "num_experts=3 are fewer than 5 ranks", "of this model 1, 2, 3 ranks are allowed",
    ):  # fmt: skip
        assert said in str(caught.value)


def test_of_an_architecture_that_is_not_in_the_table_no_ranks_are_refused() -> None:
    check_ranks(transformers.Gemma2Config(architectures=["Gemma2ForCausalLM"]), 7)


@settings(deadline=None, max_examples=60)
@given(layouts())
def test_all_ranks_together_hold_every_element(made: tuple[Any, int]) -> None:
    config, tp = made
    layout = Layout(config, tp, BF16)
    for weight, shape in layout.weights.items():
        held = torch.zeros(shape, dtype=torch.int)
        for placed in layout.placements(weight, shape):
            for placement in placed:
                placement.part(held).add_(1)
        copies = held.unique().tolist()
        assert len(copies) == 1, (weight, copies)
        assert copies[0] in (1, tp, tp // config.num_key_value_heads), (weight, copies)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("architecture", "tied"),
    [(name, tied) for name in sorted(ARCHITECTURES) for tied in (False, True) if not (tied and "Moe" in name)],
)
def test_the_table_knows_exactly_the_weights_of_a_checkpoint(architecture: str, tied: bool, bias: bool) -> None:
    config = make_config(architecture, tie_word_embeddings=tied, attention_bias=bias)
    model = transformers.AutoModelForCausalLM.from_config(config)
    sent = {name: tuple(tensor.shape) for name, tensor in full_parameters(model, BF16)}
    assert Layout(config, 2, BF16).weights == sent


def test_projections_are_fused_by_rank() -> None:
    layout = Layout(make_config("Qwen3ForCausalLM"), 2, BF16)
    qkv, row = "model.layers.1.self_attn.qkv_proj.weight", 24
    assert layout.parameters[qkv].shape == (6 * 4 + 2 * 3 * 4, 24)
    by_name = {
        part: layout.placements(f"model.layers.1.self_attn.{part}_proj.weight", [48 if part == "q" else 24, 24])
        for part in "qkv"
    }
    assert by_name["q"] == [(Placement(qkv, 0, 0, 0, 24),), (Placement(qkv, 0, 0, 24, 24),)]
    assert by_name["k"] == [(Placement(qkv, 24 * row, 0, 0, 12),), (Placement(qkv, 24 * row, 0, 12, 12),)]
    assert by_name["v"] == [(Placement(qkv, 36 * row, 0, 0, 12),), (Placement(qkv, 36 * row, 0, 12, 12),)]
    down = "model.layers.0.mlp.down_proj.weight"
    assert layout.placements(down, [24, 24]) == [(Placement(down, 0, 1, 0, 12),), (Placement(down, 0, 1, 12, 12),)]


def test_fewer_key_value_heads_than_ranks_are_copied() -> None:
    layout = Layout(make_config("LlamaForCausalLM", num_key_value_heads=2), 4, BF16)
    placed = layout.placements("model.layers.0.self_attn.k_proj.weight", [8, 24])
    assert [(placement.start, placement.length) for (placement,) in placed] == [(0, 4), (0, 4), (4, 4), (4, 4)]


def test_experts_lie_one_after_another_with_gate_before_up() -> None:
    layout = Layout(make_config("Qwen3MoeForCausalLM"), 2, BF16)
    w13 = "model.layers.0.mlp.experts.w13_weight"
    assert layout.parameters[w13].shape == (3, 2 * 18, 24)
    assert layout.parameters["model.layers.0.mlp.experts.w2_weight"].shape == (3, 24, 18)
    (up,) = layout.placements("model.layers.0.mlp.experts.2.up_proj.weight", [36, 24])[1]
    assert up == Placement(w13, (2 * 2 + 1) * 18 * 24, 0, 18, 18)
    (down,) = layout.placements("model.layers.0.mlp.experts.2.down_proj.weight", [24, 36])[1]
    assert down == Placement("model.layers.0.mlp.experts.w2_weight", 2 * 24 * 18, 1, 18, 18)


@pytest.mark.parametrize(
    ("vocabulary", "tp", "rows", "held"),
    [
        (70, 1, 128, [70]),
        (70, 2, 64, [64, 6]),
        (64, 4, 16, [16, 16, 16, 16]),
        (33, 4, 16, [16, 16, 1, 0]),  # a rank may hold nothing
        (70, 3, 64, [64, 6, 0]),  # 128 rows do not divide by 3: padded to a multiple of 3 * 64
    ],
)
def test_the_vocabulary_is_padded_before_it_is_shared_out(vocabulary: int, tp: int, rows: int, held: list[int]) -> None:
    config = make_config("LlamaForCausalLM", vocab_size=vocabulary, num_key_value_heads=12)
    layout = Layout(config, tp, BF16)
    assert layout.parameters["lm_head.weight"].shape == (rows, 24)
    placed = layout.placements("lm_head.weight", [vocabulary, 24])
    assert [sum(placement.length for placement in each) for each in placed] == held


def test_what_has_no_place_on_purpose_is_not_written() -> None:
    layout = Layout(make_config("LlamaForCausalLM", tie_word_embeddings=True), 2, BF16)
    assert layout.placements("lm_head.weight", [70, 24]) == [(), ()]
    assert layout.placements("model.layers.0.self_attn.rotary_emb.inv_freq", [2]) == [(), ()]
    assert "lm_head.weight" not in layout.parameters
    assert "lm_head.weight" not in layout.weights


def test_unknown_weights_and_other_shapes_are_refused_by_name() -> None:
    layout = Layout(make_config("Qwen3ForCausalLM"), 1, BF16)
    with pytest.raises(ConfigError, match=r"weight model\.vision\.weight: Qwen3ForCausalLM .*q_norm.*broadcast"):
        layout.placements("model.vision.weight", [1])
    with pytest.raises(ConfigError, match=r"weight model\.norm\.weight has shape \[21\].*\[24\]"):
        layout.placements("model.norm.weight", [21])


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, 1, "architecture GPT2LMHeadModel.*Qwen3MoeForCausalLM.*broadcast"),
        ({"architectures": None}, 1, "architecture None"),
        ({"mlp_bias": True}, 1, "mlp_bias=True"),
        ({}, 5, "num_attention_heads=12|num_key_value_heads=6"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 12}, 8, "intermediate_size=12"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 3, "num_key_value_heads=4 cannot be shared out"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 24},
            6,
            "num_key_value_heads=4 cannot be shared out",
        ),
    ],
)
def test_what_the_table_does_not_cover_is_refused(changes: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(make_config("LlamaForCausalLM", **changes), tp, BF16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ],
)
def test_experts_that_sglang_would_serve_wrongly_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(make_config("Qwen3MoeForCausalLM", **changes), 1, BF16)


def registered(layout: Layout) -> dict[str, tuple[int, int, int]]:
    return {name: (4096, prod(parameter.shape), 2) for name, parameter in layout.parameters.items()}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda memory: memory.pop(NORM), "not registered"),
        (lambda memory: memory.update({NORM: (0, 21, 2)}), r"21 elements, where 24 \[24\]"),
        (lambda memory: memory.update({NORM: (0, 24, 1)}), r"1 bytes per element, where torch\.bfloat16 has 2"),
        (lambda memory: memory.update({f"{NORM}_scale": (0, 1, 4)}), "no weight of the model lies there"),
    ],
)
def test_an_engine_with_other_memory_is_refused(change: Any, message: str) -> None:
    layout = Layout(make_config("Qwen3ForCausalLM"), 2, BF16)
    memory = registered(layout)
    check_registered(layout, 1, memory)
    change(memory)
    with pytest.raises(LayoutMismatch, match=rf"rank 1, parameter {NORM}\w*: .*{message}"):
        check_registered(layout, 1, memory)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tp_size", 1), ("ep_size", 2), ("pp_size", 2), ("dp_size", 2), ("enable_dp_attention", True),
        ("quantization", "fp8"), ("moe_runner_backend", "flashinfer_trtllm"), ("moe_dense_tp_size", 1),
    ],
)  # fmt: skip
def test_an_engine_that_is_split_in_another_way_is_refused(setting: str, value: object) -> None:
    layout = Layout(make_config("Qwen3MoeForCausalLM"), 2, BF16)
    check_served(layout, {"tp_size": 2, "ep_size": 1, "moe_runner_backend": "auto"}, "http://host:1")
    with pytest.raises(LayoutMismatch, match=f"http://host:1 was started with {setting}={value}: .*broadcast"):
        check_served(layout, {"tp_size": 2, setting: value}, "http://host:1")
