"""What the writing and the reading process of a peer do: load, put, remove; get, look, let go. Times are taken here."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.transport.digests import differing, make_usable
from benchmarks.transport.peers import Loaded, Peer
from benchmarks.transport.workload import Workload, batch_of, mapped, stamp


@dataclass(frozen=True)
class Put:
    """seconds: of the put alone."""

    ref: Any
    seconds: float


@dataclass(frozen=True)
class Read:
    """seconds: from the call until every column was usable. wrong: names of the columns that were not as expected."""

    seconds: float
    wrong: list[str]


class WritingRole:
    """The writer of one peer."""

    def __init__(self, peer: Peer, service: Any) -> None:
        self._writer = peer.writer(service)
        self._batch: dict[str, Any] = {}

    def load(self, workload: Workload, path: str) -> dict[str, str] | None:
        """Have the batch ready; returns what `Writer.prepare` does."""
        self._batch = batch_of(workload, mapped(path))
        untouched = mapped(path)  # what is stamped into the batch stays there
        expected = self._writer.prepare(Loaded(self._batch, untouched, workload.nbytes))
        stamp(self._batch, 0)
        gc.collect()
        with suppress(AttributeError):  # glibc only: or memory that was freed would hide what a put takes
            ctypes.CDLL(None).malloc_trim(0)
        return expected

    def put(self, number: int) -> Put:
        """Put the batch with a number of its own stamped into it."""
        stamp(self._batch, number)
        gc.collect()
        start = time.perf_counter()
        ref = self._writer.put()
        return Put(ref, time.perf_counter() - start)

    def put_all(self, numbers: Sequence[int]) -> list[Put]:
        """Put a batch for each number."""
        return list(map(self.put, numbers))

    def remove(self, ref: Any) -> None:
        self._writer.remove(ref)

    def close(self) -> None:
        self._writer.close()


class ReadingRole:
    """A reader of one peer."""

    def __init__(self, peer: Peer, service: Any) -> None:
        assert peer.reader is not None
        self._reader = peer.reader(service)

    def read(self, ref: Any, expected: Mapping[str, str]) -> Read:
        """Get a batch, look whether it is the expected one, and let go of it."""
        gc.collect()
        start = time.perf_counter()
        held = self._reader.get(ref)
        make_usable(held.batch)
        seconds = time.perf_counter() - start
        wrong = differing(expected, held.batch)
        held.batch.clear()
        held.release()
        return Read(seconds, wrong)

    def close(self) -> None:
        self._reader.close()
