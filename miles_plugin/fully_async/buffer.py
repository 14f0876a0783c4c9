"""The buffer between generation and training, behind miles's contract: `put`, `get` and `get_metrics`.

Whoever generates puts each group as it is finished; whoever trains gets one after the other. What must not be trained
on never comes out: an aborted group is refused when it comes, and how stale a group is, is judged when it goes, in the
same step of the loop that hands it out. For a `get` that waited, that is by the version that is current then.

The order is that of arrival, on both sides, for groups as for those who wait; whoever is cancelled takes nothing along.
Every call but `get_metrics` is O(1) for each group that passes.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import floor
from typing import Any, Literal

from miles_plugin.fully_async.books import Books, JournalBooks
from miles_plugin.fully_async.counts import PREFIX, Counts, Staleness
from miles_plugin.fully_async.entries import Entry, Hooks, InMemory, Queue, Spot
from miles_plugin.fully_async.groups import DataBufferInput, PromptGroup, is_aborted
from miles_plugin.fully_async.journal import Journal
from miles_plugin.fully_async.staleness import ASKED, Judgement, Origin, Watermark, is_final, judge, number_of
from miles_plugin.fully_async.waiting import Line
from mooncake_store.errors import ConfigError, StoreError

_log = logging.getLogger(__name__)


class BufferClosed(StoreError):
    """The buffer was closed, in order; nobody puts or gets any more."""


class BufferFailed(BufferClosed):
    """What fills the buffer has failed; `__cause__` says how. What still lies in it is not handed out."""


@dataclass(frozen=True)
class BufferSettings:
    """How much is buffered, and what comes out.

    Attributes:
        capacity: groups that may lie in the buffer; then `put` waits.
        max_weight_staleness: groups beyond it are not handed out; None turns the filter off, see `judge`.
        unused: what happens to a group that is not handed out: "retry", its prompts are generated again, or "drop".

    Raises:
        ConfigError: another value.
    """

    capacity: int
    max_weight_staleness: int | None = None
    unused: Literal["retry", "drop"] = "drop"

    def __post_init__(self) -> None:
        _check_count("capacity", self.capacity, 1)
        if self.max_weight_staleness is not None:
            _check_count("max_weight_staleness", self.max_weight_staleness, 0)
        if self.unused not in ("retry", "drop"):
            raise ConfigError(f"unused = {self.unused!r}: allowed are 'retry' and 'drop'")

    @classmethod
    def of(cls, args: Any) -> "BufferSettings":
        """From the flags of a job, this project's or miles's, which have the same names. Raises ConfigError."""
        capacity = capacity_of(args.async_data_buffer_capacity_factor, args.rollout_batch_size)
        return cls(capacity, args.max_weight_staleness, args.async_unused_samples_handler)


def capacity_of(factor: float, rollout_batch_size: int) -> int:
    """Groups in the buffer for miles's capacity factor; ConfigError when that is not even one."""
    capacity = floor(factor * rollout_batch_size) if factor < float("inf") else 0
    if capacity < 1:
        raise ConfigError(
            f"a buffer of {factor!r} times the rollout batch of {rollout_batch_size} groups has no place for any; "
            "allowed: a finite factor that gives at least 1"
        )
    return capacity


class DataBuffer:
    """See the module. All in one event loop, but `announce`, which any thread may call.

    Args:
        settings: the bounds.
        regenerate: has a group of prompts generated again; must not wait. Needed for "retry". Groups whose samples were
            lost in a store go there in any case.
        dropped: told of a group of prompts that is not.
        run_id: of this run; groups that say that they are of another one are never handed out. None: not known.
        queue: where groups lie, `InMemory` or `Spill`; this buffer's alone.
        journal: notes what becomes of each group, for a restart; groups need distinct numbers then, in `group_index`.
        number: which version a sample names, None for none; for a host whose own numbers may fall.
        clock: in seconds, monotonic.

    Raises:
        ConfigError: "retry" without `regenerate`.
    """

    def __init__(
        self,
        settings: BufferSettings,
        regenerate: Callable[[PromptGroup], None] | None = None,
        *,
        dropped: Callable[[PromptGroup], None] = lambda _: None,
        run_id: str | None = None,
        queue: Queue | None = None,
        journal: Journal | None = None,
        number: Callable[[object], int | None] = number_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.unused == "retry" and regenerate is None:
            raise ConfigError("unused = 'retry' needs `regenerate`, which generates a group again; or say 'drop'")
        self._settings, self._regenerate, self._dropped, self._run_id = settings, regenerate, dropped, run_id
        self._number, self._watermark, self._counts = number, Watermark(), Counts()
        self._queue: Queue = InMemory() if queue is None else queue
        self._books: Books = (
            Books(self._queue.discard)
            if journal is None
            else JournalBooks(journal, self._queue.discard, self._counts.add, self.fail)
        )
        self._queue.attach(
            Hooks(self._changed, self._books.stored, self._lost, self._is_unusable, self.fail, self._counts.add),
            self._books.keeps,
        )
        self._lying: Counter[Origin] = Counter()
        self._putters, self._getters = Line(self._has_room, clock), Line(self._has_group, clock)
        self._is_closed = False
        self._failure: BaseException | None = None

    async def put(self, input: DataBufferInput) -> None:
        """Take a finished group, waiting while the buffer is full. An aborted one goes where unused ones go.

        Who is cancelled while it waits has its group still: it is not in the buffer.

        Raises:
            BufferClosed, BufferFailed: at once, also to those who wait.
            ValueError: a group without samples or without prompts.
            TypeError: with a journal, a group without a number.
        """
        self._check_open()
        entry = Entry.of(input, self._number)
        self._books.check(entry)
        if is_aborted(input.group):
            self._counts.add("aborted_groups_filtered")
            self._give_up(entry)
            return
        with self._putters.place() as place:
            await place.reached()
            self._check_open()
            if self._books.finished(entry):
                self._append(entry)
            else:
                self._counts.add("duplicate_groups_filtered")

    async def get(
        self, current_version: int | None = None, *, batch: int | None = None, **_context: Any
    ) -> DataBufferInput:
        """The next group to train on, waiting until there is one. Those before it that must not be are given up.

        Who awaits it in a task of its own gets the group a step of the loop after it was judged.

        Args:
            current_version: what the caller takes for the current one; what was announced counts, where it is higher.
            batch: the number of the rollout that the group is for; noted in the journal, for `trained_before`.

        Raises:
            BufferClosed, BufferFailed: at once, whatever lies in the buffer.
            ValueError: `current_version` is no version.
        """
        self._check_open()
        self._watermark.note(current_version, ASKED)
        with self._getters.place() as place:
            while True:
                await place.reached()
                self._check_open()
                taken = self._take(batch)
                if taken is not None:
                    return taken

    def announce(self, version: int) -> None:
        """`version` is the current one from here on, for groups that lie here, too. From any thread; call it before the
        first engine resumes with it. ValueError when it is no version."""
        self._watermark.note(version)

    @property
    def current_version(self) -> int | None:
        """The version that groups are measured against; None before the first."""
        return self._watermark.current

    def restore(self, entries: Iterable[Entry]) -> None:
        """Take back what `recover` found, before the first `put`; more than the capacity, if need be. In the loop."""
        for entry in entries:
            self._books.restored(entry)
            self._append(entry)

    async def flush(self) -> None:
        """Return when the journal has all that happened: before what was taken is given to those who train.

        Raises:
            JournalUnavailable: the file system failed; call it again.
        """
        await self._books.flush()

    async def trained(self, groups: Iterable[int]) -> None:
        """Note in the journal that the groups with these numbers were trained on; idempotent. Raises as `flush`."""
        await self._books.trained(groups)

    async def trained_before(self, batch: int) -> None:
        """The same of all groups that were got for a batch with a lower number."""
        await self._books.trained_before(batch)

    def fail(self, error: BaseException) -> None:
        """What fills this buffer has ended: every `put` and `get`, waiting or to come, raises BufferFailed at once,
        though groups are left. In the loop; the first error counts."""
        if not self._is_closed:
            self._failure = error
        self.close()

    async def clear(self) -> None:
        """Close, and remove from the store what lies there, since nobody will go on with it. Takes as long as calls of
        the store in flight."""
        self._end_waiting()
        await self._queue.clear()
        self.close()

    def close(self) -> None:
        """Nobody puts or gets any more: every `put` and `get` raises. In the loop; idempotent."""
        self._end_waiting()
        self._books.close()
        self._queue.close()

    def get_metrics(self) -> dict[str, float]:
        """Metrics under `rollout/fully_async/`, see docs/async.md; the counters start anew."""
        lying = Staleness()
        for origin, groups in self._lying.items():
            staleness = judge(origin, self.current_version, None, self._run_id).staleness
            if staleness is not None:
                lying.add(staleness, groups)
        metrics = {
            "queue_size": len(self._queue),
            **self._queue.gauges(),
            **self._counts.take(),
            **lying.metrics("buffer_"),
            "put_wait_seconds": self._putters.take_waited(),
            "get_wait_seconds": self._getters.take_waited(),
            "version_steps_back": self._watermark.take_steps_back(),
        }
        return {PREFIX + name: value for name, value in metrics.items()}

    def _end_waiting(self) -> None:
        self._is_closed = True
        self._putters.close()
        self._getters.close()

    def _has_room(self) -> bool:
        return len(self._queue) < self._settings.capacity and self._queue.has_room()

    def _has_group(self) -> bool:
        return self._queue.first() is not None

    def _changed(self) -> None:
        self._getters.wake()
        self._putters.wake()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise BufferFailed(f"what fills the buffer has failed: {self._failure!r}") from self._failure
        if self._is_closed:
            raise BufferClosed("the buffer is closed")

    def _append(self, entry: Entry) -> None:
        self._lying[entry.origin] += 1
        self._queue.append(entry)
        self._getters.wake()

    def _left(self, entry: Entry, spot: Spot) -> None:
        """A group is in the queue no more."""
        entry.spot = spot
        self._lying[entry.origin] -= 1
        if not self._lying[entry.origin]:
            del self._lying[entry.origin]
        self._putters.wake()

    def _judge(self, entry: Entry) -> Judgement:
        return judge(entry.origin, self._watermark.current, self._settings.max_weight_staleness, self._run_id)

    def _is_unusable(self, entry: Entry) -> bool:
        return is_final(self._judge(entry))

    def _take(self, batch: int | None) -> DataBufferInput | None:
        """Take the first group, or give it up and return None."""
        entry = self._queue.first()
        assert entry is not None, "looked at when the place was reached"
        judgement = self._judge(entry)
        if not judgement.keep:
            _log.info(
                "a group is not trained on: %s; it is of versions %s to %s, and the current one is %s",
                *(judgement.verdict.value, entry.origin.oldest, entry.origin.newest, self.current_version),
            )
            self._give_up(entry)
            self._queue.pop()
            self._left(entry, Spot.GIVEN_UP)
            self._counts.judged(judgement)
            return None
        assert entry.group is not None, "only what is unusable for good is not read"
        self._queue.pop()
        self._left(entry, Spot.TAKEN)
        self._counts.judged(judgement)
        self._books.taken(entry, batch)
        return DataBufferInput(entry.prompt_group, entry.group, entry.origin.run_id)

    def _give_up(self, entry: Entry, always_again: bool = False) -> None:
        """Have a group generated again, or not; when that raises, nothing has happened."""
        again = self._regenerate is not None and (always_again or self._settings.unused == "retry")
        if self._regenerate is not None and again:
            self._regenerate(entry.prompt_group)
        else:
            self._dropped(entry.prompt_group)
        self._counts.add("recycled_groups" if again else "dropped_groups")
        self._books.given_up(entry, again)

    def _lost(self, entry: Entry) -> None:
        self._left(entry, Spot.GIVEN_UP)
        self._counts.add("lost_groups")
        self._give_up(entry, always_again=True)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} = {value!r}: allowed is an integer of at least {least}")
