"""The updater that a trainer rank opens for disk-delta, with a real model, and the hosts that the manager opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.engines.fleet import EngineAddress  # noqa: E402
from miles_plugin.engines.sglang import EngineError, SGLangEngine  # noqa: E402
from miles_plugin.training import weights  # noqa: E402
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402
from miles_plugin.training.weights import Place, open_updater  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.opened import open_hosts  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.transport import DeltaTransport  # noqa: E402
from miles_plugin.weight_transfer.sources import full_parameters  # noqa: E402
from miles_plugin.weight_transfer.transfer import UpdateFailed, Updater  # noqa: E402
from tests.delta_reader import Model, read_checkpoint  # noqa: E402
from tests.unit.plugin.delta_training import held  # noqa: E402
from tests.weight_updates import Versions  # noqa: E402

A, B = "http://10.0.0.1:30000", "http://10.0.0.2:30000"
told: list[str] = []


def wrote(args: Any, version_dir: str, engines: Sequence[str]) -> None:
    told.append(f"{Path(version_dir).name} {' '.join(engines)}")


class Engine:
    """Loads checkpoints, and does nothing else that is asked of it."""

    def __init__(self, url: str) -> None:
        self.url, self.loaded = url, Model()
        self.error: EngineError | None = None
        self.version = "default"

    def weight_version(self, seconds: float | None = None) -> str:
        return self.version

    def load_checkpoint(self, path: str, _seconds: float, version: int) -> None:
        if self.error is not None:
            raise self.error
        self.loaded, self.version = read_checkpoint(Path(path)), str(version)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments: None


class Remote:
    """A Ray actor's handle, whose actor is in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._actor, name)
        method = SimpleNamespace(remote=call)
        method.options = lambda **_options: method
        return method


class Manager:
    def __init__(self, hosts: Any) -> None:
        self.bring_weights = hosts.bring_to
        self.versions = Versions()

    def register_trainer(self, trainer: str) -> None: ...

    def note_progress(self, nbytes: int, total: int) -> None: ...

    def allocate_version(self, _trainer: str) -> int:
        return self.versions.allocate()

    def verify_version(self, version: int, trainer: str) -> None: ...

    def announce_version(self, version: int, _trainer: str) -> None:
        self.versions.announce(version)

    def commit_version(self, version: int, _trainer: str, confirmed: Any, left: Any) -> None:
        self.versions.commit(version, confirmed, left)


class Job:
    def __init__(self, root: Path, *flags: str) -> None:
        self.model, self.run_dir = build_model(32, 1, seed=0), root / "run"
        checkpoint = root / "checkpoint"
        if not checkpoint.exists():
            save_checkpoint(self.model, build_tokenizer(), checkpoint)
        config = load_config(["--update-weight-transfer-mode", "disk-delta", *flags])
        manager = Remote(Manager(open_hosts(config, self.run_dir, checkpoint)))
        place = Place("run", "127.0.0.1", "cpu", self.run_dir, checkpoint)
        self.updater: Updater = open_updater(config, self.model, place, manager)
        self.engines = {url: Engine(url) for url in (A, B)}
        self.updater.clients.update(cast(dict[str, SGLangEngine], self.engines))

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.view(-1)[::50].mul_(1.5)

    def sent(self) -> Model:
        return held(dict(full_parameters(self.model, torch.bfloat16)))

    def update(self) -> Any:
        done = self.updater.update(
            lambda: full_parameters(self.model, torch.bfloat16), [EngineAddress(A), EngineAddress(B)]
        )
        assert done is not None
        return done


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.setattr(weights, "_get", lambda result: result)
    monkeypatch.setattr(weights.dist, "get_world_size", lambda: 1)
    told.clear()
    made: list[Job] = []

    def make(*flags: str) -> Job:
        made.append(Job(tmp_path, *flags))
        return made[-1]

    yield make
    for job in made:
        job.updater.transport.close()


def test_engines_have_the_trainer_s_weights_after_every_update(jobs: Callable[..., Job]) -> None:
    job = jobs("--update-weight-anchor-interval", "3", "--custom-update-weight-post-write-path", f"{__name__}.wrote")
    assert isinstance(job.updater.delivery, DeltaTransport)
    assert job.updater.delivery is job.updater.transport
    densities = []
    for version in range(5):
        done = job.update()
        assert (done.version, done.confirmed, done.left) == (version, (A, B), ())
        assert job.engines[A].loaded == job.engines[B].loaded == job.sent()
        densities.append(done.density)
        job.train()
    assert densities[0] == 0, "engines start from what the trainer does"
    assert all(0 < density < 1 for density in (densities[1], densities[2], densities[4]))
    assert densities[3] >= 1, "all of it, as the interval has it"
    assert told == [f"weight_v00000{version} {A} {B}" for version in (1, 2, 3, 4)]
    versions = sorted(path.name for path in (job.run_dir / "weights").glob("weight_v*"))
    assert versions == [f"weight_v00000{version}" for version in (1, 2, 3, 4)]


def test_after_an_update_that_no_engine_took_the_next_one_arrives(jobs: Callable[..., Job]) -> None:
    job = jobs()
    job.update()
    job.train()
    for engine in job.engines.values():
        engine.error = EngineError("out of memory", 400)
    with pytest.raises(UpdateFailed, match="failed in load: out of memory; it was told to load "):
        job.update()
    for engine in job.engines.values():
        engine.error = None
    job.train()
    done = job.update()
    assert (done.version, 0 < done.density < 1) == (2, True), "what was published is a base, whoever loaded it"
    assert job.engines[A].loaded == job.sent()


def test_after_a_source_that_raised_the_next_one_arrives(jobs: Callable[..., Job]) -> None:
    job = jobs()
    job.update()
    job.train()
    parameters = full_parameters(job.model, torch.bfloat16)

    def broken() -> Iterator[Any]:
        yield next(parameters)
        raise ValueError("weights were lost")

    with pytest.raises(ValueError, match="weights were lost"):
        job.updater.update(broken, [EngineAddress(A)])
    assert not list((job.run_dir / "weights").glob(".*"))
    job.train()
    done = job.update()
    assert (done.version, done.density >= 1) == (2, True)
    assert job.engines[A].loaded == job.engines[B].loaded == job.sent()
