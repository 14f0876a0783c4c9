"""Where prompts come from: the interface of both sources, and how a prompt becomes the text that engines get."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from miles_plugin.arguments import TrainConfig
from mooncake_store.errors import ConfigError

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Item:
    """One prompt with what its reward needs.

    index: position in its stream; a stream started at `index + 1` goes on after this item.
    prompt: text, or chat messages with "role" and "content".
    label: the reference answer. metadata: travels with each sample.
    origin: where it came from, for messages. entry: what the source's own verifier needs.
    """

    index: int
    prompt: Prompt
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    entry: Any = None

    @property
    def key(self) -> str:
        """Equal for equal prompts."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)


class PromptSource(Protocol):
    """An endless, seeded stream of training items, and the items that are never trained on.

    name: what checkpoints call it; another for other items, wherever they are read from.
    held_out: fixed; they measure accuracy.
    """

    @property
    def name(self) -> str: ...
    @property
    def held_out(self) -> Sequence[Item]: ...
    def rollout(self, start: int = 0) -> Iterator[Item]:
        """Training items from stream position `start`; the same ones whenever settings and `start` are the same."""


@lru_cache
def load_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of a Hugging Face checkpoint directory; loaded once per process.

    Raises:
        ConfigError: there is none that transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"hf_checkpoint={checkpoint}: transformers cannot read its tokenizer: {str(error).splitlines()[0]}"
        ) from error


def context_length(checkpoint: Path) -> int | None:
    """How many tokens the model of a Hugging Face checkpoint directory sees at most; None when it does not say.

    Raises:
        ConfigError: transformers does not know the model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"hf_checkpoint={checkpoint}: transformers cannot read its config.json: {str(error).splitlines()[0]}"
        ) from error
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def to_text(item: Item, tokenizer: Any, config: TrainConfig) -> str:
    """The text of an item's prompt; with `apply_chat_template` the template's, a plain text being one user message.

    Raises:
        ConfigError: the tokenizer has no template, or the template refuses the messages.
    """
    if not config.apply_chat_template:
        assert isinstance(item.prompt, str), "sources refuse messages without apply_chat_template"
        return item.prompt
    if not tokenizer.chat_template:
        raise ConfigError(
            f"apply_chat_template: the tokenizer of {tokenizer.name_or_path} has no chat template; take "
            "an instruction-tuned checkpoint, or leave the flag out and give prompts as text"
        )
    prompt = item.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **config.apply_chat_template_kwargs
        )
    except Exception as error:  # a template is a program of the checkpoint's author
        raise ConfigError(f"{item.origin or item.key[:80]}: the chat template refuses it: {error}") from error
    return text


def check_length(item: Item, text: str, tokenizer: Any, context: int | None, config: TrainConfig) -> None:
    """Raise ConfigError if an item's text and a response exceed `context` tokens, if that is known.

    The engine would refuse the whole request, and say of no prompt that it is the one.
    """
    response = config.rollout_max_response_len
    if context is None or len(text.encode()) <= context - response:
        return  # a token is at least a byte
    length = len(tokenizer.encode(text, add_special_tokens=False))
    if length + response > context:
        lower = f", or lower rollout_max_response_len to {context - length}" if length < context else ""
        raise ConfigError(
            f"{item.origin or f'item {item.index}'}: a prompt of {length} tokens ({text!r:.60}); allowed are "
            f"{context - response}: the model's context of {context} less rollout_max_response_len={response}; shorten "
            f"the prompt, leave it out{lower}"
        )
