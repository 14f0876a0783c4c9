"""Which of the engine's own parameters hold a weight of a Hugging Face checkpoint, and where in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake_store.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """Part of a weight: `length` rows of `axis` from `start` on (all of it where `axis` is None).

    It lands as one contiguous run in `parameter`, `offset` elements from its start.
    """

    parameter: str
    offset: int
    axis: int | None = None
    start: int = 0
    length: int = 0


class Layout(Protocol):
    """The parameters of every tensor-parallel rank, and how weights map to them."""

    def parameters(self, rank: int) -> Mapping[str, Sequence[int]]:
        """Name -> shape."""

    def placements(self, name: str, shape: Sequence[int]) -> Sequence[Sequence[Placement]]:
        """By rank, where a weight goes; nothing for a name that the engine does not know, which SGLang skips."""


class IdentityLayout:
    """Every weight is a parameter of its own, under its own name. One rank."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = shapes

    def parameters(self, rank: int) -> Mapping[str, Sequence[int]]:  # noqa: ARG002  # there is one
        return self._shapes

    def placements(self, name: str, shape: Sequence[int]) -> Sequence[Sequence[Placement]]:
        if name not in self._shapes:
            return [[]]
        if list(shape) != list(self._shapes[name]):
            raise ValueError(f"{name} is {list(self._shapes[name])} here, {list(shape)} was sent")
        return [[Placement(name, 0)]]


def make_layout(config: Mapping[str, object], shapes: Mapping[str, Sequence[int]], tp: int) -> Layout:  # noqa: ARG001
    """The layout of an engine that serves this checkpoint.

    Args:
        config: the checkpoint's config.json. shapes: of its weights.
        tp: tensor-parallel ranks.
    """
    if tp != 1:
        raise ConfigError(f"--tp {tp}: weights keep their own names and are whole here; use --tp 1")
    return IdentityLayout(shapes)
