"""What runs while batches are moved: services, and per workload and peer a writer and readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ActorProcess, Process, SpawnedProcess
from benchmarks.transport import ray_objects
from benchmarks.transport.digests import digests_of
from benchmarks.transport.peers import Peer, Room
from benchmarks.transport.roles import ReadingRole, WritingRole
from benchmarks.transport.workload import SharedNumbers, Workload, batch_of, mapped, stamp


@dataclass(frozen=True)
class Pair:
    """The processes of one peer.

    Attributes:
        peer: whose they are.
        writers, readers: at least one writer; readers may be none.
    """

    peer: Peer
    writers: Sequence[Process]
    readers: Sequence[Process]

    @property
    def processes(self) -> list[Process]:
        return [*self.writers, *self.readers]


class Batch:
    """A workload in memory, with what a reader must find.

    Attributes:
        workload: which one.
        nbytes: of its payload.
    """

    def __init__(self, workload: Workload, numbers: SharedNumbers) -> None:
        self.workload, self.nbytes, self.path = workload, workload.nbytes, numbers.path
        self._values = batch_of(workload.as_numpy(), mapped(numbers.path))
        self._of_peer: dict[str, dict[str, str]] = {}
        self._stamped: int | None = None
        self._expected: dict[str, str] = {}

    def loaded(self, peer: Peer, expected: dict[str, str] | None) -> None:
        """Remember what a peer's readers get, if it is not the batch."""
        if expected is not None:
            self._of_peer[peer.name] = expected

    def expected_of(self, peer: Peer, number: int) -> dict[str, str]:
        """Digests of what a reader of this peer must find: mostly of the batch with this number stamped into it."""
        if peer.name in self._of_peer:
            return self._of_peer[peer.name]
        if number != self._stamped:
            stamp(self._values, number)
            self._stamped, self._expected = number, digests_of(self._values)
        return self._expected


@contextmanager
def services(peers: Sequence[Peer], capacity: int, kept: int, directory: Path) -> Iterator[dict[str, Any]]:
    """Run what the peers need; yields its values by name of service.

    Args:
        capacity: bytes of batches that are moved at a time.
        kept: bytes of batches that each peer leaves in its store.
    """

    def room(those: Sequence[Peer]) -> Room:
        return Room(capacity, max(capacity, len(those) * kept)) if those else Room(0, 0)

    with ExitStack() as stack:
        if any(peer.on_ray for peer in peers):
            stack.enter_context(ray_objects.cluster(room([peer for peer in peers if peer.name == "ray"])))
        running: dict[str, Any] = {}
        for peer in peers:
            if peer.service not in running:
                sharing = [other for other in peers if other.service == peer.service]
                running[peer.service] = stack.enter_context(peer.serve(room(sharing), directory))
        yield running


@contextmanager
def pairs(
    peers: Sequence[Peer], batch: Batch, running: Mapping[str, Any], directory: Path, writers: int = 1, readers: int = 1
) -> Iterator[list[Pair]]:
    """Start the processes of the peers and load the batch into each writer."""
    made: list[Pair] = []
    started: list[Process] = []

    def start(peer: Peer, kind: str, role: type[WritingRole] | type[ReadingRole], number: int) -> Process:
        name = f"{peer.name}-{kind}{number or ''}-{batch.workload.variant}"
        service = running[peer.service]
        process = (
            ActorProcess(name, role, peer, service)
            if peer.on_ray
            else SpawnedProcess(name, directory, role, peer, service)
        )
        started.append(process)
        return process

    try:
        for peer in peers:
            writing = [start(peer, "writer", WritingRole, number) for number in range(writers)]
            reading = [start(peer, "reader", ReadingRole, number) for number in range(readers if peer.reader else 0)]
            made.append(Pair(peer, writing, reading))
        loading = [
            (pair.peer, process.start("load", batch.workload, batch.path)) for pair in made for process in pair.writers
        ]
        for peer, loaded in loading:
            batch.loaded(peer, loaded())
        for process in started:
            process.wait()
        yield made
    except BaseException:
        for process in started:
            process.kill()
        raise
    with ThreadPoolExecutor(max(1, len(started))) as closing:
        list(closing.map(lambda process: process.stop(), started))
