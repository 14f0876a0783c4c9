"""Progress for programs: one JSON object per line on standard output, and nothing else there.

Everything that is not an event, such as what a part of the job prints, goes to standard error.

Every object has `event`, `time` (ISO 8601 with milliseconds, UTC) and `run_id`. A number that was not finite is null.
Keys are never renamed or removed, others may be added. By event:

    run_started    report (directory), started_at, checkpoint, config, machine
    message        text: one line of news
    arm_started    arm ("real", "shuffled"), initial_accuracy, num_rollout, steps_done (not 0 after a resume)
    phase_started  arm and rollout_id (null before the first arm), phase ("generate", "train", "update", "evaluate" or
                   "save")
    progress       phase ("update"), done_bytes, total_bytes: now and then, while it takes more than a second
    step_finished  arm, num_rollout, rollout_id, reward, held_out_accuracy (null: not measured), loss, clip_fraction,
                   grad_norm, samples, tokens, tokens_per_second (generated), trained_tokens_per_second,
                   seconds and nbytes (by phase), sample_versions (strings), served_version (null: no update),
                   version_lag, updates (of weights: version, nbytes, density, seconds by phase, engines, left,
                   proven), buffer (fully asynchronous: its metrics, by name), eta_seconds (until the run is done)
    run_finished   status ("finished", or "stopped: ..."), seconds_total (with the runs it goes on from), summary (by
                   arm: initial_accuracy, final_accuracy, rise, steps, digests_equal), files (of the report, those that
                   exist)
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from miles_plugin.report import units
from miles_plugin.report.console import ClaimedStdout, write_line
from miles_plugin.report.observer import Observer
from miles_plugin.report.pace import Pace
from miles_plugin.report.record import Arm, Report, finite


class JsonLines(Observer):
    """Observer that writes the events above.

    Args:
        stream: where to; by default standard output, which is claimed until the run has finished.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._release: Callable[[], None] = lambda: None
        if stream is None:
            claimed = ClaimedStdout("utf-8")
            stream, self._release = claimed.stream, claimed.release
        self._stream = stream
        self._run_id: str | None = None
        self._arm: Arm | None = None
        self._directory = Path()

    def run_started(self, report: Report, directory: Path) -> None:
        self._run_id, self._directory, self._pace = report.run_id, directory, Pace(report.config)
        self._write(
            "run_started",
            report=str(directory),
            started_at=report.started_at,
            checkpoint=report.checkpoint,
            config=report.config,
            machine=report.machine,
        )

    def message(self, text: str) -> None:
        self._write("message", text=text)

    def arm_started(self, arm: Arm, num_rollout: int) -> None:
        self._arm = arm
        self._pace.arm_started(arm, num_rollout)
        self._write(
            "arm_started",
            arm=arm.reward,
            initial_accuracy=arm.initial_accuracy,
            num_rollout=num_rollout,
            steps_done=len(arm.steps),
        )

    def phase_started(self, phase: str) -> None:
        arm = self._arm
        rollout_id = None
        if arm is not None:
            rollout_id = arm.steps[-1].rollout_id if phase == "save" else _next_rollout(arm)
        self._write("phase_started", arm=arm.reward if arm else None, rollout_id=rollout_id, phase=phase)

    def progress(self, done: int, total: int) -> None:
        self._write("progress", phase="update", done_bytes=done, total_bytes=total)

    def step_finished(self, _report: Report, arm: Arm) -> None:
        self._pace.step_finished()
        step = arm.steps[-1]
        self._write(
            "step_finished",
            arm=arm.reward,
            num_rollout=self._pace.num_rollout,
            rollout_id=step.rollout_id,
            reward=step.reward,
            held_out_accuracy=step.held_out_accuracy,
            loss=step.loss,
            clip_fraction=step.clip_fraction,
            grad_norm=step.grad_norm,
            samples=step.samples,
            tokens=step.tokens,
            tokens_per_second=units.per_second(step.tokens, step.seconds.get("generate")),
            trained_tokens_per_second=units.per_second(step.tokens, step.seconds.get("train")),
            seconds=step.seconds,
            nbytes=step.nbytes,
            sample_versions=step.sample_versions,
            served_version=step.served_version,
            version_lag=arm.version_lag(len(arm.steps) - 1),
            updates=[asdict(update) for update in step.updates],
            buffer=step.buffer,
            eta_seconds=self._pace.remaining(),
        )

    def run_finished(self, report: Report) -> None:
        files = [self._directory / f"report.{suffix}" for suffix in ("json", "png", "html")]
        try:
            self._write(
                "run_finished",
                status=report.status,
                seconds_total=report.seconds_total,
                summary={name: arm.summary() for name, arm in report.arms.items()},
                files=[str(path) for path in files if path.exists()],
            )
        finally:
            self._release()

    def _write(self, event: str, **values: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"event": event, "time": time, "run_id": self._run_id} | values
        write_line(self._stream, json.dumps(finite(record), allow_nan=False))


def _next_rollout(arm: Arm) -> int:
    return arm.steps[-1].rollout_id + 1 if arm.steps else 0
