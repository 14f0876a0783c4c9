"""The picture of a comparison: put above, get below, a column per variant, a bar per peer on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, gathered, seconds_of, spread_of
from benchmarks.transport.peers import Peer
from miles_plugin.report import units
from miles_plugin.report.plot import INK

_OPERATIONS = ("put", "get")


def draw(measurements: Sequence[Measurement], peers: Sequence[Peer], directory: Path, name: str) -> Sequence[Path]:
    """Write `name`.png and `name`.svg; return their paths."""
    seconds = seconds_of(measurements)
    variants = gathered(measurements, lambda item: item.variant)
    sizes = {item.variant: item.bytes for item in measurements}
    shown = [peer for peer in peers if any(cell.peer == peer.name for cell in seconds)]

    def paint(figure: Any) -> None:
        grid = figure.add_gridspec(
            2, len(variants), left=0.175, right=0.975, top=0.83, bottom=0.09, wspace=0.12, hspace=0.38
        )
        for row, operation in enumerate(_OPERATIONS):
            for column, variant in enumerate(variants):
                axes = figure.add_subplot(grid[row, column])
                axes.set_title(f"{operation}, {variant}, {units.nbytes(sizes[variant])}", fontsize=13)
                _bars(axes, seconds, shown, variant, operation)
                if column:
                    axes.set_yticklabels([])
                if row:
                    axes.set_xlabel("milliseconds")

    item = measurements[0]
    return figures.save(
        directory,
        name,
        f"A rollout batch from one process to another{', into memory never used' if item.fresh else ''}",
        f"median and quartiles of {len({m.round for m in measurements})} rounds, shorter is better · {item.machine} · "
        f"run {item.run}",
        paint,
    )


def _bars(axes: Any, seconds: Seconds, peers: Sequence[Peer], variant: str, operation: str) -> None:
    axes.set_xscale("log")
    axes.grid(axis="y", visible=False)
    ends = []
    for place, peer in enumerate(peers):
        cell = Cell(variant, peer.name, operation)
        if cell not in seconds:
            continue
        median, low, high = spread_of(1000 * value for value in seconds[cell].values())
        axes.barh(place, median, color=figures.colour_of(peer.name), height=0.72)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
        text = f"{median:.0f}" if median >= 10 else f"{median:.2g}"
        axes.annotate(text, (high, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=10)
        ends += [low, high]
    if ends:
        axes.set_xlim(min(ends) / 3, max(ends) * 4)
    axes.set_yticks(range(len(peers)), [peer.label for peer in peers], fontsize=11)
    axes.set_ylim(len(peers) - 0.4, -0.6)
