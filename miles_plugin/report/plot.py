"""`report.png`: the run on one slide, 16:9."""

from pathlib import Path
from typing import Any

from miles_plugin.report import series
from miles_plugin.report.panel import Line, Panel
from miles_plugin.report.record import Report

INK, PALE = "#222222", "#6E6E6E"
STYLE = {
    "font.size": 13,
    "axes.titlesize": 16,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "text.color": INK,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "legend.handlelength": 1.2,
}
_SIZE_INCHES, _DPI = (16, 9), 120


def draw(report: Report, path: Path) -> None:
    """Write a PNG of 1920 x 1080; a run that has no step yet gives empty axes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI)
        FigureCanvasAgg(figure)
        # Between the two the labels at the ends of the learning curves have room.
        left = figure.add_gridspec(1, 1, left=0.055, right=0.34, top=0.8, bottom=0.18)
        right = figure.add_gridspec(2, 2, left=0.515, right=0.975, top=0.8, bottom=0.18, wspace=0.3, hspace=0.55)
        panels = {panel.key: panel for panel in series.panels(report)}  # for all of them only the page has room
        below = ("staleness", "utilisation") if "staleness" in panels else ("versions", "lag")
        places = [left[0], right[0, 0], right[0, 1], right[1, 0], right[1, 1]]
        for key, place in zip(("learning", "time", "bytes", *below), places, strict=True):
            _draw_panel(figure.add_subplot(place), panels[key])
        _text(figure, 0.945, series.title(report), 25, fits=62, fontweight="bold")
        _text(figure, 0.9, series.subtitle(report), 15, fits=132, color=PALE)
        for height, line in zip((0.08, 0.052, 0.024), series.footer(report), strict=True):
            _text(figure, height, line, 12, fits=165, color=PALE)
        figure.savefig(path, format="png")


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    axes.set_title(panel.title, pad=24)
    axes.text(0, 1.0, panel.subtitle, transform=axes.transAxes, fontsize=12, color=PALE, va="bottom")
    axes.set(xlabel="rollout", ylabel=panel.y_label)
    axes.set_xlim(0, panel.last_x + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    if panel.stacked:
        _draw_stack(axes, panel.lines)
    else:
        for line in panel.lines:
            _draw_line(axes, line)
    if panel.log_y:
        axes.set_yscale("log", base=2)
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    if panel.y_ticks:
        axes.set_yticks([value for value, _ in panel.y_ticks], [text for _, text in panel.y_ticks])
        axes.yaxis.set_minor_locator(NullLocator())
    for x in panel.resumes:
        axes.axvline(x, color=PALE, linewidth=1, linestyle=":")
    for label in panel.labels:
        axes.text(1.012, label.y, label.text, transform=axes.get_yaxis_transform(), color=label.colour, fontsize=14,
                  fontweight="bold", va="center", linespacing=1.25, parse_math=False)  # fmt: skip
    if panel.legend:
        _legend(axes, panel)


def _draw_line(axes: Any, line: Line) -> None:
    # A run of one step is a point, which a line does not show.
    axes.plot(line.x, line.y, color=line.colour, linewidth=line.width, alpha=line.opacity, label=line.label,
              linestyle="--" if line.dashed else "-", drawstyle="steps-post" if line.stairs else "default",
              marker="o" if len(line.x) == 1 else None, solid_capstyle="round")  # fmt: skip


def _draw_stack(axes: Any, lines: list[Line]) -> None:
    from numpy import append, array, nan_to_num, zeros

    if not lines:
        return
    edges = append(array(lines[0].x) - 0.5, lines[0].x[-1] + 0.5)
    below = zeros(len(lines[0].x))
    for line in lines:
        above = below + nan_to_num(line.y, posinf=0.0, neginf=0.0)
        axes.stairs(above, edges, baseline=below, fill=True, color=line.colour, label=line.label)
        below = above
    axes.set_ylim(0, 1.05 * max(below.max(), 1e-9))


def _legend(axes: Any, panel: Panel) -> None:
    """Inside the axes, above the data: the y axis grows to make room."""
    if not panel.lines:
        return
    columns = 2
    rows = -(-len(panel.lines) // columns)
    share = 0.1 * rows + 0.03
    low, high = axes.get_ylim()
    axes.set_ylim(low, low * (high / low) ** (1 / (1 - share)) if panel.log_y else low + (high - low) / (1 - share))
    axes.legend(loc="upper left", ncols=columns, columnspacing=1.0, borderaxespad=0.2, labelspacing=0.25)


def _text(figure: Any, height: float, text: str, size: float, fits: int, **style: Any) -> None:
    """One line across the figure. Of a longer text than `fits` characters the type is smaller, down to half, then the
    rest is left out. A dollar sign has no meaning here, as it would have to matplotlib.
    """
    text = " ".join(text.split())
    if len(text) > 2 * fits:
        text = text[: 2 * fits - 1] + "…"
    size *= min(1.0, fits / max(1, len(text)))
    figure.text(0.02, height, text, fontsize=size, va="center", parse_math=False, **style)
