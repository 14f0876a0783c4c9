"""Which prompts a job takes: those of files, or those of a task."""

from miles_plugin.arguments import TrainConfig
from miles_plugin.rollout.data import PromptData
from miles_plugin.rollout.prompts import PromptSource
from miles_plugin.rollout.task import Task


def open_prompts(config: TrainConfig) -> PromptSource:
    """The prompts that the settings ask for.

    Raises:
        ConfigError: a file or a row of it is not what the settings say, or no such task can be made.
    """
    if config.prompt_data is not None:
        return PromptData(config)
    return Task(config.task, config.task_kwargs, config.held_out_size, config.seed)
