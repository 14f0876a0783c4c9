"""The engines of a run: which of them are in rotation, and why the others are not.

In rotation is an engine that confirmed the newest weight update (before the first update: every engine). Only those
get requests. An engine outside is offered every update, and is in rotation again when it has confirmed one, so that
one that was restarted, or comes late, has the newest weights before its first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from miles_plugin.engines.sglang import EngineError, SGLangEngine

# Seconds within which an engine says what it serves.
_ANSWER_SECONDS = 10.0
# Seconds within which a dying engine is seen dead.
_DYING_SECONDS = 5.0
_JOIN = "join"


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine is, and how many ranks it has (its tensor-parallel size).

    life: how often it failed. What was agreed with it in an earlier life, e.g. a process group, may be gone.
    """

    url: str
    ranks: int = 1
    life: int = 0


@dataclass(frozen=True)
class Left:
    """An engine that left the rotation. phase: of the weight update, or what else it failed in."""

    url: str
    phase: str
    reason: str

    def __str__(self) -> str:
        return f"{self.url} failed in {self.phase}: {self.reason}"


class Member(Protocol):
    """An engine that a run started, or that was there before."""

    @property
    def engine(self) -> SGLangEngine: ...

    @property
    def ranks(self) -> int: ...

    def ended(self, patience: float = 0.0) -> str | None:
        """How its process, if that is ours, has ended; None while it runs.

        Args:
            patience: seconds to wait for the end of one that does not answer.
        """

    def check(self, patience: float = 0.0) -> None:
        """Raise EngineError, with its log's last lines, if it has `ended`."""

    def stop(self) -> None:
        """Let go of it; a process of ours is ended."""


class External:
    """An engine that runs without us: it is spoken to, and never ended."""

    def __init__(self, url: str, ranks: int) -> None:
        self.engine, self.ranks = SGLangEngine(url), ranks

    def ended(self, patience: float = 0.0) -> str | None:  # noqa: ARG002
        """Its processes are not ours to look after; requests show whether it answers."""
        return None

    def check(self, patience: float = 0.0) -> None:
        pass

    def stop(self) -> None:
        self.engine.close()


class Fleet:
    """The engines of a run. Safe to ask from any thread.

    Args:
        members: all engines; they serve the checkpoint that the run starts from, and are in rotation.
    """

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self._members = {member.engine.url: member for member in members}
        self._outside: dict[str, Left] = {}
        self._lives = dict.fromkeys(self._members, 0)
        self._version: int | None = None
        self._news: list[str] = []
        # What those outside failed in when that was last said: the same again is no news.
        self._failed_in: dict[str, str] = {}
        # Outside, and failed an update since it was last seen not to answer: it gets the next one, but none of its own.
        self._tried: set[str] = set()

    @property
    def version(self) -> int | None:
        """What every engine in rotation has confirmed; None before the first update."""
        return self._version

    def addresses(self) -> list[EngineAddress]:
        """All engines: those outside the rotation are offered every update."""
        return [EngineAddress(url, member.ranks, self._lives[url]) for url, member in list(self._members.items())]

    def serving(self) -> list[SGLangEngine]:
        """The engines in rotation.

        Raises:
            EngineError: none is left.
        """
        outside = dict(self._outside)
        engines = [member.engine for url, member in list(self._members.items()) if url not in outside]
        if not engines:
            reasons = "; ".join(map(str, outside.values())) or "the run has none"
            raise EngineError(f"no engine is in rotation: {reasons}")
        return engines

    def outside(self) -> list[Left]:
        """The engines outside the rotation, and why."""
        return list(self._outside.values())

    def news(self) -> list[str]:
        """Which engines left the rotation since this was asked last, and why, and which came back; a line for each."""
        news, self._news = self._news, []
        return news

    def leave(self, left: Left) -> None:
        """Take an engine out of rotation until it has confirmed an update. Why it left stays what was said first."""
        member = self._members.get(left.url)
        if member is None:
            return
        self._lives[left.url] += 1
        if left.url in self._outside:
            return
        if ended := member.ended(_DYING_SECONDS):  # the cause, of which whoever noticed knows only the effect
            left = replace(left, reason=ended)
        self._outside = {**self._outside, left.url: left}
        self._failed_in[left.url] = left.phase
        self._news.append(f"warning: an engine left the rotation: {left}")

    def join(self, member: Member) -> None:
        """Take in an engine that came late; in rotation it is when it has confirmed an update.

        Raises:
            EngineError: it is one of the run's already.
        """
        url = member.engine.url
        if url in self._members:
            raise EngineError(f"{url} is one of the run's engines already")
        self._lives[url] = 0
        self._outside = {**self._outside, url: Left(url, _JOIN, "has not confirmed a weight update yet")}
        self._members = {**self._members, url: member}
        self._news.append(f"engine {url} joined; it gets the newest weights before its first request")

    def updated(self, version: int, confirmed: Sequence[str], left: Sequence[Left]) -> None:
        """An update is complete: in rotation is who confirmed it."""
        self._version = version
        self._tried = {each.url for each in left}
        for each in left:
            if each.url in self._outside and self._failed_in.get(each.url) != each.phase:
                self._failed_in[each.url] = each.phase
                self._news.append(f"warning: an engine stays out of rotation: {each}")
            self.leave(each)
        for url in self._members.keys() - set(confirmed) - self._outside.keys():
            self.leave(Left(url, "prepare", "was not asked to take the newest weights"))
        entered = self._outside.keys() & set(confirmed)
        for url in sorted(entered):
            back = "" if self._outside[url].phase == _JOIN else "back "
            self._news.append(f"engine {url} is {back}in rotation, with version {version}")
        self._outside = {url: why for url, why in self._outside.items() if url not in entered}

    def roll_call(self) -> list[str]:
        """Before requests are sent: look whether each engine still serves what it confirmed; one that does not leaves.

        Returns the engines outside the rotation that answer and wait for an update, but those that failed the last one
        and have answered since.
        """
        expected = None if self._version is None else str(self._version)
        waiting: list[str] = []
        members = dict(self._members)
        with ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="roll call") as pool:
            answers = {
                url: pool.submit(member.engine.weight_version, _ANSWER_SECONDS) for url, member in members.items()
            }
        for url, answer in answers.items():
            try:
                served = answer.result()
            except EngineError as error:
                self.leave(Left(url, "roll call", str(error)))
                self._tried.discard(url)
                continue
            if url in self._outside:
                waiting += {url} - self._tried
            elif expected is not None and served != expected:
                self.leave(Left(url, "roll call", f"serves version {served!r}, not {expected}: it was started anew"))
                waiting.append(url)
        return waiting

    def check(self, patience: float = 0.0) -> None:
        """Raise EngineError for an engine of ours that has ended, with its log's last lines."""
        for member in list(self._members.values()):
            member.check(patience)

    def stop(self) -> None:
        """Let go of every engine; idempotent."""
        members, self._members = self._members, {}
        with ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="stop") as pool:
            for stopped in [pool.submit(member.stop) for member in members.values()]:
                stopped.result()
