"""The GRPO loss against a slow reference, padding, buckets: torch, but no process."""

import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.rollout.batch import to_columns  # noqa: E402
from miles_plugin.training.grpo import (  # noqa: E402
    PaddedBatch,
    clipped_policy_loss,
    next_token_log_probs,
    truncated_weights,
)
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402
from miles_plugin.training.trainer import learning_rate_factor, pad  # noqa: E402
from miles_plugin.weight_transfer.sources import buckets, full_parameters  # noqa: E402
from mooncake_store.decode import decode  # noqa: E402
from mooncake_store.encode import encode  # noqa: E402
from tests.unit.plugin.test_rollout import make_samples  # noqa: E402


def one_token(old: float, advantage: float, sampled: float = 0.0) -> PaddedBatch:
    ones, log_probs = torch.ones(1, 1), (torch.tensor([[sampled]]), torch.tensor([[old]]))
    return PaddedBatch(torch.zeros(1, 2), torch.ones(1, 2), ones, *log_probs, torch.tensor([advantage]))


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 1.0, 1.27, 2.0])
def test_the_ratio_is_clipped_only_where_it_would_help(ratio: float, advantage: float) -> None:
    batch = one_token(-math.log(ratio), advantage)
    loss, bound = clipped_policy_loss(torch.zeros(1, 1), batch, 1.0, eps_low=0.2, eps_high=0.28)
    reference = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert loss.item() == pytest.approx(reference, rel=1e-5)
    assert bound.item() == float((advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8))


def test_a_clipped_token_has_no_gradient() -> None:
    for log_prob, expected in ((0.0, -1.0), (1.0, 0.0)):
        value = torch.full((1, 1), log_prob, requires_grad=True)
        loss, _ = clipped_policy_loss(value, one_token(0.0, 1.0), 1.0, 0.2, 0.28)
        loss.backward()
        assert value.grad is not None
        assert value.grad.item() == pytest.approx(expected)


@pytest.mark.parametrize("advantage", [1.5, -0.5])
@pytest.mark.parametrize("older", [0.1, 1.0, 1.9, 2.1, 40.0])
def test_a_token_counts_by_its_weight_which_is_truncated_above(older: float, advantage: float) -> None:
    """However unlikely the policy that sampled it made a token, only the step from the old policy on is clipped."""
    batch = one_token(-1.0, advantage, sampled=-1.0 - math.log(older))
    for log_prob, step in ((-1.0, 1.0), (-1.0 + math.log(1.1), 1.1)):
        value = torch.full((1, 1), log_prob, requires_grad=True)
        loss, bound = clipped_policy_loss(value, batch, truncated_weights(batch, most=2.0), 0.2, 0.28)
        loss.backward()
        assert value.grad is not None
        assert value.grad.item() == pytest.approx(-min(older, 2.0) * step * advantage, rel=1e-5)
        assert bound.item() == 0.0


def test_log_probs_are_of_the_next_token_at_the_sampling_temperature() -> None:
    logits, tokens = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    got = next_token_log_probs(logits, tokens, temperature=0.7)
    for row in range(2):
        for position in range(4):
            reference = torch.log_softmax(logits[row, position] / 0.7, -1)[tokens[row, position + 1]]
            assert got[row, position].item() == pytest.approx(reference.item(), abs=1e-5)


def test_padding_puts_every_response_token_under_its_prediction() -> None:
    samples = make_samples(groups=2, size=4)
    for sample in samples:
        sample.rollout_log_probs = [-float(token) for token in sample.tokens[-sample.response_length :]]
        sample.advantage = float(sample.index)
    encoded = encode(to_columns(samples, 0))
    stored = np.zeros(encoded.nbytes, np.uint8)
    encoded.write_into(stored)
    batch = decode(stored)
    rows = [5, 2, 7]
    padded = pad(batch, rows, torch.device("cpu"))
    for i, row in enumerate(rows):
        length, response = len(samples[row].tokens), samples[row].response_length
        assert padded.tokens[i, :length].tolist() == samples[row].tokens
        assert padded.attention_mask[i].sum().item() == length
        assert padded.response_mask[i].sum().item() == response
        chosen = padded.response_mask[i].bool()
        for log_probs in (padded.sampled_log_probs, padded.old_log_probs):
            assert (-log_probs[i][chosen]).tolist() == padded.tokens[i, 1:][chosen].tolist()
            assert not log_probs[i][~chosen].any()
        assert padded.advantages[i].item() == row


def test_buckets_keep_order_and_stay_below_their_size() -> None:
    tensors = [(str(i), torch.zeros(n, dtype=torch.bfloat16)) for i, n in enumerate([10, 10, 10, 100, 1, 1])]
    grouped = list(buckets(tensors, max_bytes=40))
    assert [[name for name, _ in bucket] for bucket in grouped] == [["0", "1"], ["2"], ["3"], ["4", "5"]]


def test_the_tiny_policy_round_trips_text_and_weights(tmp_path: Path) -> None:
    tokenizer, model = build_tokenizer(), build_model(32, 1, seed=0)
    text = "What is 12 + 3?\n€"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("12 + 3", add_special_tokens=False)) == 6
    weights = {name: tensor.clone() for name, tensor in full_parameters(model, torch.bfloat16)}
    save_checkpoint(model, tokenizer, tmp_path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert {name for name, _ in loaded.named_parameters()} == set(weights)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == loaded.config.eos_token_id


def test_model_and_items_are_seeded() -> None:
    first, again, other = (next(build_model(32, 1, seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert np.isfinite(first.detach().numpy()).all()


def test_the_learning_rate_rises_holds_and_decays() -> None:
    base = ["--num-rollout", "5", "--num-steps-per-rollout", "2", "--lr", "1.0", "--lr-warmup-iters", "4"]
    constant = load_config(base)
    assert [learning_rate_factor(constant, step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = load_config([*base, "--lr-decay-style", "linear", "--min-lr", "0.1"])
    factors = [learning_rate_factor(linear, step) for step in range(12)]
    assert factors[3] == factors[4] == 1
    assert factors[4:11] == sorted(factors[4:11], reverse=True)
    assert factors[10] == factors[11] == pytest.approx(0.1)
