"""What a column of a batch was made of, so that a reader gets the types that Ray's store would give it.

The transport gives numbers back as numpy arrays, whatever carried them in. miles's trainer tells types apart: its
logger takes lists and tensors and no arrays, it calls `.to()` on what was a tensor, and joins lists with +.
"""

from collections.abc import Mapping
from typing import Any

import torch

from miles_plugin.in_miles.names import LOG_PROBS, MADE_TENSORS
from mooncake_store import BATCH_LEVEL, ValueSpec
from mooncake_store.arrays import is_array
from mooncake_store.columns import analyse, num_rows_of

LISTS, TENSORS = "lists", "tensors"
AS_IT_WENT_IN = ValueSpec("msgpack_ragged")


def form_of(name: str, column: Any) -> str | None:
    """LISTS for numbers in lists, TENSORS for tensors, alone or inside of other values, None for all else."""
    if name in MADE_TENSORS:
        return None  # the trainer makes tensors of them, of arrays quicker than of lists
    if _has_tensor(column):
        return TENSORS
    return LISTS if isinstance(column, list) and not any(map(is_array, column)) else None


def restored(name: str, column: Any, form: str | None) -> Any:
    """A column that was read, in its form. Tensors are copies: writing to one is nobody else's affair."""
    if name in LOG_PROBS and isinstance(column, list):
        return [torch.tensor(row) if is_array(row) else row for row in column]
    if form == TENSORS:
        return _tensors(column)
    if form == LISTS:
        return _lists(column)
    return column


def specs_for(batch: Mapping[str, Any]) -> dict[str, ValueSpec]:
    """How to store the columns whose numbers cannot be stored as arrays: as they are, slower.

    miles's own specs say which columns are arrays of numbers; here the values say so, and a row of None, or a float
    among ints, is no reason to end a job that Ray's store would go on with.
    """
    num_rows = num_rows_of(batch)
    odd = {}
    for name, column in batch.items():
        try:
            analyse(name, column, None, num_rows)
        except (TypeError, OverflowError, ValueError):
            odd[name] = AS_IT_WENT_IN
    return odd


def is_read_by_rows(name: str, column: Any, num_rows: int) -> bool:
    """Whether it is a column of rows, texts or mappings: small numbers cost less to read than to leave out."""
    if name in BATCH_LEVEL or not isinstance(column, list) or len(column) != num_rows:
        return False
    return any(isinstance(item, list | tuple | dict | str) or is_array(item) for item in column)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value)) if value and not isinstance(value[0], int | float | str) else False
    return any(map(_has_tensor, value.values())) if isinstance(value, dict) else False


def _tensors(value: Any) -> Any:
    if is_array(value):
        return torch.tensor(value) if not isinstance(value, torch.Tensor) else value
    if isinstance(value, list | tuple):
        return type(value)(map(_tensors, value))
    return {key: _tensors(item) for key, item in value.items()} if isinstance(value, dict) else value


def _lists(value: Any) -> Any:
    if is_array(value):
        return value.tolist()
    if isinstance(value, list) and value and all(map(is_array, value)):
        return [row.tolist() for row in value]
    return value
