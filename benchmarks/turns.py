"""Measurements in one process: steps take turns, so that what disturbs the machine meets them all."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.statistics import Spread, spread_of
from benchmarks.transport.targets import LOAD
from benchmarks.transport.workload import SharedNumbers, Workload, batch_of, mapped


def batches_to_measure(description: str | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Variant, batch and number of repeats, as the command line asks for them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each, of which the median counts (9)")
    parser.add_argument("--variants", nargs="+", default=["numpy", "routed"], help="of the batch (numpy routed)")
    arguments = parser.parse_args()
    for variant in arguments.variants:
        workload = Workload(variant, LOAD["samples"], LOAD["shortest"], LOAD["longest"], seed=0)
        with SharedNumbers(workload) as numbers:
            yield variant, batch_of(workload, mapped(numbers.path)), arguments.repeats


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
