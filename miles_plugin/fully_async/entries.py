"""A finished group in the buffer, and where such groups lie until they are taken: here in memory, `Spill` elsewhere."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from miles_plugin.fully_async.groups import DataBufferInput, Group, PromptGroup
from miles_plugin.fully_async.staleness import Origin, number_of, origin_of


class Spot(Enum):
    """Where a group is: among those that can be taken, behind them, handed out, or given up."""

    READY = "ready"
    BEHIND = "behind"
    TAKEN = "taken"
    GIVEN_UP = "given up"


@dataclass(eq=False)
class Entry:
    """A finished group.

    group: its samples; None while they lie in a store. ref: names them there, None when they do not.
    """

    prompt_group: PromptGroup
    group: Group | None
    origin: Origin
    ref: Any = None
    spot: Spot = Spot.READY

    @classmethod
    def of(cls, given: DataBufferInput, number: Callable[[object], int | None] = number_of) -> "Entry":
        """Raises ValueError for a group without samples or prompts. number: of a version, see `origin_of`."""
        if not given.group or not given.prompt_group:
            raise ValueError(
                f"a group of {len(given.group)} samples from {len(given.prompt_group)} prompts cannot be put; put what "
                "was generated together with what it was generated from"
            )
        run_id = getattr(given, "run_id", None)  # miles's own DataBufferInput has none
        return cls(given.prompt_group, given.group, origin_of(given.group, run_id, number))

    @property
    def number(self) -> int:
        """The number of the group in its run; see `journal_records`."""
        number = self.prompt_group[0].group_index
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise TypeError(f"group_index = {number!r:.80} of a prompt; with a journal it is an int of at least 0")
        return number


@dataclass(frozen=True)
class Hooks:
    """What a `Queue` tells its buffer; always called in the buffer's loop.

    changed: the first group may have become ready, or room may have come. stored: a group got its ref, or has none any
    more. lost: a group is in the queue no more, and its samples cannot be read. is_unusable: whether a group will
    certainly not be handed out. failed: nothing works any more. count: one more of a metric.
    """

    changed: Callable[[], None]
    stored: Callable[[Entry], None]
    lost: Callable[[Entry], None]
    is_unusable: Callable[[Entry], bool]
    failed: Callable[[BaseException], None]
    count: Callable[[str], None]


class Queue(Protocol):
    """Groups in the order in which they came; every call is O(1) and waits for nothing."""

    def attach(self, hooks: Hooks, keeps: bool) -> None:
        """Once, before all else. keeps: whether somebody notes what lies in a store, for a process after this one."""

    def __len__(self) -> int: ...
    def has_room(self) -> bool:
        """Whether one more group may be held in memory."""

    def append(self, entry: Entry) -> None: ...
    def first(self) -> Entry | None:
        """The first one, its samples in memory unless it is unusable; None when there is none, or not yet."""

    def pop(self) -> None:
        """Remove what `first` gives."""

    def discard(self, ref: Any) -> None:
        """Remove the samples that `ref` names from the store."""

    def gauges(self) -> dict[str, float]:
        """Metrics of what there is."""

    async def clear(self) -> None:
        """Remove all groups, and their samples from the store; when nothing is appended any more."""

    def close(self) -> None:
        """End all that runs in the background; idempotent."""


class InMemory:
    """A `Queue` that keeps all samples on the heap."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def attach(self, hooks: Hooks, keeps: bool) -> None:
        pass

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self) -> bool:
        return True

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)

    def first(self) -> Entry | None:
        return self._entries[0] if self._entries else None

    def pop(self) -> None:
        self._entries.popleft()

    def discard(self, ref: Any) -> None:
        pass

    def gauges(self) -> dict[str, float]:
        return {}

    async def clear(self) -> None:
        self._entries.clear()

    def close(self) -> None:
        pass
