"""The report's files: `report.json` after every step, `report.png` and `report.html` at the end."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from miles_plugin.report.observer import Observer
from miles_plugin.report.record import Arm, Report
from mooncake_store.errors import ConfigError

_PICTURES = ("report.png", "report.html")
_log = logging.getLogger(__name__)


class ReportFiles(Observer):
    """Observer that writes the report. It never gives up: a disk that was full may have room at the next step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run_started(self, report: Report, directory: Path) -> None:
        """Raises ConfigError when the report cannot be written: the time to find out is before the run."""
        try:
            report.write(directory / "report.json")
        except OSError as error:
            raise ConfigError(f"report={directory}: {error}; name a directory that can be written") from error

    def step_finished(self, report: Report, _arm: Arm) -> None:
        self._write(report, "after the next step")

    def run_finished(self, report: Report) -> None:
        self._write(report, "no more")
        for name in _PICTURES:
            _draw(report, self._directory / name)

    def _write(self, report: Report, again: str) -> None:
        path = self._directory / "report.json"
        try:
            report.write(path)
        except OSError as error:
            _log.error("%s was not written: %s; tried again: %s", path, error, again)


def redraw(directory: Path) -> list[Path]:
    """Write `report.png` and `report.html` anew from the `report.json` in `directory`.

    Returns:
        the files written.

    Raises:
        ConfigError: there is no report that can be read, or a file cannot be written.
    """
    report = Report.read(directory / "report.json")
    paths = [directory / name for name in _PICTURES]
    for path in paths:
        try:
            _replace(report, path)
        except (ImportError, OSError) as error:
            raise ConfigError(f"{path}: {error}") from error
    return paths


def _draw(report: Report, path: Path) -> None:
    try:
        _replace(report, path)
    except ImportError as error:
        _log.warning("no %s: %s; install the extra `train`", path.name, error)
    except Exception as error:  # a picture is not worth the end of a run
        _log.warning("no %s: %s: %s", path.name, type(error).__name__, error)


def _replace(report: Report, path: Path) -> None:
    """Draw `path` anew, whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        _drawer(path)(report, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _drawer(path: Path) -> Callable[[Report, Path], None]:
    if path.suffix == ".png":
        from miles_plugin.report.plot import draw

        return draw
    from miles_plugin.report.html import write

    return write
