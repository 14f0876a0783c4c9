"""Two threads on two processors.

Linux may wake a thread on the processor of the thread that wakes it, though another is idle. There one of them waits
until the other has had its time slice, 3 ms: longer than both together need (seen with Linux 6.18 on two processors, in
25 of 26 puts that came after a pause).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")
_UNKNOWN = -1
_libc = ctypes.CDLL(None)


def processor() -> int:
    """Number of the processor that this thread is on; -1 where the C library does not tell."""
    try:
        return int(_libc.sched_getcpu())
    except AttributeError:
        return _UNKNOWN


def beside(other: int, call: Callable[[], Result]) -> Result:
    """`call`, begun on another processor than `other`, if this thread may run on another; it may move on from there."""
    if other != _UNKNOWN and processor() == other:
        with suppress(OSError):
            allowed = os.sched_getaffinity(0)
            if len(allowed) > 1:
                os.sched_setaffinity(0, allowed - {other})
                os.sched_setaffinity(0, allowed)
    return call()
