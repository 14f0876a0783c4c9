"""Rows that lie back to back in an object, and how they are written: in steps, each copied and then digested."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from mooncake_store.arrays import Array, Bytes, as_bytes
from mooncake_store.format import Buffer, Numbers, aligned, block_size, blocks_of_items, blocks_of_rows, digests
from mooncake_store.gather import gather
from mooncake_store.worker import Worker

# What is copied and then digested while it is still in the core's own cache.
STEP_BYTES = 512 << 10
# The same in place, where it is digested as it is copied: two threads that ask for the interpreter's lock more often
# wait for each other (measured: with 512 KiB they are no faster than one).
IN_PLACE_BYTES = 2 << 20
_NONE: Bytes = np.empty(0, dtype=np.uint8)


class Sink(Protocol):
    """Takes the bytes of an object, in steps.

    Attributes:
        helper: a thread that may reserve and fill steps, too, in any order; None where only the order below will do.
        in_place: whether what is reserved is the object itself.
        until: what was reserved may be written to up to this time.monotonic(); then it has to be reserved again.
    """

    helper: Worker | None
    in_place: bool
    until: float

    def reserve(self, position: int, nbytes: int) -> Bytes:
        """Memory (uint8 [nbytes]) for what comes at `position`; it is filled before the next call of this object.

        Positions grow from the start of the data to the end, then come those before it. A step is at most STEP_BYTES,
        IN_PLACE_BYTES in place.
        """

    def finish(self) -> None:
        """All was reserved, and filled."""


def step_bytes(sink: Sink) -> int:
    """The most that is reserved at once."""
    return IN_PLACE_BYTES if sink.in_place else STEP_BYTES


class Step(NamedTuple):
    """Rows that are written together. rows, blocks: (first, last). start, end: in the buffer."""

    rows: tuple[int, int]
    blocks: tuple[int, int]
    start: int
    end: int


class Rows:
    """Rows that will lie back to back.

    Attributes:
        at: where in the data.
        nbytes: of all rows.
    """

    def __init__(self, ends: Numbers, stride: int = -1, lengths: Numbers | None = None) -> None:
        self.at = 0
        self._ends, self._stride = ends, stride
        self.nbytes = int(ends[-1]) if ends.size else 0
        if lengths is None:
            size = block_size(self.nbytes, ends.size)
            self._blocks = blocks_of_rows(ends, size)
        else:
            size = block_size(self.nbytes, int(lengths.sum()))
            self._blocks = blocks_of_items(ends, lengths, size)

    @property
    def index_bytes(self) -> int:
        ends = self._ends.size if self._stride < 0 else 0
        return 8 * (ends + self._blocks.ends.size)

    def buffer(self) -> Buffer:
        return Buffer(self.at, self.nbytes, self._ends.size, self._stride, self._blocks.size)

    def fill(self, first: int, last: int, target: Bytes) -> None:
        """Put rows first..last into `target`."""
        raise NotImplementedError

    def fill_and_digest(self, first: int, last: int, target: Bytes, ends: Numbers, sink: Sink) -> list[int]:  # noqa: ARG002
        """The same with what the sink reserved; return the digests of the target's blocks, which end at `ends`.

        Raises:
            TimeoutError: the sink's time has come.
        """
        self.fill(first, last, target)
        return digests(target.data, ends)

    def row(self, number: int) -> Bytes:
        """The bytes of one row."""
        raise NotImplementedError

    def steps(self, most: int = STEP_BYTES) -> Iterator[Step]:
        """In which to write them: as many rows as fit into `most` bytes, or as few as one block has, or one
        row if that has several."""
        ends, blocks = self._ends, self._blocks
        if self.nbytes <= most:  # most columns
            if blocks.ends.size:
                yield Step((0, ends.size), (0, blocks.ends.size), 0, self.nbytes)
            return
        if blocks.first is None:
            unit_ends = blocks.ends
            rows = np.minimum(np.arange(1, unit_ends.size + 1) * blocks.size, ends.size)
            numbers = np.arange(1, unit_ends.size + 1)
        else:
            unit_ends, rows, numbers = ends, np.arange(1, ends.size + 1), blocks.first[1:]
        unit, row, block, start = 0, 0, 0, 0
        while unit < unit_ends.size:
            unit = max(unit + 1, int(unit_ends.searchsorted(start + most, side="right")))
            end = int(unit_ends[unit - 1])
            yield Step((row, int(rows[unit - 1])), (block, int(numbers[unit - 1])), start, end)
            row, block, start = int(rows[unit - 1]), int(numbers[unit - 1]), end

    def write(self, step: Step, sink: Sink, data_at: int) -> list[int]:
        """Write one step, what pads the rows behind the last; return the digests of its blocks."""
        position = data_at + self.at
        rows, blocks, start, end = step
        ends = self._blocks.ends[slice(*blocks)]
        if end - start <= step_bytes(sink):
            sums = self._at_once(sink, position, step, ends - start)
        else:
            sums = list(self._stream(sink, position, range(*rows), ends.tolist(), start))
        padding = aligned(self.nbytes) - self.nbytes
        if padding and start < end == self.nbytes:
            sink.reserve(position + end, padding)[:] = 0
        return sums

    def write_index(self, out: Bytes, sums: Sequence[int]) -> None:
        """Write where rows end, if they differ, and the blocks' digests, into `out` (uint8 [index_bytes])."""
        out[: out.size - 8 * len(sums)].view("<i8")[:] = self._ends if self._stride < 0 else self._ends[:0]
        out[out.size - 8 * len(sums) :].view("<u8")[:] = sums

    def _at_once(self, sink: Sink, position: int, step: Step, ends: Numbers) -> list[int]:
        while True:
            target = sink.reserve(position + step.start, step.end - step.start)
            with suppress(TimeoutError):  # a process that was stopped asks again whether the memory is still its own
                return self.fill_and_digest(*step.rows, target, ends, sink)

    def _stream(self, sink: Sink, position: int, rows: range, ends: Sequence[int], start: int) -> Iterator[int]:
        """Write rows that exceed a step, which end with a block; yield the digests of the blocks."""
        left = iter(ends)
        end, hasher = next(left), xxhash.xxh3_64()
        for number in rows:
            row, taken = self.row(number), 0
            while taken < row.size:
                piece = row[taken : taken + min(STEP_BYTES, end - start)]
                target = sink.reserve(position + start, piece.size)
                target[:] = piece
                hasher.update(target.data)
                taken += piece.size
                start += piece.size
                while start == end:
                    yield hasher.intdigest()
                    hasher = xxhash.xxh3_64()
                    end = next(left, -1)


class ArrayRows(Rows):
    """The rows of one array, [rows, ...]."""

    def __init__(self, array: Array, stored: np.dtype[Any]) -> None:
        self._array, self._dtype = array, stored
        stride = stored.itemsize * math.prod(array.shape[1:])
        super().__init__(np.arange(1, len(array) + 1, dtype=np.int64) * stride, stride)

    def fill(self, first: int, last: int, target: Bytes) -> None:
        rows = self._array[first:last]
        np.copyto(target.view(self._dtype).reshape(rows.shape), rows, casting="unsafe")

    def row(self, number: int) -> Bytes:
        return as_bytes(np.ascontiguousarray(self._array[number], dtype=self._dtype))


class StackedRows(Rows):
    """Arrays of one dtype and rank.

    Attributes:
        shapes: int64 [rows, ndim].
        item: the shape of every row but its first dimension; None where they differ.
    """

    def __init__(self, rows: list[Array], stored: np.dtype[Any], ndim: int, sliced: bool) -> None:
        self._rows, self._dtype = rows, stored
        self._as_they_are = bool(rows) and rows[0].dtype == stored  # of one dtype they all are
        self.item: tuple[int, ...] | None = None
        if ndim == 1:  # ten times as fast as of tuples
            lengths = _lengths(rows)
            self.shapes, self.item, ends = lengths.reshape(-1, 1), (), np.cumsum(lengths)
        else:
            self.shapes = np.array([row.shape for row in rows], dtype=np.int64).reshape(len(rows), ndim)
            # An item without bytes leaves no trace of how many there are.
            first = self.shapes[0, 1:] if rows else self.shapes[:0]
            if ndim and rows and first.all() and (self.shapes[:, 1:] == first).all():
                self.item = tuple(first.tolist())
            ends = np.cumsum(self.shapes.prod(axis=1))
        super().__init__(ends * stored.itemsize, lengths=self.shapes[:, 0] if sliced else None)

    def fill(self, first: int, last: int, target: Bytes) -> None:
        rows = self._rows[first:last]
        out = target.view(self._dtype)
        if self.item is None:
            rows = [row.reshape(-1) for row in rows]
        elif self.item:
            out = out.reshape(-1, *self.item)
        if len(rows) == 1:
            np.copyto(out, rows[0], casting="unsafe")
        elif rows:
            np.concatenate(rows, out=out, casting="unsafe")

    def fill_and_digest(self, first: int, last: int, target: Bytes, ends: Numbers, sink: Sink) -> list[int]:
        if self._as_they_are:
            sums = gather(self._rows[first:last], target, ends, sink.in_place, sink.until)
            if sums is not None:
                return sums
        return super().fill_and_digest(first, last, target, ends, sink)

    def row(self, number: int) -> Bytes:
        return as_bytes(np.ascontiguousarray(self._rows[number], dtype=self._dtype))


class PackedRows(Rows):
    """Packed values, after `prefix`."""

    def __init__(self, blobs: list[bytes], prefix: bytes) -> None:
        self._blobs = [prefix + blobs[0], *blobs[1:]] if blobs and prefix else blobs
        super().__init__(np.cumsum(_lengths(self._blobs)))

    def fill(self, first: int, last: int, target: Bytes) -> None:
        target[:] = np.frombuffer(b"".join(self._blobs[first:last]), dtype=np.uint8)

    def row(self, number: int) -> Bytes:
        return np.frombuffer(self._blobs[number], dtype=np.uint8)


def _lengths(rows: Sequence[Any]) -> Numbers:
    return np.fromiter(map(len, rows), np.int64, len(rows))


class LeafRows(Rows):
    """The arrays in the values of each row, as byte pieces."""

    def __init__(self, rows: list[list[Bytes]]) -> None:
        self._pieces = rows if any(rows) else []  # most columns have none, and need no index for that
        sizes = [sum(piece.size for piece in pieces) for pieces in self._pieces]
        super().__init__(np.cumsum(sizes, dtype=np.int64))

    def fill(self, first: int, last: int, target: Bytes) -> None:
        pieces = [piece for row in self._pieces[first:last] for piece in row]
        if pieces:
            np.concatenate(pieces, out=target)

    def row(self, number: int) -> Bytes:
        return np.concatenate([_NONE, *self._pieces[number]])
