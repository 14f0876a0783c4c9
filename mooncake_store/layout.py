"""Format 1 of a stored batch. No pickle: every byte read is checked before it is believed.

    offset 0          header, 64 bytes, little-endian:
                      magic 8s | format u32 | zero u32 | object bytes u64 | table bytes u64 | table digest 16s | zeros
    offset 64         table of contents: msgpack of `Table`
    next multiple of 64
                      buffers, each starting on a multiple of 64, zeros between them; spans count from here

The table holds the xxh3-128 digest of every buffer and the header holds that of the table, so the header's digest
covers the whole object, and a reader of a few columns can check just those. The magic is written last: an object whose
writer died midway is not an object. Equal batches have equal bytes, whichever types carried the numbers.
"""

from __future__ import annotations

import difflib
import math
import operator
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import xxhash

from mooncake_store.arrays import Array, Bytes, as_bytes, dtype_of, is_array, name_of
from mooncake_store.columns import Column, Dense, Ragged, Tree, ValueSpec, analyse, num_rows_of
from mooncake_store.errors import IntegrityError, MissingDependency
from mooncake_store.tensors import restore
from mooncake_store.tree import ALIGNMENT, tree_reader

FORMAT = 1
MAGIC = b"MCBATCH\x01"
HEADER = struct.Struct("<8sIIQQ16s16s")
assert HEADER.size == ALIGNMENT
DIGEST_BYTES = 16
_MAX_RANK = 64  # numpy's own limit since 2.0

Rows = slice | Sequence[int] | None


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A buffer: byte offset from the start of the buffers, length in bytes, xxh3-128 of its bytes."""

    offset: int
    nbytes: int
    digest: bytes


class DenseEntry(msgspec.Struct, array_like=True, frozen=True, tag="dense"):
    """A per-sample column that is one array of `shape`; shape[0] is the number of rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Span


class RaggedEntry(msgspec.Struct, array_like=True, frozen=True, tag="ragged"):
    """Rows of one dtype and rank, back to back in `data`; `shapes` is int64 [num_rows, ndim]."""

    name: str
    dtype: str
    ndim: int
    shapes: Span
    data: Span


class TreeEntry(msgspec.Struct, array_like=True, frozen=True, tag="tree"):
    """Packed values back to back in `blob`; `ends` is int64, where each ends; `leaves` holds the arrays among them."""

    name: str
    per_row: bool
    ends: Span
    blob: Span
    leaves: Span


Entry = DenseEntry | RaggedEntry | TreeEntry


class Table(msgspec.Struct, array_like=True, frozen=True):
    """Table of contents of one object."""

    num_rows: int
    entries: tuple[Entry, ...]


_table_encoder = msgspec.msgpack.Encoder()
_table_decoder = msgspec.msgpack.Decoder(Table)


class Encoded:
    """A batch converted and laid out, not yet written anywhere.

    Attributes:
        num_rows: number of samples.
        nbytes: exact size of the object in bytes.
    """

    def __init__(self, columns: Mapping[str, Column], num_rows: int) -> None:
        self.num_rows = num_rows
        self._columns = columns
        self._buffers = [buffer for column in columns.values() for buffer in _buffers_of(column)]
        self._sizes = [sum(chunk.size for chunk in buffer) for buffer in self._buffers]
        # Digests have a fixed width, so a table with blank ones already has its final length.
        self._table_bytes = len(self._table([bytes(DIGEST_BYTES)] * len(self._buffers)))
        self._start = _aligned(HEADER.size + self._table_bytes)
        self.nbytes = self._start + sum(map(_aligned, self._sizes))

    def write_into(self, out: Bytes | memoryview | bytearray) -> str:
        """Write the object into `out` (uint8, exactly nbytes) in one pass; return its digest, 32 hex digits."""
        target = np.frombuffer(out, dtype=np.uint8)
        if target.size != self.nbytes or not target.flags.writeable:
            raise ValueError(f"need {self.nbytes} writable bytes, got {target.size}")
        target[: HEADER.size] = 0
        digests = []
        position = self._start
        for chunks, size in zip(self._buffers, self._sizes, strict=True):
            hasher = xxhash.xxh3_128()
            start = position
            for chunk in chunks:
                piece = target[position : position + chunk.size]
                piece[:] = chunk
                hasher.update(piece.data)  # what was written, while it is still in the cache
                position += chunk.size
            digests.append(hasher.digest())
            target[position : start + _aligned(size)] = 0
            position = start + _aligned(size)
        table = self._table(digests)
        target[HEADER.size : HEADER.size + len(table)] = np.frombuffer(table, dtype=np.uint8)
        target[HEADER.size + len(table) : self._start] = 0
        digest = xxhash.xxh3_128_digest(table)
        header = HEADER.pack(MAGIC, FORMAT, 0, self.nbytes, len(table), digest, bytes(16))
        target[len(MAGIC) : HEADER.size] = np.frombuffer(header[len(MAGIC) :], dtype=np.uint8)
        target[: len(MAGIC)] = np.frombuffer(MAGIC, dtype=np.uint8)
        return digest.hex()

    @property
    def digest(self) -> str:
        """The digest `write_into` would return, computed without writing."""
        digests = []
        for chunks in self._buffers:
            hasher = xxhash.xxh3_128()
            for chunk in chunks:
                hasher.update(chunk.data)
            digests.append(hasher.digest())
        return xxhash.xxh3_128_hexdigest(self._table(digests))

    def _table(self, digests: Sequence[bytes]) -> bytes:
        spans = self._spans(digests)
        entries = tuple(_entry(name, column, spans) for name, column in self._columns.items())
        return _table_encoder.encode(Table(self.num_rows, entries))

    def _spans(self, digests: Sequence[bytes]) -> Iterator[Span]:
        offset = 0
        for size, digest in zip(self._sizes, digests, strict=True):
            yield Span(offset, size, digest)
            offset += _aligned(size)


def encode(batch: Mapping[str, Any], value_spec: Mapping[str, ValueSpec] | None = None) -> Encoded:
    """Convert and lay out a batch; nothing is written yet. `columns` states how entries are told apart and stored.

    Raises:
        TypeError, OverflowError, ValueError: a value that cannot be stored; names the column and the row.
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
    columns = {name: analyse(name, value, specs.get(name), num_rows) for name, value in batch.items()}
    return Encoded(columns, num_rows)


def batch_digest(batch: Mapping[str, Any], value_spec: Mapping[str, ValueSpec] | None = None) -> str:
    """Digest of a batch, 32 hex digits: equal for what was put and what was got, whichever types carried it.

    It covers names, their order, dtypes, shapes and values. Raises what `encode` raises.
    """
    return encode(batch, value_spec).digest


def decode(
    buffer: Bytes | bytes | bytearray | memoryview,
    fields: Sequence[str] | None = None,
    rows: Rows = None,
    *,
    digest: str | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Read a batch, or some of its columns and rows, from the bytes of one object.

    Dense and ragged columns, and arrays inside trees, are views of `buffer`, read-only when it is; a dense column is
    copied when `rows` is not a slice. bfloat16 and float8 come back as torch tensors, which are copies. Entries that
    are one value for the whole batch ignore `rows`.

    Args:
        buffer: the object, as bytes or uint8.
        fields: names to return, in this order; None for all in the order they were put.
        rows: a slice, or row numbers in any order, negative ones counting from the end; None for all.
        digest: the expected digest of the object (`BatchRef.digest`).
        verify: check the digest of every buffer that is read.

    Raises:
        IntegrityError: the bytes are not an object of format 1, or not the expected one.
        KeyError: a field that the batch does not have.
        IndexError, TypeError: a row that the batch does not have, or a mask.
        MissingDependency: a column of bfloat16 or float8 where torch is not installed.
    """
    data = np.frombuffer(buffer, dtype=np.uint8)
    table, found, buffers = _open(data)
    if digest is not None and digest != found:
        raise IntegrityError(f"the object's digest is {found}, its ref says {digest}: these are another batch's bytes")
    entries = {entry.name: entry for entry in table.entries}
    if len(entries) != len(table.entries):
        raise IntegrityError("two columns have the same name")
    if isinstance(fields, str):
        raise TypeError(f"fields is a sequence of names: [{fields!r}], not {fields!r}")
    names = list(entries) if fields is None else list(fields)
    for name in names:
        if name not in entries:
            close = difflib.get_close_matches(name, entries, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise KeyError(f"no column {name!r}{hint} The batch has {', '.join(entries)}")
    reader = _Reader(buffers, table.num_rows, _selection(rows, table.num_rows), verify)
    return {name: reader.read(entries[name]) for name in names}


def verify(buffer: Bytes | bytes | bytearray | memoryview, digest: str) -> None:
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


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"column name {name!r} is a {type(name).__name__}; names are strings")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise TypeError(f"column name {name!r} is not valid Unicode: {error}") from None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _buffers_of(column: Column) -> list[list[Bytes]]:
    """The buffers of a column in the order in which `_entry` takes their spans, each as byte pieces."""
    match column:
        case Dense(array):
            return [[as_bytes(array)]]
        case Ragged(rows, _, ndim):
            shapes = np.array([row.shape for row in rows], dtype="<i8").reshape(len(rows), ndim)
            return [[as_bytes(shapes)], [as_bytes(row) for row in rows]]
        case Tree(blobs, leaves, _):
            ends = np.cumsum([len(blob) for blob in blobs], dtype="<i8")
            return [[as_bytes(ends)], [np.frombuffer(b"".join(blobs), dtype=np.uint8)], leaves.chunks]


def _entry(name: str, column: Column, spans: Iterator[Span]) -> Entry:
    match column:
        case Dense(array):
            return DenseEntry(name, name_of(array.dtype), array.shape, next(spans))
        case Ragged(_, dtype, ndim):
            return RaggedEntry(name, name_of(dtype), ndim, next(spans), next(spans))
        case Tree(_, _, per_row):
            return TreeEntry(name, per_row, next(spans), next(spans), next(spans))


def _open(data: Bytes) -> tuple[Table, str, Bytes]:
    """Check the header and the table; return the table, the object's digest, and the bytes after the table."""
    if data.size < HEADER.size:
        raise IntegrityError(f"{data.size} bytes are fewer than a header of {HEADER.size}")
    magic, version, zero, nbytes, table_bytes, digest, zeros = HEADER.unpack_from(data.data)
    if magic != MAGIC:
        raise IntegrityError(f"magic {magic!r} is not {MAGIC!r}: not a batch, or its writer did not finish")
    if version != FORMAT:
        raise IntegrityError(f"the object has format {version}, this package reads format {FORMAT}")
    if zero or any(zeros):
        raise IntegrityError("reserved bytes of the header are not zero")
    start = _aligned(HEADER.size + table_bytes)
    if nbytes != data.size or start > nbytes:
        raise IntegrityError(f"header says {nbytes} bytes with a table of {table_bytes}, there are {data.size}")
    table = data[HEADER.size : HEADER.size + table_bytes]
    if xxhash.xxh3_128_digest(table.data) != digest:
        raise IntegrityError("the table of contents does not match its digest")
    try:
        contents = _table_decoder.decode(table.data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise IntegrityError(f"the table of contents cannot be read: {error}") from error
    if contents.num_rows < 0:
        raise IntegrityError(f"the table of contents says {contents.num_rows} rows")
    return contents, digest.hex(), data[start:]


@dataclass(frozen=True, slots=True)
class _Selection:
    """Chosen rows: `index` selects them from an array, `numbers` lists them."""

    index: slice | Array
    numbers: Sequence[int]


def _selection(rows: Rows, num_rows: int) -> _Selection:
    if rows is None:
        rows = slice(None)
    if isinstance(rows, slice):
        return _Selection(rows, range(num_rows)[rows])
    numbers = []
    for row in rows:
        if isinstance(row, bool | np.bool_):
            raise TypeError("rows are row numbers, not a mask; pass numpy.flatnonzero(mask)")
        number = operator.index(row)
        if not -num_rows <= number < num_rows:
            raise IndexError(f"row {number} of a batch of {num_rows} rows")
        numbers.append(number % num_rows)
    return _Selection(np.array(numbers, dtype=np.intp), numbers)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads entries from the buffers of one object, checking each against the buffers' size."""

    buffers: Bytes
    num_rows: int
    selection: _Selection
    verify: bool

    def read(self, entry: Entry) -> Any:
        try:
            match entry:
                case DenseEntry():
                    return self._dense(entry)
                case RaggedEntry():
                    return self._ragged(entry)
                case TreeEntry():
                    return self._tree(entry)
        except (IntegrityError, MissingDependency) as error:
            raise type(error)(f"column {entry.name!r}: {error}") from None
        except (ValueError, OverflowError) as error:  # numpy refusing an impossible dtype, shape or size
            raise IntegrityError(f"column {entry.name!r}: {error}") from error

    def _span(self, span: Span, nbytes: int | None = None) -> Bytes:
        if span.offset < 0 or span.nbytes < 0 or span.offset + span.nbytes > self.buffers.size:
            raise IntegrityError(f"{span.nbytes} bytes at {span.offset} exceed {self.buffers.size} bytes")
        if nbytes is not None and span.nbytes != nbytes:
            raise IntegrityError(f"a buffer has {span.nbytes} bytes, its shape needs {nbytes}")
        piece = self.buffers[span.offset : span.offset + span.nbytes]
        if self.verify and xxhash.xxh3_128_digest(piece.data) != span.digest:
            raise IntegrityError("the bytes do not match their digest")
        return piece

    def _dense(self, entry: DenseEntry) -> Any:
        dtype = dtype_of(entry.dtype)
        if entry.shape[:1] != (self.num_rows,):
            raise IntegrityError(f"shape {entry.shape} in a batch of {self.num_rows} rows")
        _check_shape(entry.shape)
        data = self._span(entry.data, dtype.itemsize * math.prod(entry.shape))
        return restore(data.view(dtype).reshape(entry.shape)[self.selection.index])

    def _ragged(self, entry: RaggedEntry) -> list[Any]:
        dtype, ndim = dtype_of(entry.dtype), entry.ndim
        if not 0 <= ndim <= _MAX_RANK:
            raise IntegrityError(f"rank {ndim}")
        sizes = self._span(entry.shapes, 8 * self.num_rows * ndim).view("<i8").reshape(self.num_rows, ndim)
        if sizes.size and int(sizes.min()) < 0:
            raise IntegrityError("a row has a negative size")
        if self.num_rows > self.buffers.size and not ndim:  # rank 0 leaves no sizes that would bound the rows
            raise IntegrityError(f"{self.buffers.size} bytes cannot hold {self.num_rows} numbers")
        # Python integers: the product of corrupt sizes must not wrap around.
        shapes = [tuple(shape) for shape in sizes.tolist()]
        ends = list(accumulate(map(math.prod, shapes)))
        data = self._span(entry.data, dtype.itemsize * (ends[-1] if ends else 0)).view(dtype)
        starts = [0, *ends]
        return [restore(data[starts[row] : ends[row]].reshape(shapes[row])) for row in self.selection.numbers]

    def _tree(self, entry: TreeEntry) -> Any:
        count = self.num_rows if entry.per_row else 1
        ends = self._span(entry.ends, 8 * count).view("<i8").tolist()
        blob = self._span(entry.blob)
        if any(end < start for start, end in zip([0, *ends], [*ends, blob.size], strict=True)):
            raise IntegrityError("packed values overlap or exceed their buffer")
        read, starts = tree_reader(self._span(entry.leaves)), [0, *ends]
        if not entry.per_row:
            return read(blob)
        return [read(blob[starts[row] : ends[row]]) for row in self.selection.numbers]


def _check_shape(shape: tuple[int, ...]) -> None:
    if min(shape, default=0) < 0 or len(shape) > _MAX_RANK:
        raise IntegrityError(f"shape {shape} is impossible")
