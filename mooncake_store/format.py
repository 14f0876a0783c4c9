"""Format 1 of a stored batch, specified in docs/format.md. No pickle: what is read is checked before it is used.

    header      64 bytes, little-endian:
                magic 8s | format u32 | zero u32 | object bytes u64 | table bytes u64 | head bytes u64 |
                table digest 16s | zeros 8s
    table       msgpack of `Table`
    indexes     one per column, on multiples of 64: where its rows end, and the digest of every block of its bytes
    data        from `head bytes` on: the columns' buffers, on multiples of 64, zeros between them

The header's digest is that of the table, the table holds the digest of every index, and an index those of the blocks.
So the one digest covers the object, and a reader of some rows and columns can check exactly what it read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from mooncake_store.arrays import Bytes
from mooncake_store.errors import IntegrityError

FORMAT = 1
MAGIC = b"MCBATCH\x01"
HEADER = struct.Struct("<8sIIQQQ16s8s")
ALIGNMENT = 64
BLOCK_BYTES = 4096  # a block has at least so many, where its column has: 8 bytes of digest for each
MAX_RANK = 64  # numpy's own limit since 2.0
assert HEADER.size == ALIGNMENT

Numbers = npt.NDArray[np.int64]


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A column's index: byte offset among the indexes, length in bytes, xxh3-128 of its bytes."""

    offset: int
    nbytes: int
    digest: bytes


class Buffer(msgspec.Struct, array_like=True, frozen=True):
    """Rows back to back in the data.

    Attributes:
        offset, nbytes: of its bytes, from the start of the data.
        rows: how many there are.
        stride: bytes of each row, -1 where they differ: then the index says where each ends.
        block: rows in one block; for a column with a slice axis the items of a row in one block.
    """

    offset: int
    nbytes: int
    rows: int
    stride: int
    block: int


class DenseEntry(msgspec.Struct, array_like=True, frozen=True, tag="dense"):
    """A per-sample column that is one array, [num_rows, *item]; its numbers are stored as `stored`."""

    name: str
    dtype: str
    stored: str
    item: tuple[int, ...]
    index: Span
    data: Buffer


class RaggedEntry(msgspec.Struct, array_like=True, frozen=True, tag="ragged"):
    """Rows of one dtype and rank.

    Attributes:
        item: the shape of every row but its first dimension, as it is stored; None where rows differ in more than
            that: then the index says the shape of each (int64 [num_rows, ndim]).
        axis: which is stored first, so that slices of it are contiguous; -1 for rows that are not sliced.
    """

    name: str
    dtype: str
    stored: str
    ndim: int
    item: tuple[int, ...] | None
    axis: int
    index: Span
    data: Buffer


class TreeEntry(msgspec.Struct, array_like=True, frozen=True, tag="tree"):
    """Packed values: one per sample, or a single one for the whole batch.

    Attributes:
        per_row: then `blob` is one msgpack array of them all.
        shared: whether equal rows are stored once: the index says which is whose (uint32 [num_rows]).
        blob: the packed values.
        leaves: the arrays among them.
    """

    name: str
    per_row: bool
    shared: bool
    index: Span
    blob: Buffer
    leaves: Buffer


Entry = DenseEntry | RaggedEntry | TreeEntry


class Table(msgspec.Struct, array_like=True, frozen=True):
    """Table of contents.

    Attributes:
        num_rows: samples.
        partitions: rows of each partition; the rows lie in this order. Empty without partitions.
        order: index of uint32 [num_rows], which row of the batch lies where; empty without partitions.
        entries: the columns in the order they were put.
    """

    num_rows: int
    partitions: tuple[int, ...]
    order: Span
    entries: tuple[Entry, ...]


class Head(NamedTuple):
    """What the header says: bytes of the table and of everything before the data, and the object's digest."""

    table_bytes: int
    nbytes: int
    digest: str


_table_encoder = msgspec.msgpack.Encoder()
_table_decoder = msgspec.msgpack.Decoder(Table)
encode_table = _table_encoder.encode


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack_header(object_bytes: int, table: bytes, head_bytes: int) -> bytes:
    """The header of an object whose table is `table`."""
    digest = xxhash.xxh3_128_digest(table)
    return HEADER.pack(MAGIC, FORMAT, 0, object_bytes, len(table), head_bytes, digest, bytes(8))


def read_header(data: Bytes, nbytes: int, digest: str | None) -> Head:
    """Read the header of an object of `nbytes`.

    Args:
        data: uint8, starting with the object.
        digest: that the object should have; None for any.

    Raises:
        IntegrityError: not an object of format 1, or another one.
    """
    if data.size < HEADER.size:
        raise IntegrityError(f"{data.size} bytes are fewer than a header of {HEADER.size}")
    magic, version, zero, object_bytes, table_bytes, head_bytes, root, zeros = HEADER.unpack_from(data.data)
    if magic != MAGIC:
        raise IntegrityError(f"magic {magic!r} is not {MAGIC!r}: not a batch, or its writer did not finish")
    if version != FORMAT:
        raise IntegrityError(f"the object has format {version}, this package reads format {FORMAT}")
    if zero or any(zeros):
        raise IntegrityError("reserved bytes of the header are not zero")
    if object_bytes != nbytes or not aligned(HEADER.size + table_bytes) <= head_bytes <= nbytes:
        raise IntegrityError(
            f"header says {object_bytes} bytes with a table of {table_bytes} and a head of {head_bytes}, "
            f"there are {nbytes}"
        )
    if digest is not None and digest != root.hex():
        raise IntegrityError(
            f"the object's digest is {root.hex()}, its ref says {digest}: these are another batch's bytes"
        )
    return Head(table_bytes, head_bytes, root.hex())


def read_table(data: Bytes, head: Head) -> Table:
    """Read the table of contents from the bytes of the head; IntegrityError when it is not what the header says."""
    table = data[HEADER.size : HEADER.size + head.table_bytes]
    if xxhash.xxh3_128_hexdigest(table.data) != head.digest:
        raise IntegrityError("the table of contents does not match its digest")
    try:
        contents = _table_decoder.decode(table.data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise IntegrityError(f"the table of contents cannot be read: {error}") from error
    if contents.num_rows < 0 or (contents.partitions and sum(contents.partitions) != contents.num_rows):
        raise IntegrityError(
            f"the table of contents says {contents.num_rows} rows in partitions of {contents.partitions}"
        )
    if len({entry.name for entry in contents.entries}) != len(contents.entries):
        raise IntegrityError("two columns have the same name")
    return contents


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a buffer, each with a digest.

    Attributes:
        ends: int64 [blocks], where each ends in the buffer; it starts where the one before ends.
        first: int64 [rows + 1], for a sliced column the first block of each row; None where blocks are whole rows.
        size: rows in a block, or items.
    """

    ends: Numbers
    first: Numbers | None
    size: int


def blocks_of_rows(ends: Numbers, rows: int) -> Blocks:
    """Blocks of `rows` rows each."""
    if rows >= ends.size:
        return Blocks(ends[-1:], None, rows)
    last = np.minimum(np.arange(rows, ends.size + rows, rows), ends.size) - 1
    return Blocks(ends[last], None, rows)


def blocks_of_items(ends: Numbers, lengths: Numbers, items: int) -> Blocks:
    """Blocks of `items` of a row's `lengths` items (int64 [rows]); no block reaches from one row into the next."""
    counts = -(-lengths // items)
    first = np.concatenate(([0], np.cumsum(counts)))
    number = np.arange(first[-1]) - np.repeat(first[:-1], counts)
    starts = np.concatenate(([0], ends))[: ends.size]
    item_bytes = (ends - starts) // np.maximum(lengths, 1)
    within = np.minimum((number + 1) * items, np.repeat(lengths, counts))
    return Blocks(np.repeat(starts, counts) + within * np.repeat(item_bytes, counts), first, items)


def block_size(nbytes: int, things: int) -> int:
    """How many of `things` that take `nbytes` together make a block of BLOCK_BYTES or more."""
    return max(1, min(things, -(-BLOCK_BYTES * things // nbytes))) if nbytes else max(1, things)


def digests(data: memoryview, ends: Numbers, start: int = 0) -> list[int]:
    """xxh3-64 of every block of `data`, which begins `start` bytes into the buffer whose blocks end at `ends`."""
    to = (ends - start).tolist()
    return list(map(xxhash.xxh3_64_intdigest, map(data.__getitem__, map(slice, [0, *to[:-1]], to))))


def as_numbers(data: Bytes, dtype: str, count: int, what: str) -> Numbers:
    """Little-endian integers of an index as int64 [count]."""
    if data.size != count * np.dtype(dtype).itemsize:
        raise IntegrityError(f"{what}: {data.size} bytes are not {count} numbers")
    return data.view(dtype).astype(np.int64)
