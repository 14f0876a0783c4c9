"""Numbers in, little-endian C-ordered numpy out: the only dtypes and the only conversions the transport knows.

Stored are the dtypes in DTYPES and datetime64 and timedelta64 of any unit. longdouble is not: its bytes differ from
machine to machine under one name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_store.tensors import TORCH_DTYPES, from_tensor, is_tensor, is_tensor_type, narrow, widen

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

# numpy name -> struct format; bool has none because struct's "?" would accept any truthy object.
_STRUCT = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip
DTYPES = ("bool", *_STRUCT, "complex64", "complex128", *TORCH_DTYPES)
ALLOWED = f"allowed: {', '.join(DTYPES)}, datetime64[unit], timedelta64[unit]"
_TIME = re.compile(r"(datetime|timedelta)64(\[\d*[A-Za-z]+\])?")
_NATIVE = {bool: np.dtype("bool"), int: np.dtype("int64"), float: np.dtype("float64")}

# kind of a dtype -> kinds of the dtypes that convert to it without losing a fraction or the number itself
_CONVERTS = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "c": "biufc"}
_INTEGERS = [
    (np.iinfo(code).min, np.iinfo(code).max, np.dtype(code)) for code in ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8")
]
_native_numbers: Callable[[list[Any], Array, str], bool] | None = None
with suppress(ImportError):  # no C compiler where this was installed
    from mooncake_store._native import numbers as _native_numbers
_MISFIT = (struct.error, OverflowError, TypeError, ValueError)


@lru_cache(256)  # numpy takes microseconds to spell a dtype, and a batch has dozens of arrays
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the little-endian dtype stored as `name`; ValueError when there is none."""
    if name in TORCH_DTYPES:
        return TORCH_DTYPES[name]
    if name in DTYPES:
        return np.dtype(name).newbyteorder("<")
    if _TIME.fullmatch(name):
        with suppress(TypeError, ValueError):
            dtype: np.dtype[Any] = np.dtype(name)
            if dtype.name == name:  # numpy accepts several spellings; one is stored
                return dtype.newbyteorder("<")
    raise ValueError(f"dtype {name!r} cannot be stored; {ALLOWED}")


@lru_cache(256)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name under which `dtype` is stored, whatever its byte order.

    Raises:
        TypeError: it cannot be stored.
    """
    if dtype.names is not None:
        name = "".join(dtype.names)
        if name in TORCH_DTYPES and TORCH_DTYPES[name] == dtype:
            return name
        raise TypeError(f"a structured array of fields {', '.join(dtype.names)} cannot be stored; pass a column each")
    if dtype.name in DTYPES or dtype.kind in "mM":
        return dtype.name
    if dtype.char in "gG":
        raise TypeError(f"dtype {dtype} (longdouble) has other bytes on other machines; convert it to float64")
    raise TypeError(f"dtype {dtype} cannot be stored; {ALLOWED}")


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array or a torch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def normalise(value: Any) -> Any:
    """Turn an ndarray or a torch tensor into a storable ndarray; arrays of objects or text into lists; keep the rest.

    No copy is made of an array that is already little-endian and C-ordered.

    Raises:
        TypeError: a dtype that cannot be stored, a tensor that `from_tensor` refuses, or a masked array.
    """
    if not is_array(value):
        return value
    array = value if isinstance(value, np.ndarray) else from_tensor(value)
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array cannot be stored; pass its filled() array and its mask as two columns")
    if array.dtype.kind in "OUST":
        return array.tolist()
    dtype = dtype_of(name_of(array.dtype))
    return np.asarray(array, dtype=dtype, order="C").view(np.ndarray)


def plain_scalar(value: np.generic) -> Any:
    """Return the Python number, text or bytes that a numpy scalar is; the scalar itself when there is none."""
    # item() of a datetime64 or timedelta64 in nanoseconds is a bare int, that of a void bare bytes.
    return value.item() if value.dtype.kind in "biufSU" else value


def infer(values: Sequence[Any]) -> Array | None:
    """Return the 1-D array that a list of numbers of one kind stands for, or None when it is not such a list.

    bool -> bool, int -> int64, float -> float64; numpy scalars of one dtype keep it. Mixed kinds are no numeric list.

    Raises:
        OverflowError: an int beyond int64.
    """
    if values and (first := _NATIVE.get(type(values[0]))) and (quick := _by_extension(values, first)) is not None:
        return quick
    kinds = set(map(type, values))
    if any(issubclass(kind, np.generic) for kind in kinds):
        found = {value.dtype if isinstance(value, np.generic) else None for value in values}
        scalar = found.pop() if len(found) == 1 else None
        if scalar is not None and (scalar.name in DTYPES or scalar.kind in "mM"):
            return np.array(values, dtype=scalar.newbyteorder("<"))
        values = [plain_scalar(value) if isinstance(value, np.generic) else value for value in values]
        kinds = set(map(type, values))
    if len(kinds) != 1:
        return None
    dtype = _NATIVE.get(kinds.pop())
    return None if dtype is None else pack(values, dtype)


def is_number(value: object) -> bool:
    """Whether `value` is one number, of Python's or of numpy's."""
    return isinstance(value, bool | int | float | complex | np.number | np.bool_) and not isinstance(
        value, np.timedelta64
    )


def pack(values: Sequence[Any], dtype: np.dtype[Any]) -> Array:
    """Convert a flat sequence of numbers to a 1-D array of exactly `dtype`.

    Raises:
        OverflowError: a number outside the range of dtype.
        TypeError: something that is not a number of dtype's kind (a float for an int dtype, None, text).
    """
    if dtype.names is not None:
        return cast(pack(values, np.dtype("<f8")), dtype)
    with suppress(*_MISFIT):
        return _packed(values, dtype)
    for position, value in enumerate(values):
        try:
            _packed([value], dtype)
        except _MISFIT:
            where = f"element {position} ({value!r:.80})"
            if (dtype.kind in "iufc" and isinstance(value, int)) or (dtype.kind in "fc" and isinstance(value, float)):
                raise OverflowError(f"{where} does not fit {name_of(dtype)}") from None
            problem = f"is a {type(value).__name__}, not a number that {name_of(dtype)} can hold"
            raise TypeError(f"{where} {problem}") from None
    raise TypeError(f"not a flat list of {name_of(dtype)}")


def narrowest(low: int, high: int) -> np.dtype[Any]:
    """The narrowest integer dtype that holds numbers from `low` to `high`."""
    for least, most, dtype in _INTEGERS:
        if least <= low and high <= most:
            return dtype
    return np.dtype("<i8")


def _by_extension(values: Sequence[Any], dtype: np.dtype[Any]) -> Array | None:
    """`values` if all are Python ints, or floats, that `dtype` holds; None for all else."""
    if _native_numbers is None or type(values) is not list or dtype.kind not in "iuf":
        return None
    array = np.empty(len(values), dtype=dtype)
    return array if _native_numbers(values, array, dtype.kind) else None


def _packed(values: Sequence[Any], dtype: np.dtype[Any]) -> Array:
    if (quick := _by_extension(values, dtype)) is not None:
        return quick
    code = _STRUCT.get(dtype.name)
    if code is not None:
        # struct takes whatever has __float__ for a float: a complex scalar without its imaginary part, a datetime64.
        if code in "efd" and not _are_real(values):
            raise TypeError
        # Twice as fast as np.array on Python numbers, and it refuses what does not fit instead of wrapping.
        return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), dtype=dtype)
    match dtype.kind:
        case "b" if all(isinstance(value, bool | np.bool_) for value in values):
            return np.array(values, dtype=dtype)
        case "m" | "M" if all(isinstance(value, np.generic) and value.dtype == dtype for value in values):
            return np.array(values, dtype=dtype)
        case "c" if all(map(is_number, values)):
            return cast(np.array(values, dtype="<c16"), dtype)
    raise TypeError


def _are_real(values: Sequence[Any]) -> bool:
    # A sum of floats is a float, and takes a third of the time that a look at each type does.
    with suppress(TypeError, ValueError, ArithmeticError):
        if type(sum(values)) is float:
            return True
    return all(map(_is_real, set(map(type, values))))


def _is_real(kind: type) -> bool:
    if issubclass(kind, np.generic):
        return issubclass(kind, np.integer | np.floating | np.bool_) and not issubclass(kind, np.timedelta64)
    return issubclass(kind, int | float) or is_tensor_type(kind)


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Convert an array to `dtype` without wrapping; the array itself when it has the dtype already.

    Raises:
        OverflowError: a value outside the range of dtype.
        TypeError: a conversion that would drop the fraction (float to int), the number (anything to bool) or the
            scale (anything to float8), or that changes the unit of a time.
    """
    if array.dtype == dtype:
        return array
    given = array.dtype
    if given.names is not None:
        array = widen(array)
    target = np.dtype("f4") if name_of(dtype) == "bfloat16" else dtype
    if array.dtype.kind not in _CONVERTS.get(target.kind, ""):
        raise TypeError(f"an array of {name_of(given)} cannot be stored as {name_of(dtype)} without loss; convert it")
    if target.kind in "iu":
        limits = np.iinfo(target)
        if array.size and array.dtype.kind != "b":
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                raise OverflowError(f"values from {low} to {high} do not fit {name_of(dtype)}")
        return array.astype(target)
    if target.kind == "b":
        return array.astype(target)
    with np.errstate(over="ignore"):
        result = array.astype(target)
    check = result
    if target is not dtype:
        result = narrow(result, name_of(dtype))
        check = widen(result)
    if np.any(np.isinf(check) & np.isfinite(array)):
        magnitude = np.abs(array[np.isfinite(array)]).max()
        raise OverflowError(f"a value of magnitude {magnitude} does not fit {name_of(dtype)}")
    return result


def as_bytes(array: Array) -> Bytes:
    """View a C-ordered array of any rank as uint8, 1-D."""
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat
