"""The producer: keeps engines full with samples of one group after the other, and puts each group when it is finished.

It submits a group as long as no more than `concurrent` samples are in flight, and none while a finished group waits for
room in the buffer. What ends it ends the buffer: whoever waits for a group is told at once.

The number of a group is the position of its item in the stream, so whoever knows the number can find the item.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from itertools import takewhile

from miles_plugin.fully_async.buffer import BufferClosed, DataBuffer
from miles_plugin.fully_async.groups import DataBufferInput, PromptGroup
from miles_plugin.rollout.prompts import Item
from miles_plugin.rollout.sample import Sample

# Makes the samples of an item as the group of a number; told of each that is finished.
Generate = Callable[[Item, int, Callable[[], None]], Awaitable[list[Sample]]]


class Producer:
    """See the module. All in one event loop.

    Args:
        generate: the samples of one group.
        items: what groups are made of, without end, from a position on.
        start: position of the first item that is new.
        unfinished: positions before it, of groups that come first; those that are no item's do no harm.
        waiting: of them, those that lie in the buffer already.
        group_size: samples of a group.
        concurrent: samples in flight at most, at least a group's.
        by_sample: whether the next group is submitted when as many samples have finished as it has; else when a whole
            group has.
    """

    def __init__(
        self,
        generate: Generate,
        items: Callable[[int], Iterator[Item]],
        start: int,
        unfinished: Collection[int],
        waiting: Collection[int],
        group_size: int,
        concurrent: int,
        by_sample: bool,
        run_id: str,
    ) -> None:
        self._generate, self._items, self._next = generate, items(start), start
        self._group_size, self._by_sample, self._run_id = group_size, by_sample, run_id
        self._free = concurrent
        self._to_put = 0
        self._changed = asyncio.Event()
        wanted = {*unfinished}
        begun = takewhile(lambda item: item.index < start, items(min(wanted, default=start)))
        self._of = {item.index: item for item in begun if item.index in wanted}
        self._again = deque(number for number in self._of if number not in waiting)
        self._in_flight = 0

    def regenerate(self, prompts: PromptGroup) -> None:
        """Generate a group again, before new ones."""
        self._again.append(prompts[0].group_index)
        self._changed.set()

    def taken(self, number: int) -> None:
        """A group is trained on: nobody will ask for it again."""
        del self._of[number]

    def dropped(self, prompts: PromptGroup) -> None:
        """A group is given up for good."""
        del self._of[prompts[0].group_index]

    def position(self) -> tuple[int, list[int]]:
        """Where in the stream the next new item is; and positions before it of which nobody was handed the group."""
        return self._next, sorted(self._of)

    @property
    def in_flight(self) -> int:
        """Groups that are being generated, or wait for room."""
        return self._in_flight

    async def run(self, buffer: DataBuffer) -> None:
        """Produce until cancelled; what goes wrong is handed to `buffer`."""
        try:
            async with asyncio.TaskGroup() as groups:
                while True:
                    await self._room()
                    number = self._again.popleft() if self._again else self._begin()
                    self._free -= self._group_size
                    groups.create_task(self._one(number, buffer))
        except* BufferClosed:
            pass  # whoever closed it wants no more
        except* Exception as failures:
            buffer.fail(failures.exceptions[0])

    def _begin(self) -> int:
        item = next(self._items)
        self._of[item.index], self._next = item, item.index + 1
        return item.index

    async def _room(self) -> None:
        while self._free < self._group_size or self._to_put:
            self._changed.clear()
            await self._changed.wait()

    def _release(self, samples: int) -> None:
        self._free += samples
        self._changed.set()

    async def _one(self, number: int, buffer: DataBuffer) -> None:
        self._in_flight += 1
        try:
            await self._generate_and_put(number, buffer)
        finally:
            self._in_flight -= 1

    async def _generate_and_put(self, number: int, buffer: DataBuffer) -> None:
        item = self._of[number]
        samples = await self._generate(item, number, (lambda: self._release(1)) if self._by_sample else _nothing)
        if not self._by_sample:
            self._release(self._group_size)
        prompts = [Sample(sample.index, number, sample.prompt, item.label, dict(item.metadata)) for sample in samples]
        self._to_put += 1
        try:
            await buffer.put(DataBufferInput(prompts, samples, self._run_id))
        finally:
            self._to_put -= 1
            self._changed.set()


def _nothing() -> None: ...
