"""The picture: GB/s of each mode and of each limit, a column per case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, gathered, seconds_of, spread_of
from benchmarks.weights.report import TRANSFER
from benchmarks.weights.trainer import BROADCAST, P2P
from benchmarks.weights.turns import RAW_BROADCAST, RAW_WRITES, SOCKET
from miles_plugin.report.plot import INK

_COLOURS = {BROADCAST: "#0072B2", P2P: "#009E73"}
_LIMIT = "#A8A8A8"
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
            axes.grid(axis="y", visible=False)
            for place, peer in enumerate(_SHOWN):
                cell = Cell(variant, peer, TRANSFER)
                if cell not in seconds:
                    continue
                median, low, high = spread_of(nbytes[variant] / 1e9 / value for value in seconds[cell].values())
                axes.barh(place, median, color=_COLOURS.get(peer, _LIMIT), height=0.72)
                axes.plot([low, high], [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
                axes.annotate(
                    f"{median:.2f}", (high, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=10
                )
            axes.set_yticks(range(len(_SHOWN)), _SHOWN if not column else [""] * len(_SHOWN), fontsize=11)
            axes.set_ylim(len(_SHOWN) - 0.4, -0.6)
            axes.margins(x=0.15)

    item = measurements[0]
    return figures.save(
        directory,
        "weights",
        "Weights from a trainer to stand-in engines",
        f"transfer, median and quartiles of {len({m.round for m in measurements})} rounds, longer is better; limits "
        f"are grey · {item.bytes / 1e9:.2f} GB · {item.machine} · run {item.run}",
        paint,
    )
