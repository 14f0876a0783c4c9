"""Tells when the last view of some memory is gone, in a thread where the one who is told may do anything."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

from mooncake_store.arrays import Bytes

CLOSE_SECONDS = 5.0
# A function that waits for the one who waits here must not hold it up for ever.
SETTLE_SECONDS = 1.0
_log = logging.getLogger(__name__)


class Releases:
    """Calls functions when arrays end.

    An array may end at any allocation, in any thread and under any lock, so the function is only queued there: the
    queue's put is reentrant.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()

    def call_when_gone(self, root: Bytes, *functions: Callable[[], None]) -> None:
        """Call the functions once, in this order, when `root` and every view of it are gone. Failures are logged."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="store releases", daemon=True)
                self._thread.start()
        weakref.finalize(root, self._put, functions).atexit = False

    def settle(self) -> None:
        """Let what was queued so far be called, a bounded time; at once in the thread that calls it."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            called = threading.Event()
            self._queue.put(called.set)
            called.wait(SETTLE_SECONDS)

    def close(self) -> None:
        """Let what was queued be called, a bounded time."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join(CLOSE_SECONDS)

    def _put(self, functions: Sequence[Callable[[], None]]) -> None:
        for function in functions:
            self._queue.put(function)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except BaseException:  # asyncio's CancelledError, too: the next release must not wait for ever
                _log.exception("a release was not acknowledged")
            del function  # and what it refers to, which may be the last view of another batch
