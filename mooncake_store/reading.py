"""How an object is read: seen in place where its holder's segment is mapped, else copied into a warm buffer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mooncake_store import frame
from mooncake_store.arrays import Bytes
from mooncake_store.backends import Loan, Result, Stored
from mooncake_store.bounded import attempts
from mooncake_store.client import Limits, Location, MooncakeClient, Range
from mooncake_store.decode import AtHand
from mooncake_store.errors import IntegrityError, ObjectLost, ObjectNotFound, StoreError, StoreUnavailable
from mooncake_store.format import aligned
from mooncake_store.frame import Frame
from mooncake_store.holder import SLOTS
from mooncake_store.owners import Owners
from mooncake_store.placement import MAX_PARTS, frames, part_key
from mooncake_store.pool import BufferPool, Lease
from mooncake_store.ref import BatchRef, CopyOf

WHOLE_BYTES = 64 << 10  # an object of at most so many is fetched in one go, whatever is wanted of it
_NOTHING: Bytes = np.empty(0, dtype=np.uint8)
_ID = re.compile("[0-9a-f]{32}")


class Reader:
    """Reads objects. Safe to share between threads.

    Args:
        pool: warm registered buffers, for what is not mapped.
    """

    def __init__(self, client: MooncakeClient, owners: Owners, pool: BufferPool, limits: Limits) -> None:
        self._client, self._owners, self._pool, self._limits = client, owners, pool, limits

    def get(self, ref: BatchRef, whole: bool, use: Callable[[Stored], Result]) -> Result:
        """What `use` makes of the object, of the first of its copies that can be read.

        Args:
            whole: fetch all of it at once where it is not mapped; else what `use` takes from its source.

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
                        return use(self._copy(ref, copy, whole))
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

    def _copy(self, ref: BatchRef, copy: int, whole: bool) -> Stored:
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
        far: _Copy
        if len(mapped) == len(parts):
            far = _MappedCopy(ref, self._pool, parts, mapped)
        else:
            far = _FarCopy(ref, self._pool, parts, self._client, keys)
        if whole or ref.nbytes <= WHOLE_BYTES:
            (data,) = far.take([(0, ref.nbytes)])
            return Stored(AtHand(data, far.root, self._pool.spare))
        return Stored(far)

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

        return Stored(
            AtHand(root, spare=self._pool.spare), shared=True, loan=Loan(view[frame.NBYTES :], check, is_kept)
        )

    def _view(self, location: Location, part: Frame) -> Bytes | None:
        """One part in mapped memory, its frame first; None where it is not mapped."""
        owner = self._owners.of(location)
        if owner is None or (offset := owner.offset_of(location)) is None:
            return None
        mapping = self._owners.mapping(owner, writable=False)
        if mapping is None:
            return None
        return mapping.bytes[offset : offset + frame.NBYTES + part.part_bytes]

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


class _Piece(NamedTuple):
    """Bytes of one stored part, frame included, and where in a buffer they go."""

    part: int
    offset: int
    to: int
    nbytes: int


class _Copy:
    """One copy of an object as a `Source`: fetches ranges side by side into a warm buffer."""

    def __init__(self, ref: BatchRef, pool: BufferPool, parts: Sequence[Frame]) -> None:
        self.nbytes, self.head_bytes, self.root = ref.nbytes, ref.head_bytes, _NOTHING
        self._pool, self._parts, self.spare = pool, parts, pool.spare

    def peek(self, ranges: Sequence[tuple[int, int]]) -> list[Bytes]:
        return self._fetch(ranges)[0]

    def take(self, ranges: Sequence[tuple[int, int]]) -> list[Bytes]:
        pieces, self.root = self._fetch(ranges)
        return [np.frombuffer(piece.data.toreadonly(), dtype=np.uint8) for piece in pieces]

    def _fetch(self, ranges: Sequence[tuple[int, int]]) -> tuple[list[Bytes], Bytes]:
        """uint8 arrays, each starting on a multiple of 64, and the one that all of them look into."""
        sizes = [end - start for start, end in ranges]
        starts = [0, *accumulate(map(aligned, sizes))]
        pieces = [
            piece for (start, end), to in zip(ranges, starts, strict=False) for piece in self._within(start, end, to)
        ]
        touched = sorted({piece.part for piece in pieces})
        lease = self._pool.acquire(starts[-1] + frame.NBYTES * max(1, len(touched)))
        try:
            self._bring(lease, pieces, touched, starts[-1])
        except BaseException:
            lease.release()
            raise
        return [lease.array[to : to + nbytes] for to, nbytes in zip(starts, sizes, strict=False)], lease.array

    def _within(self, start: int, end: int, to: int) -> Iterator[_Piece]:
        part_bytes = self._parts[0].part_bytes
        while start < end:
            part, offset = divmod(start, part_bytes)
            nbytes = min(end - start, part_bytes - offset)
            yield _Piece(part, frame.NBYTES + offset, to, nbytes)
            start += nbytes
            to += nbytes

    def _bring(self, lease: Lease, pieces: Sequence[_Piece], touched: Sequence[int], spare: int) -> None:
        """Copy the pieces of the parts `touched`, each with the frame it should have; from `spare` on there is room."""
        raise NotImplementedError


class _MappedCopy(_Copy):
    """Of a copy whose parts are mapped, but not in one piece."""

    def __init__(self, ref: BatchRef, pool: BufferPool, parts: Sequence[Frame], views: Sequence[Bytes]) -> None:
        super().__init__(ref, pool, parts)
        self._views = views

    def _bring(self, lease: Lease, pieces: Sequence[_Piece], touched: Sequence[int], spare: int) -> None:  # noqa: ARG002
        self._check(touched)
        for part, offset, to, nbytes in pieces:
            lease.array[to : to + nbytes] = self._views[part][offset : offset + nbytes]
        self._check(touched)

    def _check(self, touched: Sequence[int]) -> None:
        for part in touched:
            self._parts[part].check(self._views[part])


class _FarCopy(_Copy):
    """Of a copy whose bytes come over the network, all of a fetch together."""

    def __init__(
        self, ref: BatchRef, pool: BufferPool, parts: Sequence[Frame], client: MooncakeClient, keys: Sequence[str]
    ) -> None:
        super().__init__(ref, pool, parts)
        self._client, self._keys = client, keys
        self._seen: set[int] = set()  # parts whose frames were checked; what they hold has digests

    def _bring(self, lease: Lease, pieces: Sequence[_Piece], touched: Sequence[int], spare: int) -> None:
        new = [part for part in touched if part not in self._seen]
        wanted = [Range(self._keys[part], spare + frame.NBYTES * n, 0, frame.NBYTES) for n, part in enumerate(new)]
        wanted += [Range(self._keys[part], to, offset, nbytes) for part, offset, to, nbytes in pieces]
        if wanted:
            self._client.read(lease.address, wanted, seconds=0)
        for n, part in enumerate(new):
            self._parts[part].check(lease.array[spare + frame.NBYTES * n :])
        self._seen.update(new)


def _weight(error: StoreError) -> int:
    """Of the failures of several copies the one to tell: what may heal, then what is wrong, then what is gone."""
    kinds = (ObjectNotFound, ObjectLost, IntegrityError, StoreUnavailable)
    return next(weight for weight, kind in enumerate(kinds) if isinstance(error, kind))
