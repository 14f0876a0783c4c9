"""Reward functions that tests give to a job, which imports them by name."""

from typing import Any


def one_expert_pair_per_token_and_layer(_args: Any, sample: Any) -> float:
    """1.0 when the sample carries the experts of a model with two layers and four experts, two of them per token."""
    experts = sample.rollout_routed_experts
    fits = (
        experts is not None and experts.shape == (len(sample.tokens) - 1, 2, 2) and set(experts.flat) <= set(range(4))
    )
    return float(fits)
