"""Pictures in the style of the report's, as PNG and as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles_plugin.report.plot import PALE, STYLE

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
_OTHER = "#B07AA1"


def colour_of(peer: str) -> str:
    return COLOURS.get(peer, _OTHER)


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
