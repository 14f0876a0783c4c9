"""`report.html` in a real browser: the plots are drawn, nothing is complained of, nothing is fetched."""

import copy
import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the extra `train` is not installed")

from miles_plugin.report import html, series
from miles_plugin.report.record import Report
from tests.report_samples import make_reports

REPORTS = make_reports()
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        BROWSER is None and not os.environ.get("CI_REQUIRES_CHROMIUM"),
        reason="no Chromium: requirements/install-chromium.sh installs it",
    ),
]


class Page(HTMLParser):
    """What a page has drawn: per plot whether its script came to its end, its traces, and the texts of its legend."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.drawn: dict[str, bool] = {}
        self.traces: dict[str, int] = {}
        self.legend: dict[str, list[str]] = {}
        self._plot = ""
        self._in_legend_text = False
        self.feed(dom)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        classes = (values.get("class") or "").split()
        if "plot" in classes:
            self._plot = (values.get("id") or "").removeprefix("plot-")
            self.drawn[self._plot] = values.get("data-drawn") == "yes"
            self.traces[self._plot], self.legend[self._plot] = 0, []
        elif tag == "g" and classes[:1] == ["trace"]:
            self.traces[self._plot] += 1
        self._in_legend_text = "legendtext" in classes

    def handle_data(self, data: str) -> None:
        if self._in_legend_text:
            self.legend[self._plot].append(data)

    def handle_endtag(self, _tag: str) -> None:
        self._in_legend_text = False


def browse(page: Path, scratch: Path) -> tuple[Page, str, list[str]]:
    """Load `page` in a browser that finds no host; return what it drew, the console's lines, and what it asked for."""
    assert BROWSER is not None, f"none of {', '.join(NAMES)} is installed; requirements/install-chromium.sh does that"
    log = scratch / "network.json"
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch / 'profile'}",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-default-apps", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--log-net-log={log}", "--enable-logging=stderr", "--window-size=1400,1900",
            "--virtual-time-budget=20000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    # What the browser itself asks for, and does not get, is of no page: its initiator is "not an origin".
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    asked = {event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"}
    return Page(done.stdout), console, sorted(url for url in asked if not url.startswith(("file:", "data:", "blob:")))


@pytest.mark.parametrize("report", [copy.deepcopy(report) for report in REPORTS.values()], ids=REPORTS)
def test_the_page_draws_its_plots_by_itself(report: Report, tmp_path: Path) -> None:
    html.write(report, tmp_path / "report.html")
    page, console, addresses = browse(tmp_path / "report.html", tmp_path)
    assert console == ""
    assert addresses == []
    panels = series.panels(report)
    assert page.drawn == {panel.key: True for panel in panels}
    for panel in panels:
        # A line without a single number is in the legend, but not on the plot.
        shown = [line for line in panel.lines if line.y]
        assert page.traces[panel.key] >= sum(any(value == value for value in line.y) for line in shown)
        if len(shown) > 1:
            assert {line.label for line in shown} == set(page.legend[panel.key])


def test_a_page_that_loads_or_complains_would_be_noticed(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<script>console.error("no")</script><img src="http://127.0.0.2:9/x.png"><div class="plot"></div>')
    page, console, addresses = browse(path, tmp_path)
    assert '"no"' in console
    assert addresses == ["http://127.0.0.2:9/x.png"]
    assert page.drawn == {"": False}


def test_a_page_changed_by_another_hand_runs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write(copy.deepcopy(REPORTS["finished"]), path)
    added = "<script>document.title = 'changed'</script><img src='http://127.0.0.2:9/x.png'>"
    path.write_text(path.read_text().replace("<header>", f"{added}<header>"))
    page, console, addresses = browse(path, tmp_path)
    assert all(page.drawn.values())
    assert console.count("Content Security Policy") == 2
    assert addresses == []
