"""Arrow's IPC stream as the layout of a batch, against ours: into memory, and out of it until every row is an array.

    python -m benchmarks.arrow_layout [--repeats 9]

Both write into memory that is warm, and neither moves anything between processes. Ours computes its digests; a stream
has none. docs/format.md has what this printed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as arrow

from benchmarks.transport.workload import LAYERS, ROUTED, TOP_K
from benchmarks.turns import batches_to_measure, milliseconds, seconds_in_turns
from mooncake_store.arrays import Bytes
from mooncake_store.decode import decode
from mooncake_store.encode import encode

SPARE = 1 << 20  # bytes that a stream takes beside the payload


def main() -> None:
    for variant, batch, repeats in batches_to_measure(__doc__):
        compare(variant, batch, repeats)


def compare(variant: str, batch: dict[str, Any], repeats: int) -> None:
    """Measure both, turn by turn, and print medians and their ratio."""
    nbytes = encode(batch).nbytes
    ours, theirs = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes + SPARE, dtype=np.uint8)

    def our_put() -> None:
        encode(batch).write_into(ours)

    def our_get() -> None:
        decode(ours.data.toreadonly(), verify=False)

    def their_get() -> None:
        read(theirs)

    steps: dict[str, Callable[[], None]] = {
        "our put": our_put,
        "their put": partial(write, batch, theirs),
        "our get": our_get,
        "their get": their_get,
    }
    found = seconds_in_turns(repeats, steps)
    got = read(theirs)
    assert all(map(np.array_equal, got["tokens"], batch["tokens"]))
    print(f"{variant}, {nbytes / 1e6:.0f} MB: {milliseconds(found)}")
    for what in ("put", "get"):
        print(f"  {what}: Arrow takes {found[f'their {what}'].median / found[f'our {what}'].median:.2f} times as long")


def write(batch: dict[str, Any], out: Bytes) -> None:
    """Into a stream; values that Arrow has no type for go as msgpack, as ours do."""
    columns = {name: _column(value) for name, value in batch.items() if isinstance(value, list)}
    table = arrow.table(columns)
    sink = arrow.FixedSizeBufferWriter(arrow.py_buffer(out))
    with arrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


def read(stored: Bytes) -> dict[str, Any]:
    """Views of the stream, row by row, and Python values of the rest."""
    table = arrow.ipc.open_stream(arrow.py_buffer(stored)).read_all()
    return {name: _values(name, table.column(name).chunk(0)) for name in table.column_names}


def _column(values: list[Any]) -> Any:
    if isinstance(values[0], np.ndarray):
        ends = np.cumsum([len(row) for row in values], dtype=np.int64)
        flat = np.concatenate(values)
        items = arrow.array(flat.reshape(-1))
        if flat.ndim > 1:
            items = arrow.FixedSizeListArray.from_arrays(items, LAYERS * TOP_K)
        return arrow.LargeListArray.from_arrays(arrow.array(np.concatenate(([0], ends))), items)
    if isinstance(values[0], dict | list):
        return arrow.array(list(map(msgspec.msgpack.encode, values)), arrow.large_binary())
    return arrow.array(values)


def _values(name: str, column: Any) -> Any:
    kind = column.type
    if arrow.types.is_large_list(kind):
        ends = np.asarray(column.offsets).tolist()
        items = column.values
        flat = np.asarray(items.values).reshape(-1, LAYERS, TOP_K) if name == ROUTED else np.asarray(items)
        return list(map(flat.__getitem__, map(slice, ends[:-1], ends[1:])))
    if arrow.types.is_large_binary(kind):
        return list(map(msgspec.msgpack.decode, column.to_pylist()))
    return column.to_pylist() if arrow.types.is_string(kind) else np.asarray(column)


if __name__ == "__main__":
    main()
