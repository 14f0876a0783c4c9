"""What the tests of the receiving side share: a small model's history, and what engines see of it."""

from __future__ import annotations

import os
from pathlib import Path

from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage
from tests.delta_publisher import DeltaPublisher, Tensors, changed, random_tensors, read_checkpoint, write_checkpoint

ROOT = Path(__file__).parents[3]
SHAPES = [
    ("embed.weight", "BF16", (64, 48)),
    ("norm.weight", "F32", (33,)),
    ("scale", "F32", ()),
    ("none.weight", "BF16", (0, 7)),
    ("odd.weight", "F8_E4M3", (1001,)),
    ("steps", "I64", (5,)),
    ("head.weight", "F16", (40, 31)),
]


class World:
    """A base checkpoint, a publisher, and a reader's local directory, all below one directory."""

    def __init__(self, root: Path, encoding: str = "xor", base: Tensors | None = None) -> None:
        self.root, self.base, self.local, self.source = root, root / "base", root / "local", root / "source"
        tensors = base if base is not None else random_tensors(0, SHAPES)
        write_checkpoint(self.base, tensors)
        self.publisher = DeltaPublisher(self.source, tensors, encoding)

    def publish(self, *versions: int, density: float = 0.05, share: float = 0.8) -> None:
        for version in versions:
            self.publisher.delta(version, self.next(version, density, share))

    def anchor(self, version: int) -> None:
        self.publisher.full(version, self.next(version))

    def next(self, seed: int, density: float = 0.05, share: float = 0.8) -> Tensors:
        return changed(self.publisher.versions[max(self.publisher.versions)], seed, density, share)

    def reader(self, threads: int = 2, wait_seconds: float = 20.0) -> Materializer:
        return Materializer(
            DirectoryStorage(self.source), self.local, self.base, threads=threads, wait_seconds=wait_seconds
        )

    def seen(self) -> int | None:
        """The version whose very bits engines see; None before the first. Fails when they see anything else."""
        return seen(self.local, self.publisher)


def seen(local: Path, publisher: DeltaPublisher) -> int | None:
    if not (local / "current").is_symlink():
        return None
    slot = local / os.readlink(local / "current")
    assert (slot / "config.json").is_file()
    found = read_checkpoint(slot)
    matching = [version for version, tensors in publisher.versions.items() if found == tensors]
    assert matching, f"{slot} holds no version that was published"
    return max(matching)
