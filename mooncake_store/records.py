"""Small records kept in the store itself: who lends memory, who owns a run, what is asked of a holder.

There is no other service to run, to reach through a firewall, or to lose. A claim is a put that is read back: of two
that put the same key Mooncake keeps the first and answers success to both (measured on 0.3.13.post1).

A master that was restarted believes that all memory is free, that of batches which somebody is looking at, too. So
between allocation and writing it is asked whether it knows the segment; `upsert` gives no moment to ask.
"""

from __future__ import annotations

import mmap
import threading
import uuid
from collections.abc import Callable

import numpy as np
import xxhash

from mooncake_store import codes
from mooncake_store.bounded import attempts
from mooncake_store.client import MooncakeClient, Range
from mooncake_store.errors import IntegrityError, ObjectLost, ObjectNotFound, StoreError, StoreUnavailable

MAX_BYTES = 64 << 10
REPLACED_SECONDS = 1.0  # within which a record that was read while it was written or replaced is whole
_DIGEST, _TOKEN = 8, 16  # bytes; the token tells apart two equal records, one of which lost


class Records:
    """Reads and writes records through one client. Safe to share between threads.

    Args:
        is_known: whether the master knows the memory that is lent under a segment's name; by default of who only reads.
    """

    def __init__(self, client: MooncakeClient, is_known: Callable[[str], bool] = lambda _: True) -> None:
        self._client, self._is_known = client, is_known
        self._lock = threading.RLock()
        self._memory = mmap.mmap(-1, MAX_BYTES)
        self._scratch = np.frombuffer(self._memory, dtype=np.uint8)
        client.register(self._scratch.ctypes.data, MAX_BYTES)

    def claim(self, key: str, payload: bytes, segment: str) -> bool:
        """Write a record that nobody has written yet, in `segment` if it has room; whether it is ours.

        Raises:
            StoreFull, StoreUnavailable: it could not be written.
        """
        stored = _stored(payload)
        with self._lock:
            self._scratch[: len(stored)] = np.frombuffer(stored, dtype=np.uint8)
            address = self._scratch.ctypes.data
            if self._client.exist([key])[0]:
                return False
            try:
                self._client.allocate([key], [len(stored)], segment)
            except StoreError as error:  # not revoked: what is under the key is another's
                if error.code == _ALREADY_THERE:
                    return False
                raise
            try:
                if not self._is_known(segment):
                    raise StoreUnavailable(f"the master has forgotten segment {segment}: it was restarted")
                self._client.write(key, 0, address, len(stored))
                self._client.commit([key])
            except StoreError:
                self._client.revoke([key])
                raise
            # What is not seen at once may be ours: who takes a claim of its own for another's has lost it for good.
            for _ in attempts(REPLACED_SECONDS):
                if found := self._stored_under(key):
                    return found == stored
            return False

    def replace(self, key: str, payload: bytes, segment: str) -> None:
        """Write a record in the place of what is there; for a moment there is none.

        Waits for no master that is gone: whoever writes heartbeats does so again soon, and may have to close first.

        Raises:
            StoreFull, StoreUnavailable: it could not be written.
        """
        _stored(payload)  # refuses what is too large before anything is removed
        with self._lock:
            self._client.remove(key, REPLACED_SECONDS)
            if not self.claim(key, payload, segment):
                raise StoreUnavailable(f"the record {key!r} was not replaced: another process writes it, too")

    def read(self, key: str) -> bytes | None:
        """The record under `key`; None when there is none, or its memory is gone.

        Raises:
            StoreUnavailable: the master does not answer.
            IntegrityError: it is not a record.
        """
        for _ in attempts(REPLACED_SECONDS):
            with self._lock:
                # Asked first, since Mooncake logs an error for a location that there is not.
                stored = self._stored_under(key) if self._client.exist([key])[0] else None
            if stored is None:
                return None
            body = stored[_DIGEST:]
            if len(body) >= _TOKEN and stored[:_DIGEST] == xxhash.xxh3_64_digest(body):
                return body[_TOKEN:]
        raise IntegrityError(f"the record {key!r} does not match its checksum")

    def _stored_under(self, key: str) -> bytes | None:
        """The raw record, read through the scratch memory."""
        location = self._client.locate([key])[0]
        if location is None or location.nbytes > MAX_BYTES:
            return None
        try:
            self._client.read(self._scratch.ctypes.data, [Range(key, 0, 0, location.nbytes)], seconds=0)
        except (ObjectNotFound, ObjectLost):  # its owner died, or it went between the two questions
            return None
        except IntegrityError:  # a shorter one came between them
            return b""
        except StoreUnavailable as error:
            if error.code not in codes.BEING_REPLACED:
                raise
            return b""
        return self._scratch[: location.nbytes].tobytes()


_ALREADY_THERE = -705


def _stored(payload: bytes) -> bytes:
    body = uuid.uuid4().bytes + payload
    if _DIGEST + len(body) > MAX_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes exceeds {MAX_BYTES}")
    return xxhash.xxh3_64_digest(body) + body
