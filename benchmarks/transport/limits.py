"""What the machine can do at most: a copy of the same bytes in memory, and one object of them over Mooncake's TCP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.processes import SpawnedProcess
from benchmarks.transport.bundle_transfer import SegmentOwner
from benchmarks.transport.digests import digests_of
from benchmarks.transport.mooncake import check, connected, missing
from benchmarks.transport.peers import Held, Loaded, Peer, Room
from benchmarks.transport.workload import Bytes
from mooncake_store import MasterProcess
from mooncake_store.segment import populate


class MemoryCopy:
    """Implements `Writer`: a put is one memcpy between pages that are in memory."""

    def __init__(self, _service: None) -> None:
        self._source = self._target = np.empty(0, dtype=np.uint8)

    def prepare(self, loaded: Loaded) -> None:
        self._source, self._target = loaded.memory[: loaded.nbytes], _warm(loaded.nbytes)
        populate(self._source.ctypes.data, self._source.size, writable=False)

    def put(self) -> None:
        np.copyto(self._target, self._source)

    def remove(self, _ref: None) -> None:
        pass

    def close(self) -> None:
        pass


class _Service(NamedTuple):
    """segment: what Mooncake calls the memory that the owner lends."""

    master: str
    segment: str


class _RawRef(NamedTuple):
    key: str
    nbytes: int


class RawWriter:
    """Implements `Writer`: `put_from` of registered memory to a segment that another process owns."""

    def __init__(self, service: _Service) -> None:
        from mooncake.store import ReplicateConfig

        self._store = connected(service.master, None)
        self._config = ReplicateConfig()
        self._config.preferred_segment = service.segment  # or a small object might land in this process
        self._source: Bytes = np.empty(0, dtype=np.uint8)
        self._puts = 0

    def prepare(self, loaded: Loaded) -> dict[str, str]:
        self._source = loaded.memory[: loaded.nbytes]
        populate(self._source.ctypes.data, self._source.size, writable=False)
        check("register_buffer", self._store.register_buffer(self._source.ctypes.data, self._source.size))
        return digests_of({"bytes": self._source})

    def put(self) -> _RawRef:
        self._puts += 1
        ref = _RawRef(f"raw/{os.getpid()}/{self._puts}", self._source.size)
        check("put_from", self._store.put_from(ref.key, self._source.ctypes.data, ref.nbytes, self._config))
        return ref

    def remove(self, ref: _RawRef) -> None:
        check("remove", self._store.remove(ref.key, True))

    def close(self) -> None:
        self._store.close()


class RawReader:
    """Implements `Reader`: `get_into` registered memory."""

    def __init__(self, service: _Service) -> None:
        self._store = connected(service.master, None)
        self._target: Bytes = np.empty(0, dtype=np.uint8)

    def get(self, ref: _RawRef) -> Held:
        if self._target.size != ref.nbytes:  # in a warm-up
            self._target = _warm(ref.nbytes)
            check("register_buffer", self._store.register_buffer(self._target.ctypes.data, ref.nbytes))
        check("get_into", self._store.get_into(ref.key, self._target.ctypes.data, ref.nbytes), ref.nbytes)
        return Held({"bytes": self._target}, partial(self._target.fill, 0))

    def close(self) -> None:
        self._store.close()


@contextmanager
def serve(room: Room, directory: Path) -> Iterator[_Service]:
    """A master, and a process that lends the memory."""
    segment = int(1.2 * room.stored) + (64 << 20)
    with (
        MasterProcess(directory / "mooncake_master-raw.log") as master,
        SpawnedProcess("raw-owner", directory, SegmentOwner, master.address, segment) as owner,
    ):
        yield _Service(master.address, owner.call("segment_name"))


def _warm(nbytes: int) -> Bytes:
    memory = np.empty(nbytes, dtype=np.uint8)
    memory.fill(0)
    return memory


PEERS = (
    Peer("memcpy", "memcpy", MemoryCopy, None, 1.0),
    Peer("raw", "one put_from / get_into", RawWriter, RawReader, 2.1, "raw", serve, missing=missing),
)
