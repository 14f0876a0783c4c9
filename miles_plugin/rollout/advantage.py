"""Rewards -> advantages, and the control that takes the information out of them."""

import random
from collections.abc import Sequence

from miles_plugin.rollout.sample import Sample


def shuffle_rewards(samples: Sequence[Sample], rng: random.Random) -> None:
    """Permute the rewards across all samples of a rollout, in place.

    Their distribution stays, what they say about a response goes: a policy that still improves is not learning
    from its rewards. Samples without a reward stay without.
    """
    rewarded = [sample for sample in samples if sample.reward is not None]
    rewards = [sample.reward for sample in rewarded]
    rng.shuffle(rewards)
    for sample, reward in zip(rewarded, rewards, strict=True):
        sample.reward = reward


def assign_group_advantages(samples: Sequence[Sample]) -> None:
    """GRPO: (reward - mean of the group) / (standard deviation of the group + 1e-6), in place.

    A group whose rewards are all equal gets advantage 0 and teaches nothing. A sample without a reward gets 0 and is
    left out of its group's mean.
    """
    groups: dict[int, list[tuple[Sample, float]]] = {}
    for sample in samples:
        sample.advantage = 0.0
        if sample.reward is not None:
            groups.setdefault(sample.group_index, []).append((sample, sample.reward))
    for group in groups.values():
        mean = sum(reward for _, reward in group) / len(group)
        variance = sum((reward - mean) ** 2 for _, reward in group) / len(group)
        for sample, reward in group:
            sample.advantage = (reward - mean) / (variance**0.5 + 1e-6)
