"""Which engines form a process group together, found out by trying.

One that joins alone may not join with others: it does not reach them, or hangs when they are there. A group that does
not form says little of who is to blame: who waits for the others in vain looks like who keeps them waiting.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.sglang import EngineError

Engines = list[EngineAddress]


class NotFormed(EngineError):
    """A process group did not form. refused: URL of the engine that said so first, if one did; who says no after it
    may have waited for it in vain."""

    def __init__(self, message: str, refused: str | None = None) -> None:
        super().__init__(message)
        self.refused = refused


class Joiners:
    """As many engines as form one group, and why the others do not. What was tried once is not tried again.

    Args:
        form: forms a group of these engines, or raises NotFormed.
        seconds: after which no group is tried that was not before: the other trainer ranks wait meanwhile.

    Attributes:
        failed: why an engine is left out, by URL.
    """

    def __init__(self, form: Callable[[Sequence[EngineAddress]], None], seconds: float) -> None:
        self._form, self._seconds, self._began = form, seconds, time.monotonic()
        self._tried: dict[frozenset[str], str] = {}
        self._refusals: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    def most(self, engines: Sequence[EngineAddress], known: Collection[EngineAddress]) -> Engines:
        """The largest group that was found.

        Args:
            known: who was in a group before, in the same life.
        """
        before = [engine for engine in engines if engine in known]
        new = [engine for engine in engines if engine not in known]
        if before:  # they serve on while each of the others is tried alone: who waits for one that hangs does not
            new = self._alone(new)
        if not self._why_not([*before, *new]):
            return [*before, *new]
        if before and not self._why_not(before):
            return self._grown(before, new)
        return self._largest(self._alone([*before, *new]))

    def _alone(self, engines: Engines) -> Engines:
        """Those that join a group of their own; the others have failed."""
        for engine in engines:
            if why := self._why_not([engine]):
                self.failed[engine.url] = why
        return [engine for engine in engines if engine.url not in self.failed]

    def _largest(self, engines: Engines) -> Engines:
        """Of engines that each join alone. Where one of three or more is to blame, all but that one."""
        if len(engines) < 2 or not self._why_not(engines):
            return engines
        waited = [engine for engine in engines if not self._refusals[engine.url]]
        half = len(engines) // 2
        # Who joins nobody is in no group of two, so that one without it is grown.
        for group in (waited, engines[half:], engines[:half]):
            if 1 < len(group) < len(engines) and not self._why_not(group):
                return self._grown(group, [engine for engine in engines if engine not in group])
        engines = sorted(engines, key=lambda engine: self._refusals[engine.url])  # who comes first stays in a tie
        best = max(self._largest(engines[:half]), self._largest(engines[half:]), key=len)
        return self._grown(best, [engine for engine in engines if engine not in best])

    def _grown(self, group: Engines, others: Engines) -> Engines:
        """A group, and as many of the others as join it; halved again and again, where not all of them do."""
        if not others or not (why := self._why_not([*group, *others])):
            for engine in others:
                self.failed.pop(engine.url, None)
            return [*group, *others]
        if len(others) == 1:
            urls = ", ".join(engine.url for engine in group)
            self.failed[others[0].url] = f"joins a process group alone; with {urls}: {why}"
            return group
        half = len(others) // 2
        return self._grown(self._grown(group, others[:half]), others[half:])

    def _why_not(self, engines: Engines) -> str:
        """Why these do not form a group; empty if they do."""
        urls = frozenset(engine.url for engine in engines)
        if urls not in self._tried and time.monotonic() - self._began > self._seconds:
            return f"not tried any more, to find out who joins whom has taken {self._seconds:g} s"
        if urls not in self._tried:
            self._tried[urls] = ""
            try:
                self._form(engines)
            except NotFormed as error:
                self._tried[urls] = str(error)
                if error.refused is not None:
                    self._refusals[error.refused] += 1
        return self._tried[urls]
