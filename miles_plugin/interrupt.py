"""Ctrl-C: once ends a running job in order, twice, or before it runs, at once. Neither leaves a process."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import psutil

_LOOK_SECONDS = 0.05
_in_order = False
_handled = False


def install() -> None:
    """Handle SIGINT, SIGTERM and SIGHUP: they end the process at once and quietly, with status 130.

    Not by KeyboardInterrupt: in the midst of an import, native code may answer an exception with abort().
    """
    handled = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        handled.append(signal.SIGHUP)  # the terminal is gone
    arrived, arrives = os.pipe()
    os.set_blocking(arrives, False)
    signal.set_wakeup_fd(arrives, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # the child's signals are not ours
    for number in handled:
        signal.signal(number, _handle)
    threading.Thread(target=_end_at_the_second, args=(arrived, set(handled)), name="signals", daemon=True).start()


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
    global _handled
    if _in_order and not _handled:
        _handled = True
        with contextlib.suppress(OSError):  # a terminal that hung up
            os.write(sys.stderr.fileno(), b"\nmiles-mooncake: stopping; once more ends everything at once\n")
        raise KeyboardInterrupt
    _end_at_once()


def _end_at_the_second(arrived: int, handled: set[int]) -> None:
    """Count the signals as they arrive: while the main thread is in native code, its handler sees several as one."""
    count = 0
    while count < 2:
        count += os.read(arrived, 1)[0] in handled
    _end_at_once()


def _end_at_once() -> NoReturn:
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
        for process in (left := _left_after(self._noted, patience)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _left_after(left, patience)


@contextlib.contextmanager
def no_descendant_left(patience: float = 2.0) -> Iterator[Descendants]:
    """End at exit what the block has started and not ended itself, e.g. a Ray actor that does not listen."""
    descendants = Descendants()
    try:
        yield descendants
    finally:
        descendants.end(patience)


def kill_descendants() -> None:
    """SIGKILL every process that this one started, directly or not. Returns when none is left, zombies aside."""
    import psutil

    me = psutil.Process()
    dying: set[psutil.Process] = set()  # one that has lost its parent is no descendant any more
    while left := {*me.children(recursive=True), *dying}:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(left, timeout=1.0)
        dying = {process for process in alive if not _is_zombie(process)}


def _left_after(processes: "Iterable[psutil.Process]", seconds: float) -> "set[psutil.Process]":
    """Which have not ended by then. Where nobody reaps orphans they stay as zombies, which are not waited for."""
    deadline = time.monotonic() + seconds
    while left := {process for process in processes if process.is_running() and not _is_zombie(process)}:
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_SECONDS)
    return left


def _is_zombie(process: "psutil.Process") -> bool:
    import psutil

    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
