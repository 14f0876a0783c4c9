"""The picture: samples per second, where a step's time goes, and staleness, measured and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.fully_async import report
from benchmarks.fully_async.settings import SYNCHRONOUS
from benchmarks.measurements import Measurement
from benchmarks.statistics import spread_of
from miles_plugin.report.theme import phase_colour
from miles_plugin.simulation.result import Outcome, Run

_INK, _GREY = "#222222", "#A8A8A8"
_PHASES = {"waiting": "generate", "training": "train", "updating": "update"}
_PARTS = {"waiting": "waited", "training": "trained", "updating": "updated"}
_COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#F0E442")


def draw(measurements: Sequence[Measurement], simulated: Mapping[str, Outcome], directory: Path) -> Sequence[Path]:
    """Write async.png and async.svg; return their paths."""
    turns = report.turns(measurements)
    colours = {
        mode: _GREY if mode == SYNCHRONOUS else _COLOURS[(place - 1) % len(_COLOURS)]
        for place, mode in enumerate(turns)
    }

    def paint(figure: Any) -> None:
        grid = figure.add_gridspec(1, 3, left=0.16, right=0.975, top=0.79, bottom=0.1, wspace=0.16)
        _speeds(figure.add_subplot(grid[0, 0]), turns, simulated, colours)
        _steps(figure.add_subplot(grid[0, 1]), turns)
        _staleness(figure.add_subplot(grid[0, 2]), turns, simulated, colours)

    item = measurements[0]
    return figures.save(
        directory,
        "async",
        "Generation beside training, and in turn with it",
        f"seconds of a sample {item.settings['generation']}, of a training step {item.settings['step']} · medians of "
        f"{len({each.round for each in measurements})} rounds; diamonds: simulated · run {item.run}",
        paint,
    )


def _speeds(axes: Any, turns: Any, simulated: Mapping[str, Outcome], colours: Mapping[str, str]) -> None:
    axes.set_title("samples per second", fontsize=13)
    for place, (mode, lines) in enumerate(turns.items()):
        median, low, high = spread_of(map(report.SPEED.measured, lines))
        axes.barh(place, median, color=colours[mode], height=0.6)
        axes.plot([low, high], [place, place], color=_INK, linewidth=1.2, solid_capstyle="butt")
        guess = spread_of(map(report.SPEED.simulated, _runs(mode, simulated))).median
        axes.plot(guess, place, marker="D", color=_INK, markerfacecolor="white", markersize=7)
        axes.annotate(
            f"{median:.1f}", (max(high, guess), place), xytext=(9, 0), textcoords="offset points", va="center"
        )
    _rows(axes, list(turns))
    axes.margins(x=0.2)


def _steps(axes: Any, turns: Any) -> None:
    axes.set_title("seconds of a step, for the trainers", fontsize=13)
    for place, lines in enumerate(turns.values()):
        left = 0.0
        for label, name in _PARTS.items():
            seconds = spread_of(report.came_to(item)[name] for item in lines).median
            colour = phase_colour(_PHASES[label])
            axes.barh(place, seconds, left=left, color=colour, height=0.6, label="" if place else label)
            left += seconds
    _rows(axes, [""] * len(turns))
    axes.legend(loc="lower right")


def _staleness(axes: Any, turns: Any, simulated: Mapping[str, Outcome], colours: Mapping[str, str]) -> None:
    axes.set_title("staleness, percent of the groups", fontsize=13)
    modes = [mode for mode in turns if mode != SYNCHRONOUS]
    width = 0.8 / max(1, len(modes))
    most = 0
    for number, mode in enumerate(modes):
        counted: dict[int, float] = {}
        for item in turns[mode]:
            for value, groups in report.staleness(item).items():
                counted[value] = counted.get(value, 0.0) + groups
        guess = simulated[mode].histogram()
        shift = width * (number - (len(modes) - 1) / 2)
        values, total = sorted(counted), sum(counted.values())
        heights = [100 * counted[value] / total for value in values]
        axes.bar([value + shift for value in values], heights, width=width, color=colours[mode], label=mode)
        axes.plot([value + shift for value in guess], [100 * share for share in guess.values()], "D", color=_INK,
                  markerfacecolor="white", markersize=7)  # fmt: skip
        most = max([most, *values, *guess])
    axes.set_xticks(range(most + 1))
    axes.set_xlabel("versions behind")
    axes.margins(y=0.25)
    axes.legend(loc="upper left")


def _runs(mode: str, simulated: Mapping[str, Outcome]) -> Sequence[Run]:
    return next(iter(simulated.values())).synchronous if mode == SYNCHRONOUS else simulated[mode].asynchronous


def _rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=11)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
