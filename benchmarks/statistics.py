"""Medians with their spread, and ratios between what was measured in the same rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.measurements import Measurement


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the ranges between the quartiles have a point in common."""
        return self.low <= other.high and other.low <= self.high


class Cell(NamedTuple):
    """What measurements are gathered by."""

    variant: str
    peer: str
    operation: str


Seconds = Mapping[Cell, Mapping[int, float]]


def spread_of(values: Iterable[float]) -> Spread:
    """Of at least one value."""
    low, median, high = np.percentile(list(values), [25, 50, 75]).tolist()
    return Spread(median, low, high)


def seconds_of(measurements: Iterable[Measurement]) -> Seconds:
    """Seconds by cell and round."""
    gathered: dict[Cell, dict[int, float]] = defaultdict(dict)
    for item in measurements:
        if item.seconds is not None:
            gathered[Cell(item.variant, item.peer, item.operation)][item.round] = item.seconds
    return dict(gathered)


def ratio(seconds: Seconds, above: Cell, below: Cell) -> Spread | None:
    """How many times as long `above` took as `below`, in the rounds that both have; None when there is none.

    Of each round for itself: what slows the machine for a while slows both.
    """
    slow, fast = seconds.get(above, {}), seconds.get(below, {})
    common = slow.keys() & fast.keys()
    return spread_of(slow[number] / fast[number] for number in common) if common else None


def gathered(measurements: Iterable[Measurement], key: Callable[[Measurement], str]) -> list[str]:
    """The different values of `key`, in the order in which they were first seen."""
    return list(dict.fromkeys(map(key, measurements)))
