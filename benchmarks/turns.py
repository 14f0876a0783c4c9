"""Steps of one process that take turns, so that what disturbs the machine meets them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from benchmarks.statistics import Spread, spread_of


def seconds_in_turns(repeats: int, steps: Mapping[str, Callable[[], float | None]]) -> dict[str, Spread]:
    """How long each step takes, by name; a step that returns seconds is believed. One round more warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            own = step()
            if turn:
                seconds[name].append(time.perf_counter() - began if own is None else own)
    return {name: spread_of(values) for name, values in seconds.items()}


def milliseconds(found: Mapping[str, Spread]) -> str:
    """All of them in one line."""
    return ", ".join(
        f"{name} {1e3 * spread.median:.2f} ms ({1e3 * spread.low:.2f} to {1e3 * spread.high:.2f})"
        for name, spread in found.items()
    )
