"""The buffer by its contract: what comes out in which order, what does not, who waits, and what is counted."""

import asyncio
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from miles_plugin.fully_async import buffer as buffer_module
from miles_plugin.fully_async.buffer import BufferClosed, BufferFailed, BufferSettings, DataBuffer, capacity_of
from miles_plugin.fully_async.groups import DataBufferInput, PromptGroup
from miles_plugin.rollout.sample import Sample
from mooncake_store.errors import ConfigError
from tests.unit.plugin.fully_async_groups import finished, let_run, metric, number, run


def make(capacity: int = 100, most: int | None = None, **more: Any) -> tuple[DataBuffer, list[PromptGroup]]:
    again: list[PromptGroup] = []
    return DataBuffer(BufferSettings(capacity, most, "retry"), again.append, **more), again


def test_groups_come_out_as_they_came_in() -> None:
    async def body() -> None:
        buffer, again = make()
        given = [finished(n, "5") for n in range(5)]
        for each in given:
            await buffer.put(each)
        assert [await buffer.get() for _ in given] == given
        assert not again

    run(body)


def test_a_full_buffer_makes_put_wait_and_serves_it_in_its_order() -> None:
    async def body() -> None:
        buffer, _ = make(capacity=2)
        putting = [asyncio.create_task(buffer.put(finished(n))) for n in range(5)]
        await let_run()
        assert [task.done() for task in putting] == [True, True, False, False, False]
        assert metric(buffer.get_metrics(), "queue_size") == 2
        for taken in range(5):
            assert number(await buffer.get()) == taken
            await let_run()
            assert sum(task.done() for task in putting) == min(5, 3 + taken)

    run(body)


def test_who_came_first_is_served_first_though_another_asks_in_between() -> None:
    async def body() -> None:
        buffer, _ = make()
        early = asyncio.create_task(buffer.get())
        await let_run()
        await buffer.put(finished(0))
        late: Any = buffer.get()
        late.send(None)  # runs before `early`, which was woken, and has to wait
        await let_run()
        assert number(early.result()) == 0
        await buffer.put(finished(1))
        with pytest.raises(StopIteration) as stopped:
            late.send(None)
        assert number(stopped.value.value) == 1

    run(body)


def test_who_came_first_puts_first_though_another_comes_in_between() -> None:
    async def body() -> None:
        buffer, _ = make(capacity=1)
        await buffer.put(finished(0))
        early = asyncio.create_task(buffer.put(finished(1)))
        await let_run()
        await buffer.get()
        late: Any = buffer.put(finished(2))
        late.send(None)
        assert number(await buffer.get()) == 1
        assert early.done()
        late.close()

    run(body)


def test_what_miles_puts_and_asks_beside_is_no_mistake() -> None:
    async def body() -> None:
        buffer, _ = make(run_id="this")
        given = finished(1)
        await buffer.put(SimpleNamespace(prompt_group=given.prompt_group, group=given.group))  # type: ignore[arg-type]
        assert number(await buffer.get(current_version=1, some_future_key=2)) == 1

    run(body)


def test_only_the_version_at_the_time_of_get_counts() -> None:
    async def body() -> None:
        buffer, again = make(most=2)
        stale = finished(1, "5")
        await buffer.put(stale)
        await buffer.put(finished(2, "9"))
        assert number(await buffer.get(current_version=10)) == 2
        assert again == [stale.prompt_group]
        metrics = buffer.get_metrics()
        assert metric(metrics, "stale_groups_filtered") == metric(metrics, "recycled_groups") == 1
        assert metric(metrics, "max_staleness") == 5, "as miles counts: of all that were judged"
        assert metric(metrics, "consumed_max_staleness") == 1

    run(body)


def test_before_the_first_version_nothing_is_stale_and_nothing_is_0() -> None:
    async def body() -> None:
        buffer, again = make(most=0)
        for n, spans in enumerate([("5",), ("default",), ()]):
            await buffer.put(finished(n, *spans))
        assert [number(await buffer.get(current_version=None)) for _ in range(3)] == [0, 1, 2]
        assert not again
        metrics = buffer.get_metrics()
        assert not [name for name in metrics if name.endswith(("avg_staleness", "max_staleness"))]
        assert metric(metrics, "consumed_staleness_0") == 0
        assert buffer.current_version is None

    run(body)


def test_a_get_that_waits_is_measured_against_what_is_announced_meanwhile() -> None:
    """No window: whoever resumes engines announces first, from whichever thread."""

    async def body() -> None:
        buffer, again = make(most=1)
        waiting = asyncio.create_task(buffer.get(current_version=6))
        await let_run()
        announcing = threading.Thread(target=buffer.announce, args=(8,))
        announcing.start()
        announcing.join()
        await buffer.put(finished(0, "6"))
        await let_run()
        assert not waiting.done()
        assert len(again) == 1
        await buffer.put(finished(1, "7"))
        assert number(await waiting) == 1
        assert metric(buffer.get_metrics(), "consumed_max_staleness") == 1

    run(body)


def test_what_is_announced_after_a_getter_was_woken_counts_still() -> None:
    async def body() -> None:
        buffer, again = make(most=0)
        buffer.announce(1)
        waiting = asyncio.create_task(buffer.get())
        await let_run()
        await buffer.put(finished(0, "1"))  # wakes the getter, which has not run yet
        buffer.announce(2)
        await let_run()
        assert not waiting.done()
        assert len(again) == 1
        waiting.cancel()

    run(body)


def test_a_number_that_steps_back_does_not_let_old_groups_through() -> None:
    async def body() -> None:
        buffer, again = make(most=1)
        await buffer.put(finished(0, "10"))
        assert number(await buffer.get(current_version=10)) == 0
        for n, version in ((1, "4"), (2, "9")):
            await buffer.put(finished(n, version))
        assert number(await buffer.get(current_version=4)) == 2
        assert len(again) == 1
        metrics = buffer.get_metrics()
        assert metric(metrics, "version_steps_back") == 1
        assert metric(metrics, "consumed_max_staleness") == 1
        assert metric(buffer.get_metrics(), "version_steps_back") == 0

    run(body)


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        (finished(0, "default"), "unstamped"),
        (finished(0), "unstamped"),
        (finished(0, "default", "7"), "unstamped"),
        (finished(0, "8"), "foreign"),
        (finished(0, "7", run_id="other"), "foreign"),
    ],
)
def test_what_cannot_be_measured_is_given_up_and_counted_apart(given: DataBufferInput, counted: str) -> None:
    async def body() -> None:
        for unused in ("retry", "drop"):
            again: list[PromptGroup] = []
            buffer = DataBuffer(BufferSettings(9, 100, unused), again.append, run_id="this")  # type: ignore[arg-type]
            buffer.announce(7)
            await buffer.put(given)
            await buffer.put(finished(1, "7", run_id="this"))
            assert number(await buffer.get()) == 1
            assert again == ([given.prompt_group] if unused == "retry" else [])
            metrics = buffer.get_metrics()
            for name in ("unstamped", "foreign", "stale", "aborted"):
                assert metric(metrics, f"{name}_groups_filtered") == (name == counted)
            assert metric(metrics, "recycled_groups") == (unused == "retry")
            assert metric(metrics, "dropped_groups") == (unused == "drop")

    run(body)


def test_without_a_bound_versions_keep_nothing_back_and_are_still_counted() -> None:
    async def body() -> None:
        buffer, again = make(most=None, run_id="this")
        buffer.announce(7)
        for n, version in enumerate(["0", "default", "9"]):
            await buffer.put(finished(n, version))
        await buffer.put(finished(3, "7", run_id="other"))
        await buffer.put(finished(4, "7"))
        assert [number(await buffer.get()) for _ in range(4)] == [0, 1, 2, 4]
        assert len(again) == 1, "another run's is never trained on"
        metrics = buffer.get_metrics()
        assert metric(metrics, "unstamped_groups_consumed") == metric(metrics, "foreign_groups_consumed") == 1
        assert metric(metrics, "consumed_avg_staleness") == 3.5

    run(body)


@pytest.mark.parametrize("unused", ["retry", "drop"])
def test_an_aborted_group_needs_no_room(unused: Any) -> None:
    async def body() -> None:
        again: list[PromptGroup] = []
        buffer = DataBuffer(BufferSettings(1, None, unused), again.append)
        await buffer.put(finished(0))
        aborted = finished(1, status=Sample.Status.ABORTED)
        await buffer.put(aborted)
        nested = [finished(2).group, finished(3, status=Sample.Status.ABORTED).group]
        await buffer.put(DataBufferInput(finished(2).prompt_group, nested))  # type: ignore[arg-type]
        assert len(again) == 2 * (unused == "retry")
        assert all(prompts[0].group_index in (1, 2) for prompts in again)
        metrics = buffer.get_metrics()
        assert metric(metrics, "aborted_groups_filtered") == 2
        assert metric(metrics, "queue_size") == 1

    run(body)


def test_a_regeneration_that_fails_loses_no_group() -> None:
    async def body() -> None:
        again: list[PromptGroup] = []
        works = False

        def regenerate(prompts: PromptGroup) -> None:
            if not works:
                raise RuntimeError("the source of prompts is closed")
            again.append(prompts)

        buffer = DataBuffer(BufferSettings(9, 0, "retry"), regenerate)
        buffer.announce(1)
        await buffer.put(finished(0, "0"))
        await buffer.put(finished(1, "1"))
        with pytest.raises(RuntimeError):
            await buffer.get()
        assert metric(buffer.get_metrics(), "queue_size") == 2
        works = True
        assert number(await buffer.get()) == 1
        assert len(again) == 1
        assert metric(buffer.get_metrics(), "stale_groups_filtered") == 1

    run(body)


def test_metrics_are_of_the_time_since_they_were_looked_at_last() -> None:
    async def body() -> None:
        now = 100.0
        buffer, _ = make(capacity=3, clock=lambda: now)
        for n, version in enumerate(["4", "6", "8"]):
            await buffer.put(finished(n, version))
        assert not [name for name in buffer.get_metrics() if "buffer_" in name], "no version was heard of"
        blocked = [asyncio.create_task(buffer.put(finished(n, "10"))) for n in (3, 4)]
        await let_run()
        now += 2.0
        assert metric(buffer.get_metrics(), "put_wait_seconds") == 4.0, "of two that wait still"
        now += 1.0
        assert number(await buffer.get(current_version=10)) == 0
        await let_run()
        assert [task.done() for task in blocked] == [True, False]
        now += 0.5
        metrics = buffer.get_metrics()
        assert metric(metrics, "put_wait_seconds") == 2.5
        assert metric(metrics, "avg_staleness") == metric(metrics, "consumed_avg_staleness") == 6
        assert metric(metrics, "consumed_staleness_6") == metric(metrics, "consumed_groups") == 1
        assert metric(metrics, "buffer_avg_staleness") == pytest.approx((4 + 2 + 0) / 3)
        assert metric(metrics, "buffer_max_staleness") == 4
        buffer.announce(20)
        assert metric(buffer.get_metrics(), "buffer_max_staleness") == 14
        for _ in range(4):
            await buffer.get()
            await let_run()
        metrics = buffer.get_metrics()
        assert metric(metrics, "consumed_staleness_8_or_more") == metric(metrics, "consumed_groups") == 4
        assert not [name for name in metrics if "buffer_" in name]
        hungry = asyncio.create_task(buffer.get())
        await let_run()
        now += 7.0
        hungry.cancel()
        await let_run()
        now += 1.0
        assert metric(buffer.get_metrics(), "get_wait_seconds") == 7.0

    run(body)


def test_a_failure_reaches_everybody_at_once_though_groups_are_left() -> None:
    async def body() -> None:
        buffer, _ = make(capacity=1)
        await buffer.put(finished(0))
        putting = [asyncio.create_task(buffer.put(finished(n))) for n in (1, 2, 3)]
        empty, _ = make()
        getting = [asyncio.create_task(empty.get()) for _ in range(3)]
        await let_run()
        error = RuntimeError("generation exploded")
        for each in (buffer, empty):
            each.fail(error)
            each.fail(ValueError("a later one"))
            each.close()
        await let_run(2)
        for task in [*putting, *getting]:
            failure = task.exception()
            assert type(failure) is BufferFailed
            assert failure.__cause__ is error
            assert "generation exploded" in str(failure)
        assert len({id(task.exception()) for task in [*putting, *getting]}) == 6, "each has a traceback of its own"
        for call in (buffer.get(), buffer.put(finished(9)), empty.get()):
            with pytest.raises(BufferFailed):
                await call
        assert metric(buffer.get_metrics(), "queue_size") == 1

    run(body)


def test_closing_in_order_is_no_failure() -> None:
    async def body() -> None:
        buffer, _ = make()
        waiting = asyncio.create_task(buffer.get())
        await let_run()
        for _ in range(2):
            buffer.close()
        buffer.fail(RuntimeError("too late to matter"))
        with pytest.raises(BufferClosed) as raised:
            await waiting
        assert type(raised.value) is BufferClosed

    run(body)


def test_a_getter_cancelled_after_it_was_woken_leaves_the_group_to_the_next() -> None:
    async def body() -> None:
        buffer, _ = make(capacity=1)
        first, second = asyncio.create_task(buffer.get()), asyncio.create_task(buffer.get())
        await let_run()
        await buffer.put(finished(0))
        first.cancel()
        await let_run()
        assert first.cancelled()
        assert number(second.result()) == 0
        await buffer.put(finished(1))
        putting = [asyncio.create_task(buffer.put(finished(n))) for n in (2, 3)]
        await let_run()
        assert number(await buffer.get()) == 1  # wakes the first putter
        putting[0].cancel()
        await let_run()
        assert putting[0].cancelled()
        assert putting[1].done()
        assert number(await buffer.get()) == 3, "2 is its putter's still"

    run(body)


@pytest.mark.parametrize("seed", range(4))
def test_many_putters_and_getters_lose_and_double_nothing(seed: int) -> None:
    """Some are cancelled at any moment, while versions rise; afterwards every group is accounted for, once."""

    async def body() -> None:
        chance = random.Random(seed)
        buffer, again = make(capacity=7, most=3)
        put: list[int] = []
        got: list[int] = []

        async def putter(first: int) -> None:
            for n in range(first, first + 30):
                await buffer.put(finished(n, str(buffer.current_version or 0)))
                put.append(n)  # in the same step that it was put in
                if chance.random() < 0.3:
                    await asyncio.sleep(0)

        async def getter() -> None:
            while True:
                got.append(number(await buffer.get()))
                if chance.random() < 0.3:
                    await asyncio.sleep(0)

        putters = [asyncio.create_task(putter(1000 * index)) for index in range(30)]
        getters = [asyncio.create_task(getter()) for _ in range(20)]
        for step in range(200):
            await asyncio.sleep(0)
            if chance.random() < 0.2:
                buffer.announce(step // 10)
            if chance.random() < 0.1:
                chance.choice(putters).cancel()
            if chance.random() < 0.05:
                chance.choice(getters[:-1]).cancel()
        while not all(task.done() for task in putters):
            await asyncio.sleep(0)
        await let_run()
        recycled = [prompts[0].group_index for prompts in again]
        assert sorted(got + recycled) == sorted(put)
        assert len(put) > 300
        for first in range(0, 30_000, 1000):
            mine = [n for n in got if first <= n < first + 1000]
            assert mine == sorted(mine)
        buffer.close()
        await asyncio.gather(*getters, return_exceptions=True)

    run(body)


def operations(call: Callable[[], object]) -> int:
    """Calls made meanwhile, of functions in Python and in C."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


class Counted:
    """Stands before a deque or an OrderedDict, and lets those calls through that are O(1)."""

    allowed = frozenset({"append", "popleft"})

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        assert name in self.allowed, f"{name} of a {type(self._inner).__name__} is not O(1)"
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, key: Any) -> Any:
        assert key == 0
        return self._inner[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._inner[key] = value

    def __delitem__(self, key: Any) -> None:
        assert isinstance(self._inner, OrderedDict), "in a deque the others move up"
        del self._inner[key]

    def __iter__(self) -> Any:
        assert isinstance(self._inner, OrderedDict)
        yield next(iter(self._inner))  # and nobody asks for a second one
        raise AssertionError("walked through the line")


def test_the_cost_of_a_call_does_not_depend_on_how_many_lie_or_wait_there() -> None:
    """Counted are calls, and what is asked of the two containers that grow."""

    async def body() -> dict[str, set[int]]:
        costs: dict[str, set[int]] = {name: set() for name in ("put", "get", "announce", "cancel", "wake")}
        for size in (3, 100, 3000):
            buffer, _ = make(capacity=size + 2, most=0)
            buffer.announce(1)
            for n in range(size):
                await buffer.put(finished(n, "1"))
            buffer._queue._entries = Counted(deque(buffer._queue._entries))  # type: ignore[attr-defined]
            given = finished(size, "1")
            costs["put"].add(operations(lambda b=buffer, g=given: finish(b.put(g))))  # type: ignore[misc]
            costs["get"].add(operations(lambda b=buffer: finish(b.get())))  # type: ignore[misc]
            costs["announce"].add(operations(lambda b=buffer: b.announce(1)))  # type: ignore[misc]
            hungry, _ = make()
            waiting: list[Any] = [hungry.get() for _ in range(size)]
            for call in waiting:
                call.send(None)
            hungry._getters._places = Counted(hungry._getters._places)  # type: ignore[assignment]
            costs["cancel"].add(operations(lambda c=waiting[size // 2]: throw(c)))  # type: ignore[misc]
            costs["wake"].add(operations(lambda b=hungry, g=given: finish(b.put(g))))  # type: ignore[misc]
            for call in waiting:
                call.close()
        return costs

    for name, costs in run(body).items():
        assert len(costs) == 1, f"{name}: {sorted(costs)}"


def finish(call: Any) -> None:
    """Drive a coroutine that need not wait."""
    with pytest.raises(StopIteration):
        call.send(None)


def throw(call: Any) -> None:
    with pytest.raises(asyncio.CancelledError):
        call.throw(asyncio.CancelledError())


def test_giving_up_many_stale_groups_costs_each_of_them_the_same() -> None:
    async def body(size: int) -> int:
        buffer, again = make(capacity=size + 1, most=0)
        for n in range(size):
            await buffer.put(finished(n, "0"))
        await buffer.put(finished(size, "1"))
        buffer.announce(1)
        cost = operations(lambda: finish(buffer.get()))
        assert len(again) == size
        return cost

    few, some, many = (run(lambda s=size: body(s)) for size in (100, 200, 300))  # type: ignore[misc]
    assert many - some == some - few


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"capacity": 0}, "capacity = 0: allowed is an integer of at least 1"),
        ({"capacity": 2.5}, "capacity = 2.5"),
        ({"capacity": True}, "capacity = True"),
        ({"max_weight_staleness": -1}, "max_weight_staleness = -1: allowed is an integer of at least 0"),
        ({"unused": "recycle"}, "unused = 'recycle': allowed are 'retry' and 'drop'"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BufferSettings(**{"capacity": 1, **wrong})
    with pytest.raises(ConfigError, match="needs `regenerate`"):
        DataBuffer(BufferSettings(1, unused="retry"))


def test_the_capacity_is_miles_factor_of_a_batch_rounded_down() -> None:
    assert [capacity_of(factor, 3) for factor in (2.0, 0.5, 1.99)] == [6, 1, 5]
    for factor in (0.3, 0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="has no place for any"):
            capacity_of(factor, 3)


def test_what_is_no_group_or_version_is_refused() -> None:
    async def body() -> None:
        buffer, again = make()
        for empty in (DataBufferInput([], finished(0).group), DataBufferInput(finished(0).prompt_group, [])):
            with pytest.raises(ValueError, match="cannot be put"):
                await buffer.put(empty)
        with pytest.raises(ValueError, match="is no policy version"):
            await buffer.get(current_version=-1)
        assert metric(buffer.get_metrics(), "queue_size") == 0
        assert not again

    run(body)


def test_the_names_of_miles_are_there() -> None:
    async def body() -> None:
        buffer, _ = make(most=0)
        buffer.announce(3)
        await buffer.put(finished(0, "3"))
        await buffer.put(finished(1, "3"))
        await buffer.get()
        names = {
            *("queue_size", "aborted_groups_filtered", "stale_groups_filtered", "avg_staleness", "max_staleness"),
            *("buffer_avg_staleness", "buffer_max_staleness"),
        }
        metrics = buffer.get_metrics()
        assert {f"rollout/fully_async/{name}" for name in names} <= metrics.keys()
        assert all(type(value) in (int, float) for value in metrics.values())

    run(body)
    assert buffer_module.PREFIX == "rollout/fully_async/"
