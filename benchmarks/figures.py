"""Pictures in the style of the report's, as PNG and as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.statistics import Spread
from miles_plugin.report.plot import INK, PALE, STYLE

SIZE_INCHES, DPI = (16, 9), 120
# Of Okabe and Ito's palette; what is measured only as a limit is grey.
COLOURS = {
    "ours": "#0072B2",
    "ours-verified": "#56B4E9",
    "ours-network": "#009E73",
    "ray": "#E69F00",
    "bundle": "#D55E00",
    "bundle-own": "#CC79A7",
    "transfer-queue": "#F0E442",
    "memcpy": "#6E6E6E",
    "raw": "#A8A8A8",
}
_OTHER, _LIMIT = "#B07AA1", "#A8A8A8"


def colour_of(peer: str) -> str:
    return COLOURS.get(peer, _OTHER)


def speed_bars(
    axes: Any, shown: Sequence[str], rates: Mapping[str, Spread], colours: Mapping[str, str], labelled: bool
) -> None:
    """A bar for each name of `shown` that has a rate; those without a colour of their own are limits, and grey."""
    axes.grid(axis="y", visible=False)
    for place, name in enumerate(shown):
        if name not in rates:
            continue
        median, low, high = rates[name]
        axes.barh(place, median, color=colours.get(name, _LIMIT), height=0.72)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
        axes.annotate(
            f"{median:.2f}", (high, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=10
        )
    axes.set_yticks(range(len(shown)), shown if labelled else [""] * len(shown), fontsize=11)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.margins(x=0.15)


def save(directory: Path, name: str, title: str, subtitle: str, paint: Callable[[Any], None]) -> Sequence[Path]:
    """Write `name`.png and `name`.svg.

    Args:
        paint: given the matplotlib Figure, draws into the part between 6 % and 86 % of its height.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI)
        FigureCanvasAgg(figure)
        paint(figure)
        figure.text(0.02, 0.955, title, fontsize=24, fontweight="bold", va="center", parse_math=False)
        figure.text(0.02, 0.91, subtitle, fontsize=13, color=PALE, va="center", parse_math=False)
        paths = [directory / f"{name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            figure.savefig(path)
    return paths
