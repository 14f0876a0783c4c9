"""What a response is worth: the user's own function, a math answer's correctness, or the task's own verifier."""

from argparse import Namespace
from typing import Protocol

from miles_plugin.arguments import TrainConfig
from miles_plugin.rollout.accept import check_reward
from miles_plugin.rollout.functions import call_function, load_function
from miles_plugin.rollout.prompts import Item, PromptSource
from miles_plugin.rollout.sample import Sample
from miles_plugin.rollout.task import Task
from mooncake_store.errors import ConfigError


class Reward(Protocol):
    """Scores one sample; called for many at once on one event loop."""

    async def __call__(self, args: Namespace, sample: Sample, item: Item) -> float:
        """The reward of a generated sample of `item`; 1.0 or more counts as a correct answer."""

    def close(self) -> None:
        """Release what it holds; idempotent."""


def load_reward(config: TrainConfig, source: PromptSource) -> Reward:
    """The reward function that the settings ask for: custom_rm_path, else rm_type, else the task's own verifier.

    Raises:
        ConfigError: there is none, or the custom one cannot be loaded.
    """
    if config.custom_rm_path is not None:
        return CustomReward(config.custom_rm_path)
    if config.rm_type == "math":
        from miles_plugin.rollout.math_reward import MathReward

        return MathReward()
    if not isinstance(source, Task):
        raise ConfigError("prompt_data needs a reward function: set rm_type or custom_rm_path")
    return TaskReward(source)


class TaskReward:
    """The verifier that a reasoning-gym task comes with."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def __call__(self, args: Namespace, sample: Sample, item: Item) -> float:  # noqa: ARG002
        return self._task.score(sample.response, item)

    def close(self) -> None:
        pass


class CustomReward:
    """`custom_rm_path`: (args, sample) -> float. An ordinary function holds up the others while it runs; an async one
    does not while it waits."""

    def __init__(self, path: str) -> None:
        self._named = f"custom_rm_path={path}"
        self._function = load_function("custom_rm_path", path, ("args", "sample"))

    async def __call__(self, args: Namespace, sample: Sample, item: Item) -> float:  # noqa: ARG002
        where = f"{self._named}, sample {sample.index} ({sample.response!r:.60})"
        reward = await call_function(self._function, where, args, sample)
        return check_reward(reward, self._named, sample.index)

    def close(self) -> None:
        pass
