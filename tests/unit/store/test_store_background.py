"""What a store does in the background: prefetched batches, and calls that keep an event loop going."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mooncake_store import BatchRef, ObjectNotFound, ObjectStore, StoreClosed
from mooncake_store.backends import BackendOptions, Stored
from tests.unit.store.store_memory import BATCH, Memory


@pytest.fixture
def carrier() -> Memory:
    return Memory(BackendOptions("run1"))


@pytest.fixture
def store(carrier: Memory) -> Iterator[ObjectStore]:
    with ObjectStore("memory", "run1", carrier) as opened:
        yield opened


# --- prefetch ---------------------------------------------------------------------------------------------------------


def test_a_prefetched_batch_is_read_once(store: ObjectStore, carrier: Memory) -> None:
    ref, begun = store.put(BATCH), threading.Event()
    carrier.during = begun.set
    store.prefetch(ref)
    store.prefetch(ref)
    assert begun.wait(10)
    with store.get(ref, as_lists=True) as batch:
        assert batch == BATCH
    assert carrier.gets == 1
    store.get(ref)
    assert carrier.gets == 2


def test_a_prefetched_batch_that_was_removed_since_is_not_taken(store: ObjectStore, carrier: Memory) -> None:
    ref, begun = store.put(BATCH), threading.Event()
    carrier.during = begun.set
    store.prefetch(ref)
    assert begun.wait(10)
    carrier.kept = False  # and whoever was given its memory may have written there
    del carrier.objects[ref.key]
    with pytest.raises(ObjectNotFound):
        store.get(ref)


def test_a_failed_prefetch_is_told_by_the_next_get_alone(store: ObjectStore, carrier: Memory) -> None:
    ref, begun = store.put(BATCH), threading.Event()
    kept = carrier.objects.pop(ref.key)
    carrier.during = begun.set
    store.prefetch(ref)
    assert begun.wait(10)
    with pytest.raises(ObjectNotFound):
        store.get(ref)
    carrier.objects[ref.key] = kept
    store.get(ref)
    assert carrier.gets == 2


@pytest.mark.parametrize(
    "wanted",
    [{"fields": ["tokens"]}, {"rows": np.array([0])}, {"rows": [1]}, {"fields": np.array(["tokens"])}, {}],
)
@pytest.mark.parametrize(
    "asked", [{"rows": np.array([0, 1])}, {"rows": (0, 1)}, {"fields": ("round_number", "tokens")}]
)
def test_a_get_of_something_else_reads_it_and_lets_go_of_what_was_prefetched(
    store: ObjectStore, carrier: Memory, wanted: dict[str, Any], asked: dict[str, Any]
) -> None:
    ref = store.put(BATCH)
    store.prefetch(ref, **asked)
    store._prefetches[ref.key][1].result(10)
    with store.get(ref, **wanted) as batch:
        assert "tokens" in batch
    assert not store._prefetches
    assert carrier.gets == 2


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_a_prefetch_of_the_same_in_other_words_is_taken(
    store: ObjectStore, carrier: Memory, make: Callable[[Any], Any]
) -> None:
    ref = store.put(BATCH)
    for asked in ({"rows": [0, 1]}, {"fields": ["tokens"]}):
        carrier.gets = 0
        store.prefetch(ref, **asked)
        store._prefetches[ref.key][1].result(10)
        store.get(ref, **{name: make(value) for name, value in asked.items()}).release()
        assert carrier.gets == 1


def test_a_prefetch_that_waits_for_buffers_holds_up_no_get(store: ObjectStore, carrier: Memory) -> None:
    first, second = store.put(BATCH), store.put(BATCH)
    begun, leave = threading.Event(), threading.Event()

    def wait() -> None:
        if "prefetch" in threading.current_thread().name:
            begun.set()
            assert leave.wait(10)

    carrier.during = wait
    store.prefetch(first)
    assert begun.wait(10)

    async def work() -> None:
        (await store.aget(second)).release()

    asyncio.run(work())
    leave.set()


def test_a_prefetch_that_has_not_begun_is_given_up(store: ObjectStore, carrier: Memory) -> None:
    first, second = store.put(BATCH), store.put(BATCH)
    begun, leave = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert leave.wait(10)

    carrier.during = wait
    store.prefetch(first)
    assert begun.wait(10)
    store.prefetch(second)
    store.get(second)  # does not wait for the first
    leave.set()
    store.get(first)
    store.close()
    assert carrier.gets == 2


def test_a_get_in_the_background_does_not_wait_for_a_prefetch_behind_it(store: ObjectStore, carrier: Memory) -> None:
    ref = store.put(BATCH)
    begun, leave = threading.Event(), threading.Event()

    async def work() -> None:
        carrier.during = lambda: (begun.set(), leave.wait(10))
        writing = asyncio.ensure_future(store.aput(BATCH))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        reading = asyncio.ensure_future(store.aget(ref))  # queued before the prefetch of the same batch
        await asyncio.sleep(0)
        store.prefetch(ref)
        leave.set()
        with await asyncio.wait_for(reading, 10) as batch:
            assert batch["round_number"] == 1
        await writing

    asyncio.run(work())


@pytest.mark.parametrize("end", ["remove", "close"])
def test_what_was_prefetched_is_let_go(store: ObjectStore, carrier: Memory, end: str) -> None:
    ref = store.put(BATCH)
    gone = threading.Event()
    original = carrier.get

    def get(ref: BatchRef, whole: bool, use: Callable[[Stored], Any]) -> Any:
        def watched(stored: Stored) -> Any:
            store._releases.call_when_gone(stored.source.root, gone.set)
            return use(stored)

        return original(ref, whole, watched)

    carrier.get = get  # type: ignore[method-assign]
    store.prefetch(ref)
    while not store._prefetches[ref.key][1].done():
        threading.Event().wait(0.001)
    store.remove(ref) if end == "remove" else store.close()
    gc.collect()
    assert gone.wait(10)
    if end == "remove":
        with pytest.raises(ObjectNotFound):
            store.get(ref)


# --- async ------------------------------------------------------------------------------------------------------------


def test_async_calls_keep_the_event_loop_ticking(store: ObjectStore, carrier: Memory) -> None:
    ticked = threading.Event()

    async def tick() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        ticked.set()

    async def work() -> None:
        waited: list[bool] = []
        carrier.during = lambda: waited.append(ticked.wait(10))  # goes on only when the loop does
        ticker = asyncio.ensure_future(tick())
        ref = await store.aput(BATCH)
        await ticker
        ticked.clear()
        ticker = asyncio.ensure_future(tick())
        with await store.aget(ref, fields=["tokens"], rows=[0], as_lists=True) as batch:
            assert batch == {"tokens": [[1, 2]]}
        await ticker
        assert waited == [True, True]

    asyncio.run(work())


def test_async_calls_raise_what_the_others_do(store: ObjectStore) -> None:
    async def work() -> None:
        ref = await store.aput(BATCH)
        told = threading.Event()
        (await store.aget(ref, on_release=told.set)).release()
        gc.collect()
        assert told.wait(10)
        store.remove(ref)
        with pytest.raises(ObjectNotFound):
            await store.aget(ref)
        with pytest.raises(TypeError, match="row"):
            await store.aput({"tokens": [object()]})

    asyncio.run(work())


def test_a_put_that_waits_for_room_does_not_stop_the_get_that_makes_it(store: ObjectStore, carrier: Memory) -> None:
    ref, put, removed = store.put(BATCH), carrier.put, threading.Event()

    def wait_for_room(payload: Any) -> Any:
        assert removed.wait(10)
        return put(payload)

    carrier.put = wait_for_room  # type: ignore[method-assign]

    async def free() -> None:
        (await store.aget(ref)).release()
        store.remove(ref)
        removed.set()

    async def work() -> None:
        await asyncio.gather(store.aput(BATCH), free())

    asyncio.run(work())


def test_async_calls_end_with_the_store(store: ObjectStore, carrier: Memory) -> None:
    """Those that wait for their turn when it is closed, and those that come later."""
    ref = store.put(BATCH)
    begun, leave = threading.Semaphore(0), threading.Event()

    async def work() -> None:
        carrier.during = lambda: (begun.release(), leave.wait(10))
        running, reading = asyncio.ensure_future(store.aput(BATCH)), asyncio.ensure_future(store.aget(ref))
        for _ in range(2):  # neither waits for the other
            while not begun.acquire(blocking=False):
                await asyncio.sleep(0.001)
        waiting = [asyncio.ensure_future(call) for call in (store.aget(ref), store.aput(BATCH))]
        await asyncio.sleep(0)
        closing = asyncio.get_running_loop().run_in_executor(None, store.close)
        while not store._closed:
            await asyncio.sleep(0.001)
        leave.set()
        assert (await running).num_rows == 2  # what has begun is done
        assert (await reading).value["round_number"] == 1
        await closing
        for call in (*waiting, store.aget(ref), store.aput(BATCH)):
            with pytest.raises(StoreClosed):
                await call

    asyncio.run(work())


def test_a_close_in_the_midst_of_a_call_is_told_as_one(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = store.put(BATCH)
    check, calls = (
        store._check_open,
        [
            lambda: store.prefetch(ref),
            lambda: asyncio.run(store.aput(BATCH)),
            lambda: asyncio.run(store.aget(ref)),
        ],
    )

    def check_then_close() -> None:
        check()
        monkeypatch.setattr(store, "_check_open", check)
        store.close()

    for call in calls:
        store._closed = False
        monkeypatch.setattr(store, "_check_open", check_then_close)
        with pytest.raises(StoreClosed):
            call()
