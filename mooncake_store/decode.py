"""The bytes of one object as a batch, or as some of its columns, rows and slices: what those need is fetched, no more.

Where all bytes are at hand, nothing is done for each row but to make its view.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

from mooncake_store.arrays import Bytes, is_array
from mooncake_store.errors import IntegrityError, MissingDependency
from mooncake_store.format import HEADER, Head, Numbers, Span, Table, aligned, as_numbers, read_header, read_table
from mooncake_store.stored_columns import ChosenRows, Lane, Slicing, StoredColumn, column_of

Rows = slice | Sequence[int] | None
Range = tuple[int, int]  # start and end, in bytes of the object


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a batch is wanted; see `ObjectStore.get`."""

    fields: Sequence[str] | None = None
    rows: Rows = None
    partition: int | None = None
    slices: Mapping[str, Slicing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.fields, str):
            raise TypeError(f"fields is a sequence of names: [{self.fields!r}], not {self.fields!r}")
        # As plain values, which can be compared.
        if self.fields is not None:
            object.__setattr__(self, "fields", list(self.fields))
        if self.rows is not None and not isinstance(self.rows, slice):
            object.__setattr__(self, "rows", list(map(_row_number, self.rows)))
        if not isinstance(self.slices, Mapping):
            raise TypeError(f"slices = {self.slices!r:.80}: allowed: a dict of slices by column")
        object.__setattr__(self, "slices", {name: _slicing(name, cut) for name, cut in self.slices.items()})
        if self.rows is not None and self.partition is not None:
            raise TypeError("rows and partition are two ways to name rows; give one of them")

    def count(self, num_rows: int, partitions: Sequence[int]) -> int:
        """How many rows that is of a batch with so many, in such partitions."""
        if self.partition is not None:
            return partitions[self.partition]
        if self.rows is None:
            return num_rows
        return len(range(num_rows)[self.rows] if isinstance(self.rows, slice) else self.rows)

    @property
    def is_all(self) -> bool:
        """Whether it is the whole batch."""
        return self.fields is None and self.rows is None and self.partition is None and not self.slices


def ordinary_memory(nbytes: int) -> Bytes:
    """uint8 [nbytes]."""
    return np.empty(nbytes, dtype=np.uint8)


class Source(Protocol):
    """Where the bytes of an object come from."""

    @property
    def nbytes(self) -> int:
        """Of the object."""

    @property
    def head_bytes(self) -> int:
        """What is fetched first; all of it where everything is at hand."""

    @property
    def root(self) -> Bytes:
        """The array that all views of what was taken look into."""

    def peek(self, ranges: Sequence[Range]) -> list[Bytes]:
        """Fetch ranges of the object, for a moment."""

    def take(self, ranges: Sequence[Range]) -> list[Bytes]:
        """Fetch ranges that the batch will look into; called once. Nobody can write through what it returns."""

    def spare(self, nbytes: int) -> Bytes:
        """Memory (uint8 [nbytes]) for numbers that are not read as they are stored; it stays while a view lives."""


class AtHand:
    """An object whose bytes (uint8 [nbytes]) are all here.

    Args:
        root: what `data` looks into; itself by default.
        spare: see `Source.spare`; ordinary memory by default.
    """

    def __init__(self, data: Bytes, root: Bytes | None = None, spare: Callable[[int], Bytes] = ordinary_memory) -> None:
        # Through a read-only memoryview: an array's own flag could be set back by whoever holds a view.
        self._data = np.frombuffer(data.data.toreadonly(), dtype=np.uint8)
        self.root = data if root is None else root
        self.nbytes = self.head_bytes = data.size
        self.spare = spare

    def peek(self, ranges: Sequence[Range]) -> list[Bytes]:
        return [self._data[start:end] for start, end in ranges]

    take = peek


def decode(
    buffer: Bytes | bytes | bytearray | memoryview,
    fields: Sequence[str] | None = None,
    rows: Rows = None,
    *,
    partition: int | None = None,
    slices: Mapping[str, Slicing] | None = None,
    digest: str | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """`read` from the bytes of a whole object."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    return read(AtHand(data), Selection(fields, rows, partition, slices or {}), digest=digest, verify=verify)


def read(source: Source, wanted: Selection, *, digest: str | None = None, verify: bool = True) -> dict[str, Any]:
    """Read a batch, or what is wanted of it.

    Dense and ragged columns, and arrays inside trees, are views of what was taken, read-only when that is; a dense
    column is copied when its rows are not a slice, and so is a column that is stored narrower than it was. bfloat16
    and float8 come back as torch tensors, which are copies. Entries that are one value for the whole batch ignore
    which rows are wanted.

    Args:
        digest: the expected digest of the object (`BatchRef.digest`).
        verify: check the digest of every block that is read.

    Raises:
        IntegrityError: the bytes are not an object of format 1, or not the expected one.
        KeyError: a field that the batch does not have.
        IndexError, TypeError: a row, partition or slice that the batch does not have, or a mask.
        MissingDependency: a column of bfloat16 or float8 where torch is not installed.
    """
    heads = _Heads(source, digest)
    table = heads.table
    entries = {entry.name: entry for entry in table.entries}
    for name in [*(wanted.fields or ()), *wanted.slices]:
        if name not in entries:
            close = difflib.get_close_matches(name, entries, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise KeyError(f"no column {name!r}{hint} The batch has {', '.join(entries)}")
    chosen = [entries[name] for name in (entries if wanted.fields is None else wanted.fields)]
    rows = _chosen_rows(wanted, table, heads.index(table.order))
    columns: dict[str, StoredColumn] = {}
    for entry in chosen:
        with _naming(entry.name):
            slicing = wanted.slices.get(entry.name)
            columns[entry.name] = column_of(
                entry,
                heads.index(entry.index),
                table.num_rows,
                source.nbytes - heads.head.nbytes,
                rows,
                slicing,
                source.spare,
            )
    _take(source, heads.head.nbytes, [lane for column in columns.values() for lane in column.lanes])
    result = {}
    for name, column in columns.items():
        with _naming(name):
            if verify:
                for lane in column.lanes:
                    lane.verify()
            result[name] = column.read()
    return result


def check(buffer: Bytes | bytes | bytearray | memoryview, digest: str) -> None:
    """Raise IntegrityError unless the bytes are the whole object of this digest."""
    decode(buffer, digest=digest)


def as_lists(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a decoded batch with every numeric column turned into Python lists; arrays inside trees stay arrays."""

    def plain(value: Any) -> Any:
        if is_array(value):
            return value.tolist()
        if isinstance(value, list) and value and all(map(is_array, value)):
            return [item.tolist() for item in value]
        return value

    return {name: plain(value) for name, value in batch.items()}


class _Heads:
    """The table of an object, and the indexes it names."""

    def __init__(self, source: Source, digest: str | None) -> None:
        self._source = source
        self._bytes = self._peek(source.head_bytes)
        self.head: Head = read_header(self._bytes, source.nbytes, digest)
        start = HEADER.size + self.head.table_bytes
        if self._bytes.size < self.head.nbytes:  # more than was expected
            self._bytes = self._peek(self.head.nbytes)
        self.table: Table = read_table(self._bytes, self.head)
        self._start = aligned(start)

    def index(self, span: Span) -> Bytes:
        """The bytes of an index, checked against its digest."""
        start, end = self._start + span.offset, self._start + span.offset + span.nbytes
        if span.offset < 0 or span.nbytes < 0 or end > self.head.nbytes:
            raise IntegrityError(f"an index of {span.nbytes} bytes at {span.offset} exceeds the head")
        index = self._bytes[start:end]
        if xxhash.xxh3_128_digest(index.data) != span.digest:
            raise IntegrityError("an index does not match its digest")
        return index

    def _peek(self, nbytes: int) -> Bytes:
        (piece,) = self._source.peek([(0, min(nbytes, self._source.nbytes))])
        return piece


def _chosen_rows(wanted: Selection, table: Table, order: Bytes) -> ChosenRows:
    num_rows, partitions = table.num_rows, table.partitions
    if wanted.partition is not None:
        number = operator.index(wanted.partition)
        if not 0 <= number < len(partitions):
            raise IndexError(f"partition {number} of a batch that has {len(partitions)}")
        start = sum(partitions[:number])
        return ChosenRows(slice(start, start + partitions[number]), num_rows)
    index = _selected(wanted.rows, num_rows)
    if not partitions:
        return ChosenRows(index, num_rows)
    lies = as_numbers(order, "<u4", num_rows, "the order of the rows")
    places = np.argsort(lies)
    if not np.array_equal(lies[places], np.arange(num_rows)):
        raise IntegrityError("the order of the rows is none")
    return ChosenRows(places[index], num_rows)


def _selected(rows: Rows, num_rows: int) -> slice | Numbers:
    if rows is None:
        return slice(None)
    if isinstance(rows, slice):
        return rows
    for row in rows:
        if not -num_rows <= row < num_rows:
            raise IndexError(f"row {row} of a batch of {num_rows} rows")
    return np.array([row % num_rows for row in rows], dtype=np.int64)


def _slicing(name: str, cut: Any) -> Slicing:
    if isinstance(cut, slice):
        return cut
    cuts = list(cut) if isinstance(cut, Iterable) else [cut]
    for each in cuts:
        if not isinstance(each, slice):
            raise TypeError(f"slices of column {name!r}: {each!r:.80} is none; allowed: a slice, or one for each row")
    return cuts


def _row_number(row: Any) -> int:
    if isinstance(row, bool | np.bool_):
        raise TypeError("rows are row numbers, not a mask; pass numpy.flatnonzero(mask)")
    return operator.index(row)


def _take(source: Source, data_at: int, lanes: Sequence[Lane]) -> None:
    """Fetch what the lanes need, all together."""
    if source.head_bytes >= source.nbytes:  # all is at hand
        (data,) = source.take([(data_at, source.nbytes)])
        for lane in lanes:
            lane.put_all(data)
        return
    ranges = [(data_at + start, data_at + end) for lane in lanes for start, end in lane.needed()]
    pieces = iter(source.take(ranges))
    for lane in lanes:
        lane.put([next(pieces) for _ in lane.needed()])


@contextmanager
def _naming(column: str) -> Iterator[None]:
    try:
        yield
    except (IntegrityError, MissingDependency) as error:
        raise type(error)(f"column {column!r}: {error}") from None
    except (ValueError, OverflowError, MemoryError) as error:  # numpy refusing an impossible dtype, shape or size
        raise IntegrityError(f"column {column!r}: {error}") from error
