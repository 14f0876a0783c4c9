"""A finished group as the columns of a stored batch, and back: every field of every sample comes back equal.

One column per field of `Sample`, whatever fields it has, with one row per sample. Rows of numbers go as arrays, 64 bits
wide, so that no number changes; the rest as it is. The columns' names are not those of a rollout batch, which the store
would make float32 and int32 of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from miles_plugin.fully_async.groups import Group, iter_samples
from miles_plugin.rollout.sample import Sample
from mooncake_store import ValueSpec
from mooncake_store.errors import IntegrityError

_PREFIX, _KINDS, _SHAPE = "sample/", "kinds", "shape"
_INTS, _FLOATS, _ARRAYS, _VALUES = "ints", "floats", "arrays", "values"
_ROWS = ValueSpec("typed_ragged")
_AS_IT_IS = ValueSpec("msgpack_ragged")


def to_columns(group: Group) -> tuple[dict[str, Any], dict[str, ValueSpec]]:
    """The columns of a group, and how each is to be stored.

    Attributes that were set on a sample and are not its fields are left out.

    Raises:
        TypeError: an item is not this package's Sample.
    """
    samples = list(iter_samples(group))
    for sample in samples:
        if type(sample) is not Sample:
            raise TypeError(f"a {type(sample).__module__}.{type(sample).__qualname__} has no columns; allowed: Sample")
    # A tuple, so that it is one value and no column.
    columns: dict[str, Any] = {_SHAPE: tuple(len(item) if isinstance(item, Sequence) else -1 for item in group)}
    kinds, specs = {}, {}
    for field in fields(Sample):
        values = [getattr(sample, field.name) for sample in samples]
        if field.name == "status":
            values = [value.value for value in values]
        name = _PREFIX + field.name
        kinds[field.name], columns[name], specs[name] = _column(values)
    return {**columns, _KINDS: kinds}, specs


def from_columns(columns: Mapping[str, Any]) -> list[Sample | Sequence[Sample]]:
    """What `to_columns` was given, none of it in the columns' memory.

    Raises:
        IntegrityError: they are not those of a group with the fields of this package's Sample.
    """
    try:
        by_field = {
            field.name: [_restored(row, columns[_KINDS][field.name]) for row in columns[_PREFIX + field.name]]
            for field in fields(Sample)
        }
        by_field["status"] = list(map(Sample.Status, by_field["status"]))
        names = list(by_field)
        samples = [Sample(**dict(zip(names, row, strict=True))) for row in zip(*by_field.values(), strict=True)]
        return _nested(samples, columns[_SHAPE])
    except (KeyError, ValueError, TypeError, StopIteration) as error:
        raise IntegrityError(
            f"not a group of samples: {error!r}; it was stored by another version of this package, or is no group"
        ) from error


def _column(values: list[Any]) -> tuple[str, list[Any], ValueSpec]:
    """The kind of a column, its rows and how to store them."""
    if values and all(type(value) is list for value in values):
        for kind, number, dtype in ((_INTS, int, np.int64), (_FLOATS, float, np.float64)):
            if all(set(map(type, value)) <= {number} for value in values):
                try:
                    return kind, [np.array(value, dtype) for value in values], _ROWS
                except OverflowError:  # above 64 bits
                    break
    are_arrays = values and all(isinstance(value, np.ndarray) for value in values)
    if are_arrays and len({(value.dtype, value.ndim) for value in values}) == 1 and values[0].ndim:
        return _ARRAYS, values, _ROWS
    return _VALUES, values, _AS_IT_IS


def _restored(row: Any, kind: str) -> Any:
    return row.tolist() if kind in (_INTS, _FLOATS) else _own(row)


def _own(value: Any) -> Any:
    """The same without a view of memory that is not the caller's."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple):
        return type(value)(map(_own, value))
    return {key: _own(item) for key, item in value.items()} if isinstance(value, dict) else value


def _nested(samples: list[Sample], shape: Sequence[int]) -> list[Sample | Sequence[Sample]]:
    left = iter(samples)
    group: list[Sample | Sequence[Sample]] = [
        next(left) if size < 0 else [next(left) for _ in range(size)] for size in shape
    ]
    if any(True for _ in left):
        raise ValueError(f"{len(samples)} samples do not make the shape {tuple(shape)}")
    return group
