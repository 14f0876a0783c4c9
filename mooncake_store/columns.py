"""What each entry of a batch is: a dense array, ragged rows, or a tree; and which entries have one item per sample.

Rules, in this order:
  * `num_rows` is the length of `tokens` when it is a list or an array. Otherwise it is the most common length among
    the lists and arrays (ties: the first seen), 0 without any.
  * An entry is a per-sample column when it is a list or an array of num_rows items and is not named in BATCH_LEVEL.
    Everything else (numbers, text, dicts, tuples, lists of another length) is one value, never sliced by rows.
  * How a column is stored follows its ValueSpec, else DEFAULT_SPECS, else its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from mooncake_store.arrays import (
    ALLOWED,
    DTYPES,
    Array,
    cast,
    dtype_of,
    infer,
    is_array,
    is_number,
    name_of,
    narrowest,
    normalise,
    pack,
)
from mooncake_store.tensors import is_tensor_type, plain_tensors
from mooncake_store.tree import TreeWriter, pack_texts

_Result = TypeVar("_Result")
_DTYPE, _RANK = attrgetter("dtype"), attrgetter("ndim")
NARROW_BYTES, NARROW_ROW_BYTES = 64 << 10, 256  # of a column and of a row: below, looking costs more than it saves

CODECS = ("auto", "typed_ragged", "ndarray", "ragged_tensor_dict", "msgpack_ragged")


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """How to store one column.

    Attributes:
        codec: "auto" decides from the values; "typed_ragged" stores rows of numbers; "ndarray" one rectangular array;
            "ragged_tensor_dict" dicts of arrays, or None; "msgpack_ragged" anything, as it went in.
        dtype: name of the dtype that the numbers get, or None for that of the values; numpy and torch dtypes are
            understood. Of dicts and other values it converts the arrays inside; "msgpack_ragged" converts nothing.

        slice_axis: of a row; readers may take slices along it (`ObjectStore.get`), so it is stored first. Any but 0 is
            moved when it is put, which costs more than a copy, and rows come back as views that are not contiguous.

    Raises:
        ValueError: an unknown codec, a dtype that cannot be stored, or one that the codec would not use.
    """

    codec: str = "auto"
    dtype: Any = None
    slice_axis: int | None = None

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r} is unknown; allowed: {', '.join(CODECS)}")
        if self.slice_axis is not None:
            if isinstance(self.slice_axis, bool) or not isinstance(self.slice_axis, int) or self.slice_axis < 0:
                raise ValueError(f"slice_axis = {self.slice_axis!r}; allowed: an axis of a row, counted from 0")
            if self.codec not in ("auto", "typed_ragged"):
                raise ValueError(f"slice_axis with codec {self.codec!r}; rows of numbers only have one: 'typed_ragged'")
        if self.dtype is None:
            return
        if self.codec == "msgpack_ragged":
            raise ValueError(f"dtype {self.dtype!r} with codec 'msgpack_ragged', which converts nothing; leave it out")
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))


def _dtype_name(asked: Any) -> str:
    name = str(asked).removeprefix("torch.")
    for read in (lambda: dtype_of(name), lambda: np.dtype(asked)):
        with suppress(TypeError, ValueError):
            return name_of(read())
    raise ValueError(f"dtype {asked!r} cannot be stored; {ALLOWED}")


_TOKENS = ValueSpec("typed_ragged", "int32")
_PROBABILITIES = ValueSpec("typed_ragged", "float32")

# The columns of a rollout batch as miles names them; an explicit ValueSpec wins.
DEFAULT_SPECS: Mapping[str, ValueSpec] = {
    "tokens": _TOKENS,
    "loss_masks": _TOKENS,
    "rollout_routed_experts": _TOKENS,
    "rollout_indexer_topk": _TOKENS,
    "rollout_log_probs": _PROBABILITIES,
    "teacher_log_probs": _PROBABILITIES,
    "opd_reverse_kl": _PROBABILITIES,
}

# Describe the batch as a whole, even when their length happens to equal the number of samples.
BATCH_LEVEL = frozenset(
    {"dynamic_global_batch_size", "num_microbatches", "micro_batch_indices", "num_rollouts", "round_number"}
)


@dataclass(frozen=True, slots=True)
class Dense:
    """A per-sample column that is one array, [num_rows, ...]."""

    array: Array
    stored: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Ragged:
    """A per-sample column of arrays that share dtype and rank but not shape.

    Attributes:
        rows: arrays of one dtype, which need be neither contiguous nor of the dtype they are stored in.
        dtype: what readers get.
        stored: what is stored, to which every number converts.
        axis: along which readers may take slices, -1 for none.
    """

    rows: list[Array]
    dtype: np.dtype[Any]
    ndim: int
    stored: np.dtype[Any]
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Tree:
    """Packed values: one per sample, or a single one for the whole batch.

    Attributes:
        shares: where equal values are packed once, which of them each row has.
    """

    blobs: list[bytes]
    leaves: TreeWriter
    per_row: bool
    shares: list[int] | None = None


Column = Dense | Ragged | Tree


def num_rows_of(batch: Mapping[str, Any]) -> int:
    """Number of samples of `batch`, by the rule in the module's docstring."""
    lengths = [len(value) for name, value in batch.items() if name not in BATCH_LEVEL and _is_sequence(value)]
    tokens: Any = batch.get("tokens")
    if _is_sequence(tokens):
        return len(tokens)
    return Counter(lengths).most_common(1)[0][0] if lengths else 0


def in_order(name: str, value: Any, num_rows: int, order: Sequence[int]) -> Any:
    """The entry with its rows in this order; one value for the whole batch as it is."""
    value = normalise(value)
    if not _is_per_row(name, value, num_rows):
        return value
    return value[order] if isinstance(value, np.ndarray) else [value[row] for row in order]


def analyse(name: str, value: Any, spec: ValueSpec | None, num_rows: int) -> Column:
    """Decide how to store one entry, converting its values.

    Args:
        name: the entry's key, used in messages.
        value: a list, array, tensor, or any single value.
        spec: what the caller asked for; None looks in DEFAULT_SPECS.
        num_rows: the number of samples of the batch.

    Raises:
        TypeError: a value that cannot be stored, or that contradicts its spec; names the column and the row.
        OverflowError: a number that its dtype cannot hold; names the column and the row.
        ValueError: a column that must have one item per sample has another length.
    """
    asked = spec is not None and (spec.codec != "auto" or spec.slice_axis is not None)
    spec = spec or DEFAULT_SPECS.get(name) or ValueSpec()
    dtype = None if spec.dtype is None else dtype_of(spec.dtype)
    with _naming(name):
        value = normalise(value)
    if not _is_per_row(name, value, num_rows):
        if spec.codec == "typed_ragged" and _is_sequence(value):
            raise ValueError(f"column {name!r} has {len(value)} rows, the batch has {num_rows}")
        if spec.slice_axis is not None:
            raise ValueError(f"column {name!r} has a slice_axis, but is not one row for each of {num_rows} samples")
        return _tree(name, [value], dtype, per_row=False)

    if spec.codec in ("msgpack_ragged", "ragged_tensor_dict"):
        return _tree(name, list(value), dtype, per_row=True)
    if spec.slice_axis is not None:
        return _sliceable(name, value, dtype, spec.slice_axis)
    if isinstance(value, np.ndarray):
        return _dense(value if dtype is None else _cast_rows(name, value, dtype))
    if spec.codec == "ndarray":
        return _stacked(name, value, dtype)
    if spec.codec == "typed_ragged" and (asked or all(map(_is_row_type, set(map(type, value))))):
        return _ragged(name, value, dtype)
    return _inferred(name, value, dtype)


def _is_per_row(name: str, value: Any, num_rows: int) -> bool:
    return name not in BATCH_LEVEL and _is_sequence(value) and len(value) == num_rows


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list) or (is_array(value) and value.ndim > 0)


def _is_row_type(kind: type) -> bool:
    return issubclass(kind, list | tuple | np.ndarray) or is_tensor_type(kind)


def _inferred(name: str, values: list[Any], dtype: np.dtype[Any] | None) -> Column:
    numbers = _numbers(name, values, dtype)
    if numbers is not None:
        return _dense(numbers)
    alike = _alike(values)
    rows = _typed_rows(name, values) if alike is None else alike.rows
    if rows is None:
        return _tree(name, values, dtype, per_row=True)
    if dtype is not None:
        rows = [_cast_row(name, index, row, dtype) for index, row in enumerate(rows)]
    elif alike is not None:
        return alike
    return Ragged(rows, rows[0].dtype, rows[0].ndim, rows[0].dtype)


def _dense(array: Array) -> Dense:
    return Dense(array, array.dtype)


def _alike(values: list[Any]) -> Ragged | None:
    """Arrays or tensors of one dtype and rank, without a look at each of them; None for anything else."""
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    rows = values if kind is np.ndarray else plain_tensors(values) if kind is not None else None
    if rows is None:
        return None
    dtypes, ranks = set(map(_DTYPE, rows)), set(map(_RANK, rows))
    if len(dtypes) > 1 or len(ranks) > 1:
        return None
    given = dtypes.pop()
    if given.name not in DTYPES:
        return None
    dtype = dtype_of(given.name)
    return Ragged(rows, dtype, ranks.pop(), dtype)


def _sliceable(name: str, value: list[Any] | Array, dtype: np.dtype[Any] | None, axis: int) -> Ragged:
    if not len(value):
        given = (value.dtype, value.ndim - 1) if isinstance(value, np.ndarray) else (np.dtype("<f8"), axis + 1)
        column: Column = Ragged([], dtype or given[0], given[1], dtype or given[0])
    else:
        column = _ragged(name, list(value), dtype)
    assert isinstance(column, Ragged)
    if axis >= column.ndim:
        raise ValueError(f"column {name!r} has rows of rank {column.ndim}, so no slice_axis {axis}")
    return replace(column, axis=axis)


def _numbers(name: str, values: list[Any], dtype: np.dtype[Any] | None) -> Array | None:
    """The array that a list of one number per row stands for; None when it is something else."""
    if dtype is None:
        return _naming_row(name, values, infer)
    if values and all(map(is_number, values)):
        return _naming_row(name, values, lambda some: pack(some, dtype))
    array = infer(values)
    return None if array is None else _cast_rows(name, array, dtype)


def _cast_rows(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    return _naming_row(name, array, lambda some: cast(some, dtype))


def _naming_row(name: str, rows: Any, convert: Callable[[Any], _Result]) -> _Result:
    """Convert all rows together; when that fails, one after the other, so that the error names the row."""
    try:
        return convert(rows)
    except (TypeError, OverflowError):
        for index in range(len(rows)):
            with _naming(name, index):
                convert(rows[index : index + 1])
        raise


def _typed_rows(name: str, values: list[Any]) -> list[Array] | None:
    """The rows as arrays of one dtype and rank, or None when they are not all numeric and alike."""
    rows: list[Array] = []
    for index, value in enumerate(values):
        with _naming(name, index):
            row = normalise(value)
            if isinstance(row, list):
                row = infer(row) if row else np.empty(0, dtype=bool)
        if not isinstance(row, np.ndarray):
            return None
        rows.append(row)
    # An empty list says nothing about its dtype: it takes the others', and without others stays a list.
    blank = [isinstance(value, list) and not value for value in values]
    known = {(row.dtype, row.ndim) for row, empty in zip(rows, blank, strict=True) if not empty}
    if len(known) != 1:
        return None
    dtype, ndim = known.pop()
    if any(blank) and ndim != 1:
        return None
    return [np.empty(0, dtype=dtype) if empty else row for row, empty in zip(rows, blank, strict=True)]


def _ragged(name: str, values: list[Any], dtype: np.dtype[Any] | None) -> Column:
    alike = _alike(values)
    if alike is not None and dtype in (None, alike.dtype):
        return alike
    if dtype is None:
        column = _inferred(name, values, None)
        if not isinstance(column, Ragged) and values:
            raise TypeError(f"column {name!r} is not rows of numbers of one dtype and rank, as typed_ragged asks")
        return column
    rows = [_cast_row(name, index, value, dtype) for index, value in enumerate(values)]
    ndim = max((row.ndim for row in rows), default=1)
    trailing = next((row.shape[1:] for row in rows if row.ndim == ndim), ())
    for index, row in enumerate(rows):
        if row.ndim != ndim and row.shape == (0,):  # [] among nested lists: no item, but the same item shape
            rows[index] = row = row.reshape(0, *trailing)
        if row.ndim != ndim:
            raise TypeError(f"column {name!r}, row {index}: rank {row.ndim}, while other rows have rank {ndim}")
    return Ragged(rows, dtype, ndim, dtype)


def _cast_row(name: str, index: int, value: Any, dtype: np.dtype[Any]) -> Array:
    with _naming(name, index):
        row = normalise(value)
        if isinstance(row, np.ndarray):
            return cast(row, dtype)
        if not isinstance(row, list | tuple):
            raise TypeError(f"a {type(row).__name__} is not a row of numbers")
        if row and (isinstance(row[0], list | tuple) or (is_array(row[0]) and row[0].ndim)):
            return cast(_rectangle(row), dtype)
        return pack(row, dtype)


def _stacked(name: str, values: list[Any], dtype: np.dtype[Any] | None) -> Dense:
    array = _numbers(name, values, dtype)
    if array is None:
        rows = [_rectangle_of(name, index, value, dtype) for index, value in enumerate(values)]
        alike = {(row.dtype, row.shape) for row in rows}
        if len(alike) > 1:
            found = ", ".join(f"{row_dtype}{list(shape)}" for row_dtype, shape in sorted(alike, key=str)[:4])
            raise TypeError(f"column {name!r}: rows of {found} are not one array; use typed_ragged, or give a dtype")
        array = np.stack(rows) if rows else np.empty(0, dtype or np.dtype("<f8"))
    return _dense(array)


def _rectangle_of(name: str, index: int, value: Any, dtype: np.dtype[Any] | None) -> Array:
    with _naming(name, index):
        row = normalise(value)
        array = row if isinstance(row, np.ndarray) else _rectangle(row)
        return array if dtype is None else cast(array, dtype)


def _rectangle(value: Any) -> Array:
    """A number or nested lists of numbers as one array."""
    try:
        array = np.array(value)
    except ValueError:
        raise TypeError("nested lists of unequal lengths are not one array") from None
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{value!r:.80} is not made of numbers")
    name_of(array.dtype)
    return array


def _tree(name: str, values: Sequence[Any], dtype: np.dtype[Any] | None, *, per_row: bool) -> Tree:
    leaves = TreeWriter(dtype)
    if per_row and set(map(type, values)) == {str}:
        with suppress(UnicodeEncodeError):  # which row that is, is said below
            return _texts(values, leaves)
    try:
        return Tree(leaves.pack_all(list(values)), leaves, per_row)
    except (TypeError, OverflowError):
        for index, value in enumerate(values):
            with _naming(name, index if per_row else None):
                leaves.pack(value)
        raise


def _texts(values: Sequence[str], leaves: TreeWriter) -> Tree:
    """Equal texts once: a group of samples has one prompt."""
    places = {text: place for place, text in enumerate(dict.fromkeys(values))}
    if len(places) == len(values):
        return Tree(pack_texts(values), leaves, True)
    return Tree(pack_texts(list(places)), leaves, True, list(map(places.__getitem__, values)))


def narrowed(column: Column) -> Column:
    """The same column, its integers stored as the narrowest that hold them; as it is when that saves little."""
    if isinstance(column, Dense):
        arrays, nbytes = [column.array], column.array.nbytes
    elif isinstance(column, Ragged):
        arrays, nbytes = column.rows, sum(row.size for row in column.rows) * column.dtype.itemsize
    else:
        return column
    if column.stored.kind not in "iu" or nbytes < max(NARROW_BYTES, NARROW_ROW_BYTES * len(arrays)):
        return column
    low = high = 0
    for array in arrays:
        if array.size:
            lowest, highest = _limits(array)
            low, high = min(low, lowest), max(high, highest)
        if narrowest(low, high).itemsize >= column.stored.itemsize:
            return column
    return replace(column, stored=narrowest(low, high))


def _limits(array: Array) -> tuple[int, int]:
    """The lowest and the highest of some integers, or 0 for the lowest where none is negative."""
    # In one pass: as unsigned numbers negative ones are the largest.
    highest = int(np.maximum.reduce(array.view(f"<u{array.dtype.itemsize}"), axis=None))
    if array.dtype.kind == "u" or not highest >> (8 * array.dtype.itemsize - 1):
        return 0, highest
    return int(array.min()), int(array.max())


@contextmanager
def _naming(column: str, row: int | None = None) -> Iterator[None]:
    """Put the column and the row in front of whatever goes wrong inside."""
    try:
        yield
    except (TypeError, OverflowError, ValueError) as error:
        kind = next(known for known in (TypeError, OverflowError, ValueError) if isinstance(error, known))
        where = f"column {column!r}" if row is None else f"column {column!r}, row {row}"
        raise kind(f"{where}: {error}") from error
