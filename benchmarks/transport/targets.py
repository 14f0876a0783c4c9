"""What this transport is meant to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, Spread, ratio, seconds_of
from benchmarks.targets import Result

_OURS, _NETWORK = "ours", "ours-network"
_RAY, _BUNDLE = "x Ray", "x BundleTransfer"
# How many times as long a peer takes, at least, by variant: derived where each put took memory that its store had not
# used, as in a fresh run.
_TIMES_RAY = {
    "put": {"numpy": 5.0, "torch": 10.0, "lists": 1.3, "routed": 4.0},
    "get": {"numpy": 1.0, "torch": 20.0, "lists": 20.0, "routed": 1.0},
}
_TIMES_BUNDLE = {
    "put": {"numpy": 5.0, "torch": 5.0, "lists": 2.0, "routed": 5.0},
    "get": {"numpy": 5.0, "torch": 5.0, "lists": 5.0, "routed": 5.0},
}
_OF_MEMCPY = 0.5
# A pass over the payload takes about half as long as copying it: a tenth is none.
_NO_PASS = 10.0
# Lists are left out: what they take is their conversion, which the limit does not do.
_OF_RAW, _RAW_VARIANTS = 0.8, ("numpy", "torch", "routed")
_MEMORY = 1.1
_MEMORY_FROM = 16 << 20  # bytes of a payload; of a smaller one the first put's fixed costs are most of it
LOAD = {"samples": 512, "shortest": 1024, "longest": 8192}  # that all this is meant for


def set_fresh(result: Result) -> bool:
    """Whether a target was derived from puts into memory that no store had used."""
    return result.what in (_RAY, _BUNDLE)


def results(measurements: Sequence[Measurement]) -> list[Result]:
    """Every target whose two sides were measured, in the order of variants."""
    seconds = seconds_of(measurements)
    found = [*_speeds(seconds), *_memory(measurements)]
    variants = list(dict.fromkeys(item.variant for item in measurements))
    return sorted(found, key=lambda result: variants.index(result.variant))


def _speeds(seconds: Seconds) -> Iterator[Result]:
    for operation in ("put", "get"):
        for variant, wanted in _TIMES_RAY[operation].items():
            yield from _times(seconds, variant, operation, _OURS, "ray", _RAY, wanted)
        for variant, wanted in _TIMES_BUNDLE[operation].items():
            yield from _times(seconds, variant, operation, _OURS, "bundle", _BUNDLE, wanted)
        for variant in _RAW_VARIANTS:
            raw = "put_from" if operation == "put" else "get_into"
            yield from _times(seconds, variant, operation, _NETWORK, "raw", f"network path, of raw {raw}", _OF_RAW)
    copied = Cell("routed", "memcpy", "put")
    for operation, what, wanted in (("put", "of memcpy", _OF_MEMCPY), ("get", "x a memcpy: no payload pass", _NO_PASS)):
        found = ratio(seconds, copied, Cell("routed", _OURS, operation))
        if found is not None:
            yield Result("routed", operation, what, wanted, found)


def _times(
    seconds: Seconds, variant: str, operation: str, ours: str, peer: str, what: str, wanted: float
) -> Iterator[Result]:
    found = ratio(seconds, Cell(variant, peer, operation), Cell(variant, ours, operation))
    if found is not None:
        yield Result(variant, operation, what, wanted, found)


def _memory(measurements: Sequence[Measurement]) -> Iterator[Result]:
    for item in measurements:
        if item.peer == _OURS and item.extra_bytes is not None and item.bytes >= _MEMORY_FROM:
            taken = memory_ratio(item)
            yield Result(
                item.variant, "memory", "extra memory at the peak, in payloads", _MEMORY, Spread(*[taken] * 3), True
            )


def memory_ratio(measurement: Measurement) -> float:
    """The writer's private memory at the peak of a put, in payloads; the copy that is stored is not its own."""
    return (measurement.extra_bytes or 0) / measurement.bytes
