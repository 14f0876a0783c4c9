"""The picture: GB/s of each way to move the objects, a column per operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.measurements import Measurement
from benchmarks.rdma.report import Context
from benchmarks.statistics import gathered, spread_of
from miles_plugin.report.plot import INK

_COLOURS = {
    "store": "#0072B2",
    "transfer engine": "#E69F00",
    "socket": "#A8A8A8",
    "iperf3": "#6E6E6E",
    "ib_write_bw": "#56B4E9",
}


def draw(found: Sequence[Measurement], context: Context, directory: Path) -> Sequence[Path]:
    """Write rdma.png and rdma.svg; return their paths."""
    operations = gathered(found, lambda item: item.operation)
    variants, peers = gathered(found, lambda item: item.variant), gathered(found, lambda item: item.peer)

    def paint(figure: Any) -> None:
        grid = figure.add_gridspec(1, len(operations), left=0.16, right=0.975, top=0.81, bottom=0.08, wspace=0.08)
        for column, operation in enumerate(operations):
            axes = figure.add_subplot(grid[0, column])
            axes.set_title(f"{operation}, GB/s", fontsize=13)
            axes.grid(axis="y", visible=False)
            _bars(axes, [item for item in found if item.operation == operation], variants, peers)
            if context.rate:
                axes.axvline(context.rate / 1e9, color=INK, linewidth=1, linestyle=":")
            if column:
                axes.set_yticklabels([])
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper right", ncols=len(labels), bbox_to_anchor=(0.98, 0.885), frameon=False
        )

    return figures.save(
        directory,
        "rdma",
        f"Between two hosts over {context.protocol}",
        f"median and quartiles, longer is better · {context.links} · here {context.here} · run {context.run}",
        paint,
    )


def _bars(axes: Any, found: Sequence[Measurement], variants: Sequence[str], peers: Sequence[str]) -> None:
    height = 0.8 / len(peers)
    for place, peer in enumerate(peers):
        for row, variant in enumerate(variants):
            speeds = [
                item.bytes / item.seconds / 1e9
                for item in found
                if item.seconds and (item.variant, item.peer) == (variant, peer)
            ]
            if not speeds:
                continue
            median, low, high = spread_of(speeds)
            y = row - 0.4 + (place + 0.5) * height
            axes.barh(
                y, median, height=0.92 * height, color=_COLOURS.get(peer, "#B07AA1"), label=peer if not row else None
            )
            axes.plot([low, high], [y, y], color=INK, linewidth=1)
    axes.set_yticks(range(len(variants)), variants, fontsize=10)
    axes.set_ylim(len(variants) - 0.5, -0.5)
