"""Trainers of two ranks, each a process, that are killed while they publish version after version."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
import torch

from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS
from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
from miles_plugin.weight_transfer.disk_delta.prune import newest_version, published_versions
from miles_plugin.weight_transfer.disk_delta.publish import Publisher
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage
from tests.delta_reader import from_directory, read_checkpoint, rebuild
from tests.unit.plugin.delta_training import Weights, held, make_base, some_weights, step

ANCHOR_EVERY, KEEP_VERSIONS = 4, 2


def weights_of(version: int) -> Weights:
    """Of every version, the same in every process. The base is version 0."""
    weights = some_weights()
    contents = np.random.default_rng(0).integers(0, 256, (4, 40_000), dtype=np.uint8)
    weights |= {f"model.large.{number}": torch.from_numpy(each.view(np.int16)) for number, each in enumerate(contents)}
    if version:
        step(weights, version, (0.001, 0.02, 0.2)[version % 3])
    return weights


@dataclass
class Place:
    """Where they publish, and a reader that follows.

    Attributes:
        killed: ranks so far. torn: kills that left a draft behind. versions: that readers could see, at one time or
            another.
    """

    root: Path
    killed: int = 0
    torn: int = 0
    versions: set[int] = field(default_factory=set)
    _reached: int = 0

    def __post_init__(self) -> None:
        self.base = make_base(self.root / "base", weights_of(0))
        self.source, self.numbers = self.root / "source", self.root / "numbers"
        self.numbers.touch()

    def kill_trainers(self, kills: int, seed: int) -> None:
        """Start one after another, and kill one rank of each, or both, at any moment; `kills` ranks in all."""
        moments = random.Random(seed)
        while self.killed < kills:
            with self._trainer(moments.choice(ENCODINGS)) as ranks:
                time.sleep(moments.uniform(0, 0.25))
                victims = moments.choice([ranks[:1], ranks[1:], ranks])
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)
                self.check()  # the other rank may not know yet
            self.killed += len(victims)
            self.torn += any(path.name.startswith(".weight_v") for path in self.source.iterdir())
            self.check()

    def check(self) -> None:
        """Every version that readers see is whole, or a base of it was removed; a reader comes to the newest."""
        storage = DirectoryStorage(self.source)
        newest = newest_version(storage)
        for version in published_versions(storage.names("weight_v")):
            try:
                assert rebuild(from_directory(self.source), self.base, version) == held(weights_of(version))
            except FileNotFoundError:
                assert version != newest
            self.versions.add(version)
        brought = self.reader("local").bring_to(forward=True)
        assert brought.version >= self._reached
        assert read_checkpoint(brought.path) == held(weights_of(brought.version))
        self._reached = brought.version

    def reader(self, name: str) -> Materializer:
        return Materializer(DirectoryStorage(self.source), self.root / name, self.base)

    @contextmanager
    def _trainer(self, encoding: str) -> Iterator[list[int]]:
        """Both ranks' processes; at the end they are gone."""
        ends = Pipe()
        ranks = [_forked(lambda rank=rank: self._run(rank, ends, encoding)) for rank in range(2)]
        for end in ends:
            end.close()
        yield ranks
        for rank in ranks:
            os.waitpid(rank, 0)

    def _run(self, rank: int, ends: tuple[Connection, Connection], encoding: str) -> None:
        ends[1 - rank].close()
        if rank == 0:
            self._lead(ends[0], encoding)
        else:
            self._follow(ends[1], encoding)

    def _publisher(self, rank: int, encoding: str) -> Publisher:
        return Publisher(DirectoryStorage(self.source), rank, 2, encoding, "xxh3-128", self.base, ANCHOR_EVERY)

    def _lead(self, other: Connection, encoding: str) -> None:
        publisher = self._publisher(0, encoding)

        def both(step: str) -> list[object]:
            other.send((step, version))
            mine = _take(publisher, step, version)
            return [mine, other.recv()]

        while True:
            version = self._allocate()
            try:
                shares = both("encode")
                if publisher.needs_full(shares):  # type: ignore[arg-type]
                    shares = both("full")
            except (EOFError, OSError):  # rank 1 is gone
                publisher.abandon(version)
                return
            publisher.finish(version, shares)  # type: ignore[arg-type]
            publisher.prune(KEEP_VERSIONS, {}, 0)

    def _follow(self, other: Connection, encoding: str) -> None:
        publisher = self._publisher(1, encoding)
        while True:
            step, version = other.recv()
            other.send(_take(publisher, step, version))

    def _allocate(self) -> int:
        """A number that no trainer has had before, as the version authority's are."""
        version = self.numbers.stat().st_size
        with self.numbers.open("ab") as file:
            file.write(b".")
        return version


def _take(publisher: Publisher, step: str, version: int) -> object:
    return publisher.encode(version, weights_of(version).items()) if step == "encode" else publisher.full(version)


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def late_replica_arrives(place: Place) -> None:
    """A host that comes last, and one whose directory is half gone."""
    newest = place.reader("late").newest() or 0  # not one that its trainer had no time to name the latest
    assert place.reader("late").bring_to().version == newest
    shutil.rmtree(place.root / "local" / "a", ignore_errors=True)
    assert place.reader("local").bring_to().version == newest
    for name in ("late", "local"):
        assert read_checkpoint(place.root / name / "current") == held(weights_of(newest))
