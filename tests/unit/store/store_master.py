"""A master in memory, in the place of MooncakeClient: keeps objects in segments that are real shared memory.

It does what was measured of Mooncake (a second allocation of a key answers -705, a full segment spills into another),
writes down every call, and fails when told to.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from mooncake_store.backends import Loan, Payload, Placed, Stored
from mooncake_store.client import Limits, Location, Range
from mooncake_store.encode import Into
from mooncake_store.errors import IntegrityError, ObjectNotFound, StoreError, StoreFull, StoreUnavailable
from mooncake_store.format import MAGIC
from mooncake_store.holder import slot_key
from mooncake_store.owners import Owners
from mooncake_store.placement import Writer, Written
from mooncake_store.pool import BufferPool
from mooncake_store.reading import Reader
from mooncake_store.records import Records
from mooncake_store.ref import BatchRef, CopyOf
from mooncake_store.rows import STEP_BYTES, Sink
from mooncake_store.segment import PROBE_BYTES, SegmentRecord, SharedMemory, boot_id

ALIGNMENT = 64
_SENTINEL = re.compile(r"holder/\w+/epoch/\d+")


class Lent:
    """The segment of a holder, lent by this process.

    Attributes:
        bytes: uint8 [nbytes], its memory.
        largest: the largest object that it has a hole for, None where only its size counts.
    """

    def __init__(self, name: str, nbytes: int = 1 << 20, shared: bool = True, epoch: int = 0) -> None:
        self._memory = SharedMemory(nbytes)
        self.bytes = np.frombuffer(self._memory.mapping, dtype=np.uint8)
        self.largest: int | None = None
        self.record = SegmentRecord(
            holder=uuid.uuid5(uuid.NAMESPACE_DNS, name).hex,
            epoch=epoch,
            name=name,
            endpoint=f"{name}/endpoint",
            nbytes=nbytes,
            base=self._memory.address,
            path=f"/proc/{os.getpid()}/fd/{self._memory.descriptor}" if shared else "",
            inode=os.fstat(self._memory.descriptor).st_ino,
            boot_id=boot_id(),
            pid=os.getpid(),
            probe_at=0,
            probe=bytes(range(PROBE_BYTES)).hex(),
        )
        self.bytes[:PROBE_BYTES] = np.arange(PROBE_BYTES, dtype=np.uint8)

    def __del__(self) -> None:
        self._memory.close()


@dataclass
class Held:
    """An object of the master."""

    lent: Lent
    offset: int
    nbytes: int
    committed: bool = False

    @property
    def address(self) -> int:
        return self.lent.record.base + self.offset

    @property
    def bytes(self) -> np.ndarray:
        return self.lent.bytes[self.offset : self.offset + self.nbytes]


class Master:
    """Stands in for a MooncakeClient.

    Attributes:
        calls: (operation, keys) of every call.
        failures: by operation, what its next calls raise; None lets one pass.
        meanwhile: by operation, what happens once just before its next call, in another process so to say.
        unready: keys of objects whose writers were killed while they wrote: there, but neither read nor removed.
    """

    def __init__(self, *lent: Lent) -> None:
        self.lent: list[Lent] = []
        self._for_records = Lent("records", nbytes=1 << 18)
        self.objects: dict[str, Held] = {}
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.failures: dict[str, list[Exception | None]] = {}
        self.meanwhile: dict[str, Callable[[], object]] = {}
        self.unready: set[str] = set()
        self.records = Records(self)  # type: ignore[arg-type]
        for segment in lent:
            self.lend(segment)

    def lend(self, lent: Lent) -> None:
        """What a holder does: sentinel and record."""
        self.lent.append(lent)
        self.objects[lent.record.sentinel] = Held(lent, 0, PROBE_BYTES, True)
        slot = next(key for key in map(slot_key, range(64)) if key not in self.objects)
        assert self.records.claim(slot, msgspec.json.encode(lent.record), lent.record.name)
        self.calls.clear()

    def restart(self) -> None:
        """Forget everything."""
        self.objects.clear()
        self.lent.clear()

    def order(self, *operations: str) -> list[str]:
        """The operations that were called, of these."""
        return [operation for operation, _ in self.calls if operation in operations]

    def stored(self, prefix: str = "run/") -> list[str]:
        return [key for key in self.objects if key.startswith(prefix)]

    # --- what MooncakeClient has ---

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def allocate(self, keys: Sequence[str], nbytes: Sequence[int], segment: str) -> None:
        self._note("allocate", *keys)
        if any(key in self.objects or key in self.unready for key in keys):
            raise StoreError("it is there already", code=-705)
        taken: list[str] = []
        for key, size in zip(keys, nbytes, strict=True):
            # Records lie apart, so that a test sees in a segment what batches do to it.
            lent_here = self.lent if "/b/" in key or _SENTINEL.fullmatch(key) else [self._for_records]
            for lent in sorted(lent_here, key=lambda lent: lent.record.name != segment):
                offset = self._hole(lent, size)
                if offset is not None:
                    self.objects[key] = Held(lent, offset, size)
                    taken.append(key)
                    break
            else:
                for other in taken:
                    del self.objects[other]
                raise StoreFull(f"no hole of {size} bytes", code=-200)

    def write(self, key: str, start: int, address: int, nbytes: int) -> None:
        self._note("write", key)
        assert 0 <= start <= start + nbytes <= self.objects[key].nbytes
        ctypes.memmove(self.objects[key].address + start, address, nbytes)

    def commit(self, keys: Sequence[str]) -> None:
        self._note("commit", *keys)
        for key in keys:
            self.objects[key].committed = True

    def revoke(self, keys: Sequence[str]) -> None:
        self._note("revoke", *keys)
        for key in keys:
            self.objects.pop(key, None)

    def locate(self, keys: Sequence[str]) -> list[Location | None]:
        self._note("locate", *keys)
        found = [self._committed(key) for key in keys]
        return [held and Location(held.lent.record.endpoint, held.address, held.nbytes) for held in found]

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self._note("exist", *keys)
        return [self._committed(key) is not None for key in keys]

    def read(self, address: int, ranges: Sequence[Range], seconds: float | None = None) -> None:
        self._note("read", *(wanted.key for wanted in ranges))
        for wanted in ranges:
            held = self._committed(wanted.key)
            if held is None:
                raise ObjectNotFound(wanted.key)
            if wanted.start + wanted.nbytes > held.nbytes:
                raise IntegrityError(f"{wanted.key} is shorter")
            ctypes.memmove(address + wanted.to, held.address + wanted.start, wanted.nbytes)

    def remove(self, key: str, seconds: float | None = None) -> None:
        self._note("remove", key)
        if key in self.unready:
            raise StoreUnavailable(f"remove of {key!r} answered", code=-703)
        self.objects.pop(key, None)

    def remove_matching(self, pattern: str) -> int:
        self._note("remove_matching", pattern)
        matching = [key for key in self.objects if re.search(pattern, key)]
        for key in matching:
            del self.objects[key]
        return len(matching)

    def _note(self, operation: str, *keys: str) -> None:
        self.calls.append((operation, keys))
        self.meanwhile.pop(operation, lambda: None)()
        failures = self.failures.get(operation)
        if failures and failures[0] is not None:
            raise failures.pop(0)  # type: ignore[misc]
        if failures:
            failures.pop(0)

    def _committed(self, key: str) -> Held | None:
        held = self.objects.get(key)
        return held if held is not None and held.committed else None

    def _hole(self, lent: Lent, nbytes: int) -> int | None:
        if lent.largest is not None and nbytes > lent.largest:
            return None
        at = 0
        for start, end in sorted(self._taken(lent)):
            if start - at >= nbytes:
                return at
            at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
        return at if lent.record.nbytes - at >= nbytes else None

    def _taken(self, lent: Lent) -> Iterator[tuple[int, int]]:
        yield 0, PROBE_BYTES  # where a mapping looks for the probe
        for held in self.objects.values():
            if held.lent is lent:
                yield held.offset, held.offset + held.nbytes


class Content:
    """A payload of given bytes; its digest is that of a batch, or else their first 16."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.nbytes = len(content)
        self.written = 0

    def write_into(self, out: Any) -> str:
        return self.write(Into(out))

    def write(self, sink: Sink) -> str:
        self.written += 1
        self.fill(sink)
        sink.finish()
        return self.content[40:56].hex() if self.content.startswith(MAGIC) else self.content[:16].ljust(16).hex()

    def fill(self, sink: Sink) -> None:
        """The second half first, as the head of a batch comes last."""
        middle = self.nbytes // 2
        for start, end in ((middle, self.nbytes), (0, middle)):
            for at in range(start, end, STEP_BYTES):
                step = self.content[at : min(end, at + STEP_BYTES)]
                sink.reserve(at, len(step))[:] = np.frombuffer(step, dtype=np.uint8)


@dataclass
class Got:
    """An object that was read whole."""

    bytes: np.ndarray
    root: np.ndarray
    shared: bool
    loan: Loan | None


def all_of(stored: Stored) -> Got:
    (data,) = stored.source.take([(0, stored.source.nbytes)])
    return Got(data, stored.source.root, stored.shared, stored.loan)


QUICK = Limits(put=0.0, get=0.0)  # one attempt


class Transport:
    """Writer and reader over a `Master`, put together as the backend does; a `Carrier`."""

    def __init__(
        self,
        master: Master,
        share_memory: bool = True,
        chunk_bytes: int | None = None,
        replica_num: int = 1,
        limits: Limits = QUICK,
        verify_shared: bool = False,
    ) -> None:
        client: Any = master
        self.verify_shared = verify_shared
        self.master, self.replica_num = master, replica_num
        self.leased: list[int] = []
        self.pool = BufferPool(1 << 26, 0.05, lambda _, nbytes: self.leased.append(nbytes))
        self.owners = Owners(client, master.records, share_memory)
        self.check: Callable[[], float] = lambda: math.inf
        self.writer = Writer(client, self.owners, self.pool, limits, chunk_bytes, lambda: self.check())
        self.reader = Reader(client, self.owners, self.pool, limits)
        self.claimed: list[str] = []

    def write(self, payload: Payload) -> Written:
        return self.writer.put("run/r/b", payload, self.replica_num, self.claimed.append)

    def put(self, payload: Payload) -> Placed:
        written = self.write(payload)
        return Placed(written.key, written.digest, copies=copies_of(written))

    def get(self, ref: BatchRef, whole: bool = True, use: Callable[[Stored], Any] = all_of) -> Any:
        return self.reader.get(ref, whole, use)

    def narrows(self) -> bool:
        return False

    def traffic(self) -> dict[str, int]:
        return {}

    def remove(self, ref: BatchRef) -> None:
        self.reader.remove(ref)

    def close(self) -> None:
        self.pool.close()


def copies_of(written: Written) -> tuple[CopyOf, ...]:
    return tuple(CopyOf(copy.owner.sentinel, copy.parts[0].frame.part_bytes) for copy in written.copies)


def ref_of(written: Written) -> BatchRef:
    """The ref of an object that was written."""
    nbytes = written.copies[0].parts[0].frame.object_bytes
    return BatchRef("mooncake", "r", written.key, 1, nbytes, written.digest, copies=copies_of(written))
