"""How an object is written: which holder gets a copy, in how many parts, in place or over the network.

The order makes a copy safe: memory is allocated; then the segment's sentinel is looked for, so that memory which a
restarted master believes to be free is never written; then the commit word of what was there is cleared, the payload
written, and the frame put in front, its own commit word last.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mooncake_store import frame
from mooncake_store.arrays import Bytes
from mooncake_store.backends import Payload
from mooncake_store.bounded import attempts
from mooncake_store.client import Limits, MooncakeClient
from mooncake_store.errors import StoreError, StoreFull, StoreUnavailable
from mooncake_store.frame import Frame
from mooncake_store.owners import Owners
from mooncake_store.pool import BufferPool, Lease
from mooncake_store.segment import Mapping, SegmentRecord

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
    """A whole copy of an object with one owner."""

    owner: SegmentRecord
    parts: tuple[Part, ...]


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
        pool: warm registered buffers, for what cannot be written in place.
        chunk_bytes: largest part, unless an object would have more than MAX_PARTS; None for objects in one part
            wherever they fit.
    """

    def __init__(
        self, client: MooncakeClient, owners: Owners, pool: BufferPool, limits: Limits, chunk_bytes: int | None
    ) -> None:
        self._client, self._owners, self._pool, self._limits = client, owners, pool, limits
        self._chunk_bytes = chunk_bytes

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
        largest = max(owner.nbytes for owner in owners)
        if payload.nbytes + frame.NBYTES > largest:
            raise StoreFull(
                f"a batch of {payload.nbytes} bytes exceeds the {largest} bytes of the largest segment that is lent; "
                f"lend a larger one (global_segment_size), or put smaller batches",
                retryable=False,
            )
        claim(owners[0].name)
        identity = uuid.uuid4()
        key = f"{prefix}/{identity.hex}"
        source = _Source(payload, self._pool, once=replica_num == 1)
        copies: list[Copy] = []
        refused: StoreError | None = None
        try:
            for owner in owners:
                try:
                    copies.append(self._copy(owner, key, len(copies), identity.bytes, source))
                except (StoreFull, StoreUnavailable) as error:
                    refused = error
                if len(copies) == replica_num:
                    return Written(key, source.digest, tuple(copies))
            raise refused or StoreFull("no holder took the object")
        except BaseException:
            for copy in copies:
                self._client.revoke([part.key for part in copy.parts])
            raise
        finally:
            refused = None  # see `bounded`
            source.release()

    def _copy(self, owner: SegmentRecord, key: str, copy: int, identity: bytes, source: _Source) -> Copy:
        """Write one copy to one owner, in parts small enough for the holes it has."""
        part_bytes = min(self._chunk_bytes or source.nbytes, source.nbytes)
        whole = frames(identity, source.nbytes, max(part_bytes, -(-source.nbytes // MAX_PARTS)))
        try:
            return self._write(owner, key, copy, whole, source)
        except StoreFull as full:
            pieces = frames(identity, source.nbytes, PIECE_BYTES)
            if len(pieces) <= len(whole):
                raise
            try:
                return self._write(owner, key, copy, pieces, source)
            except StoreFull as error:
                # Pieces go through a buffer, which may be too small for ever; a hole for the whole may still appear.
                raise (full if full.retryable else error) from error

    def _write(self, owner: SegmentRecord, key: str, copy: int, parts: Sequence[Frame], source: _Source) -> Copy:
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
                self._send(keys, parts, source)
                self._client.commit(keys)
                offsets = self._offsets(owner, keys)
            else:
                self._client.commit(keys)
                offsets = self._offsets(owner, keys)
                _check(not self._owners.forgotten(owner), owner)
                self._fill(mapping, offsets, parts, source)
        except BaseException:
            self._client.revoke(keys)
            raise
        return Copy(owner, tuple(map(Part, keys, parts, offsets)))

    def _offsets(self, owner: SegmentRecord, keys: Sequence[str]) -> list[int | None]:
        locations = self._client.locate(keys)
        offsets = [None if location is None else owner.offset_of(location) for location in locations]
        if any(location is None or not owner.holds(location) for location in locations):
            raise StoreFull(f"segment {owner.name} has no room", retryable=True)
        return offsets

    def _fill(self, mapping: Mapping, offsets: Sequence[int | None], parts: Sequence[Frame], source: _Source) -> None:
        targets = [
            mapping.bytes[offset : offset + frame.NBYTES + part.part_bytes]
            for offset, part in zip(offsets, parts, strict=True)
            if offset is not None
        ]
        if len(targets) != len(parts):
            raise StoreUnavailable("the segment was mapped, but not all of its parts")
        for target in targets:
            frame.clear(target)
        if source.once and len(parts) == 1:
            source.write_into(targets[0][frame.NBYTES :])
        else:
            payload = source.lease.array[frame.NBYTES :]
            for target, piece in zip(targets, _slices(parts), strict=True):
                target[frame.NBYTES :] = payload[piece]
        for target, part in zip(targets, parts, strict=True):
            frame.commit(target, part)
        if not mapping.holder_lives():
            raise StoreUnavailable("the segment's holder ended while the object was written")

    def _send(self, keys: Sequence[str], parts: Sequence[Frame], source: _Source) -> None:
        lease = source.lease
        for key, part, piece in zip(keys, parts, _slices(parts), strict=True):
            lease.array[: frame.NBYTES] = np.frombuffer(part.pack(), dtype=np.uint8)
            payload = lease.address + frame.NBYTES + piece.start
            self._client.write(key, [(lease.address, frame.NBYTES), (payload, part.part_bytes)])


class _Source:
    """The payload of one put: written once, into the store's memory where that is possible, else into a warm buffer.

    Args:
        once: whether only one copy is made, so that no buffer is needed to make it from.
    """

    def __init__(self, payload: Payload, pool: BufferPool, once: bool) -> None:
        self._payload, self._pool, self.once = payload, pool, once
        self._lease: Lease | None = None
        self.nbytes = payload.nbytes
        self.digest = ""

    def write_into(self, target: Bytes) -> None:
        """Write the payload into `target` (uint8 [nbytes])."""
        self.digest = self._payload.write_into(target)

    @property
    def lease(self) -> Lease:
        """A registered buffer with room for a frame, then the payload."""
        if self._lease is None:
            self._lease = self._pool.acquire(frame.NBYTES + self.nbytes)
            self.write_into(self._lease.array[frame.NBYTES :])
        return self._lease

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()


def _slices(parts: Sequence[Frame]) -> list[slice]:
    """Where the payload of each part lies in the object."""
    ends = list(accumulate(part.part_bytes for part in parts))
    return [slice(end - part.part_bytes, end) for end, part in zip(ends, parts, strict=True)]


def _check(known: bool, owner: SegmentRecord) -> None:
    if not known:
        raise StoreUnavailable(
            f"the master has forgotten segment {owner.name} or another: it was restarted, or a segment's holder is gone"
        )
