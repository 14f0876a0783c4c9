"""What the buffer tells its journal, when that reaches the disk, and which stored samples may be removed then."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from miles_plugin.fully_async.background import Background
from miles_plugin.fully_async.entries import Entry
from miles_plugin.fully_async.groups import PromptGroup
from miles_plugin.fully_async.journal import Journal, JournalUnavailable
from miles_plugin.fully_async.journal_records import (
    Again,
    Dropped,
    Finished,
    Known,
    Progress,
    Stored,
    Taken,
    Trained,
    prompts_of,
)
from miles_plugin.fully_async.staleness import Origin
from mooncake_store import BatchRef
from mooncake_store.errors import IntegrityError

_log = logging.getLogger(__name__)


class Books:
    """Without a journal: samples that were taken or given up are removed from the store, and nothing else is kept.

    Args:
        discard: removes the samples that a ref names from the store, some time soon.
    """

    keeps = False

    def __init__(self, discard: Callable[[Any], None]) -> None:
        self._discard = discard

    def check(self, entry: Entry) -> None:
        """Raise TypeError for a group of which no note can be made."""

    def finished(self, entry: Entry) -> bool:  # noqa: ARG002
        """A group comes; whether it is wanted. One that waits already, or was trained on or dropped, is not."""
        return True

    def restored(self, entry: Entry) -> None:
        """It comes back, as `recover` has found it."""

    def stored(self, entry: Entry) -> None:
        """Its samples lie in the store, or, without a ref, do not any more."""

    def taken(self, entry: Entry, batch: int | None) -> None:  # noqa: ARG002
        """It was handed out."""
        self._discard_of(entry)

    def given_up(self, entry: Entry, again: bool) -> None:  # noqa: ARG002
        """It was not used, and is generated again, or not."""
        self._discard_of(entry)

    async def flush(self) -> None:
        """Return when all of that is on the disk."""

    async def trained(self, groups: Iterable[int]) -> None:
        """Groups have been trained on; return when that is on the disk."""

    async def trained_before(self, batch: int) -> None:
        """The same of all that were taken for batches with lower numbers."""

    def close(self) -> None:
        """End what runs in the background; idempotent."""

    def _discard_of(self, entry: Entry) -> None:
        ref, entry.ref = entry.ref, None
        if ref is not None:
            self._discard(ref)


class JournalBooks(Books):
    """With a journal: samples in the store are removed when it is on the disk that nobody needs them.

    Args:
        count: told of each time that the journal could not be written.
        failed: told of what makes it useless.
    """

    keeps = True

    def __init__(
        self,
        journal: Journal,
        discard: Callable[[Any], None],
        count: Callable[[str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(discard)
        self._journal, self._count = journal, count
        self._refs: dict[int, Any] = {}
        self._flushing = Background(self._flush_one, failed)

    def check(self, entry: Entry) -> None:
        _ = entry.number

    def finished(self, entry: Entry) -> bool:
        if not self._journal.state.expects(entry.number):
            return False
        oldest, newest, unstamped, _ = entry.origin
        self._note(Finished(entry.number, oldest, newest, unstamped, prompts_of(entry.prompt_group)))
        return True

    def restored(self, entry: Entry) -> None:
        self._refs[entry.number] = entry.ref

    def stored(self, entry: Entry) -> None:
        if entry.ref is None:
            self._refs.pop(entry.number, None)
            self._note(Stored(entry.number, None))
            return
        known = self._journal.state.live.get(entry.number)
        if known is None or known.progress is Progress.AGAIN:  # it was trained on, or given up, meanwhile
            self._discard_of(entry)
            return
        self._refs[entry.number] = entry.ref
        self._note(Stored(entry.number, _as_text(entry.ref)))

    def taken(self, entry: Entry, batch: int | None) -> None:
        self._note(Taken(entry.number, batch))

    def given_up(self, entry: Entry, again: bool) -> None:
        number = entry.number
        if not again:
            self._note(Dropped(number))
        else:
            known = number in self._journal.state.live
            self._note(Again(number, None if known else prompts_of(entry.prompt_group)))

    async def flush(self) -> None:
        flushing = asyncio.ensure_future(asyncio.to_thread(self._journal.flush))
        flushing.add_done_callback(self._discard_freed)  # also when whoever waits here is cancelled
        await asyncio.shield(flushing)

    async def trained(self, groups: Iterable[int]) -> None:
        self._journal.note(Trained(list(groups)))
        await self.flush()

    async def trained_before(self, batch: int) -> None:
        await self.trained(self._journal.state.taken_before(batch))

    def close(self) -> None:
        self._flushing.close()

    def _discard_freed(self, flushing: asyncio.Future[list[int]]) -> None:
        if flushing.cancelled() or flushing.exception() is not None:
            return
        for group in flushing.result():
            if (ref := self._refs.pop(group, None)) is not None:
                self._discard(ref)

    def _note(self, event: Any) -> None:
        self._journal.note(event)
        self._flushing.kick()

    async def _flush_one(self) -> bool:
        if not self._journal.has_pending():
            return False
        try:
            await self.flush()
        except JournalUnavailable as error:
            _log.warning("%s", error)
            self._count("journal_failures")
            return False  # until something is noted again
        return True


@dataclass
class Recovered:
    """What a journal says is to be done by a process that goes on with it.

    Attributes:
        waiting: groups whose samples lie in the store, in their order; for `DataBuffer.restore`.
        prompts: groups of prompts to generate again.
        numbers: of groups to generate whose prompts the journal does not know: ask the source of prompts. Groups from
            `next` on were never begun, or begun and not finished.
        next: the number from which on nothing is known.
    """

    waiting: list[Entry] = field(default_factory=list)
    prompts: list[PromptGroup] = field(default_factory=list)
    numbers: list[range] = field(default_factory=list)
    next: int = 0


def recover(journal: Journal, run_id: str | None = None, discard: Callable[[Any], None] | None = None) -> Recovered:
    """Say what is to be done, before the buffer gets its first group. Waits for the disk.

    What a checkpoint says was trained on is to be noted before: `journal.trained_before(the next rollout's number)`.
    What was taken and not trained on waits again. Whether the samples are really there is found out when they are read;
    if not, the buffer has their prompt generated again.

    Args:
        run_id: the run that the groups belong to from here on: the one whose numbers go on upward, whatever the process
            that made them was called.
        discard: removes samples from the store that are not used, or cannot be, since their prompt is not known.

    Raises:
        JournalUnavailable: the file system failed.
    """
    journal.give_back_taken()
    for orphan in filter(None, map(_from_text, journal.orphans)):
        if discard is not None:
            discard(orphan)
    state, found = journal.state, Recovered()
    for group, known in list(state.live.items()):
        ref = None if known.ref is None else _from_text(known.ref)
        prompts = known.finished.prompts
        if prompts is not None and ref is not None:
            found.waiting.append(_entry(known, run_id, ref))
            continue
        if known.progress is not Progress.AGAIN:
            journal.note(Again(group, None))
        if prompts is not None:
            found.prompts.append(prompts.group())
        else:
            found.numbers.append(range(group, group + 1))
            if ref is not None and discard is not None:
                discard(ref)
    found.numbers = sorted([*found.numbers, *state.never_finished()], key=lambda numbers: numbers.start)
    found.next = state.next
    journal.flush()
    return found


def _entry(known: Known, run_id: str | None, ref: Any) -> Entry:
    record = known.finished
    assert record.prompts is not None, "looked at by the caller"
    return Entry(record.prompts.group(), None, Origin(record.oldest, record.newest, record.unstamped, run_id), ref)


def _as_text(ref: Any) -> str | None:
    """None for a ref that keeps its samples alive by itself, as Ray's does: it ends with this process."""
    try:
        return str(ref.to_json())
    except TypeError:
        return None


def _from_text(text: str) -> BatchRef | None:
    try:
        return BatchRef.from_json(text)
    except IntegrityError as error:
        _log.warning("a group's samples cannot be found, its prompt is generated again: %s", error)
        return None
