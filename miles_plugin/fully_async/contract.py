"""What a buffer of the user's has to be, for `--custom-async-data-buffer-path`; names and fields are miles's."""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles_plugin.fully_async.groups import DataBufferInput, PromptGroup


@dataclass(frozen=True)
class DataBufferConstructorInput:
    """What one is made with.

    args: the flat settings, as custom functions get them. unused_handler_fn: takes the prompt group of a group that is
    not trained on, and does what `--async-unused-samples-handler` says.
    """

    args: Namespace
    unused_handler_fn: Callable[[PromptGroup], None]


class DataBuffer(ABC):
    """To inherit from it is not needed, to have its methods is. All are called in one event loop."""

    @abstractmethod
    async def put(self, input: DataBufferInput) -> None:
        """Take a finished group, or give its prompts to `unused_handler_fn`; until it returns no new group is begun."""

    @abstractmethod
    async def get(self, **context: Any) -> DataBufferInput:
        """One group to train on, waiting until there is one.

        context: current_version, an int, None before the first weight update; more may come.
        """

    @abstractmethod
    def get_metrics(self) -> dict[str, float]:
        """Of the time since the call before, by whole names."""
