"""The picture of deltas: GB/s of each encoding, of the baseline and of the limits; a column per case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, Spread, gathered, seconds_of, spread_of
from benchmarks.weights.delta_settings import DELTAS, THREADS
from benchmarks.weights.delta_targets import best_baseline
from benchmarks.weights.delta_turns import APPLY, BASELINE, ENCODE, HASH, LIMIT, MAPPED, MEMCPY
from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS

_COLOURS = {"sparse": "#0072B2", "overwrite": "#56B4E9", "xor": "#009E73", BASELINE: "#D55E00"}
_SHOWN = (*reversed(ENCODINGS), BASELINE, HASH, MEMCPY)
_ROWS = (ENCODE, APPLY, MAPPED)


def draw(measurements: Sequence[Measurement], directory: Path) -> Sequence[Path]:
    """Write deltas.png and deltas.svg; return their paths."""
    seconds = seconds_of(measurements)
    variants = gathered(measurements, lambda item: item.variant)

    def paint(figure: Any) -> None:
        grid = figure.add_gridspec(
            len(_ROWS), len(variants), left=0.14, right=0.975, top=0.84, bottom=0.08, wspace=0.1, hspace=0.38
        )
        for row, operation in enumerate(_ROWS):
            for column, variant in enumerate(variants):
                axes = figure.add_subplot(grid[row, column])
                axes.set_title(f"{operation}, {variant}", fontsize=13)
                rates = _rates(seconds, variant, operation, measurements[0].bytes)
                figures.speed_bars(axes, _SHOWN, rates, _COLOURS, labelled=not column)
                if row == len(_ROWS) - 1:
                    axes.set_xlabel("GB/s of the model's bytes")

    item = measurements[0]
    return figures.save(
        directory,
        DELTAS,
        "What changed between two versions of the weights, made and applied",
        f"median and quartiles, longer is better; limits are grey · {item.bytes / 1e9:.2f} GB, {THREADS} threads · "
        f"{item.machine} · run {item.run}",
        paint,
    )


def _rates(seconds: Seconds, variant: str, operation: str, nbytes: int) -> dict[str, Spread]:
    cells = {name: Cell(variant, name, operation) for name in ENCODINGS}
    cells |= {name: Cell(variant, name, LIMIT) for name in (HASH, MEMCPY)}
    if (best := best_baseline(seconds, variant, operation)) is not None:
        cells[BASELINE] = best
    return {
        name: spread_of(nbytes / 1e9 / value for value in seconds[cell].values())
        for name, cell in cells.items()
        if cell in seconds
    }
