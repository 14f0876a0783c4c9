"""Who takes turns, and in which processes: of every codec several, one after the other, each fresh.

The speed of the same code differs from process to process. So a codec has several of them, which alternate with those
of the others; what is compared with is the fastest of its own, what is measured is the median of all.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import SpawnedProcess
from benchmarks.progress import Steps
from benchmarks.recorder import Recorder
from benchmarks.transport.memory import PeakMemory
from benchmarks.weights.delta_baseline import Baseline
from benchmarks.weights.delta_maker import Maker
from benchmarks.weights.delta_pair import Pair
from benchmarks.weights.delta_settings import CASES, FEW, THREADS, Case, DeltaSettings
from benchmarks.weights.delta_sides import Codec, Limits, Ours, Places, Sides, Took
from benchmarks.weights.delta_whole import FIRST_COPY, Whole
from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS
from mooncake_store.memory import available_bytes

BASELINE = "numpy, zstd, xxh3"
MEMCPY, HASH = "memcpy", "xxh3-128"
ENCODE, APPLY, MAPPED, FLUSH, LIMIT = "encode", "apply", "apply, mapped", "flush", "all bytes"
CODECS: Mapping[str, Callable[[], Codec]] = {
    BASELINE: Baseline,
    **{encoding: partial(Ours, encoding) for encoding in ENCODINGS},
}
_METHODS = {ENCODE: "encode", APPLY: "apply", MAPPED: "apply_mapped"}
_LIMITS = {MEMCPY: "copy", HASH: "hash"}
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 7  # times the model, of the directory in which most files lie


def memory_of(operation: str) -> str:
    return f"memory of {operation}"


def process_of(codec: str, number: int) -> str:
    """The name by which one process of a codec is recorded, where each counts for itself."""
    return f"{codec}, process {number + 1}"


def steps_of(settings: DeltaSettings, codecs: Mapping[str, Callable[[], Codec]] = CODECS) -> int:
    """How many processes there are that measure."""
    return len(CASES) * settings.processes * (len(codecs) + 1) + len(ENCODINGS)


def measure(
    settings: DeltaSettings,
    recorder: Recorder,
    steps: Steps,
    codecs: Mapping[str, Callable[[], Codec]] = CODECS,
) -> None:
    """Measure everything.

    Raises:
        BenchFailed: a process failed, or something was made that is not what it should be, bit by bit.
    """
    with _directories(settings) as (fast, local):
        steps.say(f"files lie in {fast}, those that are mapped in {local}")
        for case in CASES:
            steps.say(f"{case.name}: making weights")
            logs = settings.logs / case.name.replace(" ", "-").replace("%", "percent").replace(",", "")
            logs.mkdir(parents=True)
            with SpawnedProcess("maker", logs, Maker) as maker:
                pair: Pair = maker.call("make", case, settings.nbytes, fast)
            run = _Run(settings, case, pair, logs, recorder, steps)
            run.measure_codecs(codecs, fast, local)
            if case == FEW:
                run.measure_whole(fast / "whole")


class _Run:
    """One case."""

    def __init__(
        self, settings: DeltaSettings, case: Case, pair: Pair, logs: Path, recorder: Recorder, steps: Steps
    ) -> None:
        self._settings, self._case, self._pair, self._logs = settings, case, pair, logs
        self._recorder, self._steps = recorder, steps

    def measure_codecs(self, codecs: Mapping[str, Callable[[], Codec]], fast: Path, local: Path) -> None:
        names = list(codecs)
        for number in range(self._settings.processes):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                self._next(name, number)
                places = Places(local / "mapped", fast / f"payloads-{names.index(name)}")
                self._codec(name, codecs[name], number, places)
            self._next("limits", number)
            self._limits(number)
        for path in (local / "mapped", *fast.glob("payloads-*")):
            path.unlink()

    def measure_whole(self, directory: Path) -> None:
        density = self._case.density
        assert density is not None
        for encoding in ENCODINGS:
            self._steps.next(f"{self._case.name}: {encoding}, published and materialized")
            arguments = (directory, self._pair, self._settings.nbytes, density, encoding, THREADS)
            with SpawnedProcess(f"whole-{encoding}", self._logs, Whole, *arguments) as process:
                self._add(encoding, FIRST_COPY, 0, process.call("first_copy"))
                process.call("verify")
                # The first version fills the reader's other copy, and is none of those that are counted.
                for turn in range(-self._settings.warmup, self._settings.repeats):
                    took: dict[str, float] = process.call("turn")
                    process.call("verify")
                    for operation, seconds in took.items() if turn >= 0 else ():
                        self._add(encoding, operation, turn, seconds)
            shutil.rmtree(directory)

    def _codec(self, name: str, make: Callable[[], Codec], number: int, places: Places) -> None:
        """The turns of one process. What it does first shows what memory it takes: nothing is left from before."""
        peer = process_of(name, number) if name == BASELINE else name
        order = [ENCODE, APPLY] if number % 2 == 0 else [APPLY, ENCODE]
        label = f"{len(self._recorder.measurements)}-{number + 1}"
        with SpawnedProcess(f"codec-{label}", self._logs, Sides, name, make, self._pair, places, THREADS) as process:
            if order[0] == APPLY:
                process.call("load")
            for turn in range(-self._settings.warmup, self._settings.repeats):
                is_first = turn == -self._settings.warmup
                for operation in order if turn < 0 else [*order, MAPPED]:
                    looked_at = is_first and operation == order[0]
                    with PeakMemory(process.pid) if looked_at else nullcontext() as peak:
                        took: Took = process.call(_METHODS[operation])
                    process.call("verify")
                    if peak is not None:
                        extra = max(0, peak.extra - (took.wire or 0))
                        self._add(peer, memory_of(operation), number, None, extra_bytes=extra)
                    if turn >= 0:
                        self._record(peer, operation, number * self._settings.repeats + turn, took)
            if order[0] == ENCODE:
                process.call("save")

    def _limits(self, number: int) -> None:
        with SpawnedProcess(f"limits-{number + 1}", self._logs, Limits, self._pair, THREADS) as process:
            for turn in range(-self._settings.warmup, self._settings.repeats):
                for name, method in _LIMITS.items():
                    seconds = process.call(method)
                    if turn >= 0:
                        self._add(name, LIMIT, number * self._settings.repeats + turn, seconds)

    def _record(self, peer: str, operation: str, number: int, took: Took) -> None:
        pair, delta = self._pair, None
        if took.wire is not None:
            bound = round(pair.bound_bytes)
            delta = {"values": pair.values, "changed": pair.changed, "wire": took.wire, "bound": bound}
        self._add(peer, operation, number, took.seconds, delta=delta)
        if took.flush is not None:
            self._add(peer, FLUSH, number, took.flush)

    def _add(self, peer: str, operation: str, number: int, seconds: float | None, **more: Any) -> None:
        self._recorder.add(
            settings=self._settings.load(self._case),
            variant=self._case.name,
            peer=peer,
            operation=operation,
            round=number,
            seconds=seconds,
            bytes=self._pair.nbytes,
            **more,
        )

    def _next(self, name: str, number: int) -> None:
        self._steps.next(f"{self._case.name}: {name}, process {number + 1} of {self._settings.processes}")


@contextmanager
def _directories(settings: DeltaSettings) -> Iterator[tuple[Path, Path]]:
    """Where files lie, in memory if there is room, and where those lie that are mapped; both end with the block."""
    needed = _ROOM * settings.nbytes
    is_room = _SHARED_MEMORY.is_dir() and min(shutil.disk_usage(_SHARED_MEMORY).free, available_bytes() // 2) > needed
    with (
        tempfile.TemporaryDirectory(prefix="deltas-", dir=_SHARED_MEMORY if is_room else settings.output) as fast,
        tempfile.TemporaryDirectory(prefix="mapped-", dir=settings.output) as local,
    ):
        yield Path(fast), Path(local)
