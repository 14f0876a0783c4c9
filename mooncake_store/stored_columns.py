"""Columns as they lie in an object: which of their bytes a selection needs, and what those are as values.

Every number from the object is checked against its sizes before it is used.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import xxhash

from mooncake_store.arrays import Array, Bytes, dtype_of
from mooncake_store.errors import IntegrityError
from mooncake_store.format import (
    MAX_RANK,
    Blocks,
    Buffer,
    DenseEntry,
    Entry,
    Numbers,
    RaggedEntry,
    TreeEntry,
    blocks_of_items,
    blocks_of_rows,
)
from mooncake_store.tensors import TORCH_DTYPES, restore
from mooncake_store.tree import ARRAY_HEADER_BYTES, tree_reader

Slicing = slice | Sequence[slice]
_NOTHING: Bytes = np.empty(0, dtype=np.uint8)
_ZERO: Numbers = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The wanted rows by where they lie: `index` selects them from an array of all rows."""

    index: slice | Numbers
    num_rows: int

    @property
    def are_all(self) -> bool:
        """Whether they are all rows, in the order in which they lie."""
        return isinstance(self.index, slice) and self.index == slice(None)

    def numbers(self) -> Numbers:
        """int64; only where an index is known to have as many rows: a table may say any number."""
        return np.arange(self.num_rows)[self.index]


class StoredColumn(Protocol):
    """A column of which some rows are wanted."""

    @property
    def lanes(self) -> Sequence[Lane]:
        """Its buffers."""

    def read(self) -> Any:
        """Its values, once its lanes have what they need."""


class Lane:
    """One buffer: which of its blocks are needed, and then their bytes.

    Args:
        sums: uint8 [8 * blocks], the blocks' digests.
    """

    def __init__(self, buffer: Buffer, blocks: Blocks, sums: Bytes) -> None:
        self._buffer, self._blocks = buffer, blocks
        if sums.size != 8 * blocks.ends.size:
            raise IntegrityError(f"{sums.size} bytes of digests for {blocks.ends.size} blocks")
        self._sums = sums.view("<u8")
        self._starts = np.concatenate((_ZERO, blocks.ends))[: blocks.ends.size]
        self._wanted: Numbers | None = None  # numbers of blocks, ascending; None for all
        self._runs = _ZERO  # where each piece starts
        self._pieces: list[Bytes] = []
        self._is_whole = False

    def want_rows(self, numbers: Numbers) -> None:
        """Only these rows are needed, of a buffer whose blocks are rows."""
        self._wanted = np.unique(numbers // self._blocks.size)

    def want_items(self, numbers: Numbers, starts: Numbers, ends: Numbers) -> None:
        """Only the items from `starts` to `ends` of these rows are needed, of a buffer whose blocks are items."""
        assert self._blocks.first is not None
        first = self._blocks.first[numbers]
        begin, end = first + starts // self._blocks.size, first - (-ends // self._blocks.size)
        spans = zip(begin.tolist(), end.tolist(), (ends > starts).tolist(), strict=True)
        blocks = [np.arange(start, stop) for start, stop, any_ in spans if any_]
        self._wanted = np.unique(np.concatenate(blocks)) if blocks else np.zeros(0, dtype=np.int64)

    def needed(self) -> list[tuple[int, int]]:
        """Start and end in the data of what is needed, blocks next to each other together."""
        if self._wanted is None:
            starts, ends = _ZERO, np.array([self._buffer.nbytes])
        else:
            starts, ends = self._starts[self._wanted], self._blocks.ends[self._wanted]
        starts, ends = starts[ends > starts], ends[ends > starts]
        apart = starts[1:] != ends[:-1]
        at = self._buffer.offset
        first, last = (
            starts[np.concatenate(([True], apart))[: starts.size]],
            ends[np.concatenate((apart, [True]))[: ends.size]],
        )
        return list(zip((first + at).tolist(), (last + at).tolist(), strict=True))

    def put(self, pieces: list[Bytes]) -> None:
        """Give it the bytes it needs, one piece for each entry of `needed`."""
        self._pieces = pieces
        self._runs = np.array([start for start, _ in self.needed()], dtype=np.int64) - self._buffer.offset

    def put_all(self, data: Bytes) -> None:
        """Give it all data of the object."""
        self._pieces = [data[self._buffer.offset : self._buffer.offset + self._buffer.nbytes]]
        self._runs = _ZERO
        self._is_whole = True

    @property
    def whole(self) -> Bytes | None:
        """All bytes of the buffer, None where only some were needed."""
        if self._is_whole or self._wanted is None:
            return self._pieces[0] if self._pieces else _NOTHING
        return None

    def verify(self) -> None:
        """IntegrityError unless every needed block has its digest."""
        blocks = slice(None) if self._wanted is None else self._wanted
        views = self.cut(self._starts[blocks], self._blocks.ends[blocks], lambda piece: piece.data)
        if list(map(xxhash.xxh3_64_intdigest, views)) != self._sums[blocks].tolist():
            raise IntegrityError("the bytes do not match their digest")

    def cut(self, starts: Numbers, ends: Numbers, see: Callable[[Bytes], Any], unit: int = 1) -> list[Any]:
        """What lies from `starts` to `ends` of the buffer, in bytes, as slices of what `see` makes of a piece.

        Args:
            unit: bytes of one item of what `see` makes.
        """
        empty = not self._pieces
        if len(self._pieces) <= 1:  # no loop of ours over rows: there may be a hundred thousand
            seen = see(_NOTHING if empty else self._pieces[0])
            run = 0 if empty else int(self._runs[0])
            begin = np.zeros_like(starts) if empty else (starts - run) // unit
            stop = np.zeros_like(ends) if empty else (ends - run) // unit
            return list(map(seen.__getitem__, map(slice, begin.tolist(), stop.tolist())))
        seen = [see(piece) for piece in self._pieces]
        of = np.maximum(np.searchsorted(self._runs, starts, side="right") - 1, 0)
        begin, stop = (starts - self._runs[of]) // unit, (ends - self._runs[of]) // unit
        triples = zip(of.tolist(), begin.tolist(), stop.tolist(), strict=True)
        return [seen[piece][start:end] for piece, start, end in triples]


class _Index:
    """Takes a column's index apart, in order."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return self._data.size - self._at

    def take(self, dtype: str, count: int) -> Numbers:
        nbytes = np.dtype(dtype).itemsize * count
        if not 0 <= nbytes <= self.left:
            raise IntegrityError(f"an index of {self._data.size} bytes has no {count} numbers at {self._at}")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at].view(dtype).astype(np.int64)

    def ends(self, buffer: Buffer) -> Numbers:
        """Where the rows of a buffer without a stride end."""
        ends = self.take("<i8", buffer.rows)
        if ends.size and (int(ends[0]) < 0 or (ends[1:] < ends[:-1]).any()):
            raise IntegrityError("rows overlap")
        if (int(ends[-1]) if ends.size else 0) != buffer.nbytes:
            raise IntegrityError("rows do not fill their buffer")
        return ends

    def sums(self, count: int) -> Bytes:
        nbytes = 8 * count
        if nbytes > self.left:
            raise IntegrityError(f"an index of {self._data.size} bytes has no {count} digests")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def end(self) -> None:
        if self.left:
            raise IntegrityError(f"an index has {self.left} bytes too many")


def column_of(
    entry: Entry,
    index: Bytes,
    num_rows: int,
    data_bytes: int,
    rows: ChosenRows,
    slicing: Slicing | None,
    spare: Callable[[int], Bytes],
) -> StoredColumn:
    """The column that an entry describes, of which `rows`, and `slicing` of each, are wanted.

    Args:
        data_bytes: of all columns.
        spare: makes memory (uint8, of a number of bytes) for numbers that are stored in another dtype than they had.

    Raises:
        IntegrityError: the entry, or its index, contradicts itself.
        TypeError: the column cannot be sliced.
    """
    if slicing is not None and not (isinstance(entry, RaggedEntry) and entry.axis != -1):
        raise TypeError(f"column {entry.name!r} has no slice axis; put it with ValueSpec(slice_axis=...)")
    for buffer in (entry.blob, entry.leaves) if isinstance(entry, TreeEntry) else (entry.data,):
        if not 0 <= buffer.offset <= buffer.offset + buffer.nbytes <= data_bytes or buffer.nbytes < 0:
            raise IntegrityError(f"{buffer.nbytes} bytes at {buffer.offset} exceed {data_bytes} bytes")
        if buffer.block < 1 or buffer.rows < 0:
            raise IntegrityError(f"{buffer.rows} rows in blocks of {buffer.block}")
    parts = _Index(index)
    column: StoredColumn
    match entry:
        case DenseEntry():
            column = _Dense(entry, parts, num_rows, rows, spare)
        case RaggedEntry():
            column = _Ragged(entry, parts, num_rows, rows, slicing, spare)
        case TreeEntry():
            column = _Tree(entry, parts, num_rows, rows)
    parts.end()
    return column


class _Dense:
    def __init__(
        self, entry: DenseEntry, index: _Index, num_rows: int, rows: ChosenRows, spare: Callable[[int], Bytes]
    ) -> None:
        _check_shape(entry.item)
        self._entry, self._rows, self._num_rows = entry, rows, num_rows
        self._stored = dtype_of(entry.stored)
        self._widened = _Widening(dtype_of(entry.dtype), self._stored, spare)
        self._stride = stride = self._stored.itemsize * math.prod(entry.item)
        buffer = entry.data
        if (buffer.rows, buffer.stride, buffer.nbytes) != (num_rows, stride, stride * num_rows):
            raise IntegrityError(f"{buffer.nbytes} bytes in {buffer.rows} rows, its shape needs {num_rows} of {stride}")
        size = min(buffer.block, max(1, num_rows))
        count = -(-num_rows // size)
        if 8 * count != index.left:  # before anything is made of a number of rows that may be anything
            raise IntegrityError(f"{index.left} bytes of digests for {count} blocks")
        ends = np.minimum(np.arange(1, count + 1) * size, num_rows) * stride
        self._lane = Lane(buffer, Blocks(ends, None, size), index.sums(count))
        self.lanes = [self._lane]
        if not rows.are_all and stride:
            self._lane.want_rows(rows.numbers())

    def read(self) -> Any:
        whole = self._lane.whole
        if whole is not None:
            return self._array(whole, self._num_rows, self._rows.index)
        numbers = self._rows.numbers()
        if numbers.size and (np.diff(numbers) == 1).all():  # one piece, of which a view does
            starts, ends = numbers[:1] * self._stride, numbers[-1:] * self._stride + self._stride
        else:
            starts, ends = numbers * self._stride, (numbers + 1) * self._stride
        pieces = self._lane.cut(starts, ends, _as_it_is)
        data = pieces[0] if len(pieces) == 1 else np.concatenate([_NOTHING, *pieces])
        return self._array(data, numbers.size, slice(None))

    def _array(self, data: Bytes, rows: int, index: slice | Numbers) -> Any:
        array = data.view(self._stored).reshape(rows, *self._entry.item)[index]
        array.flags.writeable = False  # rows that are no slice are copied
        return restore(self._widened(array))


class _Ragged:
    def __init__(
        self,
        entry: RaggedEntry,
        index: _Index,
        num_rows: int,
        rows: ChosenRows,
        slicing: Slicing | None,
        spare: Callable[[int], Bytes],
    ) -> None:
        self._entry = entry
        self._stored = dtype_of(entry.stored)
        self._widened = _Widening(dtype_of(entry.dtype), self._stored, spare)
        if not 0 <= entry.ndim <= MAX_RANK or not -1 <= entry.axis < max(1, entry.ndim) or entry.data.rows != num_rows:
            raise IntegrityError(f"{entry.data.rows} rows of rank {entry.ndim}, sliced along {entry.axis}")
        shapes = None
        if entry.item is None:
            shapes = index.take("<i8", num_rows * entry.ndim).reshape(num_rows, entry.ndim)
        ends = index.ends(entry.data)
        starts = np.concatenate((_ZERO, ends))[:num_rows]
        lengths = self._lengths(ends - starts, shapes)
        if entry.axis < 0:
            self._lane = _lane_of_rows(entry.data, ends, index)
        else:
            self._lane = _lane_of_items(entry.data, ends, lengths, index)
        self.lanes = [self._lane]

        numbers = rows.numbers()
        self._starts, self._ends = starts[numbers], ends[numbers]
        self._shapes = None if shapes is None else shapes[numbers]
        if slicing is not None:
            lengths = lengths[numbers]
            first, last = _limits(slicing, lengths)
            self._lane.want_items(numbers, first, last)
            item_bytes = (self._ends - self._starts) // np.maximum(lengths, 1)
            self._starts, self._ends = self._starts + first * item_bytes, self._starts + last * item_bytes
            if self._shapes is not None:
                self._shapes = np.column_stack((last - first, self._shapes[:, 1:]))
        elif not rows.are_all:
            if entry.axis < 0:
                self._lane.want_rows(numbers)
            else:
                self._lane.want_items(numbers, np.zeros_like(numbers), lengths[numbers])

    def _lengths(self, nbytes: Numbers, shapes: Numbers | None) -> Numbers:
        """The first dimension of each row, as it is stored."""
        if shapes is not None:
            if shapes.size and int(shapes.min()) < 0:
                raise IntegrityError("a row has a negative size")
            # Products of corrupt sizes may wrap around; as floats they do not.
            about = shapes.astype(np.float64).prod(axis=1)
            if (about > 2**62).any() or (shapes.prod(axis=1) * self._stored.itemsize != nbytes).any():
                raise IntegrityError("the shapes of rows do not fit their bytes")
            return shapes[:, 0] if shapes.shape[1] else np.ones_like(nbytes)
        assert self._entry.item is not None
        _check_shape(self._entry.item)
        self._unit = self._stored.itemsize * math.prod(self._entry.item)
        if len(self._entry.item) != self._entry.ndim - 1 or not self._unit or (nbytes % self._unit).any():
            raise IntegrityError(f"rows of rank {self._entry.ndim} are not made of items of shape {self._entry.item}")
        return nbytes // self._unit

    def read(self) -> list[Any]:
        if self._shapes is None:
            item = self._entry.item
            assert item is not None
            rows = self._lane.cut(
                self._starts,
                self._ends,
                lambda piece: piece.view(self._stored).reshape(-1, *item),
                self._unit,
            )
            rows = self._widened.rows(rows)
        else:
            flat = self._lane.cut(
                self._starts,
                self._ends,
                lambda piece: piece.view(self._stored),
                self._stored.itemsize,
            )
            rows = list(map(np.ndarray.reshape, self._widened.rows(flat), map(tuple, self._shapes.tolist())))
        if self._entry.axis > 0:
            axes = list(range(1, self._entry.ndim))
            axes.insert(self._entry.axis, 0)
            rows = list(map(operator.methodcaller("transpose", axes), rows))
        return list(map(restore, rows)) if self._entry.dtype in TORCH_DTYPES else rows


class _Tree:
    def __init__(self, entry: TreeEntry, index: _Index, num_rows: int, rows: ChosenRows) -> None:
        self._entry, blob, leaves = entry, entry.blob, entry.leaves
        expected = num_rows if entry.per_row else 1
        refs = index.take("<u4", num_rows) if entry.shared else None
        if (
            (refs is None and blob.rows != expected)
            or leaves.rows not in (0, blob.rows)
            or (entry.shared and not entry.per_row)
        ):
            raise IntegrityError(f"{blob.rows} packed values, with arrays in {leaves.rows}, for {expected} rows")
        if refs is not None and refs.size and int(refs.max()) >= blob.rows:
            raise IntegrityError(f"a row is value {int(refs.max())} of {blob.rows}")
        ends = index.ends(blob)
        self._blob = _lane_of_rows(blob, ends, index)
        leaf_ends = index.ends(leaves)
        self._leaves = _lane_of_rows(leaves, leaf_ends, index)
        self.lanes = [self._blob, self._leaves]

        starts, leaf_starts = (
            np.concatenate((_ZERO, ends))[: ends.size],
            np.concatenate((_ZERO, leaf_ends))[: leaf_ends.size],
        )
        if entry.per_row and starts.size:
            starts[0] = ARRAY_HEADER_BYTES
        chosen = rows.numbers() if entry.per_row else _ZERO
        self._numbers = chosen if refs is None else refs[chosen]
        needed = np.unique(self._numbers)
        self._is_all = needed.size == blob.rows
        if not self._is_all:
            self._blob.want_rows(needed)
            if leaves.rows:
                self._leaves.want_rows(needed)
        self._spans = starts[self._numbers], ends[self._numbers]
        self._leaf_spans = (leaf_starts[self._numbers], leaf_ends[self._numbers]) if leaves.rows else None

    def read(self) -> Any:
        if self._is_all:
            return self._read_all()
        blobs = self._blob.cut(*self._spans, lambda piece: piece.data)
        if self._leaf_spans is None:
            return list(map(tree_reader(_NOTHING), blobs))
        leaves = self._leaves.cut(*self._leaf_spans, _as_it_is)
        starts = self._leaf_spans[0].tolist()
        return [tree_reader(leaf, start)(blob) for leaf, start, blob in zip(leaves, starts, blobs, strict=True)]

    def _read_all(self) -> Any:
        blob, leaves = self._blob.whole, self._leaves.whole
        assert blob is not None
        assert leaves is not None
        if not self._entry.per_row:
            return tree_reader(leaves)(blob)
        if not self._entry.blob.rows:
            return []
        values = tree_reader(leaves)(blob)
        if type(values) is not list or len(values) != self._entry.blob.rows:
            raise IntegrityError(f"the packed values are not a list of {self._entry.blob.rows}")
        return list(map(values.__getitem__, self._numbers.tolist()))


def _lane_of_rows(buffer: Buffer, ends: Numbers, index: _Index) -> Lane:
    blocks = blocks_of_rows(ends, min(buffer.block, max(1, ends.size)))
    return Lane(buffer, blocks, index.sums(blocks.ends.size))


def _lane_of_items(buffer: Buffer, ends: Numbers, lengths: Numbers, index: _Index) -> Lane:
    size = buffer.block
    counts = lengths // size + (lengths % size > 0)
    if counts.size and (int(counts.max()) > index.left or int(counts.sum()) * 8 > index.left):
        raise IntegrityError(f"{index.left} bytes of digests for blocks of {size} items")
    blocks = blocks_of_items(ends, lengths, size)
    return Lane(buffer, blocks, index.sums(blocks.ends.size))


def _limits(slicing: Slicing, lengths: Numbers) -> tuple[Numbers, Numbers]:
    """Where the slice of each row starts and ends."""
    slices = [slicing] * lengths.size if isinstance(slicing, slice) else list(slicing)
    if len(slices) != lengths.size:
        raise IndexError(f"{len(slices)} slices for {lengths.size} rows; give one, or one for each")
    if any(cut.step not in (None, 1) for cut in slices):
        raise TypeError("a slice of a row takes neighbours: leave its step out")
    limits = [cut.indices(length) for cut, length in zip(slices, lengths.tolist(), strict=True)]
    first = np.array([start for start, _, _ in limits], dtype=np.int64)
    last = np.array([stop for _, stop, _ in limits], dtype=np.int64)
    return first, np.maximum(first, last)


@dataclass(frozen=True, slots=True)
class _Widening:
    """Makes numbers the dtype they had; a copy, as unchangeable as a view, where they are stored in another."""

    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    spare: Callable[[int], Bytes]

    def __post_init__(self) -> None:
        if self.dtype != self.stored and not (self.dtype.kind in "iu" and self.stored.kind in "iu"):
            raise IntegrityError(f"numbers of {self.dtype} are stored as {self.stored}; only integers are narrowed")

    def __call__(self, array: Array) -> Array:
        (wide,) = self.rows([array[np.newaxis]])
        found: Array = wide[0]
        return found

    def rows(self, rows: list[Array]) -> list[Array]:
        """The same of arrays that differ in their first dimension only; these rows and no others take memory."""
        if self.dtype == self.stored or not rows:
            return rows
        lengths = list(map(len, rows))
        shape = sum(lengths), *rows[0].shape[1:]
        out = self.spare(math.prod(shape) * self.dtype.itemsize)
        np.concatenate(rows, out=out.view(self.dtype).reshape(shape), casting="unsafe")  # uint8 to int8: they fit
        # Through a read-only memoryview, like what is not widened.
        wide: Array = np.frombuffer(out.data.toreadonly(), dtype=np.uint8).view(self.dtype).reshape(shape)
        ends = list(accumulate(lengths))
        return list(map(wide.__getitem__, map(slice, [0, *ends[:-1]], ends)))


def _as_it_is(piece: Bytes) -> Bytes:
    return piece


def _check_shape(shape: tuple[int, ...]) -> None:
    if min(shape, default=0) < 0 or len(shape) > MAX_RANK:
        raise IntegrityError(f"shape {shape} is impossible")
