"""A fully asynchronous job without processes: a real rollout manager, engines that answer as they are told, and a
trainer that remembers what it has learned from."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_plugin.arguments import TrainConfig
from miles_plugin.arguments_sources import load_config
from miles_plugin.checkpoint import JOURNAL
from miles_plugin.engines.http import AsyncHTTP
from miles_plugin.engines.sglang import EngineError
from miles_plugin.fully_async.counts import PREFIX
from miles_plugin.fully_async.rollouts import AsyncRollouts
from miles_plugin.rollout import manager as manager_module
from miles_plugin.rollout.manager import Rollout, RolloutManager
from miles_plugin.rollout.task import Task
from mooncake_store import ObjectStore
from tests.unit.plugin.fully_async_groups import Carrier
from tests.unit.plugin.test_rollout_custom import TOKENIZER, FakeEngine

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
SIZE, BATCH, CONCURRENT, CAPACITY = 2, 4, 4, 8
CONFIG = load_config([
    *("--task", "chain_sum", "--held-out-size", "4", "--rollout-num-gpus", "2", "--fully-async"),
    *("--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", str(SIZE)),
    *("--async-max-concurrent-samples", str(CONCURRENT), "--async-data-buffer-capacity-factor", str(CAPACITY / BATCH)),
])  # fmt: skip


def until(condition: Callable[[], bool]) -> None:
    """Wait for what is bound to come."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Engines:
    """Both engines, over HTTP.

    version: that answers are made by. answered: of all requests so many, the first ones, are answered, and the others
    wait; None: all are. gone: nobody is there.
    asked: positions of the items of all requests. in_flight: requests now; most: at once so far. positions: of items by
    their prompts. at_request: called in the loop at each.
    """

    def __init__(self) -> None:
        self.version, self.gone = "default", False
        self.answered: int | None = None
        self.asked: list[int] = []
        self.in_flight = self.most = 0
        self.positions: dict[str, int] = {}
        self.at_request: Callable[[], None] = lambda: None

    def hold(self) -> None:
        """Answer what was asked so far, and no more."""
        self.answered = len(self.asked)

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        number = len(self.asked)
        self.asked.append(self.positions[TOKENIZER.decode(body["input_ids"])])
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        self.at_request()
        try:
            while not self.gone and self.answered is not None and self.answered <= number:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            if self.gone:
                raise EngineError(f"{url}: connection refused")
        finally:
            self.in_flight -= 1
        answered = FakeEngine(url, lambda *_: ("12", "stop"), self.version)
        return answered.generate([body["input_ids"]], body["sampling_params"])[0]


@dataclass
class Saved:
    """A checkpoint. state: of the manager. learned: positions of the items that the model has learned from."""

    rollouts: int
    state: dict[str, Any]
    learned: list[int]


@dataclass
class World:
    """What outlives a process: engines, what lies in the store, the directory, checkpoints."""

    directory: Path
    checkpoint: Path
    engines: Engines = field(default_factory=Engines)
    carrier: Carrier = field(default_factory=Carrier)
    saved: list[Saved] = field(default_factory=list)
    lives: int = 0

    @property
    def journal(self) -> Path:
        return self.directory / "saved" / JOURNAL

    @contextmanager
    def life(
        self, resume: Saved | None = None, save: str | None = "saved", master: str | None = None, **settings: Any
    ) -> Iterator["Life"]:
        """A process of the job, that saves in one directory and goes on from `saved`. master: which it has started."""
        self.lives += 1
        settings |= {"load": self.directory / "saved", "save": None if save is None else self.directory / save}
        config = CONFIG.model_copy(update=settings)
        life = Life(self, config, resume, master)
        try:
            yield life
        finally:
            life.manager.close()

    def exactly_once(self, saved: Saved) -> None:
        """Every item up to where the next one is was learned from once, or is yet to come."""
        cursor, unfinished = saved.state["cursor"], saved.state["unfinished"]
        items = sorted(position for position in self.engines.positions.values() if position < cursor)
        assert sorted([*saved.learned, *unfinished]) == items


class Life:
    """See `World.life`."""

    def __init__(self, world: World, config: TrainConfig, resume: Saved | None, master: str | None) -> None:
        self.world, self.engines = world, world.engines
        run_dir = world.directory / f"run{world.lives}"
        run_dir.mkdir()
        self.manager = RolloutManager(config, master, f"run{world.lives}", run_dir, ranks=2)
        self.manager.start_engines(world.checkpoint, "127.0.0.1", ())
        items = islice(self.manager._prompts.rollout(), 300)
        self.engines.positions = {str(item.prompt): item.index for item in items}
        self.manager.register_trainer("trainer")
        self.manager.begin(False, None if resume is None else json.loads(json.dumps(resume.state)))
        self.rollouts = 0 if resume is None else resume.rollouts
        self.learned = [] if resume is None else list(resume.learned)
        self.last: Rollout | None = None
        self.versions: set[str] = set()  # that made all its rollouts
        self.update()

    @property
    def async_rollouts(self) -> AsyncRollouts:
        assert self.manager._rollouts is not None
        return self.manager._rollouts

    def update(self) -> int:
        """A weight update, from its first step to its last."""
        version = self.manager.allocate_version("trainer")
        self.manager.announce_version(version, "trainer")
        self.engines.version = str(version)
        self.manager.commit_version(version, "trainer", URLS, [])
        return version

    def take(self) -> list[int]:
        """A rollout, read by all ranks; positions of its items."""
        self.last = rollout = self.manager.generate(self.rollouts)
        self.versions |= {*rollout.weight_versions}
        with self.manager._store.get(rollout.shards[0].ref) as batch:
            positions = [int(each["item"]) for each in batch["metadata"]]
        for shard in rollout.shards:
            self.manager.acknowledge(shard.ref.key, shard.rank)
        assert positions[::SIZE] == positions[1::SIZE], "whole groups"
        return positions[::SIZE]

    def step(self) -> list[int]:
        """A rollout, trained on, and the update after it."""
        taken = self.take()
        self.learned += taken
        self.rollouts += 1
        self.update()
        return taken

    def save(self, noted: bool = True) -> Saved:
        """A checkpoint; `noted`: the manager heard of it."""
        saved = Saved(self.rollouts, self.manager.state(), list(self.learned))
        self.world.saved.append(saved)
        if noted:
            self.manager.saved(self.rollouts)
        return saved

    def fill(self) -> None:
        """Wait until the buffer is full, and all that has to lie in the store is there."""
        capacity = self.async_rollouts._buffer._settings.capacity

        def is_full() -> bool:
            queue: Any = self.async_rollouts._buffer._queue
            return len(queue) == capacity and self.engines.in_flight == 0 and len(self.stored()) == capacity - BATCH

        until(is_full)
        self.manager._sampling.loop.run(self.async_rollouts._buffer.flush())

    def stored(self) -> list[int]:
        """Groups that the journal knows to lie in the store."""
        journal = self.async_rollouts._journal
        assert journal is not None
        return [group for group, known in list(journal.state.live.items()) if known.ref is not None]

    def counted(self, name: str) -> int:
        """Of the rollout that waits."""
        return self.async_rollouts._buffer._counts._counts[name]

    def metric(self, name: str) -> float:
        """Of the last rollout."""
        assert self.last is not None
        return self.last.buffer[PREFIX + name]

    def kill(self) -> None:
        """End as by SIGKILL: the store and the files are left as they are now."""
        journal, objects = self.world.journal, dict(self.world.carrier.objects)
        content = journal.read_bytes() if journal.exists() else None
        self.manager.close()
        self.world.carrier.objects = objects
        if content is not None:
            journal.write_bytes(content)


def in_thread(call: Callable[[], Any]) -> SimpleNamespace:
    """Call beside this thread. join(): its result, or what it raised."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = call()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(60)
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    return SimpleNamespace(join=join, is_done=lambda: bool(outcome))


def make_world(directory: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """One in which `checkpoint` is served."""
    world = World(directory, checkpoint)
    prompts = Task(CONFIG.task, CONFIG.task_kwargs, CONFIG.held_out_size, CONFIG.seed)
    monkeypatch.setattr(manager_module, "open_prompts", lambda _: prompts)

    def start(_specs: Any) -> list[SimpleNamespace]:
        engines = [FakeEngine(url, lambda *_: ("12", "stop")) for url in URLS]
        return [SimpleNamespace(engine=each, ranks=1, stop=lambda: None, ended=lambda _: None) for each in engines]

    async def post(_http: Any, url: str, body: dict[str, Any]) -> Any:
        return await world.engines.post(url, body)

    monkeypatch.setattr(
        manager_module, "open_rollout_store", lambda *_args, **_more: ObjectStore("memory", "run1", world.carrier)
    )
    monkeypatch.setattr(manager_module, "start_engines", start)
    monkeypatch.setattr(AsyncHTTP, "post", post)
    return world
