"""The payloads that others read, too: each is one zstd frame.

xor: old ^ new of all bytes. overwrite: u32 count, u32 position of each byte that changed, then the new bytes; all
little-endian.
"""

from __future__ import annotations

import numpy as np
import zstandard

from miles_plugin.weight_transfer.disk_delta.frames import BLOCK_BYTES, FrameReader, FrameWriter, blocks
from miles_plugin.weight_transfer.disk_delta.hashes import Hash
from miles_plugin.weight_transfer.disk_delta.kernels import SLACK, Indices, Kernels
from mooncake_store.arrays import Bytes
from mooncake_store.errors import ConfigError, IntegrityError

# Level 1, looking back 128 KiB and not 512: a sixth faster and smaller at 1 % changed, for the distances of what is
# alike are shorter to say, and no worse at 5 %.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, window_log=17)
# Positions that are unpacked at a time.
CHUNK = BLOCK_BYTES // 4
_ZEROS: Bytes = np.zeros(BLOCK_BYTES, dtype=np.uint8)


class XorWriter:
    """Encodes one tensor after another. Not for two threads at once."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self._scratch = np.empty(BLOCK_BYTES, dtype=np.uint8)

    def write(self, old: Bytes, new: Bytes, width: int, digest: Hash) -> bytes | None:  # noqa: ARG002  (as others)
        """See `codec.Encoder.encode`."""
        frame: FrameWriter | None = None
        for part in blocks(new.size):
            before, after = old[part], new[part]
            difference = np.bitwise_xor(before, after, out=self._scratch[: after.size])
            if frame is None and difference.any():
                frame = FrameWriter(self._compressor, new.size)
                for equal in blocks(part.start):
                    frame.write(_ZEROS[: equal.stop - equal.start])
            if frame is not None:
                frame.write(difference)
                before[:] = after
            digest.update(after.data)
        return frame.finish() if frame is not None else None


class XorReader:
    """Applies one payload, block by block; IntegrityError for one that was not written for such a tensor."""

    def __init__(self, payload: bytes | memoryview, nbytes: int, whole_bytes: int) -> None:
        self._frame = FrameReader(payload, max(1, nbytes), nbytes, whole_bytes)  # of no bytes none changes

    def patch(self, block: Bytes, at: int) -> None:  # noqa: ARG002  (blocks come in order)
        """Change uint8 [n], the next block of the tensor, which begins at byte `at`."""
        np.bitwise_xor(block, self._frame.take(block.size), out=block)

    def finish(self) -> None:
        """All was applied."""
        self._frame.finish()


class OverwriteWriter:
    """Encodes one tensor after another. Not for two threads at once.

    The count comes first, and all positions before all bytes. So a tensor is compared three times, which takes less
    than to pack them and needs no memory for them.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self._positions = np.empty(BLOCK_BYTES + SLACK, dtype=np.uint32)

    def write(self, old: Bytes, new: Bytes, width: int, digest: Hash) -> bytes | None:  # noqa: ARG002  (as others)
        """See `codec.Encoder.encode`. ConfigError for a tensor of 4 GiB and more."""
        if new.size >> 32:
            raise ConfigError(
                f"encoding overwrite: a tensor has {new.size} bytes, and their positions are 32-bit numbers; "
                "use encoding sparse or xor"
            )
        frame: FrameWriter | None = None
        count = sum(self._changes(old[part], new[part]).size for part in blocks(new.size))
        if count:
            frame = FrameWriter(self._compressor, 4 + 5 * count)
            frame.write(np.array([count], dtype="<u4").view(np.uint8))
            for part in blocks(new.size):
                positions = self._changes(old[part], new[part])
                frame.write((positions + np.uint32(part.start)).view(np.uint8))
        for part in blocks(new.size):
            before, after = old[part], new[part]
            if frame is not None:
                positions = self._changes(before, after)
                frame.write(after[positions])
                before[positions] = after[positions]
            digest.update(after.data)
        return frame.finish() if frame is not None else None

    def _changes(self, before: Bytes, after: Bytes) -> Indices:
        return self._positions[: self._kernels.changes(before, after, 1, self._positions)]


class OverwriteReader:
    """Applies one payload, block by block; IntegrityError for one that was not written for such a tensor.

    The frame is unpacked twice at a time, once for positions and once for bytes, so that neither is kept.
    """

    def __init__(self, payload: bytes | memoryview, nbytes: int) -> None:
        self._nbytes = nbytes
        self._where, self._what = (FrameReader(payload, 4 + 5, 4 + 5 * nbytes) for _ in range(2))
        self._left = int(self._where.take(4).view("<u4")[0])
        if self._where.nbytes != 4 + 5 * self._left:
            raise IntegrityError(f"overwrite payload: {self._left} changes in {self._where.nbytes} bytes")
        self._what.skip(4 + 4 * self._left)
        self._positions: Indices = np.empty(0, dtype="<u4")
        self._bytes: Bytes = np.empty(0, dtype=np.uint8)
        self._load(-1)

    def patch(self, block: Bytes, at: int) -> None:
        """Change uint8 [n], the next block of the tensor, which begins at byte `at`."""
        end = at + block.size
        while self._positions.size and self._positions[0] < end:
            count = int(np.searchsorted(self._positions, end))
            block[self._positions[:count].astype(np.int64) - at] = self._bytes[:count]
            last = int(self._positions[count - 1])
            self._positions, self._bytes = self._positions[count:], self._bytes[count:]
            if not self._positions.size:
                self._load(last)

    def finish(self) -> None:
        """All was applied."""
        self._what.finish()

    def _load(self, last: int) -> None:
        """Unpack more positions, which are above `last`, and their bytes, if there are any."""
        count = min(CHUNK, self._left)
        self._left -= count
        self._positions = self._where.take(4 * count).view("<u4")
        self._bytes = self._what.take(count)
        if not count:
            return
        rises = last < self._positions[0] and bool((self._positions[1:] > self._positions[:-1]).all())
        if not rises or self._positions[-1] >= self._nbytes:
            raise IntegrityError(f"overwrite payload: positions do not rise from {last} to below {self._nbytes}")
