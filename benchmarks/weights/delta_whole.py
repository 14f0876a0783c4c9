"""The whole path of one encoding: weights published by one trainer rank, and brought to a checkpoint of this host."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.weights.delta_maker import move
from benchmarks.weights.delta_pair import CHECKSUM, Pair, same
from benchmarks.weights.model import Weights, config_of
from miles_plugin.bench_commands import BenchFailed
from miles_plugin.weight_transfer.disk_delta.local_checkpoint import Checkpoint
from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
from miles_plugin.weight_transfer.disk_delta.publish import Publisher
from miles_plugin.weight_transfer.disk_delta.snapshot import host_bytes
from miles_plugin.weight_transfer.disk_delta.storage import open_storage
from mooncake_store.errors import IntegrityError

PUBLISH, MATERIALIZE, FIRST_COPY = "publish", "materialize", "first copy"


class Whole:
    """Publisher and reader; made in a process of its own.

    Args:
        directory: for the base checkpoint, what is published, and the reader's own copies.
        pair: of which the old weights are the base. nbytes: what its model was made for.
        density: of the values that change from version to version.
    """

    def __init__(self, directory: Path, pair: Pair, nbytes: int, density: float, encoding: str, threads: int) -> None:
        torch.set_num_threads(1)
        self._encoding, self._density, self._generator = encoding, density, np.random.default_rng(0)
        base = directory / "base"
        config = config_of(nbytes)
        self._block = np.fromfile(pair.old, np.uint8)
        self._weights = Weights(config, self._block)
        base.mkdir(parents=True)
        config.save_pretrained(base)
        save_file(dict(self._weights()), base / "model.safetensors", {"format": "pt"})
        storage = open_storage(str(directory / "published"))
        self._publisher = Publisher(storage, 0, 1, encoding, CHECKSUM, base, anchor_every=0, threads=threads)
        self._reader = Materializer(storage, directory / "local", base, threads)
        self._version = 0
        self._publish()  # takes the snapshot, and publishes nothing: readers have these weights
        self._path = base

    def first_copy(self) -> float:
        """Seconds until the reader has its own copy of the base."""
        return self._bring()

    def turn(self) -> dict[str, float]:
        """Seconds by operation, of one version. From the third on the reader applies two deltas in one pass."""
        self._version += 1
        move(self._block.view(np.uint16), self._density, self._generator)
        return {PUBLISH: self._publish(), MATERIALIZE: self._bring()}

    def verify(self) -> None:
        """Raise BenchFailed unless the reader's checkpoint is what the trainer has, bit by bit."""
        found = Checkpoint(self._path)
        for name, tensor in self._weights():
            if not same(found.tensor(name), host_bytes(tensor)):
                raise BenchFailed(f"{self._encoding}, published: {name} is not what the trainer has, bit by bit")

    def close(self) -> None:
        self._publisher.close()

    def _publish(self) -> float:
        began = time.perf_counter()
        share = self._publisher.encode(self._version, self._weights())
        full = self._publisher.needs_full([share])
        published = self._publisher.finish(self._version, [share])
        took = time.perf_counter() - began
        if full or published.is_published != (self._version > 0):
            raise BenchFailed(f"{self._encoding}: version {self._version} is no delta: {published}")
        return took

    def _bring(self) -> float:
        began = time.perf_counter()
        try:
            made = self._reader.bring_to(self._version)
        except IntegrityError as error:
            raise BenchFailed(f"{self._encoding}, published: {error}") from error
        took = time.perf_counter() - began
        if made.version != self._version or made.notes:
            raise BenchFailed(f"{self._encoding}: the reader has version {made.version}, not {self._version}: {made}")
        self._path = made.path
        return took
