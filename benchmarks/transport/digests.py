"""Whether what was got is what was put: digests of each column, computed apart from every transport's own.

A peer may return a column as other types than it was given. `make_usable` gives the ragged columns the form that a
trainer needs and belongs to the time of a get; `digests_of` does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from benchmarks.transport.workload import NUMBERS, RAGGED


def make_usable(batch: dict[str, Any]) -> None:
    """Replace rows of ragged columns that are not numpy arrays by ones that are. Arrays are not touched.

    Tensors become views. Lists are converted to the column's dtype.
    """
    for name in RAGGED.keys() & batch.keys():
        rows = batch[name]
        if not all(issubclass(kind, np.ndarray) for kind in set(map(type, rows))):
            batch[name] = [_usable(row, RAGGED[name]) for row in rows]


def _usable(row: Any, dtype: str) -> Any:
    if isinstance(row, np.ndarray):
        return row
    return row.numpy() if hasattr(row, "numpy") else np.asarray(row, dtype)


def digests_of(batch: Mapping[str, Any]) -> dict[str, str]:
    """By column the xxh3-128 of its values: of ragged columns with dtype and shape of every row, in their order."""
    return {name: _digest(name, values) for name, values in batch.items()}


def differing(expected: Mapping[str, str], batch: Mapping[str, Any]) -> list[str]:
    """Columns of `batch` that are wrong, missing or too many, sorted."""
    found = digests_of(batch)
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def _digest(name: str, values: Any) -> str:
    digest = xxhash.xxh3_128()
    if name in RAGGED:
        for row in values:
            digest.update(f"{row.dtype.str}{row.shape}".encode())
            digest.update(np.ascontiguousarray(row).data.cast("B"))
    elif name in NUMBERS:
        digest.update(_exactly(values, NUMBERS[name]))
    elif isinstance(values, np.ndarray) and values.dtype == np.uint8:  # bytes that no layout has been given
        digest.update(values.data)
    else:
        digest.update(json.dumps(_plain(values), sort_keys=True).encode())
    return digest.hexdigest()


def _exactly(values: Sequence[Any], dtype: str) -> bytes:
    """The bytes of one number per sample in `dtype`; none at all when that would change one."""
    found = np.asarray(values)
    converted = found.astype(dtype)
    return converted.tobytes() if np.array_equal(converted, found) else b""


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values
