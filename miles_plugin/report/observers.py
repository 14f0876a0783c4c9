"""Everything that watches a job, as one observer."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from miles_plugin.arguments import TrackingArguments, TrainConfig
from miles_plugin.report.files import ReportFiles
from miles_plugin.report.jsonlines import JsonLines
from miles_plugin.report.observer import Observer
from miles_plugin.report.plain import PlainLines
from miles_plugin.report.record import Arm, Report
from mooncake_store.errors import ConfigError, MissingDependency

_log = logging.getLogger(__name__)


class Observers(Observer):
    """Tells all observers of every event. One that raises is logged and told nothing more; the job goes on.

    Args:
        files: writes the report; told first, and never dropped: it looks after its own errors.
        others: the terminal and the loggers.
    """

    def __init__(self, files: ReportFiles, others: list[Observer]) -> None:
        self._files, self._others = files, others

    def run_started(self, report: Report, directory: Path) -> None:
        """Raises ConfigError when the report cannot be written."""
        self._files.run_started(report, directory)
        self._tell(lambda observer: observer.run_started(report, directory))

    def message(self, text: str) -> None:
        self._tell(lambda observer: observer.message(text))

    def arm_started(self, arm: Arm, num_rollout: int) -> None:
        self._tell(lambda observer: observer.arm_started(arm, num_rollout))

    def phase_started(self, phase: str) -> None:
        self._tell(lambda observer: observer.phase_started(phase))

    def progress(self, done: int, total: int) -> None:
        self._tell(lambda observer: observer.progress(done, total))

    def step_finished(self, report: Report, arm: Arm) -> None:
        self._files.step_finished(report, arm)
        self._tell(lambda observer: observer.step_finished(report, arm))

    def run_finished(self, report: Report) -> None:
        with ExitStack() as stack:  # an interrupt while one finishes must not keep the next from releasing the terminal
            for observer in reversed(self._others):
                stack.callback(self._tell_one, observer, lambda observer: observer.run_finished(report))
            stack.callback(self._files.run_finished, report)

    def _tell(self, event: Callable[[Observer], None]) -> None:
        for observer in list(self._others):
            self._tell_one(observer, event)

    def _tell_one(self, observer: Observer, event: Callable[[Observer], None]) -> None:
        try:
            event(observer)
        except Exception as error:
            self._others.remove(observer)
            name, said = type(observer).__name__, " ".join(str(error).split())
            _log.warning("%s failed and is told nothing more: %s: %s", name, type(error).__name__, said)


def open_observers(config: TrainConfig, directory: Path) -> Observers:
    """What `config` asks for. directory: of the report, for what has no directory of its own."""
    others: list[Observer] = [_terminal(config)]
    if config.use_tensorboard:
        from miles_plugin.report.tensorboard import TensorBoard

        others.append(TensorBoard(config.tb_project_name or directory / "tensorboard"))
    if config.use_wandb:
        from miles_plugin.report.wandb import WandB

        others.append(WandB(config, config.wandb_dir or directory))
    return Observers(ReportFiles(directory), others)


def check_tracking(config: TrainConfig) -> None:
    """Raise for what `open_observers` could not give; cheap, and leaves no trace.

    Raises:
        MissingDependency: a logger that was asked for is not installed.
        ConfigError: a setting of a logger that is off, a logger's directory that cannot be made, or W&B is to be
            written online without credentials.
    """
    for flag, prefix in (("use_tensorboard", "tb_"), ("use_wandb", "wandb_")):
        for name, field in TrackingArguments.model_fields.items():
            if name.startswith(prefix) and not getattr(config, flag) and getattr(config, name) != field.default:
                raise ConfigError(
                    f"{name}={getattr(config, name)} is set without {flag}; add --{flag.replace('_', '-')}, or leave "
                    f"{name} out"
                )
    for flag, package in (("use_tensorboard", "tensorboard"), ("use_wandb", "wandb")):
        if getattr(config, flag) and find_spec(package) is None:
            raise MissingDependency(
                f"{flag}: {package} is not installed; pip install miles-mooncake[{package}], or leave the flag out"
            )
    for name in ("tb_project_name", "wandb_dir"):
        path: Path | None = getattr(config, name)
        if path is not None:
            _check_directory(name, path.absolute())
    if config.use_wandb and config.wandb_mode == "online":
        from miles_plugin.report.wandb import check_login

        check_login()


def _check_directory(name: str, path: Path) -> None:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}={path}: {existing} is not a directory that can be written; name another")


def _terminal(config: TrainConfig) -> Observer:
    if config.log_format == "json":
        return JsonLines()
    if find_spec("rich") is not None:
        from miles_plugin.report.progress import LiveProgress, live_is_possible

        if live_is_possible():
            return LiveProgress()
    return PlainLines()
