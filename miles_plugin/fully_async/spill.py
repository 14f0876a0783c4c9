"""A queue of groups of which only the first ones lie on the heap; the others lie in an object store.

Groups wait in order: the first `in_memory` of them are here, ready to be taken; what comes behind is put into the
store, and read again when it moves up. All of that goes on in the background, so that whoever takes a group that is
ready does not wait for the store, and nothing happens to it between judging and handing it out.

What is promised: a group leaves the queue once, in its order, its samples equal to those that were put. A store that is
full or away makes the queue shorter, not wrong: what it does not take stays here, and room for more comes as groups are
taken. What is not: samples whose owner died with its machine are gone. They are given up as lost, and their prompt is
generated again, as if they had never been there. Likewise samples that cannot be read for half a minute.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from miles_plugin.fully_async.background import Background
from miles_plugin.fully_async.entries import Entry, Hooks, Spot
from miles_plugin.fully_async.group_columns import from_columns, to_columns
from miles_plugin.fully_async.groups import Group, prompts_only
from mooncake_store import ValueSpec
from mooncake_store.errors import ConfigError, StoreClosed, StoreError

# Groups beyond `in_memory` that may wait for the store; more than one, so that the next is there when one is done.
AHEAD = 2
# Reading again what cannot be read: so often, with pauses of so many seconds, each twice the one before.
TRIES, FIRST_PAUSE = 8, 0.25
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class GroupStore(Protocol):
    """Where samples lie; `ObjectStore` is one, with either backend. Each method may take long, and is called in a
    thread, each kind of call in one of its own."""

    def put(self, batch: Mapping[str, Any], value_spec: Mapping[str, ValueSpec] | None = None, /) -> Any:
        """Store columns; what is returned names them. Raises StoreError, or TypeError, OverflowError and ValueError for
        values that cannot be stored."""

    def get(self, ref: Any, /) -> AbstractContextManager[Mapping[str, Any]]:
        """The columns, while in the context. Raises StoreError."""

    def remove(self, ref: Any, /) -> None:
        """Free them; once more does nothing. Raises StoreError."""


class Spill:
    """A `Queue`, see the module.

    Args:
        store: of samples.
        in_memory: groups whose samples lie on the heap, at most; AHEAD more while they wait for the store.
        keeps_all: put every group into the store, also those that are ready here, and leave it there until the journal
            says that nobody needs it, so that a process that goes on after this one need not generate it again. Else
            samples leave the store when they are read.

    Raises:
        ConfigError: `in_memory` is less than 1.
    """

    def __init__(self, store: GroupStore, in_memory: int, keeps_all: bool = False) -> None:
        if isinstance(in_memory, bool) or not isinstance(in_memory, int) or in_memory < 1:
            raise ConfigError(f"in_memory = {in_memory!r}: allowed is an integer of at least 1, in groups")
        self._store, self._in_memory, self._keeps_all = store, in_memory, keeps_all
        self._ready: deque[Entry] = deque()
        self._behind: deque[Entry] = deque()
        self._moving: Entry | None = None  # from behind to ready
        self._held: set[Entry] = set()  # beyond the bound, until they are in the store, or have moved up
        self._to_put: deque[Entry] = deque()
        self._to_remove: deque[Any] = deque()
        self._stored_behind = 0
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="spill")

    def attach(self, hooks: Hooks, keeps: bool) -> None:
        if self._keeps_all and not keeps:
            raise ConfigError(
                "keeps_all=True without a journal: nobody would know of what is kept; give the buffer one"
            )
        self._hooks = hooks
        self._putting = Background(self._put_one, hooks.failed)
        self._reading = Background(self._read_one, hooks.failed)
        self._removing = Background(self._remove_one, hooks.failed)
        self._backgrounds = (self._putting, self._reading, self._removing)

    def __len__(self) -> int:
        return len(self._ready) + (self._moving is not None) + len(self._behind)

    def has_room(self) -> bool:
        return len(self._held) < AHEAD

    def append(self, entry: Entry) -> None:
        is_here = entry.group is not None
        if is_here and not self._behind and self._moving is None and len(self._ready) < self._in_memory:
            entry.spot = Spot.READY
            self._ready.append(entry)
        else:
            entry.spot = Spot.BEHIND
            self._behind.append(entry)
            self._stored_behind += not is_here
        if is_here and (self._keeps_all or entry.spot is Spot.BEHIND):
            self._held.add(entry)
            self._to_put.append(entry)
        self._kick()

    def first(self) -> Entry | None:
        return self._ready[0] if self._ready else None

    def pop(self) -> None:
        self._ready.popleft()
        self._kick()

    def discard(self, ref: Any) -> None:
        self._to_remove.append(ref)
        self._removing.kick()

    def gauges(self) -> dict[str, float]:
        return {"spilled_groups": self._stored_behind}

    def is_busy(self) -> bool:
        """Whether something goes on in the background."""
        return any(background.is_busy() for background in self._backgrounds)

    async def idle(self) -> None:
        """Wait until nothing does."""
        for background in self._backgrounds:
            await background.idle()

    async def clear(self) -> None:
        waiting = [*self._ready, *self._behind]
        self._ready.clear()
        self._behind.clear()
        for entry in waiting:
            entry.spot = Spot.GIVEN_UP
            if entry.ref is not None:
                self._forget(entry)
        await self.idle()

    def close(self) -> None:
        for background in self._backgrounds:
            background.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _kick(self) -> None:
        if self._to_put:
            self._putting.kick()
        if self._behind and len(self._ready) < self._in_memory:
            self._reading.kick()

    async def _call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _let_go(self, entry: Entry) -> None:
        """It is not held here beyond the bound any more."""
        if entry in self._held:
            self._held.remove(entry)
            self._hooks.changed()

    def _is_worth_putting(self, entry: Entry) -> bool:
        return entry.spot is Spot.BEHIND or (self._keeps_all and entry.spot is not Spot.GIVEN_UP)

    async def _put_one(self) -> bool:
        while self._to_put and not self._is_worth_putting(self._to_put[0]):
            self._let_go(self._to_put.popleft())
        if not self._to_put:
            return False
        entry = self._to_put[0]
        try:
            ref = await self._call(_put, self._store, entry.group)
        except StoreClosed:
            raise
        except (StoreError, TypeError, OverflowError, ValueError) as error:
            return self._not_put(entry, error)
        self._to_put.popleft()
        if self._is_worth_putting(entry):
            entry.ref = ref
            if entry.spot is Spot.BEHIND:
                entry.group, entry.prompt_group = None, prompts_only(entry.prompt_group)
                self._stored_behind += 1
            self._hooks.stored(entry)
        else:
            self.discard(ref)
        self._let_go(entry)
        return True

    def _not_put(self, entry: Entry, error: Exception) -> bool:
        """Whether to go on with the next one now; otherwise the same is tried again when a group comes or goes."""
        _log.warning("a group stays in memory: %s", error)
        self._hooks.count("spill_failures")
        is_behind = entry.spot is Spot.BEHIND
        if is_behind and isinstance(error, StoreError) and error.retryable:
            return False
        self._to_put.popleft()
        if not is_behind:
            self._let_go(entry)
        return True

    async def _read_one(self) -> bool:
        if not self._behind or len(self._ready) >= self._in_memory:
            return False
        entry = self._behind.popleft()
        if entry.group is not None:
            self._move_up(entry)
            if not self._keeps_all or entry not in self._to_put:
                self._let_go(entry)
            return True
        self._stored_behind -= 1
        if self._hooks.is_unusable(entry):
            self._move_up(entry)
            return True
        self._moving = entry
        try:
            entry.group = await self._load(entry.ref)
        except StoreClosed:
            raise
        except StoreError as error:
            _log.warning("a group is lost, its prompt is generated again: %s", error)
            entry.spot = Spot.GIVEN_UP
        finally:
            self._moving = None
        if entry.spot is Spot.GIVEN_UP:
            self._hooks.lost(entry)
            return True
        if not self._keeps_all:
            self._forget(entry)
        self._move_up(entry)
        return True

    def _forget(self, entry: Entry) -> None:
        """Its samples leave the store."""
        self.discard(entry.ref)
        entry.ref = None
        self._hooks.stored(entry)

    def _move_up(self, entry: Entry) -> None:
        entry.spot = Spot.READY
        self._ready.append(entry)
        self._hooks.changed()

    async def _load(self, ref: Any) -> Group:
        pause = FIRST_PAUSE
        for _ in range(TRIES - 1):
            try:
                return await self._call(_get, self._store, ref)
            except StoreError as error:
                if not error.retryable:
                    raise
                _log.warning("a group cannot be read just now: %s", error)
            await asyncio.sleep(pause)
            pause *= 2
        return await self._call(_get, self._store, ref)

    async def _remove_one(self) -> bool:
        if not self._to_remove:
            return False
        try:
            await self._call(self._store.remove, self._to_remove[0])
        except StoreError as error:
            _log.warning("samples that nobody needs stay in the store: %s", error)
            if error.retryable:
                return False  # until the next one is removed
        self._to_remove.popleft()
        return True


def _put(store: GroupStore, group: Group) -> Any:
    return store.put(*to_columns(group))


def _get(store: GroupStore, ref: Any) -> Group:
    with store.get(ref) as columns:
        return from_columns(columns)
