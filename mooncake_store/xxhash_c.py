"""The C library beneath the xxhash package: addresses of its functions, for extensions that call them."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def c_library() -> ctypes.PyDLL | None:
    """Its calls keep the interpreter's lock. None where the package is built otherwise.

    The package's wheels hide none of its names. Who uses one compares what it gives with what the package gives.
    """
    with suppress(ImportError, OSError):
        from xxhash import _xxhash  # type: ignore[attr-defined]

        return ctypes.PyDLL(_xxhash.__file__)
    return None


def address_of(library: ctypes.PyDLL | None, names: tuple[str, ...]) -> int:
    """Of the first of these functions that is there.

    Raises:
        AttributeError: none is.
    """
    for name in names:
        with suppress(AttributeError):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise AttributeError(f"none of {', '.join(names)}")
