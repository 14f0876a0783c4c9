"""What the journal says of each group, and what follows from it: records, and the state that they lead to.

A group has a number, `group_index` of its samples, unique in its run. What is known of it:

    nothing    it was never finished: it is generated, again if need be
    finished   it waits in the buffer; its samples may lie in a store
    taken      it was handed out to be trained on
    again      it was not used, and is being generated again
    settled    it was trained on, or dropped: it never comes back
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from miles_plugin.fully_async.groups import PromptGroup
from miles_plugin.fully_async.ranges import Ranges
from miles_plugin.rollout.sample import Sample


class Prompt(msgspec.Struct, frozen=True):
    """What a sample is generated from."""

    prompt: str
    label: Any
    metadata: dict[str, Any]


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of a group.

    Attributes:
        distinct: each once; usually there is one.
        samples: for each sample its index, its group_index and which of `distinct` it has.
    """

    distinct: list[Prompt]
    samples: list[tuple[int, int, int]]

    def group(self) -> list[Sample]:
        """Samples that have their prompt, and nothing that was generated."""
        return [
            Sample(index, group_index, each.prompt, each.label, dict(each.metadata))
            for index, group_index, which in self.samples
            for each in [self.distinct[which]]
        ]


def prompts_of(group: PromptGroup) -> Prompts | None:
    """The prompts of a group; None when JSON would not give them back as they are."""
    if not all(_is_json([sample.prompt, sample.label, sample.metadata], 0) for sample in group):
        return None
    distinct: list[Prompt] = []
    samples = []
    for sample in group:
        prompt = Prompt(sample.prompt, sample.label, sample.metadata)
        if not distinct or distinct[-1] != prompt:
            distinct.append(prompt)
        samples.append((sample.index, sample.group_index, len(distinct) - 1))
    return Prompts(distinct, samples)


def _is_json(value: Any, depth: int) -> bool:
    if value is None or type(value) is bool:
        return True
    if type(value) is int:
        return -(2**63) <= value < 2**64
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is str:
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if depth > 100:
        return False
    if type(value) is list:
        return all(_is_json(item, depth + 1) for item in value)
    return type(value) is dict and all(
        type(key) is str and _is_json(key, depth) and _is_json(item, depth + 1) for key, item in value.items()
    )


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """One record of the journal."""


class Finished(Event, frozen=True):
    """A group was finished. oldest, newest, unstamped: as in `Origin`. prompts: None when JSON cannot hold them."""

    group: int
    oldest: int | None
    newest: int | None
    unstamped: bool
    prompts: Prompts | None


class Stored(Event, frozen=True):
    """The samples of a finished group lie in the store. ref: as text; None when it means nothing after this process."""

    group: int
    ref: str | None


class Taken(Event, frozen=True):
    """A group was handed out. batch: the number of the rollout that it is for."""

    group: int
    batch: int | None


class Returned(Event, frozen=True):
    """Groups that were taken wait again: whoever had taken them is gone."""

    groups: list[int]


class Again(Event, frozen=True):
    """A group was not used, and is generated again. prompts: of one that was never noted as finished."""

    group: int
    prompts: Prompts | None


class Dropped(Event, frozen=True):
    """A group was not used, and will not be generated again."""

    group: int


class Trained(Event, frozen=True):
    """Groups have been trained on."""

    groups: list[int]


class Settled(Event, frozen=True):
    """What a compacted journal begins with: the numbers that are settled, and above which all others are unknown.

    ranges: pairs of first and last + 1. next: one more than the highest number noted.
    """

    ranges: list[tuple[int, int]]
    next: int


Events = Finished | Stored | Taken | Returned | Again | Dropped | Trained | Settled


class Progress(Enum):
    """Where a group is that is not settled."""

    FINISHED = "finished"
    TAKEN = "taken"
    AGAIN = "again"


@dataclass
class Known:
    """What is known of a group that is not settled; the attributes are those of the records. Of one that is generated
    again, `finished` has the prompts and nothing else."""

    finished: Finished
    progress: Progress = Progress.FINISHED
    ref: str | None = None
    batch: int | None = None


@dataclass(frozen=True)
class Learned:
    """What a checkpoint says of groups: its model has learned from all below `next` but those of `unfinished`.

    version: the newest that samples may have which come from a model before it; None: no samples are to be kept.
    """

    next: int = 0
    unfinished: Sequence[int] = ()
    version: int | None = None


class State:
    """What the records say so far.

    Attributes:
        live: groups that are known and not settled, in the order in which they were finished.
        freed: groups whose samples nobody needs any more, since this was emptied last.
        next: one more than the highest number noted; not below `first`.

    Args:
        first: the number of the run's first group.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = self.next = first
        self.settled = Ranges()
        self.live: dict[int, Known] = {}
        self.freed: list[int] = []

    def expects(self, group: int) -> bool:
        """Whether a group with this number would be new, or was asked for again; no to what would be trained twice."""
        known = self.live.get(group)
        return group not in self.settled if known is None else known.progress is Progress.AGAIN

    def apply(self, event: Events) -> None:
        """Note one record. What contradicts the state, such as a second end of one group, changes nothing."""
        match event:
            case Finished(group=group):
                if self.expects(group):
                    self.live.pop(group, None)  # to the end: it waits behind the others now
                    self._know(group, Known(event))
            case Stored(group=group, ref=ref):
                if (known := self._waits(group)) is not None:
                    known.ref = ref
            case Taken(group=group, batch=batch):
                if (known := self._waits(group)) is not None:
                    known.progress, known.batch = Progress.TAKEN, batch
            case Returned(groups=groups):
                for known in filter(None, map(self._waits, groups)):
                    known.progress, known.batch = Progress.FINISHED, None
            case Again(group=group, prompts=prompts):
                self._again(group, prompts)
            case Dropped(group=group):
                self._settle(group)
            case Trained(groups=groups):
                for group in groups:
                    self._settle(group)
            case Settled(ranges=ranges, next=following):
                self.settled = Ranges(ranges)
                self.next = max(self.next, following)

    def records(self) -> Iterator[Events]:
        """As few records as lead to this state."""
        yield Settled(self.settled.pairs(), self.next)
        for group, known in self.live.items():
            if known.progress is Progress.AGAIN:
                yield Again(group, known.finished.prompts)
                continue
            yield known.finished
            if known.ref is not None:
                yield Stored(group, known.ref)
            if known.progress is Progress.TAKEN:
                yield Taken(group, known.batch)

    def never_finished(self) -> list[range]:
        """Numbers below `next` of which nothing is known: they were being generated when all ended."""
        known = Ranges([*self.settled.pairs(), *((group, group + 1) for group in self.live)])
        return known.gaps(self.first, self.next)

    def taken_before(self, batch: int) -> list[int]:
        """Groups taken for a batch with a lower number."""
        return [group for group, known in self.live.items() if known.batch is not None and known.batch < batch]

    def as_of(self, learned: Learned) -> tuple["State", list[str]]:
        """The state of a run that goes on from a checkpoint, whatever this one says of what was trained on.

        Known are still the groups whose samples lie in a store, if the checkpoint has not learned from them, and no
        version made them that it has not: that was undone with all that came after it.

        Returns also the refs of samples that nobody knows any more.
        """
        state, refs = State(self.first), []
        settled = Ranges((group, group + 1) for group in learned.unfinished).gaps(self.first, learned.next)
        state.apply(Settled([(numbers.start, numbers.stop) for numbers in settled], learned.next))
        for group, known in self.live.items():
            newest = known.finished.newest
            is_of_it = newest is not None and learned.version is not None and newest <= learned.version
            if known.ref is not None and is_of_it and state.expects(group):
                state.apply(known.finished)
                state.apply(Stored(group, known.ref))
            elif known.ref is not None:
                refs.append(known.ref)
        return state, refs

    def _waits(self, group: int) -> Known | None:
        """What is known of a group that was finished and is not to be generated again."""
        known = self.live.get(group)
        return None if known is None or known.progress is Progress.AGAIN else known

    def _know(self, group: int, known: Known) -> None:
        self.live[group] = known
        self.next = max(self.next, group + 1)

    def _again(self, group: int, prompts: Prompts | None) -> None:
        if group in self.settled:
            return
        if (known := self.live.get(group)) is not None:
            prompts = known.finished.prompts
            if known.progress is not Progress.AGAIN:
                self.freed.append(group)
        self._know(group, Known(Finished(group, None, None, True, prompts), Progress.AGAIN))

    def _settle(self, group: int) -> None:
        known = self.live.pop(group, None)
        if known is not None and known.progress is not Progress.AGAIN:
            self.freed.append(group)
        self.settled.add(group)
        self.next = max(self.next, group + 1)
