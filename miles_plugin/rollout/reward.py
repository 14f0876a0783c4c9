"""Rewards -> advantages, and the control that takes the information out of them."""

import random
from collections.abc import Sequence

from miles_plugin.rollout.sample import Sample


def shuffle_rewards(samples: Sequence[Sample], rng: random.Random) -> None:
    """Permute the rewards across all samples of a rollout, in place.

    Their distribution stays, what they say about a response goes: a policy that still improves is not learning
    from its rewards.
    """
    rewards = [sample.reward for sample in samples]
    rng.shuffle(rewards)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward


def assign_group_advantages(samples: Sequence[Sample]) -> None:
    """GRPO: (reward - mean of the group) / (standard deviation of the group + 1e-6), in place.

    A group whose rewards are all equal gets advantage 0 and teaches nothing.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    for group in groups.values():
        mean = sum(sample.reward for sample in group) / len(group)
        variance = sum((sample.reward - mean) ** 2 for sample in group) / len(group)
        for sample in group:
            sample.advantage = (sample.reward - mean) / (variance**0.5 + 1e-6)
