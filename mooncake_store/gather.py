"""Rows copied back to back by an extension that lets other threads run meanwhile, which numpy does not.

It is built where the package is installed, if there is a C compiler. Without it all works, and a put takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mooncake_store.arrays import Array, Bytes

_native: Callable[[list[Any], Any], None] | None = None
with suppress(ImportError):
    from mooncake_store._native import gather as _native

IS_BUILT = _native is not None


def gather(rows: list[Array], target: Bytes) -> bool:
    """Copy the bytes of `rows`, as they are, back to back into `target` (uint8), which they fill.

    Returns False, with nothing copied, where numpy has to do it: the extension was not built, a row is not contiguous,
    its dtype is one that no buffer has, or sizes do not agree, of which numpy says more.
    """
    if _native is None:
        return False
    try:
        _native(rows, target)
    except (BufferError, ValueError):
        return False
    return True
