"""Gathers measurements, and writes each down as soon as it is made: an interrupted run leaves what it has."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measurements import Measurement, append, this_machine
from benchmarks.transport.settings import Settings
from benchmarks.transport.workload import Workload

FILE_NAME = "measurements.jsonl"


class Recorder:
    """Of one run.

    Attributes:
        measurements: so far.
        path: of the file of JSON lines.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._machine, self._versions = this_machine()
        self.measurements: list[Measurement] = []
        self.path: Path = settings.output / FILE_NAME

    def add(
        self,
        workload: Workload,
        peer: str,
        operation: str,
        number: int,
        seconds: float | None,
        nbytes: int,
        *,
        extra_bytes: int | None = None,
        scale: dict[str, int] | None = None,
    ) -> None:
        """Add one; see `Measurement`."""
        measurement = Measurement(
            run=self._settings.run,
            settings=self._settings.load(workload),
            variant=workload.variant,
            peer=peer,
            operation=operation,
            round=number,
            seconds=seconds,
            bytes=nbytes,
            machine=self._machine,
            versions=self._versions,
            extra_bytes=extra_bytes,
            scale=scale,
        )
        self.measurements.append(measurement)
        append(self.path, [measurement])
