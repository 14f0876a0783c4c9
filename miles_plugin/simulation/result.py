"""What a simulated run measured, and medians over its repetitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Census:
    """Where all samples are that were ever submitted.

    queued, running: in the engines. partial: finished, their group not. blocked: in groups that wait for room in the
    buffer. buffered, collected: in the buffer, in the batch that is being filled or trained on.
    """

    submitted: int
    queued: int
    running: int
    partial: int
    blocked: int
    buffered: int
    collected: int
    trained: int
    recycled: int
    dropped: int

    @property
    def accounted(self) -> int:
        """All but `submitted`; the same number."""
        return sum(int(value) for value in asdict(self).values()) - self.submitted


@dataclass(frozen=True)
class Run:
    """One simulated run, after its warm-up. Shares are of all slots, or of all trainers, over all of `seconds`.

    Attributes:
        steps, updates, samples: that fell into `seconds`; samples are those trained on.
        engines_busy, engines_paused: share of slots with a sample that advances; share of time in the updates' pauses.
            The rest is idle.
        trainers_busy, trainers_updating: the rest is idle, also a trainer that waits for a slower one.
        staleness: number of groups that were trained on, by their staleness.
        mixed: share of the trained samples that versions on both sides of an update made.
        recycled_groups, dropped_groups: beyond the staleness bound.
        aborted_samples: that an update made begin anew.
        wasted: of the slot-seconds of all that finished, the share of what was recycled, dropped or aborted.
        running, buffered: samples in slots, groups in the buffer; means over time.
        finished, sample_seconds: samples, and what each spent in its slot, pauses included; NaN when none finished.
        trained_sample_seconds: the same of those trained on; less when the staleness bound sorts the long ones out.
        growth: samples that were submitted and neither trained on nor lost, over those trained on; near 0 when warm-up
            and run are long enough, since what is generated comes in waves.
        census: at the end, warm-up included.
    """

    seconds: float
    steps: int
    updates: int
    samples: int
    engines_busy: float
    engines_paused: float
    trainers_busy: float
    trainers_updating: float
    staleness: Mapping[int, int]
    mixed: float
    recycled_groups: int
    dropped_groups: int
    aborted_samples: int
    wasted: float
    running: float
    buffered: float
    finished: int
    sample_seconds: float
    trained_sample_seconds: float
    growth: float
    census: Census

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def engines_idle(self) -> float:
        return max(0.0, 1 - self.engines_busy - self.engines_paused)

    @property
    def trainers_idle(self) -> float:
        return max(0.0, 1 - self.trainers_busy - self.trainers_updating)

    @property
    def engines_idle_seconds(self) -> float:
        """Of a step, for the mean slot."""
        return self.engines_idle * self.seconds_per_step

    @property
    def trainers_idle_seconds(self) -> float:
        """Of a step, for the mean trainer."""
        return self.trainers_idle * self.seconds_per_step

    @property
    def staleness_mean(self) -> float:
        return sum(value * groups for value, groups in self.staleness.items()) / sum(self.staleness.values())

    @property
    def staleness_max(self) -> int:
        return max(self.staleness)

    @property
    def unused(self) -> float:
        """Share of the groups taken from the buffer that were beyond the bound."""
        lost = self.recycled_groups + self.dropped_groups
        return lost / (lost + sum(self.staleness.values()))

    def to_dict(self) -> dict[str, Any]:
        """As a JSON line has it, what follows from other values included."""
        derived = {name: getattr(self, name) for name, kind in vars(Run).items() if isinstance(kind, property)}
        histogram = {str(value): groups for value, groups in sorted(self.staleness.items())}
        return asdict(self) | derived | {"staleness": histogram}


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float


def spread_of(values: Iterable[float]) -> Spread:
    """Of at least one value."""
    low, median, high = np.percentile(list(values), [25, 50, 75]).tolist()
    return Spread(median, low, high)


@dataclass(frozen=True)
class Outcome:
    """Repetitions of one setting; each asynchronous run has its synchronous one, from the same seed."""

    asynchronous: Sequence[Run]
    synchronous: Sequence[Run]

    @property
    def speed_up(self) -> Spread:
        """Samples per second, asynchronous over synchronous."""
        pairs = zip(self.asynchronous, self.synchronous, strict=True)
        return spread_of(fast.samples_per_second / slow.samples_per_second for fast, slow in pairs)

    def spread(self, value: Callable[[Run], float]) -> Spread:
        return spread_of(map(value, self.asynchronous))

    def synchronous_spread(self, value: Callable[[Run], float]) -> Spread:
        return spread_of(map(value, self.synchronous))

    def histogram(self) -> dict[int, float]:
        """Share of the groups that were trained on, by staleness, over all repetitions."""
        counts: dict[int, int] = {}
        for run in self.asynchronous:
            for value, groups in run.staleness.items():
                counts[value] = counts.get(value, 0) + groups
        total = sum(counts.values())
        return {value: counts[value] / total for value in sorted(counts)}
