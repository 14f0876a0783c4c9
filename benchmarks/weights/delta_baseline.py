"""What a delta of weights costs without this package: xor by numpy, zstd-1, a frame per tensor, and xxh3-128."""

from __future__ import annotations

import numpy as np
import xxhash
import zstandard

from mooncake_store.arrays import Bytes

_LEVEL = 1


class Baseline:
    """Implements `delta_sides.Codec`. Whole tensors at a time, and arrays as long as they are."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, old: Bytes, new: Bytes) -> tuple[bytes | None, str]:
        """The frame, also when nothing changed; the checksum. `old` is `new` afterwards."""
        payload = self._compressor.compress(np.bitwise_xor(old, new).data)
        np.copyto(old, new)
        return payload, xxhash.xxh3_128_hexdigest(new.data)

    def apply(self, payload: bytes | None, tensor: Bytes) -> str:
        """Change the tensor in place; its checksum then."""
        if payload is not None:
            np.bitwise_xor(tensor, np.frombuffer(self._decompressor.decompress(payload), np.uint8), out=tensor)
        return xxhash.xxh3_128_hexdigest(tensor.data)
