"""A weight update whose weights are left where engines load them: the order of steps, and what fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.engines.fleet import EngineAddress  # noqa: E402
from miles_plugin.engines.sglang import EngineError, SGLangEngine  # noqa: E402
from miles_plugin.weight_transfer.equality import WeightsDiffer  # noqa: E402
from miles_plugin.weight_transfer.ranks import RankFailed, Ranks  # noqa: E402
from miles_plugin.weight_transfer.transfer import PHASES, Delivered, Delivery, Sent, UpdateFailed, Updater  # noqa: E402
from mooncake_store.errors import StoreUnavailable  # noqa: E402
from tests.unit.plugin.test_weight_update import TOTAL, WEIGHTS, A, B, FakeEngine, FakeTransport, Update  # noqa: E402

# Each call of an engine, in order, and the phase that an engine is said to have failed in.
STEPS = {
    "model_info": "prepare",
    "pause": "pause",
    "flush_cache": "flush",
    "load": "load",
    "check": "verify",
    "resume": "resume",
}


class FakeDelivery(FakeTransport):
    """Delivers to all engines but those of `undelivered`, and fails in the steps of `raising`."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        super().__init__(events)
        self.is_not_enough = False
        self.undelivered: dict[str, str] = {}
        self.raising: dict[str, BaseException] = {}
        self.sent: list[Sent] = []

    def _note(self, step: str, *arguments: Any) -> None:
        self._events.append((step, *arguments))
        if step in self.raising:
            raise self.raising[step]

    def begin(self, version: int) -> None:
        self._note("begin", version)

    def wants_all(self, sent: Sequence[Sent]) -> bool:
        self._note("wants_all")
        return self.is_not_enough

    def send_all(self) -> Sent:
        self._note("send_all")
        return Sent(TOTAL, share="all")

    def deliver(self, version: int, sent: Sequence[Sent], engines: Sequence[EngineAddress]) -> Delivered:
        self.sent = list(sent)
        self._note("deliver", version, *(engine.url for engine in engines))
        return Delivered(sum(each.nbytes for each in sent) // 4, TOTAL, self.undelivered)

    def abandon(self, version: int) -> None:
        self._note("abandon", version)

    def load(self, engine: SGLangEngine, version: int) -> None:
        fake = cast(FakeEngine, engine)
        fake.note("load", version)
        fake.version = str(version)


class Delivering(Update):
    def __init__(self, **settings: Any) -> None:
        super().__init__(transport=FakeDelivery, **settings)

    @property
    def delivery(self) -> FakeDelivery:
        assert isinstance(self.transport, FakeDelivery)
        return self.transport

    def of(self, url: str) -> list[str]:
        return [event[0] for event in self.events if event[1:2] == (url,) and event[0] in STEPS]


def test_engines_serve_until_all_is_where_they_load_it_from() -> None:
    update = Delivering()
    done = update.run(A, B)
    assert update.steps() == [
        "allocate", "model_info", "connect", "begin", "send", "wants_all", "deliver", "pause", "flush_cache", "load",
        "check", "announce", "resume", "commit",
    ]  # fmt: skip
    assert update.of(A) == update.of(B) == list(STEPS)
    for told in (("begin", 5), ("deliver", 5, A, B), ("load", B, 5), ("announce", 5), ("commit", 5, (A, B), ())):
        assert told in update.events
    assert (done.version, done.nbytes, done.density, done.confirmed, done.left) == (5, 10, 0.25, (A, B), ())
    assert done.proven == 5
    assert update.proofs[-1].added == list(WEIGHTS)
    assert update.told == [10, TOTAL]
    assert update.ranks.dismissed == 1


def test_each_phase_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    seconds = Delivering().run(A, B).seconds
    assert tuple(seconds) == PHASES
    assert all(value > 0 for value in seconds.values())
    assert seconds["converge"] > sum(value for phase, value in seconds.items() if phase != "converge")


def test_nothing_that_changed_is_no_density() -> None:
    update = Delivering()
    update.delivery.results = [Sent(0)]
    done = update.run(A)
    assert (done.nbytes, done.density, done.confirmed) == (0, 0.0, (A,))


def test_frozen_requests_keep_their_cache() -> None:
    update = Delivering(pause_mode="in_place")
    update.engines[A].failing["flush_cache"] = EngineError("requests are still running or queued", 400)
    assert update.run(A, B).confirmed == (A, B)


def test_where_what_changed_is_not_enough_every_rank_writes_all_and_the_source_is_asked_once() -> None:
    update = Delivering(others=[Sent(TOTAL, share="of rank 1")])
    update.delivery.is_not_enough = True
    done = update.run(A)
    assert [step for step in update.steps() if step in ("send", "wants_all", "send_all", "deliver")] == [
        "send", "wants_all", "send_all", "deliver",
    ]  # fmt: skip
    assert [each.share for each in update.delivery.sent] == ["all", "of rank 1"]
    assert (done.nbytes, update.told) == (TOTAL * 2 // 4, [10, TOTAL])


@pytest.mark.parametrize("step", STEPS)
def test_an_engine_that_fails_in_a_step_leaves_and_the_others_go_on(step: str) -> None:
    update = Delivering()
    update.engines[A].failing[step] = EngineError(f"{A}: no", 500)
    done = update.run(A, B)
    assert done.confirmed == (B,)
    assert [str(left) for left in done.left] == [f"{A} failed in {STEPS[step]}: {A}: no"]
    assert update.events[-1] == ("commit", 5, (B,), (A,))
    assert update.of(B) == list(STEPS)
    assert update.of(A)[-1] == step, "nothing is asked of it any more, least of all to resume"
    assert "abandon" not in update.steps()


@pytest.mark.parametrize("step", STEPS)
def test_without_any_engine_an_update_fails_and_is_never_committed(step: str) -> None:
    update = Delivering()
    for url, engine in update.engines.items():
        engine.failing[step] = EngineError(f"{url}: it broke", 500)
    with pytest.raises(UpdateFailed, match=f"{A} failed in {STEPS[step]}.*{B} failed in {STEPS[step]}"):
        update.run(A, B)
    assert "commit" not in update.steps()
    assert ("announce" in update.steps()) == (step == "resume")
    assert "abandon" not in update.steps(), "what was published stays; before that nothing was begun"
    assert update.ranks.dismissed == 1


def test_an_engine_to_which_nothing_was_brought_serves_on_and_is_not_asked_to_load() -> None:
    update = Delivering()
    update.delivery.undelivered = {A: "its host has not got version 5 within 600 s"}
    done = update.run(A, B)
    assert (done.confirmed, [str(left) for left in done.left]) == (
        (B,), [f"{A} failed in transfer: its host has not got version 5 within 600 s"],
    )  # fmt: skip
    assert update.of(A) == ["model_info"], "it was not paused"
    assert update.of(B) == list(STEPS)


def test_brought_to_no_engine_an_update_fails_with_all_of_them_serving_on() -> None:
    update = Delivering()
    update.delivery.undelivered = dict.fromkeys((A, B), "the disk is full")
    with pytest.raises(UpdateFailed, match=f"{A} failed in transfer: the disk is full; {B} failed in transfer"):
        update.run(A, B)
    assert update.of(A) == update.of(B) == ["model_info"]
    assert not {"abandon", "announce", "commit"} & set(update.steps())
    assert update.ranks.dismissed == 1


@pytest.mark.parametrize("error", [ValueError("no room"), StoreUnavailable("no room"), KeyboardInterrupt("no room")])
@pytest.mark.parametrize("step", ["begin", "wants_all", "send_all", "deliver"])
def test_a_delivery_that_raises_is_abandoned_once_and_no_engine_is_paused(step: str, error: BaseException) -> None:
    update = Delivering()
    update.delivery.is_not_enough = True
    update.delivery.raising = {step: error}
    with pytest.raises(type(error), match="no room"):
        update.run(A, B)
    assert [event for event in update.events if event[0] == "abandon"] == [("abandon", 5)]
    assert update.of(A) == update.of(B) == ["model_info"]
    assert not {"announce", "commit"} & set(update.steps())
    assert update.ranks.dismissed == 1


def test_a_place_that_fails_is_named_by_what_failed_first() -> None:
    update = Delivering()
    update.delivery.raising = {"deliver": StoreUnavailable("no room"), "abandon": StoreUnavailable("none here either")}
    with pytest.raises(StoreUnavailable, match=r"^no room$"):
        update.run(A, B)
    assert update.steps()[-1] == "abandon"


@pytest.mark.parametrize("step", ["begin", "send", "send all"])
def test_a_rank_that_fails_ends_the_update(step: str) -> None:
    update = Delivering()
    update.delivery.is_not_enough = True
    update.fail_in(step)
    with pytest.raises(RankFailed):
        update.run(A, B)
    assert [event for event in update.events if event[0] == "abandon"] == [("abandon", 5)]
    assert update.of(A) == ["model_info"]
    assert update.ranks.dismissed == 1


def test_a_source_that_raises_is_abandoned_too() -> None:
    update = Delivering()
    update.run_broken()
    assert update.steps()[-1] == "abandon"


def test_weights_that_differ_are_never_served() -> None:
    update = Delivering()
    update.engines[A].failing["check"] = WeightsDiffer(f"engine {A} does not hold the trainer's weights")
    assert update.run(A, B).confirmed == (B,)
    assert "resume" not in update.of(A)


def test_an_engine_that_cannot_be_reached_is_not_delivered_to() -> None:
    update = Delivering()
    update.engines[A].failing["model_info"] = EngineError(f"{A}: no answer")
    update.run(A, B)
    assert ("deliver", 5, B) in update.events


def test_who_follows_begins_sends_and_sends_all_and_abandons_nothing() -> None:
    events: list[tuple[Any, ...]] = []
    followed: list[Any] = []

    class Follower(Ranks):
        def follow(self, steps: Mapping[str, Callable[..., Any]]) -> None:
            assert steps.keys() == {"connect", "begin", "send", "send all"}
            followed.extend([steps["begin"](7), steps["send"](), steps["send all"]()])

    delivery = FakeDelivery(events)
    updater = Updater(delivery, Follower(), None, "retract", delivery=cast(Delivery, delivery))
    assert updater.update(WEIGHTS.items) is None
    assert followed == [None, Sent(TOTAL), Sent(TOTAL, share="all")]
    assert events == [("begin", 7), ("send",), ("send_all",)]
