"""The picture: GB/s of each mode and of each limit, a column per case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.measurements import Measurement
from benchmarks.statistics import gathered, seconds_of, spread_of
from benchmarks.weights.report import TRANSFER
from benchmarks.weights.trainer import BROADCAST, P2P
from benchmarks.weights.turns import RAW_BROADCAST, RAW_WRITES, SOCKET

_COLOURS = {BROADCAST: "#0072B2", P2P: "#009E73"}
_SHOWN = (BROADCAST, RAW_BROADCAST, P2P, *RAW_WRITES.values(), SOCKET)  # a copy in memory is off the scale


def draw(measurements: Sequence[Measurement], directory: Path) -> Sequence[Path]:
    """Write weights.png and weights.svg; return their paths."""
    seconds = seconds_of(measurements)
    variants = gathered(measurements, lambda item: item.variant)
    nbytes = {item.variant: item.bytes for item in measurements}

    def paint(figure: Any) -> None:
        grid = figure.add_gridspec(1, len(variants), left=0.14, right=0.975, top=0.81, bottom=0.09, wspace=0.1)
        for column, variant in enumerate(variants):
            axes = figure.add_subplot(grid[0, column])
            axes.set_title(variant, fontsize=13)
            axes.set_xlabel("GB/s of the model's bytes")
            rates = {
                cell.peer: spread_of(nbytes[variant] / 1e9 / value for value in found.values())
                for cell, found in seconds.items()
                if (cell.variant, cell.operation) == (variant, TRANSFER)
            }
            figures.speed_bars(axes, _SHOWN, rates, _COLOURS, labelled=not column)

    item = measurements[0]
    return figures.save(
        directory,
        "weights",
        "Weights from a trainer to stand-in engines",
        f"transfer, median and quartiles of {len({m.round for m in measurements})} rounds, longer is better; limits "
        f"are grey · {item.bytes / 1e9:.2f} GB · {item.machine} · run {item.run}",
        paint,
    )
