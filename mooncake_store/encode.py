"""A batch as the bytes of one object: laid out first, then written in one pass, each row copied once."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import xxhash

from mooncake_store.arrays import Array, Bytes, as_bytes, name_of
from mooncake_store.columns import Column, Dense, Ragged, Tree, ValueSpec, analyse, in_order, narrowed, num_rows_of
from mooncake_store.format import (
    HEADER,
    Blocks,
    Buffer,
    DenseEntry,
    Entry,
    Numbers,
    RaggedEntry,
    Span,
    Table,
    TreeEntry,
    aligned,
    block_size,
    blocks_of_items,
    blocks_of_rows,
    digests,
    encode_table,
    pack_header,
)
from mooncake_store.tree import ARRAY_HEADER

# What is copied and then digested while it is still in the core's own cache.
STEP_BYTES = 256 << 10
_NONE: Bytes = np.empty(0, dtype=np.uint8)


class Sink(Protocol):
    """Takes the bytes of an object, in steps."""

    def reserve(self, position: int, nbytes: int) -> Bytes:
        """Memory (uint8 [nbytes]) for what comes at `position`; it is filled before the next call of this object.

        Positions grow from the start of the data to the end, then come those before it. A step is at most STEP_BYTES.
        """

    def finish(self) -> None:
        """All was reserved, and filled."""


class Into:
    """A sink that is memory for a whole object."""

    def __init__(self, out: Bytes | memoryview | bytearray) -> None:
        self._out = np.frombuffer(out, dtype=np.uint8)

    def reserve(self, position: int, nbytes: int) -> Bytes:
        return self._out[position : position + nbytes]

    def finish(self) -> None: ...


class _Nowhere:
    """A sink of what is only digested."""

    def __init__(self) -> None:
        self._scratch = np.empty(STEP_BYTES, dtype=np.uint8)

    def reserve(self, position: int, nbytes: int) -> Bytes:  # noqa: ARG002
        return self._scratch[:nbytes]

    def finish(self) -> None: ...


class Encoded:
    """A batch converted and laid out, not yet written anywhere.

    Attributes:
        num_rows: number of samples.
        partitions: rows of each partition; empty without partitions.
        nbytes: exact size of the object in bytes.
        head_bytes: of them what comes before the data.
    """

    def __init__(self, columns: Mapping[str, Column], num_rows: int, partitions: Sequence[Sequence[int]]) -> None:
        self.num_rows = num_rows
        self.partitions = tuple(map(len, partitions))
        self._order = as_bytes(np.array([row for rows in partitions for row in rows], dtype="<u4"))
        self._parts = {name: _Part(name, column) for name, column in columns.items()}
        self._place()

    def _place(self) -> None:
        at, indexes = 0, aligned(self._order.size)
        for part in self._parts.values():
            part.index_at = indexes
            indexes += aligned(part.index_bytes)
            for rows in part.buffers:
                rows.at = at
                at += aligned(rows.nbytes)
        # Digests have a fixed width, so a table with blank ones already has its final length.
        self._indexes_at = aligned(HEADER.size + len(self._table(bytes(16), [bytes(16)] * len(self._parts))))
        self.head_bytes = self._indexes_at + indexes
        self.nbytes = self.head_bytes + at

    def write_into(self, out: Bytes | memoryview | bytearray) -> str:
        """Write the object into `out` (uint8, exactly nbytes) in one pass; return its digest, 32 hex digits."""
        target = np.frombuffer(out, dtype=np.uint8)
        if target.size != self.nbytes or not target.flags.writeable:
            raise ValueError(f"need {self.nbytes} writable bytes, got {target.size}")
        return self.write(Into(target))

    def write(self, sink: Sink) -> str:
        """Write the object into a sink, the head last; return its digest, 32 hex digits."""
        head = np.zeros(self.head_bytes, dtype=np.uint8)
        indexes = head[self._indexes_at :]
        indexes[: self._order.size] = self._order
        sums = []
        for part in self._parts.values():
            index = part.write(sink, self.head_bytes)
            indexes[part.index_at : part.index_at + index.size] = index
            sums.append(xxhash.xxh3_128_digest(index.data))
        table = self._table(xxhash.xxh3_128_digest(self._order.data), sums)
        header = pack_header(self.nbytes, table, self.head_bytes)
        head[: HEADER.size + len(table)] = np.frombuffer(header + table, dtype=np.uint8)
        for position in range(0, head.size, STEP_BYTES):
            piece = head[position : position + STEP_BYTES]
            sink.reserve(position, piece.size)[:] = piece
        sink.finish()
        return xxhash.xxh3_128_hexdigest(table)

    @property
    def digest(self) -> str:
        """The digest `write_into` would return, computed without writing."""
        return self.write(_Nowhere())

    def _table(self, order: bytes, sums: Sequence[bytes]) -> bytes:
        entries = tuple(part.entry(digest) for part, digest in zip(self._parts.values(), sums, strict=True))
        return encode_table(Table(self.num_rows, self.partitions, Span(0, self._order.size, order), entries))


def encode(
    batch: Mapping[str, Any],
    value_spec: Mapping[str, ValueSpec] | None = None,
    partitions: Sequence[Sequence[int]] | None = None,
    narrow: bool = False,
) -> Encoded:
    """Convert and lay out a batch; nothing is written yet. `columns` states how entries are told apart and stored.

    Args:
        partitions: the rows of each reader, which will lie together; every row in exactly one.
        narrow: store integers as the narrowest that hold them; they are read with the dtype they had.

    Raises:
        TypeError, OverflowError, ValueError: a value that cannot be stored, named by column and row; partitions that
            are none.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch is a dict of columns by name, not a {type(batch).__name__}")
    for name in batch:
        _check_name(name)
    specs = value_spec or {}
    for name, spec in specs.items():
        if not isinstance(spec, ValueSpec):
            raise TypeError(f"value_spec of column {name!r} is a {type(spec).__name__}; allowed: a ValueSpec")
    unknown = [name for name in specs if name not in batch]
    if unknown:
        raise ValueError(f"value_spec names {unknown}, which the batch does not have; it has {list(batch)}")
    num_rows = num_rows_of(batch)
    split = _checked_partitions(partitions, num_rows)
    order = [row for rows in split for row in rows]
    columns = {name: _column(name, value, specs.get(name), num_rows, order) for name, value in batch.items()}
    if narrow:
        columns = {name: narrowed(column) for name, column in columns.items()}
    return Encoded(columns, num_rows, split)


def _column(name: str, value: Any, spec: ValueSpec | None, num_rows: int, order: Sequence[int]) -> Column:
    if order:
        with suppress(TypeError, OverflowError, ValueError):
            return analyse(name, in_order(name, value, num_rows, order), spec, num_rows)
    return analyse(name, value, spec, num_rows)  # and say what is wrong by the caller's numbers of rows


def batch_digest(batch: Mapping[str, Any], value_spec: Mapping[str, ValueSpec] | None = None) -> str:
    """Digest of a batch, 32 hex digits: equal for what was put and what was got, whichever types carried it.

    It covers names, their order, dtypes, shapes and values. Raises what `encode` raises.
    """
    return encode(batch, value_spec).digest


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"column name {name!r} is a {type(name).__name__}; names are strings")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise TypeError(f"column name {name!r} is not valid Unicode: {error}") from None


def _checked_partitions(partitions: Sequence[Sequence[int]] | None, num_rows: int) -> list[list[int]]:
    if partitions is None:
        return []
    try:
        split = [list(map(operator.index, rows)) for rows in partitions]
    except TypeError as error:
        raise TypeError(f"partitions = {partitions!r:.80}: allowed: row numbers for each reader ({error})") from None
    seen = sorted(row for rows in split for row in rows)
    if seen != list(range(num_rows)):
        wrong = sorted(set(seen) ^ set(range(num_rows))) or sorted(row for row in set(seen) if seen.count(row) > 1)
        raise ValueError(
            f"partitions must hold each of the {num_rows} rows exactly once; row {wrong[0]} is missing, unknown or "
            f"there twice"
        )
    return split


# --- columns ----------------------------------------------------------------------------------------------------------


class _Part:
    """One column's buffers and index."""

    def __init__(self, name: str, column: Column) -> None:
        self._name, self._column = name, column
        self._before = _NONE  # of the index, in front of what its buffers have there
        self.index_at = 0
        self.buffers: list[_Rows]
        match column:
            case Dense(array, stored):
                self.buffers = [_Array(array, stored)]
            case Ragged():
                self.buffers = [self._ragged(column)]
            case Tree():
                self.buffers = self._tree(column)

    @property
    def index_bytes(self) -> int:
        return self._before.size + sum(rows.index_bytes for rows in self.buffers)

    def write(self, sink: Sink, data_at: int) -> Bytes:
        """Write the buffers; return the index."""
        written = [rows.write(sink, data_at + rows.at) for rows in self.buffers]
        return np.concatenate([self._before, *written])

    def entry(self, digest: bytes) -> Entry:
        index = Span(self.index_at, self.index_bytes, digest)
        buffers = [rows.buffer() for rows in self.buffers]
        match self._column:
            case Dense(array, stored):
                return DenseEntry(self._name, name_of(array.dtype), name_of(stored), array.shape[1:], index, *buffers)
            case Ragged(_, dtype, ndim, stored, axis):
                stacked = self.buffers[0]
                assert isinstance(stacked, _Stacked)
                names = name_of(dtype), name_of(stored)
                return RaggedEntry(self._name, *names, ndim, stacked.item, axis, index, *buffers)
            case Tree(_, _, per_row, shares):
                return TreeEntry(self._name, per_row, shares is not None, index, *buffers)

    def _ragged(self, column: Ragged) -> _Stacked:
        rows = column.rows
        if column.axis > 0:
            rows = [np.moveaxis(row, column.axis, 0) for row in rows]
        stacked = _Stacked(rows, column.stored, column.ndim, sliced=column.axis >= 0)
        if stacked.item is None:
            self._before = as_bytes(stacked.shapes.astype("<i8"))
        return stacked

    def _tree(self, column: Tree) -> list[_Rows]:
        if column.shares is not None:
            self._before = as_bytes(np.array(column.shares, dtype="<u4"))
        prefix = ARRAY_HEADER + len(column.blobs).to_bytes(4, "big") if column.per_row else b""
        return [_Packed(column.blobs, prefix), _Leaves(column.leaves.rows)]


# --- buffers ----------------------------------------------------------------------------------------------------------


class _Rows:
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

    def row(self, number: int) -> Bytes:
        """The bytes of one row."""
        raise NotImplementedError

    def write(self, sink: Sink, position: int) -> Bytes:
        """Write all rows to `position` on; return the index: where rows end, if they differ, and blocks' digests."""
        sums: list[int] = []
        for rows, blocks, start, end in _steps(self._ends, self._blocks):
            if end - start <= STEP_BYTES:
                target = sink.reserve(position + start, end - start)
                self.fill(*rows, target)
                sums += digests(target.data, self._blocks.ends[slice(*blocks)], start)
            else:
                sums += self._stream(sink, position, range(*rows), self._blocks.ends[slice(*blocks)].tolist(), start)
        padding = aligned(self.nbytes) - self.nbytes
        if padding:
            sink.reserve(position + self.nbytes, padding)[:] = 0
        ends = self._ends if self._stride < 0 else self._ends[:0]
        return np.concatenate([as_bytes(ends.astype("<i8")), as_bytes(np.array(sums, dtype="<u8"))])

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


def _steps(ends: Numbers, blocks: Blocks) -> Iterator[tuple[tuple[int, int], tuple[int, int], int, int]]:
    """Rows that are written together: (first, last) row, (first, last) block, start and end in the buffer.

    As many as fit a step, or as few as one block has, or one row if that has several.
    """
    if blocks.first is None:
        unit_ends = blocks.ends
        rows = np.minimum(np.arange(1, unit_ends.size + 1) * blocks.size, ends.size)
        numbers = np.arange(1, unit_ends.size + 1)
    else:
        unit_ends, rows, numbers = ends, np.arange(1, ends.size + 1), blocks.first[1:]
    unit, row, block, start = 0, 0, 0, 0
    while unit < unit_ends.size:
        unit = max(unit + 1, int(unit_ends.searchsorted(start + STEP_BYTES, side="right")))
        end = int(unit_ends[unit - 1])
        yield (row, int(rows[unit - 1])), (block, int(numbers[unit - 1])), start, end
        row, block, start = int(rows[unit - 1]), int(numbers[unit - 1]), end


class _Array(_Rows):
    """The rows of one array, [rows, ...]."""

    def __init__(self, array: Array, stored: np.dtype[Any]) -> None:
        self._array, self._dtype = array, stored
        stride = stored.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        super().__init__(np.arange(1, len(array) + 1, dtype=np.int64) * stride, stride)

    def fill(self, first: int, last: int, target: Bytes) -> None:
        rows = self._array[first:last]
        np.copyto(target.view(self._dtype).reshape(rows.shape), rows, casting="unsafe")

    def row(self, number: int) -> Bytes:
        return as_bytes(np.ascontiguousarray(self._array[number], dtype=self._dtype))


class _Stacked(_Rows):
    """Arrays of one dtype and rank.

    Attributes:
        shapes: int64 [rows, ndim].
        item: the shape of every row but its first dimension; None where they differ.
    """

    def __init__(self, rows: list[Array], stored: np.dtype[Any], ndim: int, sliced: bool) -> None:
        self._rows, self._dtype = rows, stored
        if ndim == 1:  # ten times as fast as of tuples
            self.shapes = np.fromiter(map(len, rows), np.int64, len(rows)).reshape(-1, 1)
        else:
            self.shapes = np.array([row.shape for row in rows], dtype=np.int64).reshape(len(rows), ndim)
        self.item: tuple[int, ...] | None = None
        # An item without bytes leaves no trace of how many there are.
        first = self.shapes[0, 1:] if rows else self.shapes[:0]
        if ndim and (rows or ndim == 1) and first.all() and (self.shapes[:, 1:] == first).all():
            self.item = tuple(first.tolist()) if rows else ()
        super().__init__(
            np.cumsum(self.shapes.prod(axis=1)) * stored.itemsize, lengths=self.shapes[:, 0] if sliced else None
        )

    def fill(self, first: int, last: int, target: Bytes) -> None:
        out, rows = target.view(self._dtype), self._rows[first:last]
        if self.item is None:
            rows = [row.reshape(-1) for row in rows]
        elif self.item:
            out = out.reshape(-1, *self.item)
        if len(rows) == 1:
            np.copyto(out, rows[0], casting="unsafe")
        elif rows:
            np.concatenate(rows, out=out, casting="unsafe")

    def row(self, number: int) -> Bytes:
        return as_bytes(np.ascontiguousarray(self._rows[number], dtype=self._dtype))


class _Packed(_Rows):
    """Packed values, after `prefix`."""

    def __init__(self, blobs: list[bytes], prefix: bytes) -> None:
        self._blobs = [prefix + blobs[0], *blobs[1:]] if blobs and prefix else blobs
        super().__init__(np.cumsum(list(map(len, self._blobs)), dtype=np.int64))

    def fill(self, first: int, last: int, target: Bytes) -> None:
        target[:] = np.frombuffer(b"".join(self._blobs[first:last]), dtype=np.uint8)

    def row(self, number: int) -> Bytes:
        return np.frombuffer(self._blobs[number], dtype=np.uint8)


class _Leaves(_Rows):
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
