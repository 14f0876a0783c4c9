"""The buffer in any order of all calls, beside a model that is a few lists: what goes in comes out once, or is given up
by the rules, in order; whatever is cancelled, announced or fails meanwhile."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_plugin.fully_async import spill
from miles_plugin.fully_async.buffer import BufferFailed, BufferSettings, DataBuffer
from miles_plugin.fully_async.groups import DataBufferInput, PromptGroup
from miles_plugin.rollout.sample import Sample
from tests.unit.plugin.fully_async_groups import Store, finished, let_run, metric, number

CAPACITY, MOST = 3, 2


@dataclass
class Group:
    """What the model knows of a group: its number, versions and run."""

    number: int
    versions: list[str]
    run_id: str | None


@dataclass
class Waiting:
    task: asyncio.Task[Any]
    group: Group | None = None


class Buffers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.again: list[int] = []
        self.buffer = self.make(self.note_again)
        self.begun = 0
        self.failed = self.cancelled = False
        # The model: what lies there, who waits on each side, what was given up, what was got, and the watermark.
        self.lying: list[Group] = []
        self.putters: list[Waiting] = []
        self.getters: list[Waiting] = []
        self.given_up: list[int] = []
        self.expected: dict[asyncio.Task[Any], int] = {}
        self.current: int | None = None

    def make(self, regenerate: Callable[[PromptGroup], None]) -> DataBuffer:
        return DataBuffer(BufferSettings(CAPACITY, MOST, "retry"), regenerate, run_id="this")

    def note_again(self, prompts: PromptGroup) -> None:
        self.again.append(prompts[0].group_index)

    def teardown(self) -> None:
        for waiting in [*self.putters, *self.getters]:
            waiting.task.cancel()
        self.loop.run_until_complete(let_run())
        self.loop.run_until_complete(self.close())
        self.loop.close()

    async def close(self) -> None:
        self.buffer.close()
        await let_run()

    async def settle(self) -> None:
        await let_run()

    def check(self) -> None:
        """Let all go on until everybody waits, and the model too; both have to have come to the same."""
        self.loop.run_until_complete(self.settle())
        while self.step_model():
            pass
        for task, expected in list(self.expected.items()):
            assert task.done(), f"nobody was given group {expected}"
            assert number(task.result()) == expected
            del self.expected[task]
        for waiting in [*self.putters, *self.getters]:
            assert not waiting.task.done()
        assert self.again == self.given_up
        self.cancelled = False

    def step_model(self) -> bool:
        if self.putters and len(self.lying) < CAPACITY:
            putter = self.putters.pop(0)
            assert putter.group is not None
            assert putter.task.done()
            assert putter.task.exception() is None
            self.lying.append(putter.group)
            return True
        if not self.lying:
            return False
        if not self.getters:
            # One that is gone may have given up groups before it was cancelled, but none that may be trained on.
            noted = self.again[len(self.given_up) :][:1]
            if not self.cancelled or noted != [self.lying[0].number] or self.may_be_trained_on(self.lying[0]):
                return False
            self.given_up.append(self.lying.pop(0).number)
            return True
        group = self.lying.pop(0)
        if self.may_be_trained_on(group):
            self.expected[self.getters.pop(0).task] = group.number
        else:
            self.given_up.append(group.number)
        return True

    def may_be_trained_on(self, group: Group) -> bool:
        if group.run_id == "other":
            return False
        if self.current is None:
            return True
        if not group.versions or "default" in group.versions:
            return False
        numbers = list(map(int, group.versions))
        return self.current - MOST <= min(numbers) <= max(numbers) <= self.current

    def hear(self, version: int | None) -> None:
        if version is not None:
            self.current = max(version, self.current if self.current is not None else version)

    def begin_put(self, versions: list[str], run_id: str | None) -> Waiting:
        given = self.new_group(versions, run_id)
        task = self.loop.create_task(self.buffer.put(given))
        self.putters.append(Waiting(task, Group(self.begun, versions, run_id)))
        return self.putters[-1]

    def new_group(self, versions: list[str], run_id: str | None = None, **more: Any) -> DataBufferInput:
        self.begun += 1
        return finished(self.begun, *versions, run_id=run_id, **more)

    def begin_get(self, version: int | None) -> Waiting:
        # A task asks when it first runs, after all that is announced before the loop goes on.
        self.getters.append(Waiting(self.loop.create_task(self.buffer.get(version))))
        return self.getters[-1]

    versions = st.lists(st.one_of(st.integers(0, 6).map(str), st.just("default")), max_size=2)
    number_or_none = st.one_of(st.none(), st.integers(0, 6))
    runs = st.sampled_from([None, None, "this", "this", "other"])

    @precondition(lambda self: not self.failed)
    @rule(versions=versions, run_id=runs)
    def put(self, versions: list[str], run_id: str | None) -> None:
        self.begin_put(versions, run_id)
        self.check()

    @precondition(lambda self: not self.failed)
    @rule(back=st.integers(0, 3), run_id=runs)
    def put_one_of_now(self, back: int, run_id: str | None) -> None:
        self.put([str(max(0, (self.current or 0) - back))], run_id)

    @precondition(lambda self: not self.failed)
    @rule(version=number_or_none)
    def get(self, version: int | None) -> None:
        self.begin_get(version)
        self.hear(version)
        self.check()

    @precondition(lambda self: not self.failed)
    @rule(puts=st.lists(st.tuples(versions, runs), max_size=4), gets=st.integers(0, 4), announced=number_or_none)
    def all_at_once(self, puts: list[tuple[list[str], str | None]], gets: int, announced: int | None) -> None:
        for versions, run_id in puts:
            self.begin_put(versions, run_id)
        for _ in range(gets):
            self.begin_get(None)
        if announced is not None:
            self.buffer.announce(announced)
            self.hear(announced)
        self.check()

    @rule(version=st.integers(0, 6))
    def announce(self, version: int) -> None:
        self.buffer.announce(version)
        self.hear(version)
        self.check()

    @precondition(lambda self: not self.failed)
    @rule(versions=versions)
    def put_aborted(self, versions: list[str]) -> None:
        aborted = self.new_group(versions, status=Sample.Status.ABORTED)
        self.loop.run_until_complete(self.buffer.put(aborted))
        self.given_up.append(self.begun)
        self.check()

    @precondition(lambda self: self.putters or self.getters)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        line = [*self.putters, *self.getters]
        waiting = line[which % len(line)]
        waiting.task.cancel()
        self.forget_cancelled(waiting)
        self.check()

    @precondition(lambda self: not self.failed)
    @rule(which=st.integers(0, 99), steps=st.integers(0, 4), back=st.integers(0, 3), more=st.booleans())
    def cancel_in_the_midst(self, which: int, steps: int, back: int, more: bool) -> None:
        """A put and a get meet, and one of all those who wait or are just being served is cancelled meanwhile."""
        self.begin_put([str(max(0, (self.current or 0) - back))], None)
        if more:
            self.begin_get(None)
        line = [*self.putters, *self.getters]
        waiting = line[which % len(line)]
        self.loop.run_until_complete(let_run(steps))
        waiting.task.cancel()
        self.loop.run_until_complete(self.settle())
        self.forget_cancelled(waiting)
        self.check()

    def forget_cancelled(self, waiting: Waiting) -> None:
        self.loop.run_until_complete(let_run(2))
        if waiting.task.cancelled():
            self.cancelled = waiting in self.getters
            for line in (self.putters, self.getters):
                if waiting in line:
                    line.remove(waiting)

    @precondition(lambda self: not self.failed)
    @rule(how=st.sampled_from(["fail", "fail", "close"]), rare=st.integers(0, 9))
    def fail(self, how: str, rare: int) -> None:
        if rare:
            return
        self.failed = True
        error = RuntimeError("the worker died")
        self.loop.run_until_complete(self.end(error))
        for waiting in [*self.putters, *self.getters]:
            assert isinstance(waiting.task.exception(), BufferFailed)
        self.putters, self.getters = [], []

    async def end(self, error: Exception) -> None:
        self.buffer.fail(error)
        await let_run(2)

    @invariant()
    def what_lies_there_is_counted(self) -> None:
        metrics = self.buffer.get_metrics()
        assert metric(metrics, "queue_size") == len(self.lying)
        measured = [
            self.current - int(min(group.versions))
            for group in self.lying
            if self.current is not None
            and group.run_id != "other"
            and group.versions
            and "default" not in group.versions
            and max(map(int, group.versions)) <= self.current
        ]
        assert metrics.get("rollout/fully_async/buffer_max_staleness") == max(measured, default=None)
        assert all(value >= 0 for value in metrics.values())
        assert metrics.get("rollout/fully_async/consumed_max_staleness", 0) <= MOST

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert not (self.getters and self.lying)
        assert not (self.putters and len(self.lying) < CAPACITY)


class SpillingBuffers(Buffers):
    """The same, though but one group lies on the heap, and the store refuses now and then."""

    def make(self, regenerate: Callable[[PromptGroup], None]) -> DataBuffer:
        self.store = Store()
        self.spill = spill.Spill(self.store, in_memory=1)
        return DataBuffer(BufferSettings(CAPACITY, MOST, "retry"), regenerate, run_id="this", queue=self.spill)

    async def settle(self) -> None:
        await let_run()
        while self.spill.is_busy():
            await self.spill.idle()
            await let_run()

    @invariant()
    def one_group_lies_on_the_heap_and_the_store_has_the_others(self) -> None:
        if self.failed:
            return
        entries = [*self.spill._ready, *self.spill._behind]
        assert sum(entry.group is not None for entry in entries) <= 1
        assert all((entry.group is None) == (entry.ref is not None) for entry in entries)
        assert sorted(self.store.objects) == sorted(entry.ref.key for entry in entries if entry.ref is not None)


class TestBuffers(Buffers.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


class TestSpillingBuffers(SpillingBuffers.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
