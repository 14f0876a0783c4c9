"""Gathers measurements, and writes each down as soon as it is made: an interrupted run leaves what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.measurements import Measurement, append, this_machine


class Recorder:
    """Of one run on this machine.

    Attributes:
        machine, versions: of this host.
        measurements: so far.
        path: of the file of JSON lines.
    """

    def __init__(self, run: str, path: Path) -> None:
        self._run, self.path = run, path
        self.machine, self.versions = this_machine()
        self.measurements: list[Measurement] = []

    def add(self, **measured: Any) -> None:
        """Add one: the fields of `Measurement` that are not the run's or the machine's."""
        measurement = Measurement(run=self._run, machine=self.machine, versions=self.versions, **measured)
        self.measurements.append(measurement)
        append(self.path, [measurement])
