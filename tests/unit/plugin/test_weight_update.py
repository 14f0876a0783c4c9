"""One weight update step by step, with engines and a transport that fail when told to."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.engines.fleet import EngineAddress  # noqa: E402
from miles_plugin.engines.sglang import EngineError, SGLangEngine  # noqa: E402
from miles_plugin.version import VersionFenced  # noqa: E402
from miles_plugin.weight_transfer.equality import WeightsDiffer  # noqa: E402
from miles_plugin.weight_transfer.ranks import RankFailed, Ranks  # noqa: E402
from miles_plugin.weight_transfer.transfer import (  # noqa: E402
    PHASES,
    Bounds,
    Delivery,
    Sent,
    UpdateFailed,
    Updater,
    WeightUpdate,
)
from tests.weight_updates import Versions  # noqa: E402

A, B = "http://10.0.0.1:30000", "http://10.0.0.2:30000"
WEIGHTS = {"a": torch.zeros(10, dtype=torch.uint8), "b": torch.zeros(30, dtype=torch.uint8)}
TOTAL = 40
# Each call of an engine in an update, in order, and the phase that an engine is said to have failed in.
STEPS = {
    "model_info": "prepare",
    "pause": "pause",
    "flush_cache": "flush",
    "begin_update": "begin",
    "stamp": "stamp",
    "end_update": "end",
    "check": "verify",
    "resume": "resume",
}


class FakeEngine:
    """Notes what it is told in `events`, and fails in the steps of `failing`."""

    def __init__(self, url: str, events: list[tuple[Any, ...]]) -> None:
        self.url, self._events = url, events
        self.failing: dict[str, EngineError] = {}
        self.closed = False
        self.version, self.is_open = "default", False

    def note(self, step: str, *arguments: Any) -> None:
        self._events.append((step, self.url, *arguments))
        if step in self.failing:
            raise self.failing[step]

    def pause(self, mode: str) -> None:
        self.note("pause", mode)

    def flush_cache(self) -> None:
        self.note("flush_cache")

    def begin_update(self) -> None:
        self.note("begin_update")
        self.is_open = True

    def end_update(self) -> None:
        self.note("end_update")
        if not self.is_open:
            raise EngineError(f"{self.url}: no update is open", 400)
        self.is_open = False

    def start_anew(self) -> None:
        self.version, self.is_open = "default", False

    def stamp(self, version: int) -> None:
        self.note("stamp", version)
        self.version = str(version)

    def weight_version(self, seconds: float | None = None) -> str:
        if seconds is not None:
            assert seconds == Bounds().answer < Bounds().call, "one that hangs is offered every update"
            self.note("model_info")
        return self.version

    def resume(self) -> None:
        self.note("resume")

    def close(self) -> None:
        self.closed = True


class FakeTransport:
    """Takes all tensors, and gives the results of `results` in turn; then, that all went well."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self._events = events
        self.refusing: list[dict[str, str]] = []
        self.results: list[Sent] = []
        self.closed = 0

    def connect(self, engines: Sequence[EngineAddress]) -> Mapping[str, str]:
        self._events.append(("connect", *(engine.url for engine in engines)))
        refused = self.refusing.pop(0) if self.refusing else {}
        return {url: why for url, why in refused.items() if url in {engine.url for engine in engines}}

    def send(self, tensors: Iterable[tuple[str, Any]]) -> Sent:
        nbytes = sum(tensor.nbytes for _, tensor in tensors)
        self._events.append(("send",))
        return self.results.pop(0) if self.results else Sent(nbytes)

    def close(self) -> None:
        self.closed += 1


class FakeProof:
    def __init__(self, update: "Update") -> None:
        self._update = update
        self.added: list[str] = []

    def add(self, name: str, tensor: Any) -> None:
        self.added.append(name)

    def check(self, engine: Any) -> int:
        assert self is self._update.proofs[-1], "proven is what was sent last"
        engine.note("check")
        return 7 if engine.url == A else 5


class FakeRanks(Ranks):
    """Rank 0 of several; what the others return to `send` is in `others`."""

    def __init__(self, others: Sequence[Sent] = ()) -> None:
        super().__init__()
        self.others, self.dismissed = others, 0

    def take(self, steps: Any, name: str, *arguments: Any) -> list[Any]:
        own = super().take(steps, name, *arguments)
        return own + (list(self.others) if name.startswith("send") else [{} for _ in self.others])

    def dismiss(self) -> None:
        self.dismissed += 1


class Update:
    """An updater of two engines, and all that it did in order."""

    def __init__(
        self,
        pause_mode: str = "retract",
        prove: bool = True,
        others: Sequence[Sent] = (),
        transport: type[FakeTransport] = FakeTransport,
    ) -> None:
        self.versions = Versions(first=5)
        self.events = self.versions.events
        self.engines = {url: FakeEngine(url, self.events) for url in (A, B)}
        self.transport, self.ranks = transport(self.events), FakeRanks(others)
        self.proofs: list[FakeProof] = []
        self.told: list[int] = []
        self.updater = Updater(
            self.transport,
            self.ranks,
            self.versions,
            pause_mode,
            prove=self._prove if prove else None,
            delivery=cast(Delivery, self.transport) if hasattr(self.transport, "deliver") else None,
            progress=self.told.append,
            clients=cast(dict[str, SGLangEngine], dict(self.engines)),
        )

    def _prove(self) -> FakeProof:
        self.proofs.append(FakeProof(self))
        return self.proofs[-1]

    def run(self, *urls: str) -> WeightUpdate:
        done = self.updater.update(WEIGHTS.items, [EngineAddress(url) for url in urls])
        assert done is not None
        return done

    def fail_in(self, step: str) -> None:
        """Another rank raises when all take this step."""
        take = self.ranks.take

        def fail(steps: Any, name: str, *arguments: Any) -> list[Any]:
            if name == step:
                raise RankFailed(f"trainer rank 1, step {step}: it broke")
            return take(steps, name, *arguments)

        self.ranks.take = fail  # type: ignore[method-assign]

    def run_broken(self) -> None:
        """The source raises in its midst."""

        def broken() -> Iterator[tuple[str, Any]]:
            yield "a", WEIGHTS["a"]
            raise ValueError("weights were lost")

        with pytest.raises(ValueError, match="weights were lost"):
            self.updater.update(broken, [EngineAddress(A)])

    def steps(self) -> list[str]:
        """What was done, each step once however many engines took it side by side."""
        names = [event[0] for event in self.events]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]

    def of(self, url: str) -> list[str]:
        return [event[0] for event in self.events if event[1:2] == (url,) and event[0] in STEPS]


def test_every_engine_takes_each_step_before_any_takes_the_next() -> None:
    update = Update()
    done = update.run(A, B)
    assert update.steps() == [
        "allocate", "model_info", "connect", "pause", "flush_cache", "begin_update", "connect", "send", "stamp",
        "end_update", "check", "announce", "resume", "commit",
    ]  # fmt: skip
    assert update.of(A) == update.of(B) == list(STEPS)
    for told in (("pause", A, "retract"), ("stamp", B, 5), ("announce", 5), ("commit", 5, (A, B), ())):
        assert told in update.events
    assert (done.version, done.nbytes, done.density, done.confirmed, done.left) == (5, TOTAL, 1.0, (A, B), ())
    assert done.proven == 5, "what every engine was proven to hold"
    assert update.proofs[-1].added == list(WEIGHTS)
    assert update.ranks.dismissed == 1


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_cache_may_stay_only_where_requests_go_on_with_it(mode: str) -> None:
    """An engine with requests that are frozen refuses to flush."""
    update = Update(mode, prove=False)
    done = update.run(A, B)
    assert ("pause", A, mode) in update.events
    assert "flush_cache" in update.steps()
    assert "check" not in update.steps()
    assert done.proven == 0
    update.engines[A].failing["flush_cache"] = EngineError("requests are still running or queued", 400)
    assert update.run(A, B).confirmed == ((A, B) if mode == "in_place" else (B,))


def test_each_phase_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    seconds = Update().run(A, B).seconds
    assert tuple(seconds) == PHASES
    assert all(value > 0 for value in seconds.values())
    assert seconds["converge"] > sum(value for phase, value in seconds.items() if phase != "converge")


def test_progress_is_told_after_each_weight_up_to_the_total() -> None:
    update = Update()
    update.run(A)
    assert update.told == [10, TOTAL]


@pytest.mark.parametrize("step", STEPS)
def test_an_engine_that_fails_in_a_step_leaves_and_the_others_go_on(step: str) -> None:
    update = Update()
    update.engines[A].failing[step] = EngineError(f"{A}: no", 500)
    done = update.run(A, B)
    assert done.confirmed == (B,)
    assert [str(left) for left in done.left] == [f"{A} failed in {STEPS[step]}: {A}: no"]
    assert update.events[-1] == ("commit", 5, (B,), (A,))
    assert update.of(B) == list(STEPS)
    assert update.of(A)[-1] == step, "nothing is asked of it any more, least of all to resume"


@pytest.mark.parametrize("step", STEPS)
def test_without_any_engine_an_update_fails_and_is_never_committed(step: str) -> None:
    update = Update()
    for url, engine in update.engines.items():
        engine.failing[step] = EngineError(f"{url}: it broke", 500)
    with pytest.raises(UpdateFailed, match=f"{A} failed in {STEPS[step]}.*{B} failed in {STEPS[step]}"):
        update.run(A, B)
    assert "commit" not in update.steps()
    assert ("announce" in update.steps()) == (step == "resume"), "the manager knows what may be served"
    assert update.ranks.dismissed == 1


def test_an_update_of_no_engines_says_so() -> None:
    update = Update()
    with pytest.raises(UpdateFailed, match="no engine took the weight update: the run has none"):
        update.run()
    assert "send" not in update.steps()
    assert "commit" not in update.steps()


def test_a_fenced_trainer_leaves_its_engines_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Update()

    def fenced(version: int) -> None:
        raise VersionFenced("another trainer has taken over")

    monkeypatch.setattr(update.versions, "announce", fenced)
    with pytest.raises(VersionFenced):
        update.run(A, B)
    assert update.of(A) == update.of(B) == list(STEPS)[:-1]
    assert "commit" not in update.steps()
    assert update.ranks.dismissed == 1


def test_a_number_that_cannot_be_had_touches_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Update()
    monkeypatch.setattr(update.versions, "allocate", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update.run(A, B)
    assert not update.events
    assert update.ranks.dismissed == 1


def test_an_update_that_was_left_open_is_closed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Update()
    begin = update.engines[A].begin_update
    refusals = iter([EngineError("already updating", 400)])

    def refuse_once() -> None:
        begin()
        if (error := next(refusals, None)) is not None:
            raise error

    monkeypatch.setattr(update.engines[A], "begin_update", refuse_once)
    assert update.run(A, B).confirmed == (A, B)
    assert update.of(A)[3:8] == ["begin_update", "end_update", "begin_update", "stamp", "end_update"]
    assert update.of(B) == list(STEPS)


# The transport


def test_an_engine_that_was_started_anew_is_connected_as_another() -> None:
    """Though nobody noticed: what was agreed with it, e.g. where its memory is, is gone."""
    update = Update()
    connected: list[list[int]] = []
    connect = update.transport.connect

    def note(engines: Sequence[EngineAddress]) -> Mapping[str, str]:
        connected.append([engine.life for engine in engines])
        return connect(engines)

    update.transport.connect = note  # type: ignore[method-assign]
    update.run(A, B)
    update.run(A, B)
    assert connected[-1] == [0, 0]
    update.engines[A].start_anew()
    update.run(A, B)
    assert connected[-1] == [1, 0]
    update.run(A, B)
    assert connected[-1] == [1, 0], "it has a life of its own from then on"
    update.engines[A].start_anew()
    done = update.updater.update(WEIGHTS.items, [EngineAddress(A, life=3), EngineAddress(B)])
    assert done is not None
    assert connected[-1] == [5, 0], "others may have counted, too: no life comes twice"


def test_an_engine_that_cannot_be_connected_is_not_paused() -> None:
    update = Update()
    update.transport.refusing = [{A: "not within 60 s"}]
    done = update.run(A, B)
    assert [str(left) for left in done.left] == [f"{A} failed in prepare: not within 60 s"]
    assert update.of(A) == ["model_info"]
    assert [event for event in update.events if event[0] == "connect"] == [("connect", A, B), ("connect", B)]


def test_an_engine_that_failed_alone_costs_the_others_nothing() -> None:
    update = Update()
    update.transport.results = [Sent(TOTAL, {A: "a write failed"})]
    done = update.run(A, B)
    assert (done.confirmed, [left.phase for left in done.left]) == ((B,), ["transfer"])
    assert update.steps().count("send") == 1
    assert done.nbytes == TOTAL


def test_after_a_break_the_others_are_connected_anew_and_sent_and_proven_everything() -> None:
    update = Update()
    update.transport.results = [Sent(10, {A: "it refused a bucket"}, "an engine left the process group")]
    done = update.run(A, B)
    assert done.confirmed == (B,)
    sending = [event for event in update.events if event[0] in ("connect", "send")]
    assert sending == [("connect", A, B), ("connect", A, B), ("send",), ("connect", B), ("send",)]
    assert done.nbytes == TOTAL, "what the engine holds, not what was lost on the way"
    assert [proof.added for proof in update.proofs] == [list(WEIGHTS)] * 2
    assert update.told == [10, TOTAL] * 2, "from the start again: everything is sent again"


def test_a_break_for_no_engine_s_sake_is_tried_once_more() -> None:
    update = Update()
    update.transport.results = [Sent(10, broken="connection reset")]
    assert update.run(A, B).confirmed == (A, B)
    assert update.steps().count("send") == 2


def test_a_second_break_for_no_engine_s_sake_ends_the_update() -> None:
    update = Update()
    update.transport.results = [Sent(10, broken="connection reset"), Sent(10, broken="the network is down")]
    with pytest.raises(UpdateFailed, match=f"{A} failed in transfer: the network.*{B} failed in transfer: the network"):
        update.run(A, B)
    assert update.steps().count("send") == 2
    assert "end_update" not in update.steps()


def test_breaks_that_an_engine_is_to_blame_for_do_not_count() -> None:
    update = Update()
    update.transport.results = [Sent(0, {A: "no"}, "an engine left"), Sent(0, broken="reset")]
    assert update.run(A, B).confirmed == (B,)
    assert update.steps().count("send") == 3


# Other ranks


def test_what_any_rank_saw_fail_has_failed_and_their_bytes_are_summed() -> None:
    update = Update(others=[Sent(2), Sent(3, {B: "a write failed"})])
    done = update.run(A, B)
    assert (done.nbytes, done.confirmed) == (TOTAL + 5, (A,))
    update = Update(others=[Sent(0, broken="reset")])
    with pytest.raises(UpdateFailed, match="reset"):
        update.run(A, B)


def test_a_rank_that_fails_ends_the_update_with_its_engines_paused() -> None:
    update = Update()
    update.fail_in("send")
    with pytest.raises(RankFailed):
        update.run(A, B)
    assert update.of(A) == ["model_info", "pause", "flush_cache", "begin_update"]
    assert update.ranks.dismissed == 1


def test_a_source_that_raises_ends_the_update_with_its_engines_paused() -> None:
    update = Update()
    update.run_broken()
    assert "end_update" not in update.steps()


def test_who_follows_takes_the_steps_with_a_source_of_its_own() -> None:
    events: list[tuple[Any, ...]] = []
    followed: list[Any] = []

    class Follower(Ranks):
        def follow(self, steps: Mapping[str, Callable[..., Any]]) -> None:
            followed.extend([steps["connect"]([EngineAddress(A)]), steps["send"](), steps["send"]()])

    updater = Updater(FakeTransport(events), Follower(), None, "retract")
    assert updater.update(WEIGHTS.items) is None
    assert followed == [{}, Sent(TOTAL), Sent(TOTAL)]
    assert events == [("connect", A), ("send",), ("send",)]


def test_engines_are_spoken_to_side_by_side() -> None:
    """One that is slow does not hold up the next one's call."""
    update = Update()
    together = threading.Barrier(2)
    for engine in update.engines.values():
        engine.flush_cache = lambda: together.wait(30) and None  # type: ignore[method-assign]
    assert update.run(A, B).confirmed == (A, B)


def test_weights_that_differ_are_never_served() -> None:
    update = Update()
    update.engines[A].failing["check"] = WeightsDiffer(f"engine {A} does not hold the trainer's weights")
    done = update.run(A, B)
    assert done.confirmed == (B,)
    assert "resume" not in update.of(A)
    assert done.proven == 5


@pytest.mark.parametrize("during", ["send", "stamp", "end_update", "check", "announce"])
def test_an_engine_that_is_started_anew_during_an_update_is_never_taken_for_updated(during: str) -> None:
    """It serves its checkpoint then, whatever it is stamped with."""
    update = Update()

    class Restarts(list[tuple[Any, ...]]):
        def append(self, event: tuple[Any, ...]) -> None:
            super().append(event)
            if event[0] == during and event[1:2] != (A,):
                update.engines[A].start_anew()

    update.events = update.versions.events = update.transport._events = Restarts()
    for engine in update.engines.values():
        engine._events = update.events
    done = update.run(A, B)
    assert (done.confirmed, [left.url for left in done.left]) == ((B,), [A])
    assert "resume" not in update.of(A)


@pytest.mark.parametrize("before", ["pause", "stamp"])
def test_a_trainer_that_lost_its_number_touches_no_engine_any_more(before: str) -> None:
    update = Update()
    asked: list[int] = []

    def verify(version: int) -> None:
        asked.append(version)
        if len(asked) == (1 if before == "pause" else 2):
            raise VersionFenced("another trainer has taken over")

    update.versions.verify = verify  # type: ignore[method-assign]
    with pytest.raises(VersionFenced):
        update.run(A, B)
    assert before not in update.of(A)
    assert asked == [5] * len(asked)


def test_clients_stay_between_updates_and_are_let_go_of_once() -> None:
    update = Update()
    update.run(A, B)
    update.run(A, B)
    assert [event for event in update.events if event[0] == "commit"] == [("commit", n, (A, B), ()) for n in (5, 6)]
    update.updater.close()
    update.updater.close()
    assert all(engine.closed for engine in update.engines.values())
    assert update.transport.closed == 2
