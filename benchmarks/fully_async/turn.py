"""What a turn measured: of the steps after its warm-up, and of all its samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.fully_async.engine import Sample
from miles_plugin.fully_async.counts import MANY, PREFIX

STALENESS = "staleness_"


@dataclass(frozen=True)
class Step:
    """One step of the loop. On the monotonic clock when it began and ended; otherwise seconds.

    Attributes:
        waited: for the samples, of which all have so many tokens. prepared: of the weight update before the engines'
            pause, paused: from then on.
        buffer: the metrics of the asynchronous rollout's buffer; empty of a synchronous one.
    """

    began: float
    ended: float
    waited: float
    tokens: int
    prepared: float
    paused: float
    buffer: Mapping[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> float:
        """All that the trainers did but wait for samples and update weights: put, get and training."""
        return self.ended - self.began - self.waited - self.prepared - self.paused


def summary(steps: Sequence[Step], samples: Sequence[Sample], groups: int, group_size: int) -> dict[str, float]:
    """What the steps came to, as numbers with names: `staleness_N` counts groups, N at most `MANY`, which stands for it
    and more; `unused` are groups that were too old. samples, tokens: of a step. waited, trained, updated: its
    seconds.
    engines_busy: share of the slots' time, pauses included, in which a sample advanced.

    Args:
        samples: of all the turn. groups: of a step. group_size: samples of a group.
    """
    staleness = _staleness(steps, groups)
    return {
        "samples": groups * group_size,
        "tokens": fmean(step.tokens for step in steps),
        "waited": fmean(step.waited for step in steps),
        "trained": fmean(step.trained for step in steps),
        "updated": fmean(step.prepared + step.paused for step in steps),
        "engines_busy": _busy_share(samples, steps, groups * group_size),
        "unused": sum(step.buffer.get(f"{PREFIX}stale_groups_filtered", 0) for step in steps),
        **{f"{STALENESS}{each}": count for each, count in staleness.items()},
    }


def seconds_of(samples: Iterable[Sample], steps: Sequence[Step]) -> list[float]:
    """Of each sample that was finished, without the pauses of updates. steps: of all the turn."""
    return [
        sample.ended - sample.began - _paused((sample.began, sample.ended), steps)
        for sample in samples
        if sample.ended is not None
    ]


def _staleness(steps: Sequence[Step], groups: int) -> dict[int, int]:
    if not steps[0].buffer:
        return {0: groups * len(steps)}
    names = {each: f"consumed_staleness_{each}" for each in range(MANY)} | {MANY: f"consumed_staleness_{MANY}_or_more"}
    counts = {each: sum(int(step.buffer[PREFIX + name]) for step in steps) for each, name in names.items()}
    return {each: count for each, count in counts.items() if count}


def _busy_share(samples: Iterable[Sample], steps: Sequence[Step], slots: int) -> float:
    """Share of the slots' time in which a sample advanced in them, over these steps."""
    began, ended = steps[0].began, steps[-1].ended
    busy = 0.0
    for sample in samples:
        span = max(began, sample.began), ended if sample.ended is None else min(ended, sample.ended)
        if span[0] < span[1]:
            busy += span[1] - span[0] - _paused(span, steps)
    return busy / (slots * (ended - began))


def _paused(span: tuple[float, float], steps: Iterable[Step]) -> float:
    return sum(_overlap(span, (step.ended - step.paused, step.ended)) for step in steps)


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
