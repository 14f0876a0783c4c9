"""`report.html`: the run as one page that needs no network, with the plots of `report.png` to zoom into.

Its content security policy names the two scripts in it by their digests and allows nothing else, so that the page can
load nothing and text from the run cannot become code.
"""

import base64
import hashlib
import json
import math
from html import escape
from pathlib import Path
from typing import Any

import yaml

from miles_plugin.report import series
from miles_plugin.report.panel import Label, Line, Panel
from miles_plugin.report.record import Report, finite

_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const figures = JSON.parse(document.getElementById("figures").textContent);
function colours() {
  const [ink, grid] = dark.matches ? ["#d6d6d6", "#3a3d44"] : ["#222222", "#e4e4e4"];
  const changes = {"font.color": ink};
  for (const axis of ["xaxis", "yaxis"]) {
    changes[axis + ".gridcolor"] = grid;
    changes[axis + ".zerolinecolor"] = grid;
  }
  return changes;
}
for (const [key, figure] of Object.entries(figures)) {
  Plotly.newPlot("plot-" + key, figure.data, figure.layout, {displayModeBar: false, responsive: true})
    .then(plot => Plotly.relayout(plot, colours()))
    .then(plot => plot.dataset.drawn = "yes");
}
dark.addEventListener("change", () => {
  for (const plot of document.querySelectorAll(".plot")) Plotly.relayout(plot, colours());
});
"""

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --pale: #666; --line: #ddd; --back: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #d6d6d6; --pale: #9a9a9a; --line: #3a3d44; --back: #16181d; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 90rem; background: var(--back); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0; }
p { margin: 0.1rem 0; color: var(--pale); }
main { display: grid; gap: 2rem; margin: 1.5rem 0; }
@media (min-width: 60rem) { main { grid-template-columns: 1fr 1fr; } }
section { min-width: 0; }
section.wide { grid-column: 1 / -1; }
.plot { height: 20rem; }
.wide .plot { height: 28rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1.2rem 0.2rem 0; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { font-weight: normal; color: var(--pale); white-space: nowrap; }
pre { overflow-x: auto; font-size: 0.85rem; }
summary { cursor: pointer; margin-top: 1rem; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p>
<p>Drag to zoom, double-click to go back; a click on a legend's entry hides its line.</p></header>
<main>{sections}</main>
<table>{facts}</table>
<details><summary>Settings</summary><pre>{config}</pre></details>
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def write(report: Report, path: Path) -> None:
    """Write the page, about 5 MB; a run that has no step yet gives empty axes."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    panels = series.panels(report)
    plotly = get_plotlyjs()
    page = _PAGE.format(
        policy=_policy(plotly, _SCRIPT),
        title=escape(series.title(report)),
        subtitle=escape(series.subtitle(report)),
        style=_STYLE,
        sections="".join(map(_section, panels)),
        facts="".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in series.facts(report)
        ),
        config=escape(yaml.safe_dump(report.config, sort_keys=False)),
        # "<" would let text of the run end the script element.
        figures=json.dumps({panel.key: figure(panel) for panel in panels}, allow_nan=False).replace("<", "\\u003c"),
        plotly=plotly,
        script=_SCRIPT,
    )
    path.write_text(page, encoding="utf-8")


def figure(panel: Panel) -> dict[str, Any]:
    """Plotly's data and layout of a panel; numbers that are not finite are null, a gap."""
    draw = _column if panel.stacked else _line
    layout: dict[str, Any] = {
        "margin": {"l": 70, "r": 190 if panel.labels else 20, "t": 10, "b": 45},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 14},
        "hovermode": "x unified",
        "hoverlabel": {"namelength": -1, "bgcolor": "rgba(128,128,128,0.9)"},
        "barmode": "stack",
        "bargap": 0,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": {"title": {"text": "rollout"}, "range": [0, panel.last_x + 0.5]},
        "yaxis": _y_axis(panel),
        "annotations": [_annotation(label) for label in panel.labels],
        "shapes": [_resume(x) for x in panel.resumes],
    }
    data: list[dict[str, Any]] = [draw(line) for line in panel.lines]
    checked: dict[str, Any] = finite({"data": data, "layout": layout})
    return checked


def _y_axis(panel: Panel) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": panel.y_label}, "automargin": True}
    if panel.log_y:
        axis["type"] = "log"
    if panel.y_range:
        axis["range"] = [math.log10(end) if panel.log_y else end for end in panel.y_range]
    if panel.y_ticks:
        axis |= {"tickvals": [value for value, _ in panel.y_ticks], "ticktext": [text for _, text in panel.y_ticks]}
    return axis


def _line(line: Line) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(line.x) == 1 else "lines",
        "name": line.label,
        "x": line.x,
        "y": line.y,
        "opacity": line.opacity,
        "line": {
            "color": line.colour,
            "width": line.width,
            "dash": "dash" if line.dashed else "solid",
            "shape": "hv" if line.stairs else "linear",
        },
    }


def _column(line: Line) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": line.label,
        "x": line.x,
        "y": line.y,
        "marker": {"color": line.colour, "line": {"width": 0}},
    }


def _annotation(label: Label) -> dict[str, Any]:
    return {
        "xref": "paper",
        "x": 1,
        "y": label.y,
        "text": "<b>" + escape(label.text).replace("\n", "<br>") + "</b>",
        "font": {"color": label.colour},
        "showarrow": False,
        "align": "left",
        "xanchor": "left",
        "xshift": 8,
    }


def _resume(x: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"dash": "dot", "width": 1, "color": "#8C8C8C"},
    }


def _section(panel: Panel) -> str:
    wide = ' class="wide"' if panel.key == "learning" else ""
    return (
        f"<section{wide}><h2>{escape(panel.title)}</h2><p>{escape(panel.subtitle)}</p>"
        f'<div class="plot" id="plot-{panel.key}"></div></section>'
    )


def _policy(*scripts: str) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # Plotly styles its elements from its script, and saves a picture by way of data: and blob:.
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
