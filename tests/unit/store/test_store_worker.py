"""The worker: calls in order, errors to who asked, and an end at any moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from mooncake_store import StoreClosed
from mooncake_store.bounded import bounded
from mooncake_store.worker import Worker

HANG = 30.0  # seconds


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test worker")
    yield made
    made.close(HANG)


def test_calls_are_done_in_order_in_one_thread(worker: Worker) -> None:
    done: list[int] = []
    futures = [worker.submit(lambda n=number: (done.append(n), threading.get_ident())[1]) for number in range(100)]
    assert len({future.result(HANG) for future in futures}) == 1
    assert done == list(range(100))


def test_an_error_reaches_who_asked_and_the_next_call_is_done(worker: Worker) -> None:
    assert str(worker.submit(int, "x").exception(HANG)).startswith("invalid literal")
    assert worker.submit(int, "7", base=8).result(HANG) == 7


def test_a_call_that_is_cancelled_is_not_done(worker: Worker) -> None:
    go, done = threading.Event(), list[int]()
    worker.submit(go.wait, HANG)
    cancelled = worker.submit(done.append, 1)
    assert cancelled.cancel()
    go.set()
    worker.submit(done.append, 2).result(HANG)
    assert done == [2]


def test_a_close_does_what_was_submitted_and_refuses_what_comes() -> None:
    worker, go, done = Worker("test worker"), threading.Event(), list[int]()
    worker.submit(go.wait, HANG)
    worker.submit(done.append, 1)
    worker.close()
    with pytest.raises(StoreClosed):
        worker.submit(done.append, 2)
    go.set()
    worker.close(HANG)
    assert done == [1]
    with pytest.raises(StoreClosed):
        worker.submit(done.append, 3)
    unused = Worker("test worker")
    unused.close(HANG)
    with pytest.raises(StoreClosed):
        unused.submit(done.append, 4)


def test_a_worker_may_close_itself(worker: Worker) -> None:
    worker.submit(worker.close, HANG).result(HANG)


def test_a_worker_that_nobody_closed_ends_with_its_last_reference() -> None:
    worker = Worker("forgotten worker")
    thread = worker.submit(threading.current_thread).result(HANG)
    del worker
    thread.join(HANG)
    assert not thread.is_alive()


@pytest.mark.parametrize("moment", ["thread start", "queue put"])
def test_a_close_in_the_midst_of_a_submit_hangs_nobody(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, start = Worker("test worker"), threading.Thread.start
    if moment == "thread start":

        def closing(thread: threading.Thread) -> None:
            worker.close()
            start(thread)

        def submit() -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", closing)
                return worker.submit(int, "7")

    else:

        class Closing:
            def __init__(self, real: Any) -> None:
                self.get, self._real = real.get, real

            def put(self, item: Any) -> None:
                worker._queue = self._real
                worker.close()
                self._real.put(item)

        def submit() -> Any:
            worker._queue = Closing(worker._queue)  # type: ignore[assignment]
            return worker.submit(int, "7")

    try:
        future = bounded(submit, HANG)
        assert future is not None, "a deadlock"
        assert future.result(HANG) == 7
    except StoreClosed:
        pass


def test_signals_that_close_it_hang_nobody() -> None:
    """Real ones, wherever the thread that submits just is."""
    worker, ended = Worker("test worker"), 0

    def close(*_: Any) -> None:
        worker.close()

    before = signal.signal(signal.SIGALRM, close)
    try:
        for number in range(300):
            worker = Worker("test worker")
            signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + number % 40))
            try:
                while True:
                    assert worker.submit(int, "7").result(HANG) == 7
            except (StoreClosed, CancelledError):
                ended += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ended == 300
