"""zstd frames: written and read block by block, and checked before memory is given to what they say they hold."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import zstandard

from mooncake_store.arrays import Bytes
from mooncake_store.errors import IntegrityError

# What is compared, encoded, hashed and copied while it is in the core's own cache.
BLOCK_BYTES = 256 << 10
# What a decoder must be able to look back, by RFC 8878; no frame of ours needs more than 512 KiB.
WINDOW_BYTES = 8 << 20
_MAGIC = b"\x28\xb5\x2f\xfd"
_RUN, _RESERVED = 1, 3  # types of blocks in a frame


def blocks(nbytes: int) -> Iterator[slice]:
    """The blocks of a tensor, in order."""
    for start in range(0, nbytes, BLOCK_BYTES):
        yield slice(start, min(start + BLOCK_BYTES, nbytes))


class FrameWriter:
    """One frame with its content size.

    Args:
        compressor: nothing else may use it until the frame is finished.
        nbytes: of the content.
    """

    def __init__(self, compressor: zstandard.ZstdCompressor, nbytes: int) -> None:
        self._stream = compressor.compressobj(size=nbytes)
        self._written = io.BytesIO()

    def write(self, data: Bytes) -> None:
        """Append uint8 [n]."""
        self._written.write(self._stream.compress(data.data))

    def finish(self) -> bytes:
        """The whole frame."""
        self._written.write(self._stream.flush())
        return self._written.getvalue()


class FrameReader:
    """The content of the one frame that a payload consists of, in order.

    Args:
        payload: the frame.
        least, most: bytes that the content may have.
        whole_bytes: content up to this is unpacked at once, which is quicker while malloc keeps the memory, and else in
            steps.

    Attributes:
        nbytes: of the content.

    Raises:
        IntegrityError: by every method, when the payload is anything but one sound frame with its content size.
    """

    def __init__(self, payload: bytes | memoryview, least: int, most: int, whole_bytes: int = 0) -> None:
        end = frame_end(memoryview(payload), 0)
        if end != len(payload):
            raise IntegrityError(f"{len(payload) - end} bytes follow the zstd frame, which ends at byte {end}")
        self.nbytes = _content_size(payload, least, most)
        self._taken = 0
        # Streams of one decompressor would share its state.
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self._whole: Bytes | None = None
        if self.nbytes <= whole_bytes:
            self._whole = unpack(decompressor, memoryview(payload), least, most)
        else:
            self._stream = decompressor.stream_reader(payload)
            self._step = np.empty(BLOCK_BYTES, dtype=np.uint8)

    def take(self, count: int) -> Bytes:
        """What comes next, uint8 [count], count <= BLOCK_BYTES; good until the next call."""
        start, self._taken = self._taken, self._taken + count
        if self._taken > self.nbytes:
            raise IntegrityError(f"zstd frame: {self.nbytes} bytes, {self._taken} were expected")
        if self._whole is not None:
            return self._whole[start : self._taken]
        step = rest = self._step[:count]
        while rest.size:
            read = self._some(rest)
            if not read:
                raise IntegrityError(f"zstd frame: it ends before byte {self._taken} of {self.nbytes}")
            rest = rest[read:]
        return step

    def skip(self, count: int) -> None:
        """Pass over so many bytes."""
        for part in blocks(count):
            self.take(part.stop - part.start)

    def finish(self) -> None:
        """All was taken, and there was no more."""
        if self._taken < self.nbytes or (self._whole is None and self._some(self._step[:1])):
            raise IntegrityError(f"zstd frame: {self.nbytes} bytes, {self._taken} were expected, or more were packed")

    def _some(self, into: Bytes) -> int:
        try:
            return self._stream.readinto(into.data)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"zstd frame: {error}") from error


def unpack(decompressor: zstandard.ZstdDecompressor, frame: memoryview, least: int, most: int) -> Bytes:
    """The content of one frame, uint8 [n] with least <= n <= most, read-only.

    Raises:
        IntegrityError: it has another size, or is no sound frame.
    """
    nbytes = _content_size(frame, least, most)
    try:
        content = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"zstd frame: {error}") from error
    if len(content) != nbytes:
        raise IntegrityError(f"zstd frame: {len(content)} bytes, its header says {nbytes}")
    return np.frombuffer(content, dtype=np.uint8)


def frame_end(data: memoryview, start: int) -> int:
    """Where the frame that starts at byte `start` ends. Nothing is decompressed.

    One call of zstd takes the first of several frames and says nothing of the others: here they are found.

    Raises:
        IntegrityError: there is no frame, or it goes beyond the data.
    """
    if bytes(data[start : start + 4]) != _MAGIC:
        raise IntegrityError(f"no zstd frame at byte {start}")
    try:
        at = start + zstandard.frame_header_size(data[start : start + 18])
        has_checksum = zstandard.get_frame_parameters(data[start : start + 18]).has_checksum
    except zstandard.ZstdError as error:
        raise IntegrityError(f"zstd frame at byte {start}: {error}") from error
    is_last = False
    while not is_last:
        header = int.from_bytes(data[at : at + 3], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        if at + 3 > len(data) or kind == _RESERVED:
            raise IntegrityError(f"zstd frame at byte {start}: no block at byte {at}")
        at += 3 + (1 if kind == _RUN else size)
    at += 4 if has_checksum else 0
    if at > len(data):
        raise IntegrityError(f"zstd frame at byte {start}: cut off, {at - len(data)} bytes are missing")
    return at


def _content_size(frame: bytes | memoryview, least: int, most: int) -> int:
    """What the header says, if that is allowed: memory is given only then."""
    try:
        nbytes = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"zstd frame: {error}") from error
    if not least <= nbytes <= most:  # -1: it does not say
        raise IntegrityError(f"zstd frame: content of {nbytes} bytes, expected {least} to {most}")
    return nbytes
