"""What the job's loop asks of its parts in a step, and what it tells of the weight updates in it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("ray", reason="the extra `train` is not installed")

from miles_plugin import job
from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.fleet import Left
from miles_plugin.fully_async.rollouts import Waiting
from miles_plugin.parts import Parts
from miles_plugin.report.observer import Observer
from miles_plugin.report.record import Arm, Report, Step
from miles_plugin.rollout.batch import Shard
from miles_plugin.rollout.manager import Rollout
from miles_plugin.training import weights
from miles_plugin.weight_transfer.transfer import PHASES, WeightUpdate

A, B = "http://10.0.0.1:30000", "http://10.0.0.2:30000"
LOST = Left(B, "transfer", "it refused a bucket")


class FakeParts:
    """Notes what is asked. waiting: engines of each roll call in turn. left: engines of each update in turn."""

    manager = "the manager"

    def __init__(self, waiting: list[list[str]], left: list[list[Left]]) -> None:
        self._waiting, self._left = waiting, left
        self.asked: list[str] = []
        self.told: list[tuple[int, int] | None] = []
        self.refused: list[str] = []
        self._version = 4
        self._news: list[str] = []

    def managed(self, method: str, *arguments: Any, tick: Any = None) -> Any:
        if method == "engine_news":
            news, self._news = self._news, []
            return news
        self.asked.append(method)
        if method == "join_engine":
            return self.refused.pop(0)
        if method == "roll_call":
            return self._waiting.pop(0)
        if method == "evaluate":
            return 0.5
        shard = SimpleNamespace(rank=0, ref=SimpleNamespace(key="key"), num_rows=8, digest="digest")
        return Rollout(
            [cast(Shard, shard)],
            0.25,
            8,
            0,
            64,
            "digest",
            {"generate": 1.0, "put": 0.5},
            100,
            self._version,
            [str(self._version)],
            self._version,
            {"rollout/fully_async/queue_size": 3.0},
        )

    def each(self, method: str, *arguments: Any, tick: Callable[[], None] | None = None) -> list[Any]:
        assert (method, arguments) == ("update_weights", (self.manager,))
        self.asked.append(method)
        for _ in list(self.told):
            assert tick is not None
            tick()
        self._version += 1
        left = tuple(self._left.pop(0)) if self._left else ()
        self._news = [f"warning: an engine left the rotation: {each}" for each in left]
        seconds = dict.fromkeys(PHASES, 0.5)
        return [WeightUpdate(self._version, 1000, 1.0, seconds, (A,), left, 12), None]

    def each_with(self, method: str, *arguments: Any) -> list[Any]:
        self.asked.append(method)
        measured = {"loss": 0.1, "clip_fraction": 0.0, "grad_norm": 1.0, "digest": "digest", "get_bytes": 50}
        return [measured | {"seconds": {"get": 0.25, "train": 2.0}}]

    def progress(self) -> tuple[int, int] | None:
        return self.told.pop(0)


class Heard(Observer):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def message(self, text: str) -> None:
        self.events.append(("message", text))

    def phase_started(self, phase: str) -> None:
        self.events.append(("phase", phase))

    def progress(self, done: int, total: int) -> None:
        self.events.append(("progress", done, total))


def step(parts: FakeParts, observer: Observer, *flags: str, rollout_id: int = 0) -> Step:
    config = load_config(["--num-rollout", "10", "--eval-interval", "10", *flags])
    return job._step(config, cast(Parts, parts), rollout_id, observer)


def test_engines_that_wait_get_the_newest_weights_before_the_rollout() -> None:
    parts, observer = FakeParts([[A, B]], []), Heard()
    made = step(parts, observer)
    assert parts.asked == ["roll_call", "update_weights", "generate", "train", "update_weights"]
    assert observer.events[:2] == [("message", f"engines that wait for weights: {A}, {B}"), ("phase", "update")]
    assert [update.version for update in made.updates] == [5, 6]
    assert made.requested_version == 5, "what the rollout was made with"
    assert made.newest_version == 5
    assert made.served_version == 6
    assert made.nbytes == {"put": 100, "get": 50, "update": 2000}, "of both updates"
    assert made.seconds["update"] > 0


def test_an_engine_that_comes_late_is_asked_in_or_it_is_said_why_not() -> None:
    parts, observer = FakeParts([], []), Heard()
    parts.refused = ["", "add-engine=10.0.0.3:1: no answer"]
    for address in ("10.0.0.2:1", "10.0.0.3:1"):
        job._join(cast(Parts, parts), address, {"10.0.0.1", "10.0.0.2"}, observer)
    assert observer.events == [("message", "warning: add-engine=10.0.0.3:1: no answer")]
    assert parts.asked == ["join_engine", "join_engine"]


def test_an_engine_at_another_address_for_each_host_is_not_asked_in() -> None:
    parts, observer = FakeParts([], []), Heard()
    job._join(cast(Parts, parts), "127.0.0.1:1", {"10.0.0.1", "10.0.0.2"}, observer)
    ((_, said),) = observer.events
    assert said.startswith("warning: add-engine=127.0.0.1:1: 127.0.0.1:1 is another engine for each of 10.0.0.1")
    assert parts.asked == []


def test_without_engines_that_wait_there_is_one_update_when_it_is_due() -> None:
    parts = FakeParts([[], []], [])
    made = step(parts, Heard(), "--update-weights-interval", "2")
    assert parts.asked == ["roll_call", "generate", "train"]
    assert (made.updates, made.served_version) == ([], None)
    assert "update" not in made.nbytes
    parts.asked.clear()
    made = step(parts, Heard(), "--update-weights-interval", "2", rollout_id=1)
    assert parts.asked == ["roll_call", "generate", "train", "update_weights"]
    assert [update.version for update in made.updates] == [made.served_version] == [5]


def test_an_engine_that_is_left_out_is_said_and_recorded() -> None:
    observer = Heard()
    made = step(FakeParts([[]], [[LOST]]), observer)
    assert observer.events.count(("message", f"warning: an engine left the rotation: {LOST}")) == 1
    (update,) = made.updates
    assert (update.engines, update.left, update.proven) == ([A], [str(LOST)], 12)
    assert tuple(update.seconds) == PHASES


def test_progress_is_shown_as_soon_as_there_is_some() -> None:
    parts, observer = FakeParts([[]], []), Heard()
    parts.told = [None, (0, 0), (10, 40), (40, 40)]
    step(parts, observer)
    assert [event for event in observer.events if event[0] == "progress"] == [
        ("progress", 10, 40),
        ("progress", 40, 40),
    ]


def test_a_rollout_that_waits_says_so_every_half_minute() -> None:
    observer, now = Heard(), 1000.0
    waits: list[Waiting | None] = [None]
    silence = job._Silence(cast(Parts, SimpleNamespace(waiting=lambda: waits[0])), observer, lambda: now)

    def look(at: float) -> list[str]:
        nonlocal now
        now = 1000.0 + at
        silence.look()
        said, observer.events = [text for _, text in observer.events], []
        return said

    waits[0] = Waiting(29.0, 3, 16, 7)
    assert look(29.9) == []
    waits[0] = None
    assert look(31) == [], "it does not wait"
    waits[0] = Waiting(32.4, 3, 16, 7)
    assert look(32.4) == ["waiting for 32 s: 3 of 16 groups are there, 7 in flight"]
    assert look(62.3) == []
    waits[0] = Waiting(62.5, 4, 16, 0)
    assert look(62.5) == ["waiting for 62 s: 4 of 16 groups are there, 0 in flight"]


def test_the_manager_hears_of_a_checkpoint_when_it_is_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[Any] = []
    said = {"state": {"cursor": 1}, "newest_version": 3, "saved": None}

    def managed(method: str, *arguments: Any) -> Any:
        done.append((method, *arguments))
        return said[method]

    parts = SimpleNamespace(managed=managed, each=lambda method, _: done.append(method))
    monkeypatch.setattr(job.checkpoint, "begin", lambda *_: tmp_path)
    monkeypatch.setattr(job.checkpoint, "commit", lambda *_: done.append("commit"))
    arm = SimpleNamespace(reward="real", steps=[SimpleNamespace(seconds={})] * 2)
    report = SimpleNamespace(arms={"real": arm}, checkpoint="", to_dict=dict)
    config = load_config(["--save", str(tmp_path), "--save-interval", "2"])
    job._save_if_due(config, cast(Parts, parts), cast(Report, report), cast(Arm, arm), Heard())
    assert done == ["save", ("state",), ("newest_version",), "commit", ("saved", 2)]


def test_the_manager_is_told_now_and_then_and_always_of_the_first_and_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[tuple[int, int]] = []
    remote = SimpleNamespace(remote=lambda done, total: noted.append((done, total)))
    manager = SimpleNamespace(note_progress=SimpleNamespace(options=lambda **_: remote))
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = weights._Progress(manager, 100)
    for done in (10, 20, 30):
        progress(done)
    assert noted == [(10, 100)]
    now += 2 * weights._PROGRESS_SECONDS
    for done in (40, 50, 100):
        progress(done)
    assert noted == [(10, 100), (40, 100), (100, 100)]
    for done in (10, 20):  # the next update, or everything again after an engine broke the first attempt
        progress(done)
    assert noted[3:] == [(10, 100)]
