"""Ctrl-C: once ends the job in order, twice ends it at once. Neither leaves a process."""

import contextlib
import os
import signal
import sys
from typing import Any

_received = 0


def install() -> None:
    """Handle SIGINT and SIGTERM in this process: the first raises KeyboardInterrupt, a second ends everything now."""
    signal.signal(signal.SIGINT, _handle)
    signal.signal(signal.SIGTERM, _handle)


def _handle(_signal: int, _frame: Any) -> None:
    global _received
    _received += 1
    if _received == 1:
        os.write(sys.stderr.fileno(), b"\nmiles-mooncake: stopping; once more ends everything at once\n")
        raise KeyboardInterrupt
    kill_descendants()
    os._exit(130)


def kill_descendants() -> None:
    """SIGKILL every process that this one started, directly or not. Returns when none is left."""
    import psutil

    me = psutil.Process()
    while children := me.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)
