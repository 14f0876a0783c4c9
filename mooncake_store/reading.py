"""How an object is read: seen in place where its holder's segment is mapped, else copied into a warm buffer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from mooncake_store import frame
from mooncake_store.arrays import Bytes
from mooncake_store.backends import Loan, Stored
from mooncake_store.bounded import attempts
from mooncake_store.client import Limits, Location, MooncakeClient, Range
from mooncake_store.errors import IntegrityError, ObjectLost, ObjectNotFound, StoreError, StoreUnavailable
from mooncake_store.frame import Frame
from mooncake_store.holder import SLOTS
from mooncake_store.owners import Owners
from mooncake_store.placement import MAX_PARTS, frames, part_key
from mooncake_store.pool import BufferPool
from mooncake_store.ref import BatchRef, CopyOf

_ID = re.compile("[0-9a-f]{32}")


class Reader:
    """Reads objects. Safe to share between threads.

    Args:
        pool: warm registered buffers, for what is not mapped.
    """

    def __init__(self, client: MooncakeClient, owners: Owners, pool: BufferPool, limits: Limits) -> None:
        self._client, self._owners, self._pool, self._limits = client, owners, pool, limits

    def get(self, ref: BatchRef) -> Stored:
        """Return the object, from the first of its copies that can be read.

        Raises:
            ObjectNotFound: it was removed.
            ObjectLost: the memory of all copies is gone, and nobody published them again within Limits.get.
            IntegrityError: the bytes are not those of this batch, or no put made this ref.
            StoreUnavailable: the master does not answer.
        """
        _check_copies(ref)
        failures: list[StoreError] = []
        try:
            for attempt in attempts(self._limits.get):
                failures.clear()
                for copy in range(len(ref.copies)):
                    try:
                        return self._copy(ref, copy)
                    except (ObjectNotFound, ObjectLost, IntegrityError, StoreUnavailable) as error:
                        failures.append(self._explained(error, ref, ref.copies[copy].sentinel))
                # What was known may be memory of before a restart of the master.
                changed = self._owners.changed()
                worth_waiting = changed or any(isinstance(error, ObjectLost) or error.retryable for error in failures)
                if attempt.is_last() or not worth_waiting:
                    break
            raise max(failures, key=_weight)
        finally:
            failures.clear()  # see `bounded`

    def remove(self, ref: BatchRef) -> None:
        """Free every part of every copy; what is already gone is not an error.

        Raises:
            IntegrityError: no put made this ref.
            StoreUnavailable: the master does not answer.
        """
        _check_copies(ref)
        for copy, named in enumerate(ref.copies):
            for part in _frames_of(ref, named):
                self._client.remove(part_key(ref.key, copy, part.part))

    def _copy(self, ref: BatchRef, copy: int) -> Stored:
        parts = _frames_of(ref, ref.copies[copy])
        keys = [part_key(ref.key, copy, part.part) for part in parts]
        locations = self._client.locate(keys)
        found = [location for location in locations if location is not None]
        for location, part in zip(locations, parts, strict=True):
            if location is not None and location.nbytes != frame.footprint(part.part_bytes):
                raise IntegrityError(
                    f"part {part.part} of {ref.key!r} has {location.nbytes} bytes in the store, "
                    f"{frame.footprint(part.part_bytes)} by its ref"
                )
        if len(found) < len(keys):
            raise ObjectNotFound(f"the store has {len(found)} of {len(keys)} parts of {ref.key!r}; it was removed")
        views = [self._view(location, part) for location, part in zip(found, parts, strict=True)]
        mapped = [view for view in views if view is not None]
        if len(mapped) == len(parts) == 1:
            return self._in_place(mapped[0], keys[0], parts[0])
        lease = self._pool.acquire(frame.NBYTES * len(parts) + ref.nbytes)
        try:
            payload = lease.array[frame.NBYTES * len(parts) :]
            if len(mapped) == len(parts):
                _gather(mapped, parts, payload)
            else:
                self._fetch(keys, parts, lease.address, lease.array)
        except BaseException:
            lease.release()
            raise
        return Stored(payload)

    def _in_place(self, view: Bytes, key: str, part: Frame) -> Stored:
        part.check(view)
        # An array of its own at the root of all views, whose end is the end of them all.
        root = np.frombuffer(memoryview(view.data)[frame.NBYTES :], dtype=np.uint8)

        def check() -> None:
            try:
                part.check(view)
            except IntegrityError as error:  # final, unlike before the batch was seen whole
                raise IntegrityError(f"the batch was removed while it was read: {error}") from None

        def is_kept() -> bool:
            try:
                return self._client.exist([key])[0]
            except StoreError:
                return False

        return Stored(root, shared=True, loan=Loan(view[frame.NBYTES :], check, is_kept))

    def _view(self, location: Location, part: Frame) -> Bytes | None:
        """One part in mapped memory, its frame first; None where it is not mapped."""
        owner = self._owners.of(location)
        if owner is None or (offset := owner.offset_of(location)) is None:
            return None
        mapping = self._owners.mapping(owner, writable=False)
        if mapping is None:
            return None
        return mapping.bytes[offset : offset + frame.NBYTES + part.part_bytes]

    def _fetch(self, keys: Sequence[str], parts: Sequence[Frame], address: int, buffer: Bytes) -> None:
        """All parts over the network: the frames to the start of the buffer, the payload back to back after them."""
        ranges, to = [], frame.NBYTES * len(parts)
        for number, (key, part) in enumerate(zip(keys, parts, strict=True)):
            ranges += [
                Range(key, frame.NBYTES * number, 0, frame.NBYTES),
                Range(key, to, frame.NBYTES, part.part_bytes),
            ]
            to += part.part_bytes
        self._client.read(address, ranges, seconds=0)
        for number, part in enumerate(parts):
            part.check(buffer[frame.NBYTES * number :])

    def _explained(self, error: StoreError, ref: BatchRef, sentinel: str) -> StoreError:
        """Tell an object that was removed from one whose memory the master has forgotten."""
        if not isinstance(error, ObjectNotFound):
            return error
        try:
            forgotten = not self._client.exist([sentinel])[0]
        except StoreUnavailable as unavailable:
            return unavailable
        if not forgotten:
            return error
        return ObjectLost(
            f"the memory of {ref.key!r} is gone: its segment's holder ended, or the master was restarted and the "
            f"batch's writer did not publish it again"
        )


def _check_copies(ref: BatchRef) -> None:
    sentinels = {copy.sentinel for copy in ref.copies}
    if not 0 < len(ref.copies) == len(sentinels) <= SLOTS:
        raise IntegrityError(
            f"no put made the ref of {ref.key!r:.200}, which names {len(ref.copies)} copies with {len(sentinels)} "
            f"owners: allowed are 1 to {SLOTS}, each with another"
        )


def _frames_of(ref: BatchRef, copy: CopyOf) -> list[Frame]:
    """What the frames of one copy must say.

    Raises:
        IntegrityError: no put made such a ref. Nothing is asked, allocated or removed by the numbers in it.
    """
    identity = ref.key.rpartition("/")[2]
    if not 0 < copy.part_bytes <= ref.nbytes <= MAX_PARTS * copy.part_bytes or not _ID.fullmatch(identity):
        raise IntegrityError(
            f"no put made the ref of {ref.key!r:.200}, which says {ref.nbytes} bytes in parts of {copy.part_bytes}: "
            f"allowed are a key that ends in 32 hex digits and 1 to {MAX_PARTS} parts of at most the whole"
        )
    return frames(bytes.fromhex(identity), ref.nbytes, copy.part_bytes)


def _gather(views: Sequence[Bytes], parts: Sequence[Frame], payload: Bytes) -> None:
    to = 0
    for view, part in zip(views, parts, strict=True):
        part.check(view)
        payload[to : to + part.part_bytes] = view[frame.NBYTES :]
        part.check(view)
        to += part.part_bytes


def _weight(error: StoreError) -> int:
    """Of the failures of several copies the one to tell: what may heal, then what is wrong, then what is gone."""
    kinds = (ObjectNotFound, ObjectLost, IntegrityError, StoreUnavailable)
    return next(weight for weight, kind in enumerate(kinds) if isinstance(error, kind))
