"""Which prompts a job takes: those of files, or those of a task; and whether they are those of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.rollout.data import PromptData
from miles_plugin.rollout.prompts import PromptSource
from miles_plugin.rollout.task import Task
from mooncake_store.errors import ConfigError


def open_prompts(config: TrainConfig) -> PromptSource:
    """The prompts that the settings ask for.

    Raises:
        ConfigError: a file or a row of it is not what the settings say, or no such task can be made.
    """
    if config.prompt_data is not None:
        return PromptData(config)
    return Task(config.task, config.task_kwargs, config.held_out_size, config.seed)


def check_same_prompts(config: TrainConfig, source: PromptSource, state: Mapping[str, Any]) -> None:
    """Raise ConfigError when `source`, opened for `config`, is not what `RolloutManager.state()` was taken of."""
    if state["prompts"] != source.name:
        given = f"task={config.task}" if config.prompt_data is None else f"prompt_data={config.prompt_data}"
        raise ConfigError(
            f"the job to go on from had the prompts {state['prompts']!r}, {given} gives {source.name!r}; go on with "
            "the same content, wherever it lies now, or start anew"
        )
