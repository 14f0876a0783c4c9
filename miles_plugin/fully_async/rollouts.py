"""Rollouts of groups that were generated beside training: the buffer and its producer, for a manager that blocks."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.fully_async.buffer import BufferFailed, BufferSettings, DataBuffer
from miles_plugin.fully_async.custom_buffer import CustomBuffer
from miles_plugin.fully_async.groups import iter_samples
from miles_plugin.fully_async.producer import Producer
from miles_plugin.fully_async.settings import concurrent_samples
from miles_plugin.rollout.generate import Sampler
from miles_plugin.rollout.prompts import Item
from miles_plugin.rollout.sample import Sample


@dataclass(frozen=True)
class Waiting:
    """What a rollout waits for: seconds so far, groups that it has of those it needs, and groups in flight."""

    seconds: float
    got: int
    needed: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.got} of {self.needed} groups are there, {self.in_flight} in flight"


class AsyncRollouts:
    """Generates from its start to `close`; safe to call from any thread, `next_rollout` from one at a time.

    Args:
        items: what groups are made of, without end.
        again: items that come first: of groups that an interrupted run had begun.
        first_group: number of the first group.
        version: the current policy version, None before the first.
    """

    def __init__(
        self,
        config: TrainConfig,
        sampler: Sampler,
        items: Iterator[Item],
        again: Sequence[Item],
        first_group: int,
        run_id: str,
        version: int | None,
    ) -> None:
        self._config, self._loop = config, sampler.loop
        self._next_item: int | None = None
        self._again = deque(again)
        size = config.n_samples_per_prompt

        def both() -> Iterator[Item]:
            while self._again:
                yield self._again.popleft()
            for item in items:
                self._next_item = item.index + 1
                yield item

        async def generate(item: Item, number: int, finished: Any) -> list[Sample]:
            return await sampler.group(item, number, size, config.rollout_temperature, finished)

        async def start() -> None:
            self._producer = Producer(
                generate,
                both(),
                first_group,
                size,
                concurrent_samples(config),
                config.rollout_submission_granularity == "sample",
                run_id,
            )
            self._buffer = DataBuffer(
                BufferSettings.of(config),
                self._producer.regenerate,
                dropped=self._producer.dropped,
                run_id=run_id,
            )
            if (path := config.custom_async_data_buffer_path) is not None:
                unused = self._producer.regenerate, self._producer.dropped
                self._buffer = CustomBuffer(path, Namespace(**sampler.settings), *unused)
            if version is not None:
                self._buffer.announce(version)

        self._loop.run(start())
        self._running: Future[None] = self._loop.start(self._producer.run(self._buffer))
        self._got: tuple[float, int] | None = None  # while a rollout waits: since when, and the groups that it has

    def announce(self, version: int) -> None:
        """`version` is the current one; call it before the first engine resumes with it."""
        self._buffer.announce(version)

    def next_rollout(self, version: int | None) -> list[list[Sample]]:
        """The samples of as many groups as a rollout batch has, none staler than allowed; waits for them.

        Raises what ended the generation.
        """
        needed = self._config.rollout_batch_size
        started = time.monotonic()

        async def take() -> list[list[Sample]]:
            groups: list[list[Sample]] = []
            try:
                while len(groups) < needed:
                    self._got = started, len(groups)
                    taken = await self._buffer.get(version)
                    self._producer.taken(taken.prompt_group[0].group_index)
                    groups.append(list(iter_samples(taken.group)))
            finally:
                self._got = None
            return groups

        try:
            return self._loop.run(take())
        except BufferFailed as error:
            raise error.__cause__ or error from None

    def waiting(self) -> Waiting | None:
        """What `next_rollout` waits for; None while it does not."""
        if (waiting := self._got) is None:
            return None
        since, got = waiting
        return Waiting(time.monotonic() - since, got, self._config.rollout_batch_size, self._producer.in_flight)

    def position(self) -> tuple[int | None, list[int]]:
        """Where in the stream the next item is, None before the first; and positions of items before it of which no
        rollout has had the group."""

        async def look() -> tuple[int | None, list[int]]:
            return self._next_item, self._producer.unfinished() + [item.index for item in self._again]

        return self._loop.run(look())

    def metrics(self) -> dict[str, float]:
        """Of the buffer, see docs/async.md; counters start anew."""

        async def take() -> dict[str, float]:
            return self._buffer.get_metrics()

        return self._loop.run(take())

    def close(self) -> None:
        """Generate no more; idempotent. Requests in flight are given up."""

        async def end() -> None:
            self._buffer.close()

        self._running.cancel()
        self._loop.run(end())
        with suppress(CancelledError):
            self._running.result()
