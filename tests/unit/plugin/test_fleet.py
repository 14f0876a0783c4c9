"""Who is in rotation, why the others are not, and how a roll call finds those that should not be."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from miles_plugin.engines.fleet import EngineAddress, Fleet, Left, Member
from miles_plugin.engines.sglang import EngineError

A, B, C = (f"http://10.0.0.{host}:30000" for host in (1, 2, 3))


class FakeEngine:
    """Says that it serves `version`, or raises that; `meanwhile` runs first."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version: str | Exception = "default"
        self.meanwhile: Callable[[], None] = lambda: None
        self.bounds: list[float | None] = []

    def weight_version(self, seconds: float | None = None) -> str:
        self.bounds.append(seconds)
        self.meanwhile()
        if isinstance(self.version, Exception):
            raise self.version
        return self.version


class Engines:
    """A fleet of some, by URL."""

    def __init__(self, *urls: str) -> None:
        self.by_url = {url: FakeEngine(url) for url in urls}
        self.stopped: list[str] = []
        members = [
            SimpleNamespace(
                engine=engine,
                ranks=rank + 1,
                ended=lambda _patience: None,
                stop=lambda url=url: self.stopped.append(url),
            )
            for rank, (url, engine) in enumerate(self.by_url.items())
        ]
        self.fleet = Fleet(cast(list[Member], members))

    def update(self, version: int, confirmed: list[str], left: tuple[Left, ...] = ()) -> None:
        self.fleet.updated(version, confirmed, left)
        for url in confirmed:
            self.by_url[url].version = str(version)

    def serving(self) -> list[str]:
        return [engine.url for engine in self.fleet.serving()]

    def outside(self) -> dict[str, str]:
        return {left.url: str(left) for left in self.fleet.outside()}

    def lives(self) -> dict[str, int]:
        return {address.url: address.life for address in self.fleet.addresses()}


@pytest.fixture
def engines() -> Engines:
    return Engines(A, B, C)


def test_all_are_in_rotation_from_the_start_and_offered_each_update(engines: Engines) -> None:
    assert engines.serving() == [A, B, C]
    engines.fleet.leave(Left(B, "generate", "no answer"))
    assert engines.serving() == [A, C]
    assert engines.outside() == {B: f"{B} failed in generate: no answer"}
    assert engines.fleet.addresses() == [EngineAddress(A, 1, 0), EngineAddress(B, 2, 1), EngineAddress(C, 3, 0)]


def test_an_engine_that_joins_is_in_rotation_when_it_has_confirmed_an_update(engines: Engines) -> None:
    late = "http://10.0.0.4:30000"
    engines.update(1, [A, B, C])
    engines.by_url[late] = FakeEngine(late)
    member = cast(Member, SimpleNamespace(engine=engines.by_url[late], ranks=2, ended=lambda _patience: None))
    engines.fleet.join(member)
    assert engines.serving() == [A, B, C]
    assert engines.outside() == {late: f"{late} failed in join: has not confirmed a weight update yet"}
    assert engines.fleet.addresses()[-1] == EngineAddress(late, 2, 0)
    assert engines.fleet.roll_call() == [late], "whatever version it says that it serves"
    engines.update(2, [A, B, C, late])
    assert engines.serving() == [A, B, C, late]
    assert engines.fleet.news() == [
        f"engine {late} joined; it gets the newest weights before its first request",
        f"engine {late} is in rotation, with version 2",
    ]
    with pytest.raises(EngineError, match="one of the run's engines already"):
        engines.fleet.join(member)


def test_an_engine_that_joins_before_the_first_update_waits_for_it_too() -> None:
    engines = Engines(A)
    engines.fleet.join(cast(Member, SimpleNamespace(engine=FakeEngine(B), ranks=1)))
    assert engines.serving() == [A]
    assert engines.fleet.roll_call() == [B]


def test_an_update_brings_back_who_confirmed_it_and_takes_out_who_did_not(engines: Engines) -> None:
    engines.fleet.leave(Left(A, "generate", "no answer"))
    engines.update(4, [A, B], (Left(C, "pause", "it hung"),))
    assert engines.serving() == [A, B]
    assert engines.outside() == {C: f"{C} failed in pause: it hung"}
    engines.update(5, [A, C])
    assert engines.serving() == [A, C]
    assert engines.outside()[B].startswith(f"{B} failed in prepare: was not asked")
    engines.update(6, [A, B, C])
    assert not engines.outside()


def test_an_engine_that_failed_has_a_new_life_even_if_it_was_outside_already(engines: Engines) -> None:
    """What was agreed with it since then, e.g. where its memory is, may be gone again."""
    engines.fleet.leave(Left(A, "generate", "no answer"))
    first = engines.lives()
    engines.update(1, [B, C], (Left(A, "pause", "it died anew, after it was connected"),))
    second = engines.lives()
    assert first[A] != second[A]
    engines.update(2, [A, B, C])
    assert engines.lives() == second, "who confirms lives on"
    assert (first[B], first[C]) == (second[B], second[C]) == (0, 0)


def test_who_is_not_of_the_fleet_cannot_leave_it(engines: Engines) -> None:
    engines.fleet.leave(Left("http://10.0.0.9:1", "generate", "who?"))
    assert engines.serving() == [A, B, C]
    assert not engines.outside()


def test_without_an_engine_every_reason_is_said(engines: Engines) -> None:
    for url, phase in ((A, "generate"), (B, "roll call"), (C, "transfer")):
        engines.fleet.leave(Left(url, phase, f"reason of {phase}"))
    with pytest.raises(EngineError) as caught:
        engines.fleet.serving()
    for url, phase in ((A, "generate"), (B, "roll call"), (C, "transfer")):
        assert f"{url} failed in {phase}: reason of {phase}" in str(caught.value)
    with pytest.raises(EngineError, match="no engine is in rotation: the run has none"):
        Fleet().serving()


def test_a_roll_call_before_the_first_update_asks_only_for_an_answer(engines: Engines) -> None:
    engines.by_url[B].version = "7"  # an engine that ran before, and was updated by another run
    engines.by_url[C].version = EngineError("refused")
    assert engines.fleet.roll_call() == []
    assert engines.serving() == [A, B]
    assert engines.outside() == {C: f"{C} failed in roll call: refused"}


def test_a_roll_call_finds_who_was_started_anew_and_who_is_gone(engines: Engines) -> None:
    engines.update(7, [A, B, C])
    assert engines.fleet.roll_call() == []
    engines.by_url[A].version = "default"
    engines.by_url[B].version = EngineError("connection refused")
    assert engines.fleet.roll_call() == [A]
    assert engines.serving() == [C]
    assert "serves version 'default', not 7: it was started anew" in engines.outside()[A]
    assert "roll call: connection refused" in engines.outside()[B]
    lives = engines.lives()
    assert lives == {A: 1, B: 1, C: 0}
    engines.by_url[B].version = "default"
    assert engines.fleet.roll_call() == [A, B], "each time, until they have confirmed an update"
    engines.by_url[A].version = "7"
    assert engines.fleet.roll_call() == [A, B], "what it says does not prove that it confirmed"
    assert engines.lives() == lives
    engines.update(8, [A, B, C])
    assert engines.fleet.roll_call() == []
    assert engines.serving() == [A, B, C]


def test_why_an_engine_left_is_what_happened_first(engines: Engines) -> None:
    engines.fleet.leave(Left(A, "transfer", "a write failed with code -1"))
    engines.by_url[A].version = EngineError("connection refused")
    engines.fleet.roll_call()
    assert "a write failed" in engines.outside()[A]


def test_who_leaves_and_who_is_back_is_said_once(engines: Engines) -> None:
    fleet = engines.fleet
    fleet.leave(Left(A, "generate", "reset"))
    for version in (0, 1):
        engines.update(version, [B, C], (Left(A, "prepare", "refused"),))
    assert fleet.news() == [
        f"warning: an engine left the rotation: {A} failed in generate: reset",
        f"warning: an engine stays out of rotation: {A} failed in prepare: refused",
    ]
    assert fleet.news() == []
    for version in (2, 3):
        engines.update(version, [A, B, C])
    assert fleet.news() == [f"engine {A} is back in rotation, with version 2"]


def test_the_end_of_its_process_is_why_an_engine_left() -> None:
    ended = f"SGLang at {A} ended with status 137; its log x"
    member: Any = SimpleNamespace(engine=FakeEngine(A), ranks=1, ended=lambda _patience: ended)
    fleet = Fleet([member])
    fleet.leave(Left(A, "generate", "no answer"))
    assert fleet.news() == [f"warning: an engine left the rotation: {A} failed in generate: {ended}"]
    with pytest.raises(EngineError, match="ended with status 137"):
        fleet.serving()


def test_an_engine_that_fails_every_update_does_not_make_the_job_send_another_before_each_rollout(
    engines: Engines,
) -> None:
    engines.update(3, [B, C], (Left(A, "verify", "differs"),))
    assert engines.fleet.roll_call() == []
    engines.by_url[A].version = EngineError("no answer")
    assert engines.fleet.roll_call() == []
    engines.by_url[A].version = "default"
    assert engines.fleet.roll_call() == [A], "it was started anew"
    engines.update(4, [A, B, C])
    assert engines.fleet.roll_call() == []


def test_engines_are_called_at_once_each_within_a_bound(engines: Engines) -> None:
    """One that is slow holds the others up for the bound of one call, not of one call each."""
    together = threading.Barrier(3)
    for engine in engines.by_url.values():
        engine.meanwhile = lambda: together.wait(30) and None
    assert engines.fleet.roll_call() == []
    for engine in engines.by_url.values():
        (bound,) = engine.bounds
        assert bound is not None
        assert 0 < bound <= 30


def test_reads_from_other_threads_see_a_whole_state(engines: Engines) -> None:
    """While engines leave and come back a reader never sees one twice, nor a failure of its own."""
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                serving = engines.serving()
                assert len(set(serving)) == len(serving) > 0
                assert len(engines.fleet.addresses()) in (0, 3)
                engines.outside()
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(50):
        engines.fleet.leave(Left(A, "generate", "no answer"))
        engines.update(version, [B, C], (Left(A, "pause", "no answer"),))
        engines.update(version, [A, B], (Left(C, "pause", "no answer"),))
    done.set()
    for reader in readers:
        reader.join()
    assert not failures


def test_stopping_lets_go_of_each_once_while_others_ask(engines: Engines) -> None:
    engines.fleet.stop()
    engines.fleet.stop()
    assert sorted(engines.stopped) == [A, B, C]
    assert engines.fleet.addresses() == []
    assert engines.fleet.roll_call() == []
    engines.fleet.updated(3, [A], [Left(B, "pause", "gone")])
    engines.fleet.check()


def test_members_are_checked_with_the_patience_that_is_given() -> None:
    asked: list[float] = []

    def check(patience: float) -> None:
        asked.append(patience)
        raise EngineError("sglang has ended: its last words")

    member: Any = SimpleNamespace(engine=FakeEngine(A), ranks=1, check=check)
    with pytest.raises(EngineError, match="its last words"):
        Fleet([member]).check(2.5)
    assert asked == [2.5]
