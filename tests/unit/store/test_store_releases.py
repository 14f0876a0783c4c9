"""Releases: told once, when the last view of any kind is gone, whoever holds it and whatever the one told does."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mooncake_store import releases as module
from mooncake_store.releases import Releases


@pytest.fixture
def releases() -> Iterator[Releases]:
    made = Releases()
    yield made
    made.close()


def root() -> np.ndarray:
    """Memory as a reader hands it out: an array at the root of all views, on memory of another."""
    return np.frombuffer(memoryview(bytearray(range(64))), dtype=np.uint8)


def test_what_ended_is_told_before_settle_returns(releases: Releases) -> None:
    releases.settle()
    told: list[int] = []
    started, go_on = threading.Event(), threading.Event()
    releases.call_when_gone(root(), started.set, lambda: go_on.wait(10) and None)
    assert started.wait(10)
    for number in range(100):
        releases.call_when_gone(root(), functools.partial(told.append, number))
    threading.Timer(0.1, go_on.set).start()
    releases.settle()
    assert told == list(range(100))


def test_settle_waits_neither_for_itself_nor_for_ever(releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.1)
    settled, go_on = threading.Event(), threading.Event()

    def told() -> None:
        releases.settle()
        settled.set()
        go_on.wait(10)

    releases.call_when_gone(root(), told)
    assert settled.wait(10)
    releases.settle()
    go_on.set()


Derive = Callable[[np.ndarray], object]


@pytest.mark.parametrize(
    "derive",
    [
        lambda array: array[8:16],
        lambda array: array.view(np.int64).reshape(2, 4)[1:].T,
        lambda array: memoryview(array)[3:],
        lambda array: np.frombuffer(array.data.toreadonly(), dtype=np.uint8)[5:6],
        lambda array: iter(array),
    ],
)
def test_a_view_of_any_kind_keeps_the_memory(releases: Releases, derive: Derive) -> None:
    array, gone = root(), threading.Event()
    releases.call_when_gone(array, gone.set)
    view = derive(array)
    del array
    gc.collect()
    assert not gone.wait(0.05)
    del view
    gc.collect()
    assert gone.wait(10)


def test_a_tensor_keeps_the_memory_and_a_copy_does_not(releases: Releases) -> None:
    torch = pytest.importorskip("torch")
    array, gone = root(), threading.Event()
    releases.call_when_gone(array, gone.set)
    tensor = torch.from_numpy(array[8:16])[1:].view(1, 7)
    copied = torch.from_numpy(array.copy())
    del array
    gc.collect()
    assert not gone.wait(0.05)
    assert tensor.tolist() == [list(range(9, 16))]
    del tensor
    gc.collect()
    assert gone.wait(10)
    assert copied.tolist() == list(range(64))


def test_it_is_told_once(releases: Releases) -> None:
    array, told = root(), []
    releases.call_when_gone(array, lambda: told.append(threading.current_thread().name))
    del array
    gc.collect()
    releases.close()
    gc.collect()
    releases.close()
    assert told == ["store releases"]


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError, SystemExit])
def test_a_failure_is_logged_and_stops_nothing(
    releases: Releases, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    told: list[int] = []

    def fail() -> None:
        raise kind("no route to the ledger")

    for function in (fail, lambda: told.append(1)):
        array = root()
        releases.call_when_gone(array, function)
        del array
    releases.close()
    assert told == [1]
    assert "not acknowledged" in caplog.text
    assert "no route to the ledger" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_what_a_function_refers_to_goes_with_it(releases: Releases) -> None:
    told, other, array = threading.Event(), root(), root()
    releases.call_when_gone(other, told.set)
    releases.call_when_gone(array, functools.partial(len, other))
    del other, array
    gc.collect()
    assert told.wait(10)


def test_close_waits_for_what_was_queued(releases: Releases) -> None:
    told, leave = [], threading.Event()
    for number in range(5):
        array = root()
        releases.call_when_gone(array, lambda number=number: (leave.wait(10), told.append(number)))
        del array
    gc.collect()
    threading.Timer(0.02, leave.set).start()
    releases.close()
    assert told == [0, 1, 2, 3, 4]


def test_close_does_not_wait_for_ever(releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    entered, leave = threading.Event(), threading.Event()
    array = root()
    releases.call_when_gone(array, lambda: (entered.set(), leave.wait(60)))
    del array
    assert entered.wait(10)
    releases.close()
    leave.set()


def test_close_within_a_release_and_without_any(releases: Releases) -> None:
    Releases().close()
    closed = threading.Event()
    array = root()
    releases.call_when_gone(array, lambda: (releases.close(), closed.set()))
    del array
    assert closed.wait(10)


def test_memory_may_end_under_any_lock(releases: Releases) -> None:
    """The last view may go inside an allocation, while this very thread registers another or tells a first."""
    told = threading.Semaphore(0)
    cycles = []
    for _ in range(200):
        array = root()
        releases.call_when_gone(array, told.release)
        cycle: list[object] = [array]
        cycle.append(cycle)
        cycles.append(cycle)
        del array, cycle
        if len(cycles) == 20:
            cycles.clear()  # collected whenever the collector likes
    cycles.clear()
    gc.collect()
    for _ in range(200):
        assert told.acquire(timeout=10)
