"""disk-delta as a transport: what is published, whom is told, which engines can load it, and what is removed."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.engines.fleet import EngineAddress  # noqa: E402
from miles_plugin.engines.sglang import EngineError, SGLangEngine  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.hosts import Brought, EngineHosts  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.materialize import Materializer  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.publish import Publisher, Superseded  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.readers import ReaderReport, write_report  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage, PublicationUnavailable  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.transport import LOAD_SECONDS, DeltaTransport  # noqa: E402
from miles_plugin.weight_transfer.transfer import Delivered, Sent  # noqa: E402
from tests.delta_reader import Model, read_checkpoint  # noqa: E402
from tests.unit.plugin.delta_training import held, make_base, some_weights, step  # noqa: E402

A, B = "http://10.0.0.1:30000", "http://10.0.0.2:30000"
ENGINES = [EngineAddress(A), EngineAddress(B)]


class Engine(SGLangEngine):
    """Loads what it is told to, and fails as told."""

    def __init__(self, url: str, error: EngineError | None = None) -> None:
        super().__init__(url)
        self.error = error
        self.loaded: Model = {}

    def load_checkpoint(self, path: str, seconds: float, version: int) -> None:
        assert seconds == LOAD_SECONDS
        if self.error is not None:
            raise self.error
        self.loaded = read_checkpoint(Path(path))


class Job:
    """The trainer ranks' transports, and the engines' hosts, of which this is one."""

    def __init__(self, root: Path, ranks: int = 2, anchor_every: int = 0, budget: int | None = None) -> None:
        self.weights = some_weights()
        self.base = root / "base" if (root / "base").exists() else make_base(root / "base", self.weights)
        self.storage = DirectoryStorage(root / "published")
        self.hosts = EngineHosts(self.storage, Materializer(self.storage, root / "local", self.base), 0, 0)
        self.told: list[tuple[str, list[str]]] = []
        self.asked: list[int | None] = []
        self.ranks = [
            DeltaTransport(
                self.storage,
                Publisher(self.storage, rank, ranks, "sparse", "xxh3-128", self.base, anchor_every),
                self.bring,
                lambda version, urls: self.told.append((version, list(urls))),
                budget,
            )
            for rank in range(ranks)
        ]

    def bring(self, version: int | None, engines: Sequence[str]) -> Brought:
        self.asked.append(version)
        return self.hosts.bring_to(version, engines)

    def send(self, version: int) -> list[Sent]:
        for each in self.ranks:
            each.begin(version)
        return [pickle.loads(pickle.dumps(each.send(self.weights.items()))) for each in self.ranks]

    def update(self, version: int) -> Delivered:
        sent = self.send(version)
        if self.ranks[0].wants_all(sent):
            sent = [each.send_all() for each in self.ranks]
        return self.ranks[0].deliver(version, sent, ENGINES)

    def loaded(self) -> Model:
        engine = Engine(A)
        self.ranks[0].load(engine, 7)
        return engine.loaded

    def versions(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.storage.names("weight_v")})

    def whole(self) -> list[str]:
        return [version for version in self.versions() if (self.storage.root / version / "config.json").exists()]

    def close(self) -> None:
        for each in self.ranks:
            each.close()
            each.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(**settings: Any) -> Job:
        made.append(Job(tmp_path, **settings))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_engines_load_what_the_trainer_sent_from_the_first_update_on(ranks: int, jobs: Any) -> None:
    job = jobs(ranks=ranks)
    first = job.update(0)
    assert (first.nbytes, first.failed, job.loaded()) == (0, {}, held(job.weights))
    assert (job.told, job.asked) == ([], [None]), "nothing was published: engines have it"
    total = sum(tensor.nbytes for tensor in job.weights.values())
    for version in (1, 2, 4):
        step(job.weights, version)
        delivered = job.update(version)
        assert (delivered.of, delivered.failed, job.loaded()) == (total, {}, held(job.weights))
        assert delivered.nbytes > 0
    assert job.told == [(f"weight_v00000{version}", [A, B]) for version in (1, 2, 4)]
    assert job.asked == [None, 1, 2, 4]
    assert job.ranks[0].connect(ENGINES) == {}


def test_a_trainer_that_did_not_start_from_the_base_sends_all(jobs: Any) -> None:
    job = jobs()
    step(job.weights, 1)
    delivered = job.update(0)
    assert delivered.nbytes > delivered.of, "all weights, and the checkpoint's other files"
    assert (job.whole(), job.asked, job.loaded()) == (["weight_v000000"], [0], held(job.weights))


def test_the_hook_is_told_before_engines_are_brought_to_a_version_and_what_it_raises_ends_the_update(jobs: Any) -> None:
    job = jobs(ranks=1)
    job.update(0)
    step(job.weights, 1)

    def fail(version: str, urls: Sequence[str]) -> None:
        assert (job.asked, version) == ([None], "weight_v000001")
        raise ValueError("no room on the mirror")

    job.ranks[0]._wrote = fail
    with pytest.raises(ValueError, match="no room"):
        job.update(1)
    assert job.asked == [None]
    job.ranks[0].abandon(1)
    assert job.versions() == ["weight_v000001"], "what was published stays, and is a base like any other"
    job.ranks[0]._wrote = None
    step(job.weights, 2)
    job.update(2)
    assert (job.whole(), job.loaded()) == ([], held(job.weights))


def test_an_update_that_comes_to_nothing_is_followed_by_all_weights(jobs: Any) -> None:
    job = jobs()
    for version in (0, 1):
        step(job.weights, version)
        job.update(version)
    step(job.weights, 2)
    job.send(2)
    job.ranks[0].abandon(2)
    assert not list(job.storage.root.glob(".*"))
    step(job.weights, 3)
    job.update(3)
    assert (job.whole(), job.loaded()) == (["weight_v000000", "weight_v000003"], held(job.weights))
    assert job.versions() == ["weight_v000000", "weight_v000001", "weight_v000003"]


def test_an_engine_whose_host_has_not_got_the_version_is_named_and_the_others_load(jobs: Any) -> None:
    job = jobs(ranks=1)
    write_report(job.storage, "gone", ReaderReport(0, "/local/a", ("10.0.0.2:30000",), is_base=True))
    step(job.weights, 1)
    failed = job.update(1).failed
    assert list(failed) == [B]
    assert "reader gone has what it started from" in failed[B]
    assert job.loaded() == held(job.weights)


def test_an_engine_that_cannot_load_is_told_with_the_path_and_what_its_host_needs(jobs: Any, tmp_path: Path) -> None:
    job = jobs(ranks=1)
    job.update(0)
    with pytest.raises(EngineError) as caught:
        job.ranks[0].load(Engine(B, EngineError(f"{B}: HTTP 400: no such directory", 400)), 7)
    assert str(caught.value).startswith(f"{B}: HTTP 400: no such directory; it was told to load {tmp_path}/local/a, on")
    assert "miles-mooncake materialize --follow" in str(caught.value)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("reader", "budget", "stays"),
    [(None, None, [4, 7]), (1, None, [1, 4, 7]), (1, 1, [7])],
    ids=["nobody is behind", "somebody is", "there is no room"],
)
def test_versions_that_nobody_needs_are_removed(
    reader: int | None, budget: int | None, stays: list[int], jobs: Any
) -> None:
    job = jobs(ranks=1, anchor_every=3, budget=budget)
    if reader is not None:
        write_report(job.storage, "behind", ReaderReport(reader, "/local/a"))
    for version in range(1, 8):
        step(job.weights, version)
        job.update(version)
    assert job.whole() == [f"weight_v{version:06d}" for version in stays]
    assert (job.versions()[0], len(job.versions())) == (job.whole()[0], 8 - stays[0])
    assert job.loaded() == held(job.weights)


def test_versions_that_cannot_be_removed_stay_and_the_update_goes_on(
    jobs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = jobs(ranks=1, anchor_every=2)

    def refuse(version: str) -> None:
        raise PublicationUnavailable("read-only file system")

    monkeypatch.setattr(job.storage, "drop", refuse)
    with caplog.at_level(logging.WARNING):
        for version in range(1, 6):
            step(job.weights, version)
            assert not job.update(version).failed
    assert job.loaded() == held(job.weights)
    assert "read-only file system" in caplog.text
    assert len(job.versions()) == 5


def test_a_trainer_that_was_taken_over_does_not_lead_readers_back(jobs: Any) -> None:
    """It hung between sending and publishing, or before either."""
    first = jobs(ranks=1)
    step(first.weights, 1)
    first.update(1)
    step(first.weights, 2)
    sent = first.send(2)
    second = jobs(ranks=1)
    step(second.weights, 3)
    second.update(3)
    with pytest.raises(Superseded, match="version 2 cannot be published: version 3 is there"):
        first.ranks[0].deliver(2, sent, ENGINES)
    first.ranks[0].abandon(2)
    assert (second.storage.root / "latest").read_text() == "000003\n"
    assert second.versions() == ["weight_v000001", "weight_v000003"]
    assert second.loaded() == held(second.weights)
    step(second.weights, 4)
    second.update(4)
    assert (second.whole(), second.loaded()) == (["weight_v000001", "weight_v000003"], held(second.weights))
