"""A batch as the bytes of one object: laid out first, then written in one pass, each row copied once."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import xxhash

from mooncake_store.arrays import Bytes, as_bytes, name_of, pack
from mooncake_store.columns import Column, Dense, Ragged, Tree, ValueSpec, analyse, in_order, narrowed, num_rows_of
from mooncake_store.format import (
    HEADER,
    DenseEntry,
    Entry,
    RaggedEntry,
    Span,
    Table,
    TreeEntry,
    aligned,
    encode_table,
    pack_header,
)
from mooncake_store.processors import beside, processor
from mooncake_store.rows import STEP_BYTES, ArrayRows, LeafRows, PackedRows, Rows, Sink, StackedRows, step_bytes
from mooncake_store.tree import ARRAY_HEADER
from mooncake_store.worker import Worker

# What two threads write sooner than one, which has to wake the other.
SHARED_BYTES = 4 << 20
_NONE: Bytes = np.empty(0, dtype=np.uint8)
_Item = TypeVar("_Item")


class Into:
    """A sink that is memory for a whole object."""

    def __init__(self, out: Bytes | memoryview | bytearray) -> None:
        self.helper: Worker | None = None
        self.in_place, self.until = False, math.inf
        self._out = np.frombuffer(out, dtype=np.uint8)

    def reserve(self, position: int, nbytes: int) -> Bytes:
        return self._out[position : position + nbytes]

    def finish(self) -> None: ...


class _Nowhere:
    """A sink of what is only digested."""

    def __init__(self) -> None:
        self.helper: Worker | None = None
        self.in_place, self.until = False, math.inf
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
        written = iter(self._write_data(sink))
        for part in self._parts.values():
            index = indexes[part.index_at : part.index_at + part.index_bytes]
            part.write_index(index, [next(written) for _ in part.buffers])
            sums.append(xxhash.xxh3_128_digest(index.data))
        table = self._table(xxhash.xxh3_128_digest(self._order.data), sums)
        header = pack_header(self.nbytes, table, self.head_bytes)
        head[: HEADER.size + len(table)] = np.frombuffer(header + table, dtype=np.uint8)
        for position in range(0, head.size, STEP_BYTES):
            piece = head[position : position + STEP_BYTES]
            sink.reserve(position, piece.size)[:] = piece
        sink.finish()
        return xxhash.xxh3_128_hexdigest(table)

    def _write_data(self, sink: Sink) -> list[list[int]]:
        """Write the buffers, the sink's helper taking part if it has one; return the digests of each."""
        buffers = [rows for part in self._parts.values() for rows in part.buffers]
        steps = [(number, step) for number, rows in enumerate(buffers) for step in rows.steps(step_bytes(sink))]
        sums: list[list[int]] = [[] for _ in steps]
        left = deque(zip(steps, sums, strict=True))  # each thread takes the next: neither waits for the other

        def write() -> None:
            for (number, step), digests in _taken(left):
                digests += buffers[number].write(step, sink, self.head_bytes)

        if sink.helper is None or self.nbytes < SHARED_BYTES:
            write()
        else:
            helping = sink.helper.submit(beside, processor(), write)
            try:
                write()
            finally:
                left.clear()
                failed = helping.exception()  # whatever ends this, the memory is another's then
            if failed is not None:
                raise failed
        found: list[list[int]] = [[] for _ in buffers]
        for (number, _), digests in zip(steps, sums, strict=True):
            found[number] += digests
        return found

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


def _taken(left: deque[_Item]) -> Iterator[_Item]:
    """What is left, also while others take from it."""
    with suppress(IndexError):
        while True:
            yield left.popleft()


# --- columns ----------------------------------------------------------------------------------------------------------


class _Part:
    """One column's buffers and index."""

    def __init__(self, name: str, column: Column) -> None:
        self._name, self._column = name, column
        self._before = _NONE  # of the index, in front of what its buffers have there
        self.index_at = 0
        self.buffers: list[Rows]
        match column:
            case Dense(array, stored):
                self.buffers = [ArrayRows(array, stored)]
            case Ragged():
                self.buffers = [self._ragged(column)]
            case Tree():
                self.buffers = self._tree(column)

    @property
    def index_bytes(self) -> int:
        return self._before.size + sum(rows.index_bytes for rows in self.buffers)

    def write_index(self, out: Bytes, sums: Sequence[Sequence[int]]) -> None:
        """out: uint8 [index_bytes]. sums: the digests of each buffer's blocks."""
        at = self._before.size
        out[:at] = self._before
        for rows, digests in zip(self.buffers, sums, strict=True):
            rows.write_index(out[at : at + rows.index_bytes], digests)
            at += rows.index_bytes

    def entry(self, digest: bytes) -> Entry:
        index = Span(self.index_at, self.index_bytes, digest)
        buffers = [rows.buffer() for rows in self.buffers]
        match self._column:
            case Dense(array, stored):
                return DenseEntry(self._name, name_of(array.dtype), name_of(stored), array.shape[1:], index, *buffers)
            case Ragged(_, dtype, ndim, stored, axis):
                stacked = self.buffers[0]
                assert isinstance(stacked, StackedRows)
                names = name_of(dtype), name_of(stored)
                return RaggedEntry(self._name, *names, ndim, stacked.item, axis, index, *buffers)
            case Tree(_, _, per_row, shares):
                return TreeEntry(self._name, per_row, shares is not None, index, *buffers)

    def _ragged(self, column: Ragged) -> StackedRows:
        rows = column.rows
        if column.axis > 0:
            rows = [np.moveaxis(row, column.axis, 0) for row in rows]
        stacked = StackedRows(rows, column.stored, column.ndim, sliced=column.axis >= 0)
        if stacked.item is None:
            self._before = as_bytes(stacked.shapes.astype("<i8"))
        return stacked

    def _tree(self, column: Tree) -> list[Rows]:
        if column.shares is not None:
            self._before = as_bytes(pack(column.shares, np.dtype("<u4")))
        prefix = ARRAY_HEADER + len(column.blobs).to_bytes(4, "big") if column.per_row else b""
        return [PackedRows(column.blobs, prefix), LeafRows(column.leaves.rows)]
