"""What disk-delta's encodings are meant to reach, and whether they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, Spread, gathered, seconds_of, spread_of
from benchmarks.targets import Result
from benchmarks.weights.delta_settings import ADAMW, FEW, MANY
from benchmarks.weights.delta_turns import APPLY, BASELINE, ENCODE, MAPPED, memory_of

XOR, SPARSE = "xor", "sparse"
# How many times as long the fastest process of the baseline takes, at least; without a case, in each of them.
_TIMES: Sequence[tuple[str | None, str, str, float]] = (
    (None, XOR, ENCODE, 1.0),
    (None, XOR, APPLY, 1.0),
    (None, XOR, MAPPED, 1.0),
    (FEW.name, SPARSE, ENCODE, 3.0),
    (FEW.name, SPARSE, APPLY, 2.5),
    (FEW.name, SPARSE, MAPPED, 2.0),
    (MANY.name, SPARSE, ENCODE, 4.0),
)
_OF_BOUND = {FEW.name: 1.03, ADAMW.name: 1.05}
_MEGABYTES: Sequence[tuple[str | None, str, float]] = ((None, XOR, 64.0), (FEW.name, SPARSE, 32.0))


def results(measurements: Sequence[Measurement]) -> list[Result]:
    """Every target whose two sides were measured, in the order of cases."""
    seconds = seconds_of(measurements)
    found: list[Result] = []
    for variant in gathered(measurements, lambda item: item.variant):
        found += _speeds(seconds, variant)
        delta = delta_of(measurements, variant, SPARSE)
        if delta is not None and variant in _OF_BOUND:
            found.append(_number(variant, SPARSE, "wire, of the bound", _OF_BOUND[variant], of_bound(delta)))
        for case, peer, most in _MEGABYTES:
            memory = most_memory(measurements, variant, peer)
            if memory is not None and case in (None, variant):
                found.append(_number(variant, peer, "extra memory at the peak, MB", most, memory / 1e6))
    return found


def best_baseline(seconds: Seconds, variant: str, operation: str) -> Cell | None:
    """The process with the least median."""
    cells = [
        cell for cell in seconds if is_baseline(cell.peer) and (cell.variant, cell.operation) == (variant, operation)
    ]
    return min(cells, key=lambda cell: spread_of(seconds[cell].values()).median, default=None)


def is_baseline(peer: str) -> bool:
    """Whether it is one of its processes."""
    return peer.startswith(f"{BASELINE}, ")


def times_faster(seconds: Seconds, variant: str, peer: str, operation: str) -> Spread | None:
    """How many times as long the best of the baseline takes. The spread is that of the peer alone: they are processes
    of other times, and have no rounds in common."""
    best, cell = best_baseline(seconds, variant, operation), Cell(variant, peer, operation)
    if best is None or cell not in seconds:
        return None
    theirs = spread_of(seconds[best].values()).median
    median, low, high = spread_of(seconds[cell].values())
    return Spread(theirs / median, theirs / high, theirs / low)


def peers_of(measurements: Sequence[Measurement], name: str) -> list[str]:
    """By which names a codec was recorded: its processes, of the baseline."""
    peers = gathered(measurements, lambda item: item.peer)
    return [peer for peer in peers if peer == name or (name == BASELINE and is_baseline(peer))]


def delta_of(measurements: Sequence[Measurement], variant: str, name: str) -> Mapping[str, int] | None:
    """What a codec made, which is the same in all its turns; see `Measurement.delta`."""
    peers = peers_of(measurements, name)
    made = (item.delta for item in measurements if item.variant == variant and item.peer in peers and item.delta)
    return next(made, None)


def of_bound(delta: Mapping[str, int]) -> float:
    """Bytes made over those that are needed at least."""
    return delta["wire"] / delta["bound"]


def most_memory(measurements: Sequence[Measurement], variant: str, name: str) -> int | None:
    """Bytes that a codec took at its peak, of making and applying, in any of its processes."""
    kinds, peers = [memory_of(operation) for operation in (ENCODE, APPLY)], peers_of(measurements, name)
    taken = [
        item.extra_bytes
        for item in measurements
        if item.variant == variant and item.peer in peers and item.operation in kinds and item.extra_bytes is not None
    ]
    return max(taken, default=None)


def _speeds(seconds: Seconds, variant: str) -> Iterator[Result]:
    for case, peer, operation, wanted in _TIMES:
        found = times_faster(seconds, variant, peer, operation)
        if found is not None and case in (None, variant):
            yield Result(variant, f"{peer} {operation}", "x the baseline", wanted, found)


def _number(variant: str, peer: str, what: str, wanted: float, found: float) -> Result:
    return Result(variant, peer, what, wanted, Spread(found, found, found), at_most=True)
