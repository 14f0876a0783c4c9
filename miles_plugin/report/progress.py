"""Live progress on a terminal: one panel that stays at the bottom, messages scroll above it."""

import atexit
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from miles_plugin.report import units
from miles_plugin.report.metrics import held_out_name
from miles_plugin.report.observer import Observer
from miles_plugin.report.pace import Pace
from miles_plugin.report.plain import arm_line, closing_lines, run_line, versions
from miles_plugin.report.record import Arm, Report, Step
from miles_plugin.report.theme import arm_label, phase_colour, phases_in

_REFRESH_PER_SECOND = 4
_WIDEST = 110
_SPARKLINE = 24
_NARROWEST_BAR = 4
_SENT_BAR = 20


def live_is_possible() -> bool:
    """Whether standard output is a terminal that can redraw and shows block characters."""
    stdout = sys.stdout
    redraws = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    return stdout.isatty() and redraws and (stdout.encoding or "").lower().replace("-", "") == "utf8"


class LiveProgress(Observer):
    """Observer that draws the panel; what is printed while it lives appears above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._state: _State | None = None
        self._directory, self._seconds_before = Path(), 0.0
        self._log_streams: list[logging.StreamHandler[TextIO]] = []
        self._live = Live(
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
            # Where stderr is not the terminal it keeps what belongs there.
            redirect_stderr=sys.stderr.isatty(),
            get_renderable=self._panel,
        )

    def run_started(self, report: Report, directory: Path) -> None:
        self._directory, self._state, self._seconds_before = directory, _State(report), report.seconds_total
        self._say(run_line(report, directory))
        atexit.register(self._stop)
        self._live.start()
        self._log_above()

    def message(self, text: str) -> None:
        self._say(text)

    def arm_started(self, arm: Arm, num_rollout: int) -> None:
        self._say(arm_line(arm))
        if self._state:
            self._state.arm_started(arm, num_rollout)

    def phase_started(self, phase: str) -> None:
        if self._state:
            self._state.phase_started(phase)

    def progress(self, done: int, total: int) -> None:
        if self._state:
            self._state.sent = done, total

    def step_finished(self, _report: Report, _arm: Arm) -> None:
        if self._state:
            self._state.pace.step_finished()
        self._live.refresh()

    def run_finished(self, report: Report) -> None:
        if self._state:
            self._state.phase_started(report.status)
            self._state.over = True
        self._stop()
        for line in closing_lines(report, self._directory, self._seconds_before):
            self._say(line)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        return self._state or Text()

    def _log_above(self) -> None:
        """Logging's handlers hold the terminal itself; while the panel lives they must write above it."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.__stderr__:
                handler.setStream(sys.stderr)
                self._log_streams.append(handler)

    def _stop(self) -> None:
        """Leave the last panel, show the cursor again; idempotent."""
        atexit.unregister(self._stop)
        self._live.stop()
        for handler in self._log_streams:
            handler.setStream(sys.__stderr__ or sys.stderr)
        self._log_streams.clear()


class _State:
    """What the panel shows. Written by the job's thread, drawn by the refreshing one."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.pace = Pace(report.config)
        self.arm: Arm | None = None
        self.over = False
        self._spinner = Spinner("dots")
        self.phase_started("starting")

    def arm_started(self, arm: Arm, num_rollout: int) -> None:
        self.pace.arm_started(arm, num_rollout)
        self.arm = arm

    def phase_started(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()
        self.sent: tuple[int, int] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _WIDEST)
        rows = Table.grid(padding=(0, 1), expand=True)
        rows.add_column(style="dim", no_wrap=True, width=9)
        rows.add_column(overflow="ellipsis", ratio=1)
        inner = max(1, width - 4 - 10)
        if self.arm is not None:
            rows.add_row("rollout", self._bar(inner))
        rows.add_row("now", self._now())
        if self.arm is not None and self.arm.steps:
            for label, row in _last_step(self.arm, inner):
                rows.add_row(label, row)
        config = self.report.config
        title = f"{held_out_name(config)} · {config['object_store_backend']} · {self.report.run_id}"
        yield Panel(rows, title=Text(title, overflow="ellipsis"), width=width, border_style="dim", padding=(0, 1))

    def _bar(self, width: int) -> RenderableType:
        pace = self.pace
        line = _line(f"ETA {units.seconds(pace.remaining())}  {pace.done}/{pace.num_rollout}")
        bar_width = min(30, width // 3, width - line.cell_len - 1)  # these words matter more than the bar
        if self.arm is not None:
            line.append(f"  {arm_label(self.arm.reward)}", style="bold")
        if pace.arms > 1:
            line.append(f" ({pace.arm} of {pace.arms})")
        if bar_width < _NARROWEST_BAR:
            return line
        bar = ProgressBar(total=max(1, pace.num_rollout), completed=pace.done, width=bar_width)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row(bar, line)
        return grid

    def _now(self) -> RenderableType:
        if self.over:
            return _line(self._phase)
        self._spinner.update(text=f"{self._phase}  {time.monotonic() - self._phase_began:.0f} s")
        if self.sent is None:
            return self._spinner
        done, total = self.sent
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            self._spinner,
            ProgressBar(total=max(1, total), completed=done, width=_SENT_BAR),
            _line(f"{units.nbytes(done)} of {units.nbytes(total)}"),
        )
        return grid


def _last_step(arm: Arm, width: int) -> list[tuple[str, RenderableType]]:
    step = arm.steps[-1]
    return [
        ("held-out", _with_sparkline(_held_out(arm), _measured(arm), width)),
        ("reward", _with_sparkline(f"{step.reward:.3f}", [s.reward for s in arm.steps], width)),
        ("tokens/s", _line(f"{_rate(step, 'generate')} generated   {_rate(step, 'train')} trained on")),
        ("versions", _line(f"{versions(step)}   lag {arm.version_lag(len(arm.steps) - 1)}")),
        ("bytes", _line("   ".join(f"{kind} {units.nbytes(amount)}" for kind, amount in step.nbytes.items()))),
        ("time", _time(step, width)),
    ]


def _held_out(arm: Arm) -> str:
    measured = _measured(arm)
    return f"{measured[-1]:.3f} ({measured[-1] - measured[0]:+.3f})"


def _measured(arm: Arm) -> list[float]:
    return [arm.initial_accuracy, *(s.held_out_accuracy for s in arm.steps if s.held_out_accuracy is not None)]


def _with_sparkline(text: str, values: list[float], width: int) -> Text:
    return _line(f"{text:<16}").append(units.sparkline(values, min(_SPARKLINE, width - 17)), style="cyan")


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _rate(step: Step, phase: str) -> str:
    return units.count(units.per_second(step.tokens, step.seconds.get(phase)))


def _time(step: Step, width: int) -> RenderableType:
    """A bar of the step's phases in proportion, then each in words."""
    known = {phase: seconds for phase, seconds in step.seconds.items() if math.isfinite(seconds)}
    total = sum(known.values())
    bar, words = Text(), []
    for phase in phases_in(known):
        share = known[phase] / total if total > 0 else 0.0
        bar.append("█" * round(share * min(width, 60)), style=phase_colour(phase))
        words.append(_line("■ ").append(f"{phase} {units.seconds(known[phase])}"))
        words[-1].stylize(phase_colour(phase), 0, 1)
    return Group(bar, Columns(words, padding=(0, 2)))
