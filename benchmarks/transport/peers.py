"""What is measured: the interface of a transport to the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.transport.workload import Bytes


@dataclass(frozen=True)
class Loaded:
    """A batch, ready in a writer's process.

    Attributes:
        batch: columns, as `batch_of` makes them.
        memory: uint8, at least nbytes: any bytes of that number, for what moves bytes without a layout.
        nbytes: size of the payload.
    """

    batch: dict[str, Any]
    memory: Bytes
    nbytes: int


@dataclass(frozen=True)
class Held:
    """What a get returned: columns by name, and how to let go of them."""

    batch: dict[str, Any]
    release: Callable[[], None]


class Writer(Protocol):
    """Puts batches; lives in a process of its own."""

    def prepare(self, loaded: Loaded) -> dict[str, str] | None:
        """Get ready to put this batch, untimed. Returns the digests of what a reader will get; None for the batch's."""

    def put(self) -> Any:
        """Store what was prepared; return what a reader needs to get it, which can be pickled. This is timed."""

    def remove(self, ref: Any) -> None:
        """Free it."""

    def close(self) -> None:
        """End, before the process does."""


class Reader(Protocol):
    """Gets batches; lives in a process of its own."""

    def get(self, ref: Any) -> Held:
        """Read a batch. This is timed."""

    def close(self) -> None:
        """End, before the process does."""


def nothing_missing() -> str:
    """Of what needs nothing but this project's own requirements."""
    return ""


@dataclass(frozen=True)
class Room:
    """What a service has room for, in bytes of batches.

    Attributes:
        moved: of what is put or got at a time, which a process's buffers must hold.
        stored: of all that lies in its store at a time.
    """

    moved: int
    stored: int


@contextmanager
def no_service(_room: Room, _directory: Path) -> Iterator[None]:
    """Of what needs no other process."""
    yield None


@dataclass(frozen=True)
class Peer:
    """One way to move a batch. It travels to the processes in which it makes a writer and readers.

    Attributes:
        name: on the command line and in the JSON lines.
        label: for people.
        writer: makes the writing side, in the process that it will live in, given the value of the service.
        reader: the same of the reading side; None where there is nothing to get.
        footprint: bytes that it takes while a batch is moved, its service's included, per byte of the payload.
        service: what must run; peers that name the same share it.
        serve: runs it, given what it must have room for and a directory for its logs.
        on_ray: whether its processes are Ray actors.
        missing: why it cannot be measured here, and what to do about it; empty when it can.
    """

    name: str
    label: str
    writer: Callable[[Any], Writer]
    reader: Callable[[Any], Reader] | None
    footprint: float
    service: str = ""
    serve: Callable[[Room, Path], AbstractContextManager[Any]] = no_service
    on_ray: bool = False
    missing: Callable[[], str] = nothing_missing
