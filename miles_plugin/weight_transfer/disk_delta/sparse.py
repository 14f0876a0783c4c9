"""The sparse payload: where values changed and by how much, in streams that an entropy coder packs well.

All numbers are little-endian:
    u8 version, u8 width, u64 bytes of the tensor
    segments, in the order of the values they change
    u64 xxh3-64 of all before
A segment is u8 flags, u64 first value, u32 count, then zstd frames with their content sizes. It begins with the first
value of a block (256 KiB of the tensor).
    flags 0 to 3: `count` values changed. Frames: gaps as bytes (`Kernels.symbols`), counted from the first value; with
        flag WIDE the low byte of each gap; differences as nibbles; with flag ESCAPES the new values that those say.
    flags DENSE: `count` is all values of the block, the frame has all differences as byte planes.
A segment holds at most some two hundred thousand changes, so neither side needs memory for more.
"""

from __future__ import annotations

import io
import struct

import numpy as np
import xxhash
import zstandard

from miles_plugin.weight_transfer.disk_delta.frames import BLOCK_BYTES, WINDOW_BYTES, frame_end, unpack
from miles_plugin.weight_transfer.disk_delta.hashes import Hash, StateHash
from miles_plugin.weight_transfer.disk_delta.kernels import DENSE_SHARE, MORE, SLACK, Indices, Kernels
from mooncake_store.arrays import Bytes
from mooncake_store.errors import IntegrityError

VERSION = 1
WIDE, ESCAPES, DENSE = 1, 2, 4
# A segment ends with the block that brings it to so many changes, or takes it so many values far.
SEGMENT_CHANGES, SEGMENT_VALUES = 1 << 16, 1 << 31
# Gaps that are longer than this in the mean are written as two bytes.
WIDE_GAP = 256
# Up to this share a block is read in order before it is changed.
TOUCHED_SHARE = 0.025
_PREFIX = struct.Struct("<BBQ")
_SEGMENT = struct.Struct("<BQI")
_DIGEST_BYTES = 8
_MOST_CHANGES = SEGMENT_CHANGES + int(BLOCK_BYTES * DENSE_SHARE) + 1
# Little is left to find but the entropy of single bytes: the quickest search that zstd has.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, min_match=7, search_log=1, target_length=0
)
_NONE: Bytes = np.empty(0, dtype=np.uint8)


class SparseWriter:
    """Encodes one tensor after another. Not for two threads at once."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self._positions = np.empty(BLOCK_BYTES + SLACK, dtype=np.uint32)
        self._gaps = np.empty(_MOST_CHANGES, dtype=np.uint32)
        self._nibbles = np.empty((_MOST_CHANGES + 1) // 2, dtype=np.uint8)
        self._escapes = np.empty(8 * _MOST_CHANGES, dtype=np.uint8)
        self._planes = np.empty(BLOCK_BYTES, dtype=np.uint8)
        self._out, self._nbytes = io.BytesIO(), 0
        # Of the segment that is being collected: its first value, the one after the last that changed, counts.
        self._start = self._after = self._changed = self._escaped = 0

    def write(self, old: Bytes, new: Bytes, width: int, digest: Hash) -> bytes | None:
        """See `codec.Encoder.encode`."""
        self._out, self._nbytes = io.BytesIO(), new.size
        self._changed = self._escaped = 0
        at = 0
        while at < new.size:
            limit = (self._start * width if self._changed else at) + SEGMENT_VALUES * width
            stop = min(new.size, limit)
            if not isinstance(digest, StateHash):  # a block at a time, which Python hashes while it is in the cache
                stop = min(stop, at + BLOCK_BYTES)
            done = self._collect(old[at:stop], new[at:stop], width, at // width, digest)
            at += done
            if self._changed >= SEGMENT_CHANGES or at == limit:
                self._flush(width)
            elif at < stop:  # before a dense block
                self._flush(width)
                block = slice(at, min(at + BLOCK_BYTES, new.size))
                self._write_dense(old[block], new[block], width, at // width)
                digest.update(new[block].data)
                at = block.stop
        self._flush(width)
        if not self._out.tell():
            return None
        self._out.write(_digest(self._out.getbuffer()))
        return self._out.getvalue()

    def _collect(self, before: Bytes, after: Bytes, width: int, first: int, digest: Hash) -> int:
        """Append what changed of the next blocks, which begin with value `first`, to the segment, and add them to
        `digest`; how many bytes."""
        function, state = (digest.function, digest.state) if isinstance(digest, StateHash) else (0, 0)
        done, skipped, changed, self._escaped, since = self._kernels.scan(
            before, after, width, BLOCK_BYTES, self._positions, first - self._after if self._changed else 0,
            self._gaps, self._nibbles, self._escapes, self._changed, self._escaped, SEGMENT_CHANGES, function, state,
        )  # fmt: skip
        if changed and not self._changed:
            self._start = first + skipped // width
        self._changed, self._after = changed, first + done // width - since
        if not function:
            digest.update(after[:done].data)
        return done

    def _flush(self, width: int) -> None:
        """Write the segment, if there is one."""
        changed, escaped, span = self._changed, self._escaped, self._after - self._start
        if not changed:
            return
        is_wide = span > changed * WIDE_GAP
        lows = np.empty(changed if is_wide else 0, dtype=np.uint8)
        symbols = np.empty(_most_symbols(changed, span, is_wide), dtype=np.uint8)
        used = self._kernels.symbols(self._gaps[:changed], symbols, lows)
        flags = (WIDE if is_wide else 0) | (ESCAPES if escaped else 0)
        self._begin_segment(flags, self._start, changed, width)
        self._write_frame(symbols[:used])
        if is_wide:
            self._write_frame(lows)
        self._write_frame(self._nibbles[: (changed + 1) // 2])
        if escaped:
            self._write_frame(self._escapes[: escaped * width])
        self._changed = self._escaped = 0

    def _write_dense(self, before: Bytes, after: Bytes, width: int, first: int) -> None:
        planes = self._planes[: after.size]
        self._kernels.spread(before, after, width, planes)
        self._begin_segment(DENSE, first, after.size // width, width)
        self._write_frame(planes)

    def _begin_segment(self, flags: int, first: int, count: int, width: int) -> None:
        if not self._out.tell():
            self._out.write(_PREFIX.pack(VERSION, width, self._nbytes))
        self._out.write(_SEGMENT.pack(flags, first, count))

    def _write_frame(self, content: Bytes) -> None:
        self._out.write(self._compressor.compress(content.data))


class SparseReader:
    """Applies one payload, in order.

    Raises:
        IntegrityError: by every method, for a payload that `SparseWriter` cannot have written for such a tensor.
    """

    def __init__(self, payload: bytes | memoryview, nbytes: int, width: int, kernels: Kernels) -> None:
        self._kernels, self._width, self._values = kernels, width, nbytes // width
        self._data = _checked(memoryview(payload), nbytes, width)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self._at = _PREFIX.size
        # Of the segment that is being applied: its first value, the one after its last, where its last block ends.
        self._start = self._free = self._end = 0
        # All its differences, or what says which values change, and how far that is.
        self._planes: Bytes | None = None
        self._positions: Indices = np.empty(0, dtype=np.uint32)
        self._nibbles = self._escapes = _NONE
        self._changed = self._escaped = 0
        self._is_touched = False
        self._load()

    def patch(self, part: Bytes, at: int, digest: StateHash | None = None) -> None:
        """Change uint8 [n], the next blocks of the tensor, which begin at byte `at`; add the result to `digest`."""
        done = 0
        while done < part.size:
            # A segment changes nothing before it begins, and ends with a block.
            start, end = (value * self._width - at for value in (self._start, self._end))
            if done < start:
                done += self._pass(part[done : min(start, part.size)], digest)
                continue
            stop = min(end, part.size)
            if self._planes is not None:
                self._kernels.unspread(part[done:stop], self._planes, self._width)
                self._pass(part[done:stop], digest)
            else:
                self._change(part[done:stop], at + done, digest)
            if stop == end:
                self._load()
            done = stop

    def finish(self) -> None:
        """All was applied."""
        if self._start < self._values:
            raise IntegrityError(f"sparse payload: value {self._start} of {self._values} was not reached")

    def _pass(self, part: Bytes, digest: StateHash | None) -> int:
        """What stays as it is; its bytes."""
        if digest is not None:
            self._kernels.patch(
                part, self._width, 0, self._positions[:0], _NONE, _NONE, 0, 0, False, digest.function, digest.state
            )
        return part.size

    def _change(self, part: Bytes, at: int, digest: StateHash | None) -> None:
        update, state = (0, 0) if digest is None else (digest.function, digest.state)
        try:
            self._changed, self._escaped = self._kernels.patch(
                part, self._width, at // self._width - self._start, self._positions, self._nibbles, self._escapes,
                self._changed, self._escaped, self._is_touched, update, state,
            )  # fmt: skip
        except ValueError as error:
            raise IntegrityError(f"sparse payload: differences do not agree: {error}") from error
        if self._changed == self._positions.size and self._escaped * self._width != self._escapes.size:
            raise IntegrityError("sparse payload: values are left that no difference asks for")

    def _load(self) -> None:
        """Unpack the next segment, if there is one."""
        self._planes = None
        if self._at == len(self._data):
            self._start = self._end = self._values
            return
        if len(self._data) - self._at < _SEGMENT.size:
            raise IntegrityError(f"sparse payload: a segment at byte {self._at} is cut off")
        flags, self._start, count = _SEGMENT.unpack_from(self._data, self._at)
        self._at += _SEGMENT.size
        block_values = BLOCK_BYTES // self._width
        if not self._free <= self._start < self._values or self._start % block_values:
            raise IntegrityError(
                f"sparse payload: a segment begins with value {self._start}, not with that of a block from "
                f"{self._free} on, of {self._values}"
            )
        left = self._values - self._start
        if flags == DENSE and count == min(block_values, left):
            self._planes = self._unpack(count * self._width, count * self._width)
            self._free = self._start + count
        elif flags in range(DENSE) and 0 < count <= min(_MOST_CHANGES, left):
            self._load_changes(flags, count, min(left, SEGMENT_VALUES))
        else:
            raise IntegrityError(f"sparse payload: {count} changes under flags {flags} of {left} values")
        self._end = min(self._values, -(-self._free // block_values) * block_values)

    def _load_changes(self, flags: int, count: int, limit: int) -> None:
        is_wide = bool(flags & WIDE)
        symbols = self._unpack(count, _most_symbols(count, limit, is_wide))
        lows = self._unpack(count, count) if is_wide else _NONE
        self._nibbles = self._unpack((count + 1) // 2, (count + 1) // 2)
        self._escapes = self._unpack(self._width, count * self._width) if flags & ESCAPES else _NONE
        self._positions = np.empty(count, dtype=np.uint32)
        try:
            span = self._kernels.positions(symbols, lows, limit, self._positions)
        except ValueError as error:
            raise IntegrityError(f"sparse payload: gaps do not fit the tensor: {error}") from error
        self._changed = self._escaped = 0
        self._free = self._start + span
        self._is_touched = count <= span * TOUCHED_SHARE

    def _unpack(self, least: int, most: int) -> Bytes:
        end = frame_end(self._data, self._at)
        content = unpack(self._decompressor, self._data[self._at : end], least, most)
        self._at = end
        return content


def _checked(payload: memoryview, nbytes: int, width: int) -> memoryview:
    """The payload without its digest, which was compared, as was what it begins with."""
    if len(payload) <= _PREFIX.size + _DIGEST_BYTES:
        raise IntegrityError(f"sparse payload: {len(payload)} bytes are too few for one")
    data, digest = payload[:-_DIGEST_BYTES], payload[-_DIGEST_BYTES:]
    if _digest(data) != bytes(digest):
        raise IntegrityError(f"sparse payload: its {len(payload)} bytes are not those that were written; read it again")
    version, *written_for = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise IntegrityError(f"sparse payload: version {version}, this package reads version {VERSION}; update it")
    if written_for != [width, nbytes]:
        raise IntegrityError(
            f"sparse payload: for {written_for[1]} bytes in values of {written_for[0]}, the tensor has {nbytes} in "
            f"values of {width}"
        )
    return data


def _digest(data: memoryview) -> bytes:
    return int(xxhash.xxh3_64_intdigest(data)).to_bytes(_DIGEST_BYTES, "little")


def _most_symbols(count: int, span: int, is_wide: bool) -> int:
    """Bytes that the gaps between so many changes take at most. span: values up to the last."""
    return count + (span >> (8 if is_wide else 0)) // MORE
