"""Sets of integers that come nearly in order, as the ranges that they make up."""

from bisect import bisect_right
from collections.abc import Iterable


class Ranges:
    """A set of integers; its size in memory is that of the number of ranges.

    Args:
        ranges: pairs of first and last + 1.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(ranges):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], stop)
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def add(self, number: int) -> None:
        """Add one integer; one that is there stays."""
        if number in self:
            return
        at = bisect_right(self._starts, number)
        joins_before = at > 0 and self._stops[at - 1] == number
        joins_after = at < len(self._starts) and self._starts[at] == number + 1
        if joins_before and joins_after:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif joins_before:
            self._stops[at - 1] = number + 1
        elif joins_after:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._stops.insert(at, number + 1)

    def pairs(self) -> list[tuple[int, int]]:
        """What the constructor takes, in order and as few as can be."""
        return list(zip(self._starts, self._stops, strict=True))

    def gaps(self, start: int, stop: int) -> list[range]:
        """The integers of [start, stop) that are not in the set."""
        gaps = []
        for first, last in zip([*self._starts, stop], [*self._stops, stop], strict=True):
            if start < min(first, stop):
                gaps.append(range(start, min(first, stop)))
            start = max(start, last)
        return gaps
