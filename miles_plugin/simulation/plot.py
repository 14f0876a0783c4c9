"""The picture of a sweep: samples per second, who is busy, and staleness, over what was given the most values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_plugin.report.plot import INK, PALE, STYLE
from miles_plugin.simulation.result import Outcome, Run, Spread
from miles_plugin.simulation.settings import Settings
from miles_plugin.simulation.sweep import SWEPT, Point
from miles_plugin.simulation.text import value

_SIZE_INCHES, _DPI = (16, 9), 120
# Okabe and Ito's, in an order in which neighbours differ.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442")
_LOGARITHMIC_FROM = 20  # times as much at the right end as at the left


@dataclass(frozen=True)
class _Line:
    """Outcomes along the axis. places: on it, one for each outcome."""

    label: str
    colour: str
    places: Sequence[float]
    outcomes: Sequence[Outcome]


@dataclass(frozen=True)
class _Axis:
    """ticks: every value of what is swept, and where it is."""

    name: str
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool


def draw(points: Sequence[Point], outcomes: Sequence[Outcome], path: Path) -> None:
    """Write a PNG of 1920 x 1080, whole or not at all. Points without an outcome are left out.

    Raises:
        ImportError: there is no matplotlib.
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = list(zip(points, outcomes, strict=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI)
        FigureCanvasAgg(figure)
        _panels(figure, *_lines(done))
        figure.text(0.02, 0.945, "Simulated: asynchronous and synchronous RL post-training", fontsize=25,
                    fontweight="bold", va="center", color=INK)  # fmt: skip
        figure.text(0.02, 0.89, _subtitle(done[0][0].settings), fontsize=14, color=PALE, va="center", parse_math=False)
        partial = path.with_suffix(".png.partial")
        try:
            figure.savefig(partial, format="png")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _panels(figure: Any, axis: _Axis, lines: Sequence[_Line]) -> None:
    from matplotlib.ticker import LogLocator

    grid = figure.add_gridspec(1, 3, left=0.055, right=0.975, top=0.76, bottom=0.19, wspace=0.24)
    panels: Sequence[tuple[str, str, Callable[[Any, Sequence[_Line]], None]]] = (
        ("samples/s", "asynchronous, and synchronous dashed; quartiles shaded", _throughput),
        ("busy", "engines, and trainers dotted; % of their time, asynchronous", _busy),
        ("staleness", "of the groups trained on: mean, and the highest dotted", _staleness),
    )
    for column, (title, subtitle, paint) in enumerate(panels):
        axes = figure.add_subplot(grid[column])
        axes.set_title(title, pad=24)
        axes.text(0, 1.01, subtitle, transform=axes.transAxes, fontsize=11, color=PALE, va="bottom")
        _scale(axes, axis)
        paint(axes, lines)
        if axis.logarithmic and paint is _throughput:
            axes.set_yscale("log")  # as the engines are
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, bbox_to_anchor=(0.5, 0.03), handlelength=2.4)


def _subtitle(settings: Settings) -> str:
    return (
        f"a step is {settings.rollout_batch_size} groups of {settings.n_samples_per_prompt} samples, an engine has "
        f"{settings.slots} slots; seconds of a sample: {settings.generation}, a step: {settings.training}, a pause "
        f"for an update: {settings.update}"
    )


def _lines(done: Sequence[tuple[Point, Outcome]]) -> tuple[_Axis, list[_Line]]:
    """What has the most values is the axis; every combination of the rest is a line."""
    names = list(done[0][0].values)
    values = {name: list(dict.fromkeys(point.values[name] for point, _ in done)) for name in names}
    along = max(names, key=lambda name: len(values[name]))
    numbers = [number for number in values[along] if number is not None]
    ordered = sorted(numbers) + [None] * (None in values[along])
    logarithmic = None not in ordered and min(numbers) > 0 and max(numbers) / min(numbers) >= _LOGARITHMIC_FROM
    even = None in ordered  # no bound at all has no place on a scale
    places = {each: float(index if even else each) for index, each in enumerate(ordered)}
    axis = _Axis(SWEPT[along].replace("\n", " "), [(places[each], value(each)) for each in ordered], logarithmic)
    gathered: dict[str, list[tuple[float, Outcome]]] = {}
    for point, outcome in done:
        rest = [f"{SWEPT[name]} {value(point.values[name])}".replace("\n", " ")
                for name in names if name != along and len(values[name]) > 1]  # fmt: skip
        gathered.setdefault(", ".join(rest), []).append((places[point.values[along]], outcome))
    lines = []
    for number, (label, found) in enumerate(gathered.items()):
        found.sort(key=lambda pair: pair[0])
        colour = _COLOURS[number % len(_COLOURS)]
        lines.append(_Line(label, colour, [place for place, _ in found], [outcome for _, outcome in found]))
    return axis, lines


def _scale(axes: Any, axis: _Axis) -> None:
    from matplotlib.ticker import NullLocator

    if axis.logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(axis.name)
    step = -(-len(axis.ticks) // 8)
    shown = axis.ticks[::step]
    axes.set_xticks([place for place, _ in shown], [text for _, text in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _throughput(axes: Any, lines: Sequence[_Line]) -> None:
    for line in lines:
        _rate(axes, line, Outcome.spread, line.colour, "-", line.label or "asynchronous")
    alike = (
        len({tuple(outcome.synchronous_spread(_samples).median for outcome in line.outcomes) for line in lines}) == 1
    )
    for line in lines[:1] if alike else lines:
        label = "synchronous" if alike else None
        _rate(axes, line, Outcome.synchronous_spread, PALE if alike else line.colour, "--", label)


def _rate(axes: Any, line: _Line, spread: Callable[..., Spread], colour: str, style: str, label: str | None) -> None:
    spreads = [spread(outcome, _samples) for outcome in line.outcomes]
    axes.plot(line.places, [each.median for each in spreads], color=colour, linestyle=style, linewidth=2.2,
              marker="o", markersize=4, label=label)  # fmt: skip
    axes.fill_between(line.places, [each.low for each in spreads], [each.high for each in spreads], color=colour,
                      alpha=0.18, linewidth=0)  # fmt: skip


def _samples(run: Run) -> float:
    return run.samples_per_second


def _busy(axes: Any, lines: Sequence[_Line]) -> None:
    _medians(axes, lines, lambda run: 100 * run.engines_busy, "-")
    _medians(axes, lines, lambda run: 100 * run.trainers_busy, ":")
    axes.set_ylim(0, 102)


def _staleness(axes: Any, lines: Sequence[_Line]) -> None:
    _medians(axes, lines, lambda run: run.staleness_mean, "-")
    _medians(axes, lines, lambda run: run.staleness_max, ":")


def _medians(axes: Any, lines: Sequence[_Line], of: Callable[[Run], float], style: str) -> None:
    for line in lines:
        axes.plot(line.places, [outcome.spread(of).median for outcome in line.outcomes], color=line.colour,
                  linestyle=style, linewidth=2.2, marker="o", markersize=4)  # fmt: skip
