"""The 64 bytes in front of every stored part: whose bytes these are, and whether its writer finished.

    commit word 8s | format u32 | part u32 | parts u32 | zero u32
    part bytes u64 | object bytes u64 | id 16s | check 8s

The id is that of the batch, fresh for every put, so it is also the generation of the memory: whoever finds another id
looks at memory that was given to someone else. `check` is the xxh3-64 of what is before it. The commit word is written
last: a writer that dies midway leaves nothing that can be read, and one that reuses memory clears it first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from mooncake_store.arrays import Bytes
from mooncake_store.errors import IntegrityError

FORMAT = 1
COMMIT = b"MCPART\x00\x01"
NBYTES = 64
_BODY = struct.Struct("<IIIIQQ16s")
_CHECK = struct.Struct("<8s")
assert len(COMMIT) + _BODY.size + _CHECK.size == NBYTES


@dataclass(frozen=True, slots=True)
class Frame:
    """What the frame of one part says.

    Attributes:
        id: 16 bytes, of the batch.
        part, parts: number of this part, from 0, and of all.
        part_bytes, object_bytes: payload of this part and of all parts together, in bytes.
    """

    id: bytes
    part: int
    parts: int
    part_bytes: int
    object_bytes: int

    def pack(self) -> bytes:
        """All 64 bytes, commit word included."""
        body = COMMIT + _BODY.pack(FORMAT, self.part, self.parts, 0, self.part_bytes, self.object_bytes, self.id)
        return body + xxhash.xxh3_64_digest(body)

    def check(self, stored: Bytes) -> None:
        """Raise IntegrityError unless `stored` (uint8) starts with exactly this frame.

        The error is retryable when only the commit word is missing: after a restart of the master a batch is written
        again, under the eyes of its readers.
        """
        found = stored[:NBYTES].tobytes()
        if found == self.pack():
            return
        raise IntegrityError(
            f"part {self.part} of {self.parts} of batch {self.id.hex()}: {_difference(found, self)}",
            retryable=len(found) == NBYTES and found[: len(COMMIT)] != COMMIT,
        )


def footprint(part_bytes: int) -> int:
    """Bytes of memory of a part with its frame: a multiple of 64, which keeps every part aligned to 64."""
    return -(-(NBYTES + part_bytes) // NBYTES) * NBYTES


def clear(target: Bytes) -> None:
    """Make memory that is about to be reused unreadable (uint8, at least 64)."""
    target[: len(COMMIT)] = 0


def commit(target: Bytes, frame: Frame) -> None:
    """Write the frame in front of a finished payload, the commit word last."""
    packed = np.frombuffer(frame.pack(), dtype=np.uint8)
    target[len(COMMIT) : NBYTES] = packed[len(COMMIT) :]
    target[: len(COMMIT)] = packed[: len(COMMIT)]


def _difference(found: bytes, expected: Frame) -> str:
    if len(found) < NBYTES:
        return f"{len(found)} bytes are fewer than a frame of {NBYTES}"
    if found[: len(COMMIT)] != COMMIT:
        return "no commit word: its writer did not finish, or the memory was given to another batch"
    if found[-_CHECK.size :] != xxhash.xxh3_64_digest(found[: -_CHECK.size]):
        return "the frame does not match its checksum"
    version, part, parts, _, part_bytes, object_bytes, identity = _BODY.unpack_from(found, len(COMMIT))
    if version != FORMAT:
        return f"the frame has format {version}, this package reads format {FORMAT}"
    if identity != expected.id:
        return f"the memory was given to batch {identity.hex()}"
    return (
        f"the frame says part {part} of {parts} with {part_bytes} of {object_bytes} bytes, "
        f"its ref {expected.part_bytes} of {expected.object_bytes}"
    )
