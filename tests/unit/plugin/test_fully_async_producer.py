"""The producer: how much it has in flight, when it stops for want of room, and what becomes of failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from itertools import count
from typing import Any

import pytest

from miles_plugin.fully_async.buffer import BufferFailed, BufferSettings, DataBuffer
from miles_plugin.fully_async.groups import DataBufferInput
from miles_plugin.fully_async.producer import Producer
from miles_plugin.rollout.prompts import Item
from miles_plugin.rollout.sample import Sample

SIZE = 4


class World:
    """A producer whose samples are finished by hand, and its buffer."""

    def __init__(
        self,
        concurrent: int = 8,
        by_sample: bool = True,
        capacity: int = 100,
        bound: int | None = None,
        unfinished: Collection[int] = (),
        waiting: Collection[int] = (),
        **more: Any,
    ) -> None:
        self.begun: list[int] = []
        self.finished: dict[int, Callable[[], None]] = {}
        self.done: dict[int, asyncio.Future[list[Sample]]] = {}

        def items(start: int) -> Iterator[Item]:  # without number 7
            return (Item(index, f"prompt {index}") for index in count(start) if index != 7)

        self.producer = Producer(self._generate, items, 10, unfinished, waiting, SIZE, concurrent, by_sample, "run")
        settings = BufferSettings(capacity, bound, **more)
        self.buffer = DataBuffer(settings, self.producer.regenerate, dropped=self.producer.dropped, run_id="run")
        self.running = asyncio.get_running_loop().create_task(self.producer.run(self.buffer))

    async def _generate(self, item: Item, number: int, finished: Callable[[], None]) -> list[Sample]:
        assert item.index == number
        self.begun.append(number)
        self.finished[number] = finished
        self.done[number] = asyncio.get_running_loop().create_future()
        return await self.done[number]

    def samples(self, number: int, version: str = "3", status: str = "completed") -> list[Sample]:
        return [
            Sample(number * SIZE + at, number, "p", status=Sample.Status(status), weight_versions=[version])
            for at in range(SIZE)
        ]

    def finish(self, number: int, **more: Any) -> None:
        """All samples of a group."""
        for _ in range(SIZE):
            self.finished[number]()
        self.done[number].set_result(self.samples(number, **more))

    async def get(self) -> int:
        taken = await self.buffer.get()
        self.producer.taken(taken.prompt_group[0].group_index)
        return taken.prompt_group[0].group_index

    async def settle(self) -> list[int]:
        """Let everybody do what can be done; numbers of the groups that were begun."""
        for _ in range(50):
            await asyncio.sleep(0)
        return list(self.begun)


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await test()

        asyncio.run(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_as_many_groups_are_in_flight_as_their_samples_allow() -> None:
    world = World(concurrent=11)
    assert await world.settle() == [10, 11], "a third would make 12"
    world.finish(11)
    assert await world.settle() == [10, 11, 12]
    assert await world.get() == 11, "in the order in which they were finished"
    world.running.cancel()


@in_loop
async def test_by_sample_a_group_follows_when_as_many_samples_have_finished() -> None:
    world = World()
    await world.settle()
    for number in (10, 11):
        for _ in range(SIZE // 2):
            world.finished[number]()
    assert await world.settle() == [10, 11, 12], "neither group is finished"
    world.running.cancel()


@in_loop
async def test_by_group_a_group_follows_when_one_has_finished() -> None:
    world = World(by_sample=False)
    await world.settle()
    for number in (10, 11):
        for _ in range(SIZE - 1):
            world.finished[number]()
    assert await world.settle() == [10, 11]
    world.finish(10)
    assert await world.settle() == [10, 11, 12]
    world.running.cancel()


@in_loop
async def test_nothing_is_submitted_while_a_group_waits_for_room() -> None:
    world = World(capacity=1)
    await world.settle()
    for number in (10, 11):
        world.finish(number)
        await world.settle()
    begun = await world.settle()
    assert begun == [10, 11, 12, 13], "11 waits for room since then"
    world.finish(12)
    assert await world.settle() == begun
    assert await world.get() == 10
    assert await world.settle() == begun, "now 12 does"
    assert await world.get() == 11
    assert await world.settle() == [*begun, 14]
    assert await world.get() == 12
    world.running.cancel()


@in_loop
async def test_an_aborted_or_stale_group_is_generated_again_before_new_ones() -> None:
    world = World(bound=1, unused="retry")
    await world.settle()
    world.buffer.announce(3)
    world.finish(10, status="aborted")
    world.finish(11, version="1")
    assert await world.settle() == [10, 11, 12, 13]
    world.finish(12)
    assert await world.settle() == [10, 11, 12, 13, 10]
    assert await world.get() == 12, "11 was too old"
    world.finish(13)
    await world.settle()
    world.finish(10)
    await world.settle()
    assert world.begun[4:] == [10, 11, 14]
    assert world.producer.position() == (15, [10, 11, 13, 14]), "12 is a rollout's"
    world.running.cancel()


@in_loop
async def test_a_group_that_is_dropped_is_not_wanted_any_more() -> None:
    world = World(unused="drop")
    await world.settle()
    world.finish(10, status="aborted")
    await world.settle()
    assert world.producer.position() == (13, [11, 12])
    world.running.cancel()


@in_loop
async def test_what_was_begun_before_comes_first_and_what_waits_already_does_not_come() -> None:
    world = World(bound=0, unfinished=[3, 7, 5, 8], waiting=[5], unused="retry")
    assert world.producer.position() == (10, [3, 5, 8]), "7 is no item's"
    assert await world.settle() == [3, 8]
    assert world.producer.in_flight == 2, "what waits is not"
    world.finish(3)
    assert await world.settle() == [3, 8, 10]
    assert await world.get() == 3
    world.buffer.announce(4)
    await world.buffer.put(DataBufferInput(world.samples(5), world.samples(5)))
    world.finish(8, version="4")
    assert await world.get() == 8
    world.finish(10, version="4")
    assert await world.settle() == [3, 8, 10, 5, 11], "it has grown stale, and its item is known"
    assert world.producer.position() == (12, [5, 10, 11])
    world.running.cancel()


@in_loop
async def test_what_ends_it_reaches_who_waits_at_once() -> None:
    world = World()
    await world.settle()
    waiting = asyncio.create_task(world.get())
    await world.settle()
    world.done[11].set_exception(ValueError("the engine said no"))
    with pytest.raises(BufferFailed, match="the engine said no"):
        await waiting
    await world.running
    assert world.done[10].cancelled(), "nothing goes on"


@in_loop
async def test_a_buffer_that_is_closed_ends_it() -> None:
    world = World()
    await world.settle()
    world.buffer.close()
    world.finish(10)
    await world.running
