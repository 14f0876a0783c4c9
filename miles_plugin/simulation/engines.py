"""Rollout engines: slots, the queue before them, and the clock that stands while weights are updated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter
from typing import NamedTuple

_NOT_BEGUN = -1


class Groups:
    """What is known of each group, in columns; a row is used again when its group is gone.

    Attributes:
        left: samples that have not finished.
        oldest: version of the weights that the oldest span of its samples was made by.
        seconds: that its finished samples spent in slots.
        mixed: samples with spans of several versions.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[int] = []
        self.left: list[int] = []
        self.oldest: list[int] = []
        self.seconds: list[float] = []
        self.mixed: list[int] = []

    def new(self) -> int:
        """A row for a group of which nothing has begun."""
        if self._free:
            row = self._free.pop()
            self.left[row], self.oldest[row], self.seconds[row], self.mixed[row] = self._size, _NOT_BEGUN, 0.0, 0
            return row
        self.left.append(self._size)
        self.oldest.append(_NOT_BEGUN)
        self.seconds.append(0.0)
        self.mixed.append(0)
        return len(self.left) - 1

    def free(self, row: int) -> None:
        self._free.append(row)

    def none_finished(self, row: int) -> bool:
        return self.left[row] == self._size


class Sums(NamedTuple):
    """What engines add up from the beginning.

    busy, held: slot-seconds, without the pauses and with them. finished, finished_seconds: samples, and what they spent
    in slots, pauses included. aborted, aborted_seconds: samples that had to begin anew, and what was lost.
    """

    busy: float
    held: float
    finished: int
    finished_seconds: float
    aborted: int
    aborted_seconds: float

    def since(self, before: Sums) -> Sums:
        return Sums(
            self.busy - before.busy,
            self.held - before.held,
            self.finished - before.finished,
            self.finished_seconds - before.finished_seconds,
            self.aborted - before.aborted,
            self.aborted_seconds - before.aborted_seconds,
        )


class Engines:
    """All slots of all engines. Times of day are seconds since the simulation began.

    Samples end by the engines' own clock, which stands during an update: so a pause moves none of them in the heap.

    Args:
        durations: seconds in a slot, drawn when a sample begins.
        restarts: whether an update makes the running samples begin anew.

    Attributes:
        version: that is served.
    """

    def __init__(self, slots: int, groups: Groups, durations: Iterator[float], restarts: bool) -> None:
        self._groups, self._durations, self._restarts = groups, durations, restarts
        # End by the engines' clock, how many began before it, begin by the day's clock, group: of those that end at a
        # time the one that began first comes first.
        self._running: list[tuple[float, int, float, int]] = []
        self._begun = self._begun_before_update = 0
        self._queue: deque[int] = deque()  # a group's row for each of its samples
        self._free = slots
        self._behind = 0.0  # the engines' clock, after the day's
        self._paused_at: float | None = None
        self._holding = False
        self._accounted_at = 0.0
        self.version = 0
        self._busy = self._held = self._finished_seconds = self._aborted_seconds = 0.0
        self._finished = self._aborted = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def next_end(self) -> float:
        """When the next sample finishes; infinity when none does by itself."""
        return self._running[0][0] + self._behind if self._running and self._paused_at is None else math.inf

    def submit(self, group: int, samples: int, now: float) -> None:
        """Samples of a group, which begin as soon as there are slots."""
        self._queue.extend([group] * samples)
        self._fill(now)

    def finish(self, now: float) -> int:
        """The next sample finishes, which is `now`; return its group. Another takes its slot."""
        groups, queue = self._groups, self._queue
        _, number, began, group = self._running[0]
        if queue and not self._holding:
            heapreplace(self._running, self._begin(queue.popleft(), now))
        else:
            self._account(now)
            heappop(self._running)
            self._free += 1
        seconds = now - began
        self._finished += 1
        self._finished_seconds += seconds
        groups.seconds[group] += seconds
        groups.left[group] -= 1
        if number <= self._begun_before_update:
            groups.mixed[group] += 1
        return group

    def hold(self) -> None:
        """Let nothing begin until `resume`."""
        self._holding = True

    def pause(self, now: float) -> None:
        """Stop; what runs stays in its slots."""
        self._account(now)
        self._paused_at = now

    def resume(self, now: float, version: int) -> None:
        """Go on with other weights."""
        assert self._paused_at is not None
        self._account(now)
        self._behind += now - self._paused_at
        self._begun_before_update = self._begun
        if self._restarts:
            self._restart(now, self._paused_at, version)
        self.version, self._paused_at, self._holding = version, None, False
        self._fill(now)

    def sums(self, now: float) -> Sums:
        """Until `now`, at which nothing that comes earlier is outstanding."""
        self._account(now)
        return Sums(
            self._busy, self._held, self._finished, self._finished_seconds, self._aborted, self._aborted_seconds
        )

    def _account(self, now: float) -> None:
        seconds = len(self._running) * (now - self._accounted_at)
        self._held += seconds
        if self._paused_at is None:
            self._busy += seconds
        self._accounted_at = now

    def _fill(self, now: float) -> None:
        if self._paused_at is not None or self._holding:
            return
        count = min(self._free, len(self._queue))
        if count:
            self._account(now)
            self._free -= count
            for _ in range(count):
                heappush(self._running, self._begin(self._queue.popleft(), now))

    def _begin(self, group: int, now: float) -> tuple[float, int, float, int]:
        oldest = self._groups.oldest
        if oldest[group] == _NOT_BEGUN:
            oldest[group] = self.version  # versions only grow: of the spans to come none is older
        self._begun += 1
        return now - self._behind + next(self._durations), self._begun, now, group

    def _restart(self, now: float, paused_at: float, version: int) -> None:
        """What ran begins anew. A group of which nothing has finished is then as young as the new weights."""
        running = sorted(self._running, key=itemgetter(1))
        for _, _, began, group in running:
            if self._groups.none_finished(group):
                self._groups.oldest[group] = version
            self._aborted_seconds += paused_at - began
        self._aborted += len(running)
        self.version = version
        self._running = [self._begin(group, now) for _, _, _, group in running]
        heapify(self._running)
