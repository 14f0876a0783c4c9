"""A plot as data, and what all plots of a report share. x is the number of the rollout, from 1; 0 is the checkpoint."""

import math
from dataclasses import dataclass, field, replace

from miles_plugin.report.record import Arm


@dataclass(frozen=True)
class Line:
    """One line. y may hold NaN, a gap. stairs: the value holds until the next x. opacity: 0 to 1."""

    label: str
    x: list[float]
    y: list[float]
    colour: str
    width: float = 2.5
    dashed: bool = False
    stairs: bool = False
    opacity: float = 1.0


@dataclass(frozen=True)
class Label:
    """Text at the right end of a panel, about the line there; labels of a panel do not overlap."""

    y: float
    text: str
    colour: str


@dataclass(frozen=True)
class Panel:
    """One plot.

    stacked: the lines are values per rollout, drawn as filled columns upon each other. legend: names the lines, where
    colours and labels do not say what they are.
    y_range, y_ticks (position and text): where there are none the renderer chooses; with `log_y` both are values, not
    their logarithms. resumes: x at which the run was resumed. last_x: the x axis is from 0 to this.
    """

    key: str
    title: str
    subtitle: str
    y_label: str
    lines: list[Line]
    stacked: bool = False
    log_y: bool = False
    legend: bool = False
    y_range: tuple[float, float] | None = None
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)
    last_x: float = 1.0


def counting(panel: Panel) -> Panel:
    """The panel with whole numbers on its y axis, from 0, or from the smallest if that is far above."""
    known = [value for line in panel.lines for value in line.y if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    low = low if low > high - low else 0.0
    stride = _round_stride((max(high, low + 2) - low) / 5)
    first, last = int(low // stride), math.ceil(high / stride)
    ticks = [(float(index * stride), str(index * stride)) for index in range(first, max(last, first + 2) + 1)]
    bottom, top = ticks[0][0], ticks[-1][0]
    return replace(panel, y_range=(bottom - 0.04 * (top - bottom), top), y_ticks=ticks)


def _round_stride(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power: int = 10 ** max(0, math.ceil(math.log10(max(least, 1))) - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def x_of(arm: Arm | None) -> list[float]:
    return [step.rollout_id + 1.0 for step in arm.steps] if arm else []


def last_of(*arms: Arm | None) -> float:
    return max([x[-1] for arm in arms if (x := x_of(arm))], default=1.0)


def median(values: list[float]) -> float:
    known = sorted(value for value in values if math.isfinite(value))
    return known[len(known) // 2] if known else math.nan
