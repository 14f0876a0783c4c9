"""Progress as plain lines, for logs, pipes and terminals that can do no more."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from miles_plugin.report import units
from miles_plugin.report.console import ClaimedStdout, write_line
from miles_plugin.report.observer import Observer
from miles_plugin.report.pace import Pace
from miles_plugin.report.record import Arm, Report, Step
from miles_plugin.report.theme import phases_in

_SHORT = {"generate": "gen", "evaluate": "eval"}


class PlainLines(Observer):
    """Observer that writes one line per event that matters; no escape codes.

    Args:
        stream: where to; by default standard output, which is claimed until the run has finished.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._release: Callable[[], None] = lambda: None
        if stream is None:
            claimed = ClaimedStdout(sys.stdout.encoding or "utf-8")
            stream, self._release = claimed.stream, claimed.release
        self._stream = stream
        self._directory, self._seconds_before = Path(), 0.0

    def run_started(self, report: Report, directory: Path) -> None:
        self._directory, self._seconds_before = directory, report.seconds_total
        self._pace = Pace(report.config)
        self.message(run_line(report, directory))

    def message(self, text: str) -> None:
        write_line(self._stream, text)

    def arm_started(self, arm: Arm, num_rollout: int) -> None:
        self._pace.arm_started(arm, num_rollout)
        self.message(arm_line(arm))

    def step_finished(self, _report: Report, arm: Arm) -> None:
        self._pace.step_finished()
        self.message(step_line(arm.steps[-1], self._pace.remaining()))

    def run_finished(self, report: Report) -> None:
        try:
            for line in closing_lines(report, self._directory, self._seconds_before):
                self.message(line)
        finally:
            self._release()


def run_line(report: Report, directory: Path) -> str:
    return f"run {report.run_id}: report in {directory}"


def arm_line(arm: Arm) -> str:
    start = f"{arm.reward} reward: held-out accuracy {arm.initial_accuracy:.3f} before training"
    return f"{start}, going on after {len(arm.steps)} rollouts" if arm.steps else start


def step_line(step: Step, remaining: float | None) -> str:
    """One step in one line. remaining: seconds until the run is done, None when not known."""
    accuracy = "" if step.held_out_accuracy is None else f"  held-out {step.held_out_accuracy:.3f}"
    rate = units.count(units.per_second(step.tokens, step.seconds.get("generate")))
    phases = " ".join(_phase(step, phase) for phase in phases_in([*step.seconds, *step.nbytes]))
    return (
        f"rollout {step.rollout_id:3d}  reward {step.reward:.3f}{accuracy}  {rate} tok/s  {versions(step)}"
        f"  s: {phases}  ETA {units.short_seconds(remaining)}"
    )


def versions(step: Step) -> str:
    """ "v3>4": version 3 made the samples, 4 is served now; "v2-3" for samples of several versions."""
    made = "-".join(dict.fromkeys([step.sample_versions[0], step.sample_versions[-1]])) if step.sample_versions else "?"
    return f"v{made}" if step.served_version is None else f"v{made}>{step.served_version}"


def closing_lines(report: Report, directory: Path, seconds_before: float) -> list[str]:
    """How the run ended: each arm's outcome, and which of the report's files there are.

    seconds_before: of `report.seconds_total`, those of the runs that this one goes on from.
    """
    lines = [
        f"{arm.reward} reward: held-out accuracy {arm.initial_accuracy:.3f} -> {arm.final_accuracy():.3f} "
        f"({arm.final_accuracy() - arm.initial_accuracy:+.3f}), digests {'equal' if arm.digests_equal() else 'DIFFER'}"
        for arm in report.arms.values()
        if arm.steps
    ]
    files = [directory / f"report.{suffix}" for suffix in ("json", "png", "html")]
    written = ", ".join(str(path) for path in files if path.exists())
    ended = "finished" if report.status == "finished" else "stopped"
    took = units.seconds(report.seconds_total - seconds_before)
    if seconds_before:
        took += f" ({units.seconds(report.seconds_total)} with what it goes on from)"
    return [*lines, f"{ended} after {took}: {written or 'no report was written'}"]


def _phase(step: Step, phase: str) -> str:
    parts = []
    if phase in step.seconds:
        parts.append(f"{step.seconds[phase]:.2f}" if step.seconds[phase] < 100 else f"{step.seconds[phase]:.0f}")
    if phase in step.nbytes:
        parts.append(units.short_nbytes(step.nbytes[phase]))
    return f"{_SHORT.get(phase, phase)} {'/'.join(parts)}"
