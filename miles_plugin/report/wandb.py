"""Metrics for Weights & Biases: one W&B run per arm, grouped. Offline, the default, nothing is sent."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from miles_plugin.arguments import TrainConfig
from miles_plugin.report.metrics import STEP_KEYS, step_metrics, track_name
from miles_plugin.report.observer import Observer
from miles_plugin.report.record import Arm, Report
from mooncake_store.errors import ConfigError

if TYPE_CHECKING:
    from wandb import Run

# A server that does not answer must not hold the job for long.
_TIMEOUT_SECONDS = 60.0


class WandB(Observer):
    """Observer that logs every step.

    Args:
        config: mode, project and group.
        directory: gets W&B's files, below `wandb/`.
    """

    def __init__(self, config: TrainConfig, directory: Path) -> None:
        self._config, self._directory = config, directory
        self._run: Run | None = None

    def run_started(self, report: Report, _directory: Path) -> None:
        self._report = report
        if self._config.wandb_mode != "online":
            # Read on import: W&B's own error reports would go out in any mode.
            os.environ["WANDB_ERROR_REPORTING"] = "false"

    def arm_started(self, arm: Arm, _num_rollout: int) -> None:
        import wandb

        self._finish()
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"{self._report.run_id}-{track_name(self._report, arm.reward)}"
        self._run = wandb.init(
            id=name,
            name=name,
            project=self._config.wandb_project,
            group=self._config.wandb_group or self._report.run_id,
            dir=self._directory,
            config=self._report.config,
            mode=self._config.wandb_mode,
            # W&B must neither capture nor add to what the job prints.
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=_TIMEOUT_SECONDS, finish_timeout=_TIMEOUT_SECONDS
            ),
        )
        for prefix, step_key in STEP_KEYS.items():
            self._run.define_metric(step_key)
            self._run.define_metric(f"{prefix}/*", step_metric=step_key)
        for index in range(len(arm.steps)):
            self._log(arm, index)

    def step_finished(self, _report: Report, arm: Arm) -> None:
        self._log(arm, len(arm.steps) - 1)

    def run_finished(self, _report: Report) -> None:
        self._finish()

    def _log(self, arm: Arm, index: int) -> None:
        if self._run is not None:
            self._run.log(step_metrics(arm, index, self._report.config))

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def check_login() -> None:
    """Raise ConfigError when W&B has no credentials to write online with; asks neither its server nor the user."""
    import wandb

    wandb.setup(wandb.Settings(silent=True))  # or it would ask the server for the user's name, to print it
    if not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "wandb_mode=online: no API key is configured, or WANDB_MODE says offline; run `wandb login` or set "
            "WANDB_API_KEY, or use --wandb-mode offline"
        )
