"""Where torch meets numpy: tensors come in, and the dtypes that numpy lacks go out as tensors again.

numpy has no bfloat16 and no float8. Inside this package such numbers are a structured dtype of one unsigned field that
carries torch's name, e.g. [("bfloat16", "<u2")]: numpy slices, reshapes, stacks and compares it like any other. The
caller gets a tensor, and a copy of its own: a tensor cannot be read-only, so one that looked into the store's memory
would let a reader change what others read.

torch is imported only for a value that needs it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_store.errors import MissingDependency

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")

# torch's name -> what its numbers are inside this package.
TORCH_DTYPES: Mapping[str, np.dtype[Any]] = {
    "bfloat16": np.dtype([("bfloat16", "<u2")]),
    **{name: np.dtype([(name, "u1")]) for name in _FLOAT8},
}


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor; does not import torch."""
    return is_tensor_type(type(value))


def is_tensor_type(kind: type) -> bool:
    """Whether `kind` is torch.Tensor or derives from it; does not import torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # without torch imported there is no tensor
    return tensor is not None and issubclass(kind, tensor)


def from_tensor(tensor: Any) -> npt.NDArray[Any]:
    """View a tensor in host memory as an array, whatever its strides; bfloat16 and float8 as in TORCH_DTYPES.

    Raises:
        TypeError: a tensor elsewhere, sparse, quantised, nested, or of a dtype that neither numpy nor this package has.
    """
    if tensor.device.type == "meta":
        raise TypeError("a tensor on meta has no values to store")
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device} cannot be stored; pass tensor.cpu()")
    torch = sys.modules["torch"]
    dtype = TORCH_DTYPES.get(_name(tensor.dtype))
    try:
        plain = tensor.detach().resolve_conj().resolve_neg()
        if dtype is None:
            array: npt.NDArray[Any] = plain.numpy()
            return array
        bits = plain.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
        return np.asarray(bits.numpy()).view(dtype)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be stored ({error})") from error


def plain_tensors(values: Sequence[Any]) -> list[npt.NDArray[Any]] | None:
    """The arrays of torch.Tensors that numpy takes as they are; None where one needs `from_tensor`, or is no tensor."""
    torch = sys.modules.get("torch")
    if torch is None or type(values[0]) is not torch.Tensor:
        return None
    try:
        return list(map(torch.Tensor.numpy, values))
    except (TypeError, RuntimeError):
        return None


def restore(array: npt.NDArray[Any]) -> Any:
    """What the caller gets for a stored array: itself, or a tensor of the caller's own for a dtype of TORCH_DTYPES.

    Raises:
        MissingDependency: torch, or a torch that has the dtype, is not installed.
    """
    if array.dtype.names is None:
        return array
    (name,) = array.dtype.names
    bits = np.array(array, order="C").view(f"u{array.dtype.itemsize}")
    return _torch(name).from_numpy(bits).view(torch_dtype(name))


def torch_dtype(name: str) -> Any:
    """The torch dtype called `name`; MissingDependency when there is no torch that has it."""
    return getattr(_torch(name), name)


def widen(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The float32 numbers that an array of a dtype of TORCH_DTYPES stands for; exact."""
    numbers: npt.NDArray[np.float32] = restore(array).float().numpy()
    return numbers


def narrow(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Round numbers to the dtype of TORCH_DTYPES called `name`, to nearest, ties to even."""
    return from_tensor(_torch(name).tensor(array).to(torch_dtype(name)))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _torch(name: str) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependency(f"{name} numbers need torch, since numpy has no such dtype: {error}") from error
    if not hasattr(torch, name):
        raise MissingDependency(f"torch {torch.__version__} has no {name}; install a later one")
    return torch
