"""How cost grows: with the batches that are outstanding, with the samples of a batch, with the readers of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import figures, markdown
from benchmarks.measurements import Measurement
from benchmarks.progress import Steps
from benchmarks.statistics import gathered, spread_of
from benchmarks.transport import stage
from benchmarks.transport.memory import check_fits
from benchmarks.transport.peers import Peer
from benchmarks.transport.recorder import Recorder
from benchmarks.transport.roles import Put, Read
from benchmarks.transport.rounds import check_read
from benchmarks.transport.settings import Settings
from benchmarks.transport.stage import Batch, Pair
from benchmarks.transport.workload import SharedNumbers, Workload
from miles_plugin.report import units
from miles_plugin.report.plot import PALE

_WRITER_PROCESSES = 4  # that the writers' worth of batches is put by, each in turn


@dataclass(frozen=True)
class Turn:
    """What one turn took, summed over its batches; of what runs side by side, the longest."""

    put: float
    get: float


@dataclass(frozen=True)
class Sweep:
    """One thing that is varied.

    Attributes:
        name: in the JSON lines.
        label: of the axis.
        points, quick_points: how far.
        turn: moves what there is to move at one point; given the settings' point, the batch and a peer's processes.
    """

    name: str
    label: str
    points: tuple[int, ...]
    quick_points: tuple[int, ...]
    turn: Callable[[int, int, Batch, Pair], Turn]

    def points_of(self, settings: Settings) -> tuple[int, ...]:
        return self.quick_points if settings.quick else self.points

    def workload(self, base: Workload, point: int) -> Workload:
        return replace(base, samples=point) if self.name == "samples" else base

    def outstanding(self, point: int) -> int:
        """Batches in the store at a time."""
        return point if self.name == "batches" else 1

    def readers(self, point: int) -> int:
        return point if self.name == "readers" else 1

    def writers(self, point: int) -> int:
        return min(point, _WRITER_PROCESSES) if self.name == "batches" else 1


def _one(_point: int, number: int, batch: Batch, pair: Pair) -> Turn:
    """One batch, one reader."""
    put: Put = pair.writers[0].call("put", number)
    read: Read = pair.readers[0].call("read", put.ref, batch.expected_of(pair.peer, number))
    check_read(read, pair.peer, batch.workload)
    pair.writers[0].call("remove", put.ref)
    return Turn(put.seconds, read.seconds)


def _outstanding(point: int, number: int, batch: Batch, pair: Pair) -> Turn:
    """As many batches as the point says, all put before the first is read, and all read before the first is removed."""
    shares = [range(start, point, len(pair.writers)) for start in range(len(pair.writers))]
    putting = [
        (process, share, process.start("put_all", [number + index for index in share]))
        for process, share in zip(pair.writers, shares, strict=True)
    ]
    placed = [(process, list(zip(share, wait(), strict=True))) for process, share, wait in putting]
    read = 0.0
    for _, puts in placed:
        for index, put in puts:
            found: Read = pair.readers[0].call("read", put.ref, batch.expected_of(pair.peer, number + index))
            check_read(found, pair.peer, batch.workload)
            read += found.seconds
    for process, puts in placed:
        for _, put in puts:
            process.call("remove", put.ref)
    return Turn(max(sum(put.seconds for _, put in puts) for _, puts in placed), read)


def _together(_point: int, number: int, batch: Batch, pair: Pair) -> Turn:
    """One batch that all readers get at a time."""
    put: Put = pair.writers[0].call("put", number)
    expected = batch.expected_of(pair.peer, number)
    reading = [process.start("read", put.ref, expected) for process in pair.readers]
    found: list[Read] = [wait() for wait in reading]
    for read in found:
        check_read(read, pair.peer, batch.workload)
    pair.writers[0].call("remove", put.ref)
    return Turn(put.seconds, max(read.seconds for read in found))


SWEEPS = (
    Sweep("batches", "batches outstanding", (1, 2, 4, 8, 16, 32, 64), (1, 4), _outstanding),
    Sweep("samples", "samples of a batch", (10, 100, 1_000, 10_000, 100_000), (10, 1_000), _one),
    Sweep("readers", "readers of one batch", (1, 2, 4, 8), (1, 2), _together),
)


def turns(settings: Settings) -> int:
    """How many turns there are."""
    points = sum(len(sweep.points_of(settings)) for sweep in SWEEPS)
    return points * len(settings.workloads) * len(_readable(settings.peers)) * (settings.warmup + settings.repeats)


def capacity(settings: Settings) -> int:
    """Bytes of batches that the services must have room for; ConfigError when that is more than there is memory for."""
    most = 0
    for sweep, point, workload in _points(settings):
        moved = sweep.outstanding(point) * workload.nbytes
        check_fits(moved, moved // 4, _readable(settings.peers), workload.variant, sweep.readers(point))
        most = max(most, moved)
    return most


def measure(settings: Settings, running: Mapping[str, Any], recorder: Recorder, steps: Steps) -> None:
    """Measure every sweep, point by point, all peers taking turns at each.

    Args:
        running: the services' values, by name.

    Raises:
        BenchFailed: a peer failed, or a reader found another batch than the one that was put.
    """
    peers = _readable(settings.peers)
    for sweep, point, workload in _points(settings):
        steps.say(f"{workload.variant}, {sweep.label}: {point}, a batch of {units.nbytes(workload.nbytes)}")
        with SharedNumbers(workload) as numbers:
            batch = Batch(workload, numbers)
            processes = sweep.writers(point), sweep.readers(point)
            with stage.pairs(peers, batch, running, settings.logs, *processes) as pairs:
                for number in range(-settings.warmup, settings.repeats):
                    for pair in pairs:
                        steps.next(f"{sweep.label}: {point}, {pair.peer.label}")
                        turn = sweep.turn(point, 1 + (number + settings.warmup) * point, batch, pair)
                        if number >= 0:
                            _record(recorder, sweep, point, batch, pair.peer.name, number, turn)


def _points(settings: Settings) -> Iterator[tuple[Sweep, int, Workload]]:
    for sweep in SWEEPS:
        for base in settings.workloads:
            for point in sweep.points_of(settings):
                yield sweep, point, sweep.workload(base, point)


def _record(recorder: Recorder, sweep: Sweep, point: int, batch: Batch, peer: str, number: int, turn: Turn) -> None:
    moved = sweep.outstanding(point) * batch.nbytes
    scale = {sweep.name: point}
    recorder.add(batch.workload, peer, "put", number, turn.put, moved, scale=scale)
    recorder.add(batch.workload, peer, "get", number, turn.get, moved * sweep.readers(point), scale=scale)


def _readable(peers: Sequence[Peer]) -> list[Peer]:
    return [peer for peer in peers if peer.reader is not None]


# --- what becomes of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curve:
    """Medians of one peer and operation along a sweep."""

    peer: str
    operation: str
    points: list[int]
    seconds: list[float]
    nbytes: list[int]

    @property
    def rates(self) -> list[float]:
        """GB/s."""
        return [nbytes / seconds / 1e9 for nbytes, seconds in zip(self.nbytes, self.seconds, strict=True)]


def text(measurements: Sequence[Measurement], peers: Sequence[Peer]) -> str:
    """A table per sweep, as Markdown."""
    labels = {peer.name: peer.label for peer in peers}
    item = measurements[0]
    parts = [f"Run {item.run} on {item.machine}; milliseconds, GB/s in brackets; medians."]
    for variant in gathered(measurements, lambda measurement: measurement.variant):
        for sweep in SWEEPS:
            curves = _curves(measurements, sweep, variant)
            points = sorted({point for curve in curves for point in curve.points})
            rows = [
                [f"{labels[curve.peer]}, {curve.operation}", *(_cell(curve, point) for point in points)]
                for curve in curves
            ]
            header = [sweep.label, *(f"{point:,}" for point in points)]
            parts.append(f"**{variant}**, {sweep.label}\n\n{markdown.table(header, rows)}")
    return "\n\n".join(parts)


def draw(measurements: Sequence[Measurement], peers: Sequence[Peer], directory: Path) -> Sequence[Path]:
    """Write scaling.png and scaling.svg of the first variant; return their paths."""
    labels = {peer.name: peer.label for peer in peers}
    item = measurements[0]

    def paint(figure: Any) -> None:
        from matplotlib.ticker import LogLocator, NullLocator

        grid = figure.add_gridspec(
            2, len(SWEEPS), left=0.06, right=0.975, top=0.83, bottom=0.15, wspace=0.22, hspace=0.25
        )
        for column, sweep in enumerate(SWEEPS):
            curves = _curves(measurements, sweep, item.variant)
            for row, label in enumerate(("seconds", "GB/s")):
                axes = figure.add_subplot(grid[row, column])
                for curve in curves:
                    axes.plot(
                        curve.points,
                        curve.rates if row else curve.seconds,
                        color=figures.colour_of(curve.peer),
                        linestyle="-" if curve.operation == "put" else "--",
                        linewidth=2,
                        label=f"{labels[curve.peer]}, {curve.operation}",
                    )
                axes.set(xscale="log", yscale="log", xlabel=sweep.label if row else "", ylabel=label)
                points = sweep.points if len(sweep.points) < 6 else sweep.points[::2]
                axes.set_xticks(points, [f"{point:,}" for point in points])
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if row else (1,), numticks=9))
                axes.yaxis.set_major_formatter("{x:g}")
                for axis in (axes.xaxis, axes.yaxis):
                    axis.set_minor_locator(NullLocator())
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="lower center", ncols=6, labelcolor=PALE, handlelength=3)

    return figures.save(
        directory,
        "scaling",
        "How the cost of a rollout batch grows",
        f"medians, {item.variant}; put whole, get dashed · {item.machine} · run {item.run}",
        paint,
    )


def _curves(measurements: Sequence[Measurement], sweep: Sweep, variant: str) -> list[_Curve]:
    gathered_seconds: dict[tuple[str, str], dict[int, list[Measurement]]] = {}
    for item in measurements:
        if item.variant == variant and item.scale and sweep.name in item.scale and item.seconds is not None:
            along = gathered_seconds.setdefault((item.peer, item.operation), {})
            along.setdefault(item.scale[sweep.name], []).append(item)
    return [
        _Curve(
            peer,
            operation,
            sorted(along),
            [spread_of(item.seconds or 0.0 for item in along[point]).median for point in sorted(along)],
            [along[point][0].bytes for point in sorted(along)],
        )
        for (peer, operation), along in gathered_seconds.items()
    ]


def _cell(curve: _Curve, point: int) -> str:
    if point not in curve.points:
        return ""
    index = curve.points.index(point)
    return f"{1000 * curve.seconds[index]:.3g} ({curve.rates[index]:.2g})"
