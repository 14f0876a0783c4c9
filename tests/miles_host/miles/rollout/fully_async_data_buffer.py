"""The contract of the buffer between rollouts and training."""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class DataBufferConstructorInput:
    args: Namespace
    unused_handler_fn: Callable


@dataclass
class DataBufferInput:
    prompt_group: list
    group: list


class DataBuffer(ABC):
    @abstractmethod
    async def put(self, input): ...

    @abstractmethod
    async def get(self, **context): ...

    @abstractmethod
    def get_metrics(self): ...
