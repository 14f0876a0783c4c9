"""Rows copied back to back, and digested, by an extension that lets other threads run meanwhile, which numpy does not.

It is built where the package is installed, if there is a C compiler. Without it all works, and a put takes longer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

from mooncake_store.arrays import Array, Bytes
from mooncake_store.format import Numbers
from mooncake_store.xxhash_c import address_of, c_library

_native: Callable[[list[Any], Any, Any, int, bool, float], list[int]] | None = None
with suppress(ImportError):
    from mooncake_store._native import gather as _native


def _hash() -> int:
    """Address of the C function behind `xxhash.xxh3_64_intdigest`, which takes the interpreter's lock; 0 for none."""
    with suppress(AttributeError):
        # By what the processor has, or by what every one has.
        address = address_of(c_library(), ("XXH3_64bits_dispatch", "XXH3_64bits"))
        function = ctypes.PYFUNCTYPE(ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t)(address)
        sample = bytes(range(256)) * 16
        if all(function(sample, size) == xxhash.xxh3_64_intdigest(sample[:size]) for size in (0, 3, 200, 4096)):
            return address
    return 0


_HASH = _hash()
IS_BUILT = _native is not None and _HASH != 0


def gather(rows: list[Array], target: Bytes, ends: Numbers, in_place: bool, until: float) -> list[int] | None:
    """Copy the bytes of `rows`, as they are, back to back into `target` (uint8), which they fill; return digests.

    Args:
        ends: int64 [blocks], where each block of the target ends.
        in_place: whether nobody here reads the target again soon: then it need not stay in the processor's caches.
        until: no block is begun after this time.monotonic().

    Returns xxh3-64 of each block; None, with nothing copied, where numpy has to do it: the extension was not built, a
    row is not contiguous, its dtype is one that no buffer has, or sizes do not agree, of which numpy says more.

    Raises:
        TimeoutError: that time has come; part of the target was written.
    """
    if _native is None or not _HASH:
        return None
    try:
        return _native(rows, target, np.ascontiguousarray(ends), _HASH, in_place, until)
    except (BufferError, ValueError):
        return None
