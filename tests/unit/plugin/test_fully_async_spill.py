"""What lies in a store instead of on the heap: how much that is, and what happens when the store is full, slow, away or
has lost what it was given."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from miles_plugin.fully_async import spill as spill_module
from miles_plugin.fully_async.buffer import BufferClosed, BufferFailed, BufferSettings, DataBuffer
from miles_plugin.fully_async.groups import DataBufferInput, PromptGroup
from miles_plugin.fully_async.spill import AHEAD, GroupStore, Spill
from mooncake_store import ObjectStore
from mooncake_store.errors import (
    ConfigError,
    IntegrityError,
    ObjectLost,
    StoreClosed,
    StoreFull,
    StoreUnavailable,
)
from tests.unit.plugin.fully_async_groups import Store, finished, let_run, metric, number, run


class Spilling:
    """A buffer with a spill over a store, and what was asked for again."""

    def __init__(self, in_memory: int, capacity: int = 100, most: int | None = None, unused: Any = "retry") -> None:
        self.store = Store()
        self.spill = Spill(self.store, in_memory)
        self.again: list[PromptGroup] = []
        self.buffer = DataBuffer(BufferSettings(capacity, most, unused), self.again.append, queue=self.spill)

    async def idle(self) -> None:
        await let_run()
        while self.spill.is_busy():
            await self.spill.idle()
            await let_run()

    async def put(self, *numbers: int, version: str = "5") -> None:
        for n in numbers:
            await self.buffer.put(finished(n, version))
            await self.idle()

    def on_heap(self) -> list[int]:
        entries = [*self.spill._ready, *self.spill._behind]
        return [entry.prompt_group[0].group_index for entry in entries if entry.group is not None]

    def metric(self, name: str) -> float:
        return metric(self.buffer.get_metrics(), name)


def in_loop(body: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    if monkeypatch is not None:
        monkeypatch.setattr(spill_module, "FIRST_PAUSE", 0.0)
    run(body)


def test_a_store_of_ours_is_one() -> None:
    def fits(store: GroupStore) -> GroupStore:
        return store

    store = Store()
    assert fits(store.inner) is store.inner  # which mypy looks at
    assert isinstance(store.inner, ObjectStore)


def test_only_the_first_groups_lie_on_the_heap_and_all_come_out_in_order() -> None:
    async def body() -> None:
        it = Spilling(in_memory=2)
        given = [finished(n, "5", str(n)) for n in range(7)]
        for each in given:
            await it.buffer.put(each)
            await it.idle()
        assert it.on_heap() == [0, 1]
        assert len(it.store.objects) == it.metric("spilled_groups") == 5
        assert it.metric("queue_size") == 7
        taken = []
        for left in range(7, 0, -1):
            taken.append(await it.buffer.get())
            await it.idle()
            assert len(it.on_heap()) == min(2, left - 1)
            assert len(it.store.objects) == max(0, left - 3), "removed as soon as they are here again"
        assert taken == given, "each sample equal"
        assert it.store.calls == {"put": 5, "get": 5, "remove": 5}
        assert not it.again

    in_loop(body)


def test_groups_that_pass_at_once_are_not_stored() -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        for n in range(20):
            await it.buffer.put(finished(n, "5"))
            assert number(await it.buffer.get()) == n
        await it.idle()
        assert it.store.calls["put"] == 0

    in_loop(body)


def test_prompts_that_hold_the_samples_let_go_of_them_as_well() -> None:
    async def body() -> None:
        it = Spilling(in_memory=1, most=0)
        await it.put(0)
        samples = finished(1, "5").group
        await it.buffer.put(DataBufferInput(samples, samples))  # type: ignore[arg-type]
        await it.idle()
        (entry,) = it.spill._behind
        assert [sample.prompt for sample in entry.prompt_group] == ["question 1"] * 2
        assert not any(sample.tokens or sample.response or sample.reward for sample in entry.prompt_group)

    in_loop(body)


def test_a_slow_store_makes_put_wait_and_get_not() -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        it.store.go_on.clear()
        putting = [asyncio.create_task(it.buffer.put(finished(n, "5"))) for n in range(6)]
        await let_run()
        assert sum(task.done() for task in putting) == 1 + AHEAD
        for n in range(6):
            assert number(await it.buffer.get()) == n
            await let_run()
        assert all(task.done() for task in putting)
        it.store.go_on.set()
        await it.idle()
        assert not it.store.objects, "what was put while its group left is removed"
        assert it.on_heap() == []

    in_loop(body)


@pytest.mark.parametrize(
    "error", [StoreFull("no room"), StoreUnavailable("the master is away"), ConfigError("no"), TypeError("a set")]
)
def test_what_the_store_does_not_take_stays_here_and_is_not_lost(error: Exception) -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        it.store.failing["put"] = error
        putting = [asyncio.create_task(it.buffer.put(finished(n, "5"))) for n in range(8)]
        await it.idle()
        assert sum(task.done() for task in putting) == 1 + AHEAD
        assert it.metric("spill_failures") > 0
        for n in range(4):
            assert number(await it.buffer.get()) == n
            await it.idle()
        del it.store.failing["put"]
        for n in range(4, 8):
            assert number(await it.buffer.get()) == n
            await it.idle()
        assert all(task.done() for task in putting)
        assert not it.again
        assert not it.store.objects

    in_loop(body)


def test_a_store_that_has_room_again_is_used_again() -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        it.store.failing["put"] = StoreFull("no room")
        await it.put(0, 1)
        del it.store.failing["put"]
        await it.put(2)
        assert it.on_heap() == [0]
        assert len(it.store.objects) == 2

    in_loop(body)


@pytest.mark.parametrize("unused", ["retry", "drop"])
@pytest.mark.parametrize("error", [ObjectLost("its owner died"), IntegrityError("another batch's bytes")])
def test_a_group_whose_samples_are_lost_is_generated_again(error: Exception, unused: str) -> None:
    """Also with "drop": nothing is wrong with the group."""

    async def body() -> None:
        it = Spilling(in_memory=1, unused=unused)
        await it.put(0, 1, 2, 3)
        it.store.failing["get"] = error
        assert number(await it.buffer.get()) == 0
        await it.idle()
        assert [prompts[0].group_index for prompts in it.again] == [1, 2, 3]
        assert (
            it.buffer.get_metrics().items()
            >= {
                "rollout/fully_async/lost_groups": 3,
                "rollout/fully_async/recycled_groups": 3,
                "rollout/fully_async/queue_size": 0,
            }.items()
        )
        del it.store.failing["get"]
        await it.put(4)
        assert number(await it.buffer.get()) == 4
        assert not it.store.objects

    in_loop(body)


def test_a_store_that_is_away_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        await it.put(0, 1)
        it.store.failing["get"] = StoreUnavailable("the master is restarted")
        assert number(await it.buffer.get()) == 0
        waiting = asyncio.create_task(it.buffer.get())
        while it.store.calls["get"] < 3:
            await asyncio.sleep(0)
        del it.store.failing["get"]
        assert number(await waiting) == 1
        assert not it.again

    in_loop(body, monkeypatch)


def test_a_store_that_stays_away_has_lost_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        await it.put(0, 1)
        it.store.failing["get"] = StoreUnavailable("the master was killed")
        assert number(await it.buffer.get()) == 0
        await it.idle()
        assert it.store.calls["get"] == spill_module.TRIES
        assert [prompts[0].group_index for prompts in it.again] == [1]

    in_loop(body, monkeypatch)


def test_what_grew_stale_in_the_store_is_not_read() -> None:
    async def body() -> None:
        it = Spilling(in_memory=1, most=1)
        it.buffer.announce(5)
        await it.put(0, 1, 2)
        await it.put(3, version="7")
        it.buffer.announce(7)
        assert number(await it.buffer.get()) == 3
        await it.idle()
        assert it.store.calls["get"] == 1
        assert [prompts[0].group_index for prompts in it.again] == [0, 1, 2]
        assert not it.store.objects

    in_loop(body)


def test_what_grows_stale_while_it_is_read_does_not_come_out() -> None:
    async def body() -> None:
        it = Spilling(in_memory=1, most=1)
        it.buffer.announce(5)
        await it.put(0, 1)
        await it.put(2, version="7")
        it.store.go_on.clear()
        assert number(await it.buffer.get()) == 0
        waiting = asyncio.create_task(it.buffer.get())
        await let_run()
        assert it.spill._moving is not None
        it.buffer.announce(7)
        it.store.go_on.set()
        assert number(await waiting) == 2
        assert [prompts[0].group_index for prompts in it.again] == [1]

    in_loop(body)


def test_what_looked_too_new_is_read_all_the_same_and_may_come_out() -> None:
    """Of all that is given up only this may be right later: when its number is announced after all."""

    async def body() -> None:
        it = Spilling(in_memory=1, most=1)
        it.buffer.announce(5)
        await it.put(0)
        await it.put(1, version="6")
        assert number(await it.buffer.get()) == 0
        await it.idle()
        assert it.on_heap() == [1]
        it.buffer.announce(6)
        assert number(await it.buffer.get()) == 1

    in_loop(body)


@pytest.mark.parametrize("method", ["put", "get"])
def test_a_closed_store_fails_everybody(method: str) -> None:
    async def body() -> None:
        it = Spilling(in_memory=1, capacity=2)
        if method == "get":
            await it.put(0, 1)
        it.store.failing[method] = StoreClosed("the store is closed")
        if method == "put":
            await it.put(0, 1)
        else:
            await it.buffer.get()
        await it.idle()
        with pytest.raises(BufferFailed, match="the store is closed"):
            await it.buffer.get()
        with pytest.raises(BufferFailed):
            await it.buffer.put(finished(9, "5"))

    in_loop(body)


def test_what_cannot_be_removed_now_is_removed_with_the_next() -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        await it.put(0, 1, 2)
        it.store.failing["remove"] = StoreUnavailable("the master is away")
        assert number(await it.buffer.get()) == 0
        await it.idle()
        assert len(it.store.objects) == 2
        del it.store.failing["remove"]
        assert number(await it.buffer.get()) == 1
        await it.idle()
        assert not it.store.objects

    in_loop(body)


def test_closing_ends_what_goes_on_and_wakes_whoever_waits() -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        it.store.go_on.clear()
        await it.buffer.put(finished(0, "5"))
        await it.buffer.put(finished(1, "5"))
        await let_run()
        assert it.spill.is_busy()
        for _ in range(2):
            it.buffer.close()
        await let_run()
        assert not it.spill.is_busy()
        it.store.go_on.set()

    in_loop(body)


@pytest.mark.parametrize("in_flight", [None, "put", "get"])
def test_a_buffer_that_is_cleared_leaves_nothing_in_the_store(in_flight: str | None) -> None:
    async def body() -> None:
        it = Spilling(in_memory=1)
        await it.put(0, 1, 2)
        if in_flight is not None:
            it.store.go_on.clear()
            if in_flight == "put":
                await it.buffer.put(finished(3, "5"))
            else:
                await it.buffer.get()
            await let_run()
        clearing = asyncio.create_task(it.buffer.clear())
        await let_run()
        with pytest.raises(BufferClosed):
            await it.buffer.get()
        assert clearing.done() == (in_flight is None and not it.store.objects)
        it.store.go_on.set()
        await clearing
        assert it.store.calls["put"] == (3 if in_flight == "put" else 2)
        assert not it.store.objects
        assert not it.again
        await it.buffer.clear()

    in_loop(body)


@pytest.mark.parametrize("in_memory", [0, -1, 1.5, True, "2"])
def test_a_bound_that_is_none_is_named(in_memory: Any) -> None:
    with pytest.raises(ConfigError, match=f"in_memory = {in_memory!r}: allowed is an integer of at least 1, in groups"):
        Spill(Store(), in_memory)


def test_keeping_all_needs_a_journal() -> None:
    with pytest.raises(ConfigError, match="without a journal"):
        DataBuffer(BufferSettings(1), queue=Spill(Store(), 1, keeps_all=True))


def test_the_cost_of_a_group_does_not_depend_on_how_many_there_are() -> None:
    """Counted in calls of the store: whatever goes into it goes in once, is read once and is removed once."""

    async def body() -> None:
        it = Spilling(in_memory=3, capacity=2000)
        putting = asyncio.create_task(it.put(*range(300)))
        taken = [number(await it.buffer.get()) for _ in range(100)]
        await putting
        taken += [number(await it.buffer.get()) for _ in range(200)]
        await it.idle()
        assert taken == list(range(300))
        assert it.store.calls["put"] == it.store.calls["get"] == it.store.calls["remove"] <= 300

    in_loop(body)
