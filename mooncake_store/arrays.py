"""Numbers in, little-endian C-ordered numpy out: the only dtypes and the only conversions the transport knows."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

# numpy name -> struct format; bool has none because struct's "?" would accept any truthy object.
_STRUCT = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q",
    "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip
DTYPES = ("bool", *_STRUCT)
_NATIVE = {bool: np.dtype("bool"), int: np.dtype("int64"), float: np.dtype("float64")}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the little-endian dtype called `name`; ValueError when it is not one of DTYPES."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} cannot be stored; allowed: {', '.join(DTYPES)}")
    return np.dtype(name).newbyteorder("<")


def normalise(value: Any) -> Any:
    """Turn an ndarray or a torch tensor into a storable ndarray; arrays of objects or text into lists; keep the rest.

    No copy is made of an array that is already little-endian and C-ordered.

    Raises:
        TypeError: a dtype outside DTYPES, a tensor that is not in host memory, or a masked array.
    """
    if not isinstance(value, np.ndarray):
        torch = sys.modules.get("torch")  # a tensor can only exist when its caller has imported torch
        if torch is None or not isinstance(value, torch.Tensor):
            return value
        value = _from_torch(value)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array cannot be stored; pass its filled() array and its mask as two columns")
    if value.dtype.kind in "OUS":
        return value.tolist()
    if value.dtype.name not in DTYPES:
        raise TypeError(f"dtype {value.dtype} cannot be stored; {_advice(str(value.dtype))}")
    return np.asarray(value, dtype=value.dtype.newbyteorder("<"), order="C").view(np.ndarray)


def _from_torch(tensor: Any) -> Array:
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device} cannot be stored; pass tensor.cpu()")
    try:
        array: Array = tensor.detach().numpy()
    except (TypeError, RuntimeError) as error:  # bfloat16, float8, sparse, quantised: numpy has no such array
        problem = f"a {tensor.layout} tensor of {tensor.dtype} cannot be stored"
        raise TypeError(f"{problem}; {_advice(str(tensor.dtype))}") from error
    return array


def _advice(dtype: str) -> str:
    if "bfloat16" in dtype:
        return "numpy has no bfloat16: pass .float(), which is exact, or .view(int16) and view it back"
    return f"allowed: {', '.join(DTYPES)}"


def infer(values: Sequence[Any]) -> Array | None:
    """Return the 1-D array that a list of numbers of one kind stands for, or None when it is not such a list.

    bool -> bool, int -> int64, float -> float64; numpy scalars of one dtype keep it. Mixed kinds are no numeric list.

    Raises:
        OverflowError: an int beyond int64.
    """
    kinds = set(map(type, values))
    if any(issubclass(kind, np.generic) for kind in kinds):
        if len(kinds) == 1 and values[0].dtype.name in DTYPES:
            return np.array(values, dtype=values[0].dtype.newbyteorder("<"))
        values = [value.item() if isinstance(value, np.generic) else value for value in values]
        kinds = set(map(type, values))
    if len(kinds) != 1:
        return None
    dtype = _NATIVE.get(kinds.pop())
    return None if dtype is None else pack(values, dtype)


def pack(values: Sequence[Any], dtype: np.dtype[Any]) -> Array:
    """Convert a flat sequence of numbers to a 1-D array of exactly `dtype`.

    Raises:
        OverflowError: a number outside the range of dtype.
        TypeError: something that is not a number of dtype's kind (a float for an int dtype, None, text).
    """
    code = _STRUCT.get(dtype.name)
    try:
        if code is not None:
            # Twice as fast as np.array on Python numbers, and it refuses what does not fit instead of wrapping.
            return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), dtype=dtype)
        if all(isinstance(value, bool | np.bool_) for value in values):
            return np.array(values, dtype=dtype)
    except (struct.error, OverflowError, TypeError, ValueError):
        pass
    raise _misfit(values, dtype)


def _misfit(values: Sequence[Any], dtype: np.dtype[Any]) -> Exception:
    for position, value in enumerate(values):
        try:
            if dtype.kind == "b" and not isinstance(value, bool | np.bool_):
                raise TypeError
            if dtype.kind != "b":
                struct.pack("<" + _STRUCT[dtype.name], value)
        except (struct.error, OverflowError, TypeError, ValueError):
            number = isinstance(value, int) or (dtype.kind == "f" and isinstance(value, float))
            where = f"element {position} ({value!r:.80})"
            if number and dtype.kind != "b":
                return OverflowError(f"{where} does not fit {dtype.name}")
            return TypeError(f"{where} is a {type(value).__name__}, not a number that {dtype.name} can hold")
    return TypeError(f"not a flat list of {dtype.name}")


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Convert an array to `dtype` without wrapping; the array itself when it has the dtype already.

    Raises:
        OverflowError: a value outside the range of dtype.
        TypeError: a conversion that would drop the fraction (float to int) or the number (anything to bool).
    """
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}[dtype.kind]:
        raise TypeError(f"an array of {array.dtype} cannot be stored as {dtype.name} without loss; convert it first")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.size and array.dtype.kind != "b":
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                raise OverflowError(f"values from {low} to {high} do not fit {dtype.name}")
        return array.astype(dtype)
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if dtype.kind == "f" and np.any(np.isinf(result) & np.isfinite(array)):
        raise OverflowError(f"a value of magnitude {np.abs(array[np.isfinite(array)]).max()} does not fit {dtype.name}")
    return result


def as_bytes(array: Array) -> Bytes:
    """View a C-ordered array of any rank as uint8, 1-D."""
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat
