"""Metrics for TensorBoard: one directory of event files per arm, so that it overlays them."""

from pathlib import Path
from typing import TYPE_CHECKING

from miles_plugin.report.metrics import STEP_KEYS, step_metrics, track_name
from miles_plugin.report.observer import Observer
from miles_plugin.report.record import Arm, Report

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Observer):
    """Observer that logs every step.

    Args:
        directory: gets a directory per arm.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def run_started(self, report: Report, _directory: Path) -> None:
        self._report = report

    def arm_started(self, arm: Arm, _num_rollout: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._close()
        self._writer = SummaryWriter(str(self._directory / track_name(self._report, arm.reward)))
        for index in range(len(arm.steps)):
            self._log(arm, index)

    def step_finished(self, _report: Report, arm: Arm) -> None:
        self._log(arm, len(arm.steps) - 1)

    def run_finished(self, _report: Report) -> None:
        self._close()

    def _log(self, arm: Arm, index: int) -> None:
        if self._writer is None:
            return
        metrics = step_metrics(arm, index, self._report.config)
        for name, value in metrics.items():
            step_key = STEP_KEYS[name.split("/")[0]]
            if name != step_key:
                self._writer.add_scalar(name, value, int(metrics[step_key]))
        self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
