"""How an object is written: which holder gets a copy, in how many parts, in place or over the network.

The order makes a copy safe: memory is allocated; then the segment's sentinel is looked for, so that memory which a
restarted master believes to be free is never written; then the commit word of what was there is cleared, the payload
written, and the frame put in front, its own commit word last. Between steps the writer asks whether it was silent for
too long, and at last whether the store still has the object.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mooncake_store import frame
from mooncake_store.arrays import Bytes
from mooncake_store.backends import Payload
from mooncake_store.bounded import attempts
from mooncake_store.client import Limits, MooncakeClient
from mooncake_store.errors import StoreError, StoreFull, StoreUnavailable
from mooncake_store.frame import Frame
from mooncake_store.owners import Owners
from mooncake_store.pool import BufferPool
from mooncake_store.segment import Mapping, SegmentRecord
from mooncake_store.sinks import InPlace, Windows, window_buffer
from mooncake_store.worker import Worker

# What a fragmented store is offered when it has no hole for a whole object.
PIECE_BYTES = 32 << 20
# Readers refuse a ref that names more, so that nobody can make them look for parts without end.
MAX_PARTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """One stored part of a copy: its key, its frame, and the offset of that in the owner's segment (None: unknown)."""

    key: str
    frame: Frame
    offset: int | None


@dataclass(frozen=True, slots=True)
class Copy:
    """A whole copy of an object with one owner; `digest` is of the object, 32 hex digits."""

    owner: SegmentRecord
    parts: tuple[Part, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Written:
    """An acknowledged object.

    Attributes:
        key: stem of the keys of all parts of all copies, "<prefix>/<id in hex>".
        digest: of the payload.
        copies: with distinct owners.
    """

    key: str
    digest: str
    copies: tuple[Copy, ...]


def part_key(key: str, copy: int, part: int) -> str:
    """Key of one part of one copy of the object `key`."""
    return f"{key}/{copy}.{part}"


def frames(identity: bytes, nbytes: int, part_bytes: int) -> list[Frame]:
    """The frames of an object of `nbytes`, in parts of at most `part_bytes` of payload."""
    parts = -(-nbytes // part_bytes)
    return [Frame(identity, part, parts, min(part_bytes, nbytes - part * part_bytes), nbytes) for part in range(parts)]


class Writer:
    """Puts objects into the holders' memory. Safe to share between threads.

    Args:
        pool: warm registered buffers, of which a put over the network takes two windows.
        check: called before each step of a put; raises StoreUnavailable when this process's memory may have been
            freed, else returns up to which time.monotonic() it is not.
        chunk_bytes: largest part, unless an object would have more than MAX_PARTS; None for objects in one part
            wherever they fit.
    """

    def __init__(
        self,
        client: MooncakeClient,
        owners: Owners,
        pool: BufferPool,
        limits: Limits,
        chunk_bytes: int | None,
        check: Callable[[], float],
    ) -> None:
        self._client, self._owners, self._pool, self._limits, self._check = client, owners, pool, limits, check
        self._chunk_bytes = chunk_bytes
        # One sends a window while the next is filled, one helps to fill mapped memory.
        self._sender, self._helper = Worker("mooncake windows"), Worker("mooncake halves")

    def put(self, prefix: str, payload: Payload, replica_num: int, claim: Callable[[str], None]) -> Written:
        """Store an object in `replica_num` copies with distinct owners, waiting for room up to Limits.put.

        Args:
            claim: called before anything is written, with the name of a segment that takes the run's records.

        Raises:
            StoreFull: no room, or nobody lends memory.
            StoreUnavailable: the master or a holder does not answer, or there are fewer holders than copies.
        """
        for attempt in attempts(self._limits.put):
            try:
                return self._put(prefix, payload, replica_num, claim)
            except (StoreFull, StoreUnavailable) as error:
                if not error.retryable or attempt.is_last():
                    raise
                self._owners.changed()
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _put(self, prefix: str, payload: Payload, replica_num: int, claim: Callable[[str], None]) -> Written:
        owners = self._owners.all()
        if not owners:
            raise StoreFull(
                "nobody lends memory to this master: run `miles-mooncake holder` on the node that reads, or open a "
                "store with contribute_segment=True and global_segment_size > 0"
            )
        if len(owners) < replica_num:
            raise StoreUnavailable(
                f"{len(owners)} segment holders serve this master, {replica_num} replicas need one each; start more "
                f"(`miles-mooncake holder`, one per node), or lower replica_num"
            )
        largest = sorted((owner.nbytes for owner in owners), reverse=True)[replica_num - 1]
        if payload.nbytes + frame.NBYTES > largest:
            which = "largest segment that is lent" if replica_num == 1 else f"segment no. {replica_num} by size"
            raise StoreFull(
                f"a batch of {payload.nbytes} bytes exceeds the {largest} bytes of the {which}, for {replica_num} "
                f"replicas; lend a larger one (global_segment_size), or put smaller batches",
                retryable=False,
            )
        claim(owners[0].name)
        identity = uuid.uuid4()
        key = f"{prefix}/{identity.hex}"
        copies: list[Copy] = []
        refused: StoreError | None = None
        try:
            for owner in owners:
                try:
                    copies.append(self._copy(owner, key, len(copies), identity.bytes, payload))
                    if copies[-1].digest != copies[0].digest:
                        raise ValueError("the batch was changed while it was put: its copies differ")
                except (StoreFull, StoreUnavailable) as error:
                    refused = error
                if len(copies) == replica_num:
                    return Written(key, copies[0].digest, tuple(copies))
            raise refused or StoreFull("no holder took the object")
        except BaseException:
            for copy in copies:
                self._client.revoke([part.key for part in copy.parts])
            raise
        finally:
            refused = None  # see `bounded`

    def is_in_place(self) -> bool:
        """Whether the next put will most likely be written in place."""
        with suppress(StoreError):
            owners = self._owners.all()
            return bool(owners) and self._owners.mapping(owners[0], writable=True) is not None
        return False

    def close(self) -> None:
        """End the threads that help; idempotent."""
        self._sender.close()
        self._helper.close()

    def _copy(self, owner: SegmentRecord, key: str, copy: int, identity: bytes, payload: Payload) -> Copy:
        """Write one copy to one owner, in parts small enough for the holes it has."""
        part_bytes = min(self._chunk_bytes or payload.nbytes, payload.nbytes)
        whole = frames(identity, payload.nbytes, max(part_bytes, -(-payload.nbytes // MAX_PARTS)))
        try:
            return self._write(owner, key, copy, whole, payload)
        except StoreFull:
            pieces = frames(identity, payload.nbytes, PIECE_BYTES)
            if len(pieces) <= len(whole):
                raise
            return self._write(owner, key, copy, pieces, payload)

    def _write(self, owner: SegmentRecord, key: str, copy: int, parts: Sequence[Frame], payload: Payload) -> Copy:
        keys = [part_key(key, copy, part.part) for part in parts]
        mapping = self._owners.mapping(owner, writable=True)
        try:
            self._client.allocate(keys, [frame.footprint(part.part_bytes) for part in parts], owner.name)
        except StoreError:  # not revoked: what is under a key may be another's
            raise
        except BaseException:
            self._client.revoke(keys)
            raise
        try:
            if mapping is None:
                # Where a full segment's objects land is told only after they were written.
                _check(not self._owners.any_forgotten(), owner)
                digest = self._send(keys, parts, payload)
                self._client.commit(keys)
                offsets = self._offsets(owner, keys)
            else:
                self._client.commit(keys)
                offsets = self._offsets(owner, keys)
                digest = self._fill(mapping, offsets, parts, payload)
                if not all(self._client.exist(keys)) and not self._owners.forgotten(owner):
                    raise StoreUnavailable(f"the memory of {key!r} was freed while it was written: put it again")
        except BaseException:
            self._client.revoke(keys)
            raise
        return Copy(owner, tuple(map(Part, keys, parts, offsets)), digest)

    def _offsets(self, owner: SegmentRecord, keys: Sequence[str]) -> list[int | None]:
        *locations, sentinel = self._client.locate([*keys, owner.sentinel])  # one request; see `forgotten`
        _check(sentinel is not None, owner)
        offsets = [None if location is None else owner.offset_of(location) for location in locations]
        if any(location is None or not owner.holds(location) for location in locations):
            raise StoreFull(f"segment {owner.name} has no room", retryable=True)
        return offsets

    def _fill(self, mapping: Mapping, offsets: Sequence[int | None], parts: Sequence[Frame], payload: Payload) -> str:
        targets = [
            mapping.bytes[offset : offset + frame.NBYTES + part.part_bytes]
            for offset, part in zip(offsets, parts, strict=True)
            if offset is not None
        ]
        if len(targets) != len(parts):
            raise StoreUnavailable("the segment was mapped, but not all of its parts")
        for target in targets:
            frame.clear(target)
        digest = payload.write(InPlace(parts, self._check, targets, self._helper))
        for target, part in zip(targets, parts, strict=True):
            frame.commit(target, part)
        if not mapping.holder_lives():
            raise StoreUnavailable("the segment's holder ended while the object was written")
        return digest

    def _send(self, keys: Sequence[str], parts: Sequence[Frame], payload: Payload) -> str:
        def send(part: int, start: int, data: Bytes) -> None:
            self._client.write(keys[part], start, data.ctypes.data, data.size)

        lease = self._pool.acquire(window_buffer(parts, self._pool.max_bytes))
        windows = Windows(parts, self._check, lease.array, send, self._sender)
        try:
            return payload.write(windows)
        finally:
            with suppress(StoreError):  # whatever raised is what the caller should see
                windows.wait()
            lease.release()


def _check(known: bool, owner: SegmentRecord) -> None:
    if not known:
        raise StoreUnavailable(
            f"the master has forgotten segment {owner.name} or another: it was restarted, or a segment's holder is gone"
        )
