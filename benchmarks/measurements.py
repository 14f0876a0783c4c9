"""What was measured, as JSON lines: each says by itself what it is, of which run, and of which machine and versions."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from miles_plugin.report.machine import describe_machine
from mooncake_store.errors import ConfigError
from mooncake_store.memory import memory_limit

FORMAT = 1


class Machine(msgspec.Struct, frozen=True):
    """cpu: the model's name. memory_bytes: what the host or its cgroup allows."""

    cpu: str
    cores: int
    memory_bytes: int
    platform: str

    def __str__(self) -> str:
        return f"{self.cores} cores of {self.cpu}, {self.memory_bytes / 2**30:.0f} GiB, {self.platform}"


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one peer.

    Attributes:
        run: id of the run.
        settings: what determines the load, by name: two runs can be compared where these are equal.
        variant: of the load.
        peer: who did it.
        operation: "put", "get", or "memory", which is the first put looked at from outside; those of other benchmarks.
        round: counts from 0, warm-ups left out; peers of one round were measured one directly after the other.
        seconds: that it took; None where it is memory.
        bytes: of the payload.
        extra_bytes: of "memory": private memory of the writer at its peak, less what it had before. Of "memory of ..."
            also less the bytes that were made.
        scale: of a scaling run, by name what was varied and how far.
        latencies: of "rdma", seconds of each operation of the round; of "async", of each sample or step of the turn.
        cpu_seconds: of "rdma", by host ("here", "there") what its processes took.
        delta: of "deltas", by name: "values", and how many of them "changed"; bytes: "wire" of what was made, "bound"
            of what it takes at least.
        machine, versions: where, and of which parts.
        loop: of "async", by name what the steps of a turn came to; see benchmarks/fully_async/turn.py.
        format: of this line.
    """

    run: str
    settings: dict[str, Any]
    variant: str
    peer: str
    operation: str
    round: int
    seconds: float | None
    bytes: int
    machine: Machine
    versions: dict[str, str]
    extra_bytes: int | None = None
    scale: dict[str, int] | None = None
    latencies: list[float] | None = None
    cpu_seconds: dict[str, float] | None = None
    delta: dict[str, int] | None = None
    loop: dict[str, float] | None = None
    format: int = FORMAT

    @property
    def fresh(self) -> bool:
        """Whether each put had to take memory that its store had not used."""
        return bool(self.settings.get("fresh"))


def this_machine() -> tuple[Machine, dict[str, str]]:
    """This machine, and the versions of Python and of the parts that are installed."""
    described = describe_machine()
    machine = Machine(_cpu(), described["cpus"], memory_limit().nbytes, platform.system() + " " + platform.release())
    versions = {"Python": described["python"], **described["versions"]}
    with suppress(PackageNotFoundError):  # a peer that most machines do not have
        versions["TransferQueue"] = version("TransferQueue")
    return machine, versions


def machine_of(described: object) -> Machine:
    """A machine that another host described as plain values."""
    return msgspec.convert(described, Machine)


def append(path: Path, measurements: Iterable[Measurement]) -> None:
    """Add lines to a file."""
    with path.open("ab") as file:
        for measurement in measurements:
            file.write(msgspec.json.encode(measurement) + b"\n")


def read(path: Path) -> list[Measurement]:
    """Every line of a file.

    Raises:
        ConfigError: it cannot be read, or has a line that is no measurement of this format; names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    found = list(_decoded(path, lines))
    if not found:
        raise ConfigError(f"{path} has no measurement")
    return found


def _decoded(path: Path, lines: Iterable[bytes]) -> Iterator[Measurement]:
    for number, line in enumerate(lines, 1):
        try:
            measurement = msgspec.json.decode(line, type=Measurement)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number} is not a measurement: {error}") from error
        if measurement.format != FORMAT:
            raise ConfigError(f"{path}, line {number} has format {measurement.format}, this checkout reads {FORMAT}")
        yield measurement


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "an unknown CPU"
