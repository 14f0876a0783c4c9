"""A batch that was read as an Arrow table, for tools that speak Arrow. Needs pyarrow."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mooncake_store.arrays import is_array
from mooncake_store.errors import MissingDependency


def to_table(batch: Mapping[str, Any], num_rows: int) -> Any:
    """Return a pyarrow.Table of the columns that have one value per sample.

    Rows of numbers become large lists, of fixed-size lists where they have more dimensions; they are copied together.
    What describes the whole batch becomes the schema's metadata, as JSON.

    Raises:
        MissingDependency: pyarrow is not installed.
        TypeError: a column that Arrow cannot hold; names it. `fields` of `ObjectStore.get` leaves columns out.
    """
    try:
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingDependency(f"to_arrow needs pyarrow: pip install pyarrow ({error})") from error
    columns, metadata = {}, {}
    for name, value in batch.items():
        try:
            if isinstance(value, list | np.ndarray) and len(value) == num_rows:
                columns[name] = _column(arrow, value)
            else:
                metadata[name] = json.dumps(value)
        except (TypeError, ValueError, arrow.ArrowException) as error:
            raise TypeError(f"column {name!r} cannot be an Arrow column: {error}") from error
    return arrow.table(columns, metadata=metadata or None)


def _column(arrow: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _items(arrow, value)
    if not value or not all(map(is_array, value)):
        return arrow.array(value)
    rows = [np.asarray(row) for row in value]
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return arrow.LargeListArray.from_arrays(
        arrow.array(np.concatenate(([0], ends))), _items(arrow, np.concatenate(rows))
    )


def _items(arrow: Any, array: Any) -> Any:
    """An array of shape [n, ...] as n values, nested in fixed-size lists."""
    values = arrow.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        values = arrow.FixedSizeListArray.from_arrays(values, size)
    return values
