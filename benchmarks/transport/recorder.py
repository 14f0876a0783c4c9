"""What the rounds of `bench transport` find, written down."""

from __future__ import annotations

from benchmarks import recorder
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
        self._recorder = recorder.Recorder(settings.run, settings.output / FILE_NAME)
        self.measurements, self.path = self._recorder.measurements, self._recorder.path

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
        self._recorder.add(
            settings=self._settings.load(workload),
            variant=workload.variant,
            peer=peer,
            operation=operation,
            round=number,
            seconds=seconds,
            bytes=nbytes,
            extra_bytes=extra_bytes,
            scale=scale,
        )
