"""How stale a group is, and whether it may be trained on: rules alone, nothing waits and nothing is kept here.

staleness = the current version - the oldest version that made any part of any sample of the group. It is None, never 0,
where it is not known, and it is never negative.
"""

import threading
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from miles_plugin.fully_async.groups import Group, iter_samples
from mooncake_store.ref import UNSTAMPED

# Who says what the current version is: whoever updates engines, by `announce`; whoever asks for a group, by `get`.
ANNOUNCED, ASKED = "announced", "asked"


class Verdict(Enum):
    """What the rules say of a group.

    FRESH: within the bound, or not measured, since no version was pushed yet.
    STALE: beyond the bound.
    UNSTAMPED: a part of it was made by an engine that had been given no version, though one had been pushed: older than
        every number, by an amount that nobody knows.
    AHEAD: a part of it has a number above the current one.
    OTHER_RUN: made by the policy of another run, whose numbers say nothing here.
    """

    FRESH = "fresh"
    STALE = "stale"
    UNSTAMPED = "unstamped"
    AHEAD = "ahead"
    OTHER_RUN = "other run"


class Origin(NamedTuple):
    """Where a group comes from; all that the rules look at.

    Attributes:
        oldest, newest: of the versions of its samples; None when none is a number.
        unstamped: whether any span, or a sample without spans, has no number.
        run_id: the run that made it, None when that is not known.
    """

    oldest: int | None
    newest: int | None
    unstamped: bool
    run_id: str | None = None


class Judgement(NamedTuple):
    """verdict: what the group is. staleness: in versions, None when not known. keep: whether it may be trained on."""

    verdict: Verdict
    staleness: int | None
    keep: bool


def number_of(version: object) -> int | None:
    """The version that a span names, as decimal text or an int of at least 0; None for "default" and all else."""
    if isinstance(version, str) and version != UNSTAMPED and version.isascii() and version.isdecimal():
        return int(version) if len(version) < 20 else None
    if isinstance(version, int) and not isinstance(version, bool) and version >= 0:
        return version
    return None


def origin_of(group: Group, run_id: str | None = None, number: Callable[[object], int | None] = number_of) -> Origin:
    """Where a finished group comes from, by the `number` of each span's version. One without samples is unstamped."""
    numbers: list[int] = []
    unstamped = not group
    for sample in iter_samples(group):
        found = [number(version) for version in sample.weight_versions]
        unstamped = unstamped or not found or None in found
        numbers += [number for number in found if number is not None]
    return Origin(min(numbers, default=None), max(numbers, default=None), unstamped, run_id)


def judge(origin: Origin, current: int | None, most: int | None, run_id: str | None = None) -> Judgement:
    """Judge a group.

    A number above the current one is not taken for the current one: engines resume with a number only after it was
    announced, so it is of another run whose id is not known, or of an update that went round the announcement. Then
    nobody can say how stale the group is; that it looks fresh is no reason to train on it.

    Args:
        current: the current version; None before the first push, when nothing can be measured.
        most: the staleness that is allowed; None turns the filter off: groups are only told apart, and all are kept
            but those of another run.
        run_id: this run, None when that is not known; then no group is of another one.
    """
    if run_id is not None and origin.run_id is not None and origin.run_id != run_id:
        return Judgement(Verdict.OTHER_RUN, None, False)
    if current is None:
        return Judgement(Verdict.FRESH, None, True)
    if origin.newest is not None and origin.newest > current:
        return Judgement(Verdict.AHEAD, None, most is None)
    if origin.unstamped or origin.oldest is None:
        return Judgement(Verdict.UNSTAMPED, None, most is None)
    staleness = current - origin.oldest
    if most is not None and staleness > most:
        return Judgement(Verdict.STALE, staleness, False)
    return Judgement(Verdict.FRESH, staleness, True)


def is_final(judgement: Judgement) -> bool:
    """Whether a group that is not kept will not be kept later either: the current version only rises."""
    return not judgement.keep and judgement.verdict is not Verdict.AHEAD


class Watermark:
    """The highest version heard of. It never falls: where a number after a higher one is heard, as after a failover of
    whoever counts, the higher one stands, and it is counted. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: int | None = None
        self._last: dict[str, int] = {}
        self._steps_back = 0

    @property
    def current(self) -> int | None:
        """The highest number so far; None before the first."""
        return self._current

    def note(self, version: int | None, source: str = ANNOUNCED) -> None:
        """Hear that `version` is the current one; None says nothing.

        Args:
            source: who says so. Only a number below the last one of the same source is a step back: a rollout that was
                asked for before an update goes on asking with its number, and means no harm.

        Raises:
            ValueError: not an int of at least 0.
        """
        if version is None:
            return
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"{version!r:.80} ({source}) is no policy version; allowed: an int of at least 0, or None")
        with self._lock:
            self._steps_back += version < self._last.get(source, version)
            self._last[source] = version
            self._current = version if self._current is None else max(self._current, version)

    def take_steps_back(self) -> int:
        """How often a source stepped back since this was asked last."""
        with self._lock:
            steps, self._steps_back = self._steps_back, 0
            return steps
