"""One thread that does what it is given, in order; a signal handler may close it wherever its thread just is."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from mooncake_store.errors import StoreClosed

Result = TypeVar("Result")


class Worker:
    """Unlike an executor it takes no lock that a handler, which runs in the midst of `submit`, would wait for.

    Args:
        name: of the thread, which starts with the first call.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = False
        # One that nobody closed ends its thread, too, which therefore refers to the queue alone.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, call: Callable[..., Result], *arguments: Any, **more: Any) -> Future[Result]:
        """Have `call` done after what was submitted before; StoreClosed when the worker was closed."""
        future: Future[Result] = Future()
        self._queue.put((future, partial(call, *arguments, **more)))
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
        # Asked last: what was queued before the end is done, what came behind it never would be.
        if self._closed and future.cancel():
            raise StoreClosed("the store was closed meanwhile; open a new one")
        return future

    def close(self, seconds: float = 0.0) -> None:
        """End when what was submitted is done; idempotent.

        Args:
            seconds: to wait for that, unless it is the worker itself that closes. Bounded, since what it does may need
                a lock that the thread has in whose midst a handler closes.
        """
        self._closed = True
        self._queue.put(None)
        thread = self._thread
        if seconds and thread is not None and thread is not threading.current_thread():
            thread.join(seconds)


def _work(given: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := given.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del item, future, call  # and what they refer to, which may be the last view of a batch
