"""The buffer, its store and its journal through the ends of processes: no group is lost, none is trained on twice."""

import asyncio
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from miles_plugin.fully_async.books import Recovered, recover
from miles_plugin.fully_async.buffer import BufferSettings, DataBuffer
from miles_plugin.fully_async.groups import PromptGroup
from miles_plugin.fully_async.journal import Journal, JournalUnavailable
from miles_plugin.fully_async.journal_records import Progress
from miles_plugin.fully_async.spill import Spill
from miles_plugin.rollout.sample import Sample
from mooncake_store.errors import ConfigError
from tests.unit.plugin.fully_async_groups import Store, finished, let_run, metric, number, run


class Process:
    """A process that has a buffer, going on with what was left in the store and in the file of the journal."""

    def __init__(
        self,
        store: Store,
        path: Path,
        keeps_all: bool = False,
        checkpoint: int = 0,
        in_memory: int = 1,
        unused: Any = "retry",
    ) -> None:
        self.store, self.path, self.again = store, path, list[PromptGroup]()
        self.journal = Journal(path)
        self.journal.trained_before(checkpoint)
        self.found: Recovered = recover(self.journal, "this", store.inner.remove)
        self.spill = Spill(store, in_memory, keeps_all)
        self.buffer = DataBuffer(
            BufferSettings(4, 1, unused), self.again.append, run_id="this", queue=self.spill, journal=self.journal
        )
        self.buffer.restore(self.found.waiting)

    async def idle(self) -> None:
        """Until all is in the store, and on the disk."""
        await let_run()
        books: Any = self.buffer._books
        while self.spill.is_busy() or books._flushing.is_busy():
            await self.spill.idle()
            await books._flushing.idle()
            await let_run()

    async def put(self, *numbers: int, version: str = "5") -> None:
        for n in numbers:
            await self.buffer.put(finished(n, version))
        await self.idle()

    async def get(self, count: int, batch: int) -> list[int]:
        taken = [number(await self.buffer.get(batch=batch)) for _ in range(count)]
        await self.buffer.flush()
        return taken

    def metric(self, name: str) -> float:
        return metric(self.buffer.get_metrics(), name)


def prompts(groups: list[PromptGroup]) -> list[int]:
    return [group[0].group_index for group in groups]


def in_loop(body: Callable[[Store, Path], Awaitable[None]], path: Path) -> None:
    run(lambda: body(Store(), path / "journal"))


def test_what_waited_or_was_taken_comes_back_and_what_was_trained_on_does_not(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path, keeps_all=True)
        await first.put(0, 1, 2)
        assert await first.get(1, batch=0) == [0]
        await first.put(3)
        assert await first.get(1, batch=1) == [1]
        await first.buffer.trained_before(1)
        await first.idle()
        assert len(store.objects) == 3, "what was trained on is removed, what was taken is not"
        second = Process(store, path)
        assert prompts([entry.prompt_group for entry in second.found.waiting]) == [1, 2, 3]
        assert (second.found.prompts, second.found.numbers, second.found.next) == ([], [], 4)
        known = second.journal.state.live.values()
        assert {(each.progress, each.batch) for each in known} == {(Progress.FINISHED, None)}
        assert await second.get(3, batch=1) == [1, 2, 3]
        await second.buffer.trained([1, 2, 3])
        await second.idle()
        assert not store.objects
        assert (Process(store, path).found.waiting, Process(store, path).found.numbers) == ([], [])

    in_loop(body, tmp_path)


def test_what_lay_on_the_heap_comes_back_as_its_prompt(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path, in_memory=2)
        await first.put(0, 1, 2, 3)
        second = Process(store, path)
        assert second.found.prompts == [finished(n).prompt_group for n in (0, 1)]
        await second.idle()
        assert len(store.objects) == 1, "what is read leaves the store"
        third = Process(store, path)
        assert prompts(third.found.prompts) == [0, 1, 2], "as long as they were not finished again"
        await third.put(1)
        assert third.metric("duplicate_groups_filtered") == 0
        assert await third.get(2, batch=0) == [3, 1]

    in_loop(body, tmp_path)


def test_what_the_store_has_lost_is_generated_again_from_its_prompt(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path, keeps_all=True)
        await first.put(0, 1)
        store.carrier.objects.clear()  # their owner died with its machine
        second = Process(store, path)
        await second.idle()
        assert second.again == [finished(n).prompt_group for n in (0, 1)]
        assert second.metric("lost_groups") == 2
        await second.put(1, 0)
        assert await second.get(2, batch=0) == [1, 0]

    in_loop(body, tmp_path)


def test_numbers_that_were_never_finished_are_named(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path)
        await first.put(2, 5)
        await first.get(2, batch=0)
        await first.buffer.trained([2])
        found = Process(store, path).found
        assert (found.numbers, found.next) == ([range(0, 2), range(3, 5)], 6)
        assert (found.waiting, prompts(found.prompts)) == ([], [5])

    in_loop(body, tmp_path)


def test_prompts_that_the_journal_cannot_hold_are_asked_of_their_source(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path, keeps_all=True)
        for n in range(3):
            given = finished(n, "5")
            given.prompt_group[0].label = (1, 2)
            await first.buffer.put(given)
        await first.idle()
        second = Process(store, path)
        assert (second.found.waiting, second.found.prompts) == ([], [])
        assert second.found.numbers == [range(0, 1), range(1, 2), range(2, 3)]
        assert not store.objects

    in_loop(body, tmp_path)


def test_a_ref_that_ends_with_its_process_is_not_looked_for(tmp_path: Path) -> None:
    class RayLike:
        """Names its object by a live handle."""

        def __init__(self, ref: Any) -> None:
            self.ref = ref

        def to_json(self) -> str:
            raise TypeError("JSON cannot carry a live handle")

    class Handles(Store):
        def put(self, batch: Any, value_spec: Any = None, /) -> Any:
            return RayLike(super().put(batch, value_spec))

        def get(self, ref: Any, /) -> Any:
            return super().get(ref.ref)

        def remove(self, ref: Any, /) -> None:
            super().remove(ref.ref)

    async def body(store: Store, path: Path) -> None:
        store = Handles()
        first = Process(store, path)
        await first.put(0, 1, 2, 3)
        assert await first.get(2, batch=0) == [0, 1]
        await first.buffer.trained_before(1)
        await first.idle()
        assert len(store.objects) == 1
        assert prompts(Process(store, path).found.prompts) == [2, 3]

    in_loop(body, tmp_path)


def test_a_second_attempt_at_a_group_is_refused_unless_it_was_asked_for(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        process = Process(store, path)
        await process.put(0, 0)
        assert process.metric("duplicate_groups_filtered") == 1
        assert await process.get(1, batch=0) == [0]
        await process.put(0)
        await process.buffer.trained_before(1)
        await process.put(0)
        assert process.metric("duplicate_groups_filtered") == 2
        await process.put(1)
        process.buffer.announce(9)
        waiting = asyncio.create_task(process.buffer.get())
        await process.idle()
        assert prompts(process.again) == [1]
        await process.put(1, version="9")
        assert number(await waiting) == 1

    in_loop(body, tmp_path)


@pytest.mark.parametrize("unused", ["retry", "drop"])
def test_what_was_not_used_comes_back_only_if_it_is_to_be_generated_again(unused: Any, tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path, keeps_all=True, unused=unused)
        await first.buffer.put(finished(0, "5", status=Sample.Status.ABORTED))
        await first.put(1)
        await first.put(2, version="9")
        first.buffer.announce(9)
        assert await first.get(1, batch=0) == [2]
        await first.idle()
        assert len(store.objects) == 1
        found = Process(store, path).found
        assert prompts(found.prompts) == ([0, 1] if unused == "retry" else [])
        assert prompts([entry.prompt_group for entry in found.waiting]) == [2]
        assert found.numbers == []

    in_loop(body, tmp_path)


def test_what_comes_back_is_judged_like_all_else(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path, keeps_all=True)
        await first.put(0, version="5")
        await first.put(1, version="9")
        second = Process(store, path)
        second.buffer.announce(9)
        assert await second.get(1, batch=0) == [1]
        assert prompts(second.again) == [0]

    in_loop(body, tmp_path)


def test_samples_that_are_put_after_their_group_was_trained_on_are_removed(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        process = Process(store, path, keeps_all=True)
        store.go_on.clear()
        await process.buffer.put(finished(0, "5"))
        assert number(await process.buffer.get(batch=0)) == 0
        await process.buffer.trained_before(1)
        store.go_on.set()
        await process.idle()
        assert store.calls["put"] == 1
        assert not store.objects

    in_loop(body, tmp_path)


def test_with_all_kept_a_slow_store_makes_put_wait(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        process = Process(store, path, keeps_all=True, in_memory=4)
        store.go_on.clear()
        putting = [asyncio.create_task(process.buffer.put(finished(n, "5"))) for n in range(4)]
        await let_run()
        assert [task.done() for task in putting] == [True, True, False, False]
        assert number(await process.buffer.get()) == 0
        assert number(await process.buffer.get()) == 1
        await let_run()
        assert not putting[2].done(), "taken is not kept yet"
        store.go_on.set()
        await process.idle()
        assert all(task.done() for task in putting)
        assert len(store.objects) == 4

    in_loop(body, tmp_path)


def test_a_journal_that_cannot_be_written_holds_up_nobody_but_who_needs_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(store: Store, path: Path) -> None:
        process = Process(store, path, keeps_all=True)
        real = Journal.flush

        def flush(journal: Journal) -> list[int]:
            raise JournalUnavailable("no space left on device")

        monkeypatch.setattr(Journal, "flush", flush)
        await process.put(0, 1, 2)
        assert process.metric("journal_failures") > 0
        assert number(await process.buffer.get(batch=0)) == 0
        for call in (process.buffer.flush(), process.buffer.trained([0])):
            with pytest.raises(JournalUnavailable):
                await call
        monkeypatch.setattr(Journal, "flush", real)
        await process.buffer.flush()
        found = Process(store, path).found
        assert prompts([entry.prompt_group for entry in found.waiting]) == [1, 2]

    in_loop(body, tmp_path)


def test_who_is_cancelled_while_the_journal_is_written_leaves_no_samples_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(store: Store, path: Path) -> None:
        process = Process(store, path, keeps_all=True)
        await process.put(0)
        assert await process.get(1, batch=0) == [0]
        go_on, real = threading.Event(), Journal.flush

        def flush(journal: Journal) -> list[int]:
            assert go_on.wait(30)
            return real(journal)

        monkeypatch.setattr(Journal, "flush", flush)
        noting = asyncio.create_task(process.buffer.trained([0]))
        await let_run()
        noting.cancel()
        await let_run()
        assert noting.cancelled()
        go_on.set()
        while store.objects:
            await asyncio.sleep(0)

    in_loop(body, tmp_path)


@pytest.mark.parametrize("group_index", [None, -1, True, "7"])
def test_a_group_without_a_number_is_refused_before_anything_happens(group_index: Any, tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        process = Process(store, path)
        for status in (Sample.Status.COMPLETED, Sample.Status.ABORTED):
            given = finished(0, "5", status=status)
            given.prompt_group[0].group_index = group_index
            with pytest.raises(TypeError, match="with a journal it is an int of at least 0"):
                await process.buffer.put(given)
        assert not process.again
        assert process.metric("queue_size") == 0

    in_loop(body, tmp_path)


def test_a_ref_of_another_format_is_no_reason_not_to_start(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path, keeps_all=True)
        await first.put(0)
        first.journal.state.live[0].ref = '{"format": 99}'
        first.journal._compact()
        assert prompts(Process(store, path).found.prompts) == [0]

    in_loop(body, tmp_path)


class Trainer:
    """Trains batch after batch; its checkpoint says which was the last, and what it has learned from."""

    def __init__(self) -> None:
        self.next_batch = 0
        self.learned: list[int] = []

    def train(self, batch: int, groups: list[int]) -> None:
        """Train and save, in one step, as far as a crash is concerned."""
        assert batch == self.next_batch
        self.next_batch, self.learned = batch + 1, [*self.learned, *groups]


async def live(process: Process, trainer: Trainer, chance: random.Random, groups: int) -> None:
    """Generate, buffer and train until `groups` groups were learned from, or for ever, if one is missing."""
    todo = deque([*prompts(process.found.prompts), *(n for numbers in process.found.numbers for n in numbers)])
    following = process.found.next

    async def produce() -> None:
        nonlocal following
        while True:
            while process.again:
                todo.append(process.again.pop()[0].group_index)
            if not todo and following < groups:
                todo.append(following)
                following += 1
            if not todo:
                await asyncio.sleep(0)
                continue
            n = todo.popleft()
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            aborted = chance.random() < 0.2
            status = Sample.Status.ABORTED if aborted else Sample.Status.COMPLETED
            await process.buffer.put(finished(n, str(process.buffer.current_version or 0), status=status))

    producers = [asyncio.create_task(produce()) for _ in range(3)]
    try:
        while len(trainer.learned) < groups:
            batch = trainer.next_batch
            count = min(2, groups - len(trainer.learned))
            taken = [number(await process.buffer.get(batch=batch)) for _ in range(count)]
            await process.buffer.flush()
            trainer.train(batch, taken)
            if chance.random() < 0.5:
                await process.buffer.trained_before(batch + 1)
            process.buffer.announce((process.buffer.current_version or 0) + 1)
    finally:
        for task in producers:
            task.cancel()


@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_process_killed_at_any_step_again_and_again_learns_from_every_group_once(
    seed: int, keeps_all: bool, tmp_path: Path
) -> None:
    """The file, the store and the checkpoint are as they were at the kill; all that was in the process is gone."""
    chance = random.Random(seed)
    store, trainer, path = Store(), Trainer(), tmp_path / "journal"

    async def life(steps: int | None) -> None:
        process = Process(store, path, keeps_all, trainer.next_batch)
        living = asyncio.create_task(live(process, trainer, chance, groups=60))
        if steps is None:
            await living
            await process.buffer.trained_before(trainer.next_batch)
            await process.idle()
            return
        for _ in range(steps):
            await asyncio.sleep(chance.choice([0, 0, 0.0003]))
        left = path.read_bytes(), dict(store.carrier.objects), trainer.next_batch, list(trainer.learned)
        living.cancel()
        process.buffer.close()
        await asyncio.gather(living, return_exceptions=True)
        process.spill._threads.shutdown(wait=True)
        path.write_bytes(left[0])
        store.carrier.objects, trainer.next_batch, trainer.learned = left[1], left[2], left[3]
        if chance.random() < 0.2:
            store.carrier.objects.clear()

    for _ in range(8):
        run(lambda: life(chance.randrange(1, 60)))
    run(lambda: life(None))
    assert sorted(trainer.learned) == list(range(60))
    assert Process(store, path).found == Recovered(next=60)


def test_a_wrong_store_for_a_ref_loses_the_group_and_not_the_run(tmp_path: Path) -> None:
    async def body(store: Store, path: Path) -> None:
        first = Process(store, path, keeps_all=True)
        await first.put(0)
        store.failing["get"] = ConfigError("ref was put by backend 'mooncake', this store is 'ray'")
        second = Process(store, path)
        await second.idle()
        assert prompts(second.again) == [0]

    in_loop(body, tmp_path)
