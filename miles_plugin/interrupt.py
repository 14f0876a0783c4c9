"""Ctrl-C: once ends a running job in order, twice, or before it runs, at once. Neither leaves a process."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_in_order = False
_received = 0


def install() -> None:
    """Handle SIGINT, SIGTERM and SIGHUP: they end the process at once and quietly, with status 130.

    Not by KeyboardInterrupt: in the midst of an import, native code may answer an exception with abort().
    """
    signal.signal(signal.SIGINT, _handle)
    signal.signal(signal.SIGTERM, _handle)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _handle)  # the terminal is gone


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Within the block, the first signal raises KeyboardInterrupt instead: there is something to end in order."""
    global _in_order
    _in_order = True
    try:
        yield
    finally:
        _in_order = False


def _handle(_signal: int, _frame: FrameType | None) -> None:
    global _received
    _received += 1
    if _in_order and _received == 1:
        with contextlib.suppress(OSError):  # a terminal that hung up
            os.write(sys.stderr.fileno(), b"\nmiles-mooncake: stopping; once more ends everything at once\n")
        raise KeyboardInterrupt
    try:
        kill_descendants()
    finally:  # psutil may be missing, or be what is being imported: then nothing has been started yet
        os._exit(130)


class Descendants:
    """Processes that this one has started, directly or not, since the object was made."""

    def __init__(self) -> None:
        import psutil

        self._me = psutil.Process()
        self._before = set(self._me.children(recursive=True))
        self._noted: set[psutil.Process] = set()

    def note(self) -> None:
        """Remember those of this moment, to find them again when they have lost their parent."""
        self._noted |= set(self._me.children(recursive=True)) - self._before

    def end(self, patience: float) -> None:
        """Wait `patience` seconds for all that were noted to end, then SIGKILL the others."""
        import psutil

        self.note()
        _, left = psutil.wait_procs(self._noted, timeout=patience)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=patience)


@contextlib.contextmanager
def no_descendant_left(patience: float = 2.0) -> Iterator[Descendants]:
    """End at exit what the block has started and not ended itself, e.g. a Ray actor that does not listen."""
    descendants = Descendants()
    try:
        yield descendants
    finally:
        descendants.end(patience)


def kill_descendants() -> None:
    """SIGKILL every process that this one started, directly or not. Returns when none is left."""
    import psutil

    me = psutil.Process()
    while children := me.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)
