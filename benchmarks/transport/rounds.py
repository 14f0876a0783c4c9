"""The comparison: in every round each peer has one turn, put and get, so that what disturbs the machine meets them all.

Who begins changes from round to round. The reader compares each batch with what was put before the next turn; a batch
that is not right ends the run.

A batch is removed when its turn ends, and the next put of that peer finds memory that its store has used before. In a
fresh run it stays until its variant ends, and every put has to take memory that its store has not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from benchmarks.progress import Steps
from benchmarks.transport import stage
from benchmarks.transport.memory import PeakMemory, check_fits
from benchmarks.transport.peers import Peer
from benchmarks.transport.recorder import Recorder
from benchmarks.transport.roles import Put, Read
from benchmarks.transport.settings import Settings
from benchmarks.transport.stage import Batch, Pair
from benchmarks.transport.workload import SharedNumbers, Workload
from miles_plugin.bench_commands import BenchFailed
from miles_plugin.report import units


def capacity(settings: Settings) -> int:
    """Bytes of batches that the services must have room for; ConfigError when that is more than there is memory for."""
    for workload in settings.workloads:
        items = workload.number_bytes() // 4
        check_fits(workload.nbytes, items, settings.peers, workload.variant, kept=_kept(settings, workload))
    return max(workload.nbytes for workload in settings.workloads)


def kept(settings: Settings) -> int:
    """Bytes of batches that each peer leaves in its store after its turns."""
    return max(_kept(settings, workload) for workload in settings.workloads)


def _kept(settings: Settings, workload: Workload) -> int:
    return (settings.warmup + settings.repeats) * workload.stored_bytes if settings.fresh else 0


def parts(settings: Settings) -> list[Settings]:
    """What services of its own must be started for: in a fresh run each variant, or it would find used memory."""
    if not settings.fresh:
        return [settings]
    return [replace(settings, workloads=(workload,)) for workload in settings.workloads]


def measure(settings: Settings, running: Mapping[str, Any], recorder: Recorder, steps: Steps) -> None:
    """Measure every workload with every peer.

    Args:
        running: the services' values, by name.

    Raises:
        BenchFailed: a peer failed, or a reader found another batch than the one that was put.
    """
    for workload in settings.workloads:
        steps.say(f"{workload.variant}: {workload.samples} samples, {units.nbytes(workload.nbytes)}")
        with SharedNumbers(workload) as numbers:
            batch = Batch(workload, numbers)
            with stage.pairs(settings.peers, batch, running, settings.logs) as pairs:
                _measure(settings, batch, pairs, recorder, steps)


def turns(settings: Settings) -> int:
    """How many turns there are."""
    return len(settings.workloads) * len(settings.peers) * (settings.warmup + settings.repeats)


def _measure(settings: Settings, batch: Batch, pairs: Sequence[Pair], recorder: Recorder, steps: Steps) -> None:
    workload = batch.workload
    stored: list[tuple[Pair, Put, int]] = []
    for number in range(-settings.warmup, settings.repeats):
        stamped = number + settings.warmup + 1
        first = number % len(pairs)
        for pair in [*pairs[first:], *pairs[:first]]:
            kind = f"warm-up {stamped}/{settings.warmup}" if number < 0 else f"round {number + 1}/{settings.repeats}"
            steps.next(f"{workload.variant}, {kind}: {pair.peer.label}")
            with PeakMemory(pair.writers[0].pid) if stamped == 1 else nullcontext() as peak:
                put: Put = pair.writers[0].call("put", stamped)
            if peak is not None:
                recorder.add(workload, pair.peer.name, "memory", 0, None, batch.nbytes, extra_bytes=peak.extra)
            got = _read(pair, put, batch, stamped)
            stored.append((pair, put, stamped))
            if not settings.fresh:
                _remove(stored)
            if number >= 0:
                recorder.add(workload, pair.peer.name, "put", number, put.seconds, batch.nbytes)
                if got is not None:
                    recorder.add(workload, pair.peer.name, "get", number, got.seconds, batch.nbytes)
    if stored:
        steps.say(f"{workload.variant}: reading all again: had a store let go of one, its memory was used again")
        for pair, put, stamped in stored:
            _read(pair, put, batch, stamped)
        _remove(stored)


def _remove(stored: list[tuple[Pair, Put, int]]) -> None:
    while stored:
        pair, put, _ = stored.pop()
        pair.writers[0].call("remove", put.ref)


def _read(pair: Pair, put: Put, batch: Batch, number: int) -> Read | None:
    if not pair.readers:
        return None
    found: Read = pair.readers[0].call("read", put.ref, batch.expected_of(pair.peer, number))
    check_read(found, pair.peer, batch.workload)
    return found


def check_read(found: Read, peer: Peer, workload: Workload) -> None:
    """Raise BenchFailed when what was read is not what was put."""
    if found.wrong:
        raise BenchFailed(
            f"{peer.label}, variant {workload.variant!r}: what was read is not what was put in columns "
            f"{', '.join(found.wrong)}; nothing of this run can be believed"
        )
