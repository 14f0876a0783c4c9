"""What is checked of prompts, reward and custom functions before a job starts anything."""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

from miles_plugin.arguments import DataArguments, TaskArguments, TrainConfig
from miles_plugin.rollout.data import PromptData
from miles_plugin.rollout.prompts import PromptSource, check_length, context_length, load_tokenizer, to_text
from miles_plugin.rollout.source import check_same_prompts, open_prompts
from mooncake_store.errors import ConfigError, MissingDependency

# Characters of prompts that are rendered and tokenized before the job starts: a few seconds' worth.
_CHECKED_CHARACTERS = 8 * 1024**2
_log = logging.getLogger(__name__)


def check_data(config: TrainConfig, state: Mapping[str, Any] | None = None) -> None:
    """Read the prompts, import the custom functions, and render and measure prompts as the job will.

    Args:
        state: of the manager of the job to go on from, if there is one.

    Raises:
        ConfigError: settings that contradict each other, other prompts than `state` was taken of, and what
            `open_prompts`, `to_text`, `check_length` and `load_function` raise.
    """
    if config.prompt_data is None:
        _check_task_settings(config)
    else:
        _check_prompt_data_settings(config)
    if config.apply_chat_template and config.hf_checkpoint is None:
        raise ConfigError("apply_chat_template: the tiny policy's tokenizer has no chat template; name hf_checkpoint")
    if config.apply_chat_template_kwargs and not config.apply_chat_template:
        raise ConfigError("apply_chat_template_kwargs is set without apply_chat_template; add that, or leave it out")
    source = open_prompts(config)
    if state is not None:
        check_same_prompts(config, source, state)
    _check_functions(config)
    if config.hf_checkpoint is not None:
        _check_prompts(config, source, config.hf_checkpoint)


def _check_prompts(config: TrainConfig, source: PromptSource, checkpoint: Path) -> None:
    """The held-out prompts, then the training prompts of files in the order of the job, as many as are cheap."""
    context = context_length(checkpoint)
    if context is not None and config.rollout_max_response_len >= context:
        raise ConfigError(
            f"rollout_max_response_len={config.rollout_max_response_len}: the model of hf_checkpoint="
            f"{checkpoint} sees {context} tokens, prompt included (max_position_embeddings); lower it"
        )
    tokenizer = load_tokenizer(checkpoint)
    training = source.epoch(0) if isinstance(source, PromptData) else islice(source.rollout(), 1)
    characters = 0
    for number, item in enumerate(chain(source.held_out, training)):
        if characters >= _CHECKED_CHARACTERS:
            _log.warning(
                "%s: only the first %d prompts, %d of them held out, were checked to fit the model's context; one "
                "that does not will end the job when its rollout is reached",
                *(config.prompt_data or config.task, number, min(number, len(source.held_out))),
            )
            break
        text = to_text(item, tokenizer, config)
        check_length(item, text, tokenizer, context, config)
        characters += len(text)


def _check_task_settings(config: TrainConfig) -> None:
    for name in ("eval_prompt_data", "label_key", "rollout_shuffle"):
        if getattr(config, name) != DataArguments.model_fields[name].default:
            raise ConfigError(f"{name}={getattr(config, name)} is set without prompt_data; add that, or leave it out")


def _check_prompt_data_settings(config: TrainConfig) -> None:
    given = f"prompt_data={config.prompt_data}"
    if config.task != TaskArguments.model_fields["task"].default or config.task_kwargs:
        raise ConfigError(
            f"{given} and task={config.task!r} with task_kwargs={config.task_kwargs} are two sources of prompts; "
            "leave one out"
        )
    if config.hf_checkpoint is None:
        raise ConfigError(f"{given} needs hf_checkpoint: the tiny policy can only be warm-started on a task")
    if config.rm_type is None and config.custom_rm_path is None:
        raise ConfigError(f"{given} needs a reward function: set rm_type or custom_rm_path")
    if config.custom_rm_path is None and config.label_key is None:
        raise ConfigError(f"rm_type={config.rm_type} needs label_key: the column of {given} with the reference answer")


def _check_functions(config: TrainConfig) -> None:
    from miles_plugin.rollout.generate import CustomGenerate
    from miles_plugin.rollout.reward import CustomReward

    if config.custom_generate_function_path is not None:
        CustomGenerate(config.custom_generate_function_path)
    if config.custom_rm_path is not None:
        CustomReward(config.custom_rm_path)
    elif config.rm_type == "math" and find_spec("math_verify") is None:
        raise MissingDependency("rm_type=math needs math-verify: pip install miles-mooncake[train]")
