"""Small records kept in the store itself: who lends memory, who owns a run, what is asked of a holder.

There is no other service to run, to reach through a firewall, or to lose. A claim is a put that is read back: of two
that put the same key Mooncake keeps the first and answers success to both (measured on 0.3.13.post1).
"""

from __future__ import annotations

import mmap
import threading
import uuid

import numpy as np
import xxhash

from mooncake_store import codes
from mooncake_store.bounded import attempts
from mooncake_store.client import MooncakeClient, Range
from mooncake_store.errors import IntegrityError, ObjectLost, ObjectNotFound, StoreError, StoreUnavailable

MAX_BYTES = 64 << 10
REPLACED_SECONDS = 1.0  # within which a record that was read while it was replaced is whole again
_DIGEST, _TOKEN = 8, 16  # bytes; the token tells apart two equal records, one of which lost


class Records:
    """Reads and writes records through one client. Safe to share between threads."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
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
                self._client.write(key, 0, address, len(stored))
                self._client.commit([key])
            except StoreError:
                self._client.revoke([key])
                raise
            return self._stored_under(key) == stored

    def replace(self, key: str, payload: bytes, segment: str) -> None:
        """Write a record over what is there; StoreFull, StoreUnavailable when it could not be written."""
        stored = _stored(payload)
        with self._lock:
            self._scratch[: len(stored)] = np.frombuffer(stored, dtype=np.uint8)
            self._client.replace(key, self._scratch.ctypes.data, len(stored), segment)

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
