"""Rollouts of groups that were generated beside training: the buffer and its producer, for a manager that blocks."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.fully_async.books import Recovered, recover
from miles_plugin.fully_async.buffer import BufferFailed, BufferSettings, DataBuffer
from miles_plugin.fully_async.custom_buffer import CustomBuffer
from miles_plugin.fully_async.groups import iter_samples
from miles_plugin.fully_async.journal import Journal, JournalUnavailable
from miles_plugin.fully_async.journal_records import Learned
from miles_plugin.fully_async.producer import Producer
from miles_plugin.fully_async.settings import concurrent_samples
from miles_plugin.fully_async.spill import GroupStore, Spill
from miles_plugin.rollout.generate import Sampler
from miles_plugin.rollout.prompts import Item, PromptSource
from miles_plugin.rollout.sample import Sample
from mooncake_store.errors import ObjectLost, StoreError, StoreUnavailable

_log = logging.getLogger(__name__)


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

    Of the groups that wait, those of one rollout lie on the heap, the others in the store. In a buffer of the user's
    they lie where it keeps them, and nobody notes it.

    Args:
        prompts: what groups are made of.
        learned: of the checkpoint that the run goes on from: which groups are still to be learned from.
        version: the current policy version, None before the first.
        store: where groups lie.
        journal: file that says which of the groups lie there, for a run that goes on after this one; None: nobody does.

    Raises:
        ConfigError, IntegrityError, JournalUnavailable: the journal cannot be used, see `Journal`.
    """

    def __init__(
        self,
        config: TrainConfig,
        sampler: Sampler,
        prompts: PromptSource,
        learned: Learned,
        run_id: str,
        version: int | None,
        store: GroupStore,
        journal: Path | None,
    ) -> None:
        self._config, self._loop = config, sampler.loop
        self._journal, found = None, Recovered(next=learned.next)
        custom = config.custom_async_data_buffer_path
        if journal is not None and custom is None:
            self._journal, found = open_journal(journal, learned, run_id, store)
        size = config.n_samples_per_prompt

        async def generate(item: Item, number: int, finished: Any) -> list[Sample]:
            return await sampler.group(item, number, size, config.rollout_temperature, finished)

        async def start() -> None:
            self._producer = Producer(
                generate,
                prompts.rollout,
                found.next,
                [*learned.unfinished, *range(learned.next, found.next)],
                [entry.number for entry in found.waiting],
                size,
                concurrent_samples(config),
                config.rollout_submission_granularity == "sample",
                run_id,
            )
            if custom is None:
                self._buffer = DataBuffer(
                    BufferSettings.of(config),
                    self._producer.regenerate,
                    dropped=self._producer.dropped,
                    run_id=run_id,
                    queue=Spill(store, config.rollout_batch_size),
                    journal=self._journal,
                )
            else:
                settings = Namespace(**sampler.settings)
                self._buffer = CustomBuffer(custom, settings, self._producer.regenerate, self._producer.dropped)
            if version is not None:
                self._buffer.announce(version)
            self._buffer.restore(found.waiting)

        self._loop.run(start())
        self._running: Future[None] = self._loop.start(self._producer.run(self._buffer))
        self._got: tuple[float, int] | None = None  # while a rollout waits: since when, and the groups that it has

    def announce(self, version: int) -> None:
        """`version` is the current one; call it before the first engine resumes with it."""
        self._buffer.announce(version)

    def next_rollout(self, rollout_id: int, version: int | None) -> list[list[Sample]]:
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
                    taken = await self._buffer.get(version, batch=rollout_id)
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

    def position(self) -> tuple[int, list[int]]:
        """Where in the stream the next new item is; and positions before it of which no rollout has had the group."""

        async def look() -> tuple[int, list[int]]:
            return self._producer.position()

        return self._loop.run(look())

    def saved(self, rollouts: int) -> None:
        """A checkpoint after so many rollouts is complete: what they had is not looked for again."""
        try:
            self._loop.run(self._buffer.trained_before(rollouts))
        except JournalUnavailable as error:  # the checkpoint says the same
            _log.warning("%s", error)

    def metrics(self) -> dict[str, float]:
        """Of the buffer, see docs/async.md; counters start anew."""

        async def take() -> dict[str, float]:
            return self._buffer.get_metrics()

        return self._loop.run(take())

    def close(self) -> None:
        """Generate no more, and leave nothing in the store; idempotent. Requests in flight are given up."""
        self._running.cancel()
        self._loop.run(self._buffer.clear())
        with suppress(CancelledError):
            self._running.result()
        if self._journal is not None:
            self._journal.close()


def open_journal(path: Path, learned: Learned, run_id: str, store: GroupStore) -> tuple[Journal, Recovered]:
    """The journal of a run that goes on from a checkpoint, set back to it, and what waits in the store. Raises as
    `AsyncRollouts`."""

    def discard(ref: Any) -> None:
        _remove(store, ref)

    journal = Journal(path, learned=learned)
    found = recover(journal, run_id, discard)
    if found.waiting and _is_gone(store, found.waiting[0].ref):
        # With its memory, which most likely was that of all; of each a reader waits for long whether it comes back.
        journal.close()
        journal = Journal(path, learned=replace(learned, version=None))
        found = recover(journal, run_id, discard)
    return journal, found


def _is_gone(store: GroupStore, ref: Any) -> bool:
    try:
        with store.get(ref):
            return False
    except (ObjectLost, StoreUnavailable) as error:
        _log.warning("what waited is generated again: %s", error)
        return True
    except StoreError:  # of this one alone
        return False


def _remove(store: GroupStore, ref: Any) -> None:
    try:
        store.remove(ref)
    except StoreError as error:
        _log.warning("samples that nobody needs stay in the store: %s", error)
