"""An updater of one trainer rank, and a version authority that remembers what it was asked, for tests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from miles_plugin.engines.fleet import EngineAddress, Left
from miles_plugin.engines.sglang import SGLangEngine
from miles_plugin.weight_transfer.broadcast import Broadcaster
from miles_plugin.weight_transfer.disk_delta.hosts import EngineHosts
from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
from miles_plugin.weight_transfer.disk_delta.publish import Publisher
from miles_plugin.weight_transfer.disk_delta.storage import open_storage
from miles_plugin.weight_transfer.disk_delta.transport import DeltaTransport
from miles_plugin.weight_transfer.equality import Expected, compare
from miles_plugin.weight_transfer.layout import Layout
from miles_plugin.weight_transfer.p2p import PeerWriter
from miles_plugin.weight_transfer.ranks import Ranks
from miles_plugin.weight_transfer.sources import NamedTensor
from miles_plugin.weight_transfer.transfer import Authority, Bounds, Proof, Updater

BUCKET_BYTES = 64 * 1024  # several per update, and tensors larger than a bucket
BOUNDS = Bounds(call=10, join=10, bucket=10)


class Versions:
    """Hands out numbers from `first` on; `events` are the calls in order."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self.events: list[tuple[Any, ...]] = []

    def allocate(self) -> int:
        self.next += 1
        self.events.append(("allocate", self.next - 1))
        return self.next - 1

    def verify(self, version: int) -> None: ...

    def announce(self, version: int) -> None:
        self.events.append(("announce", version))

    def commit(self, version: int, confirmed: Sequence[str], left: Sequence[Left]) -> None:
        self.events.append(("commit", version, tuple(confirmed), tuple(each.url for each in left)))


def broadcasting(
    versions: Authority,
    pause_mode: str = "retract",
    bounds: Bounds = BOUNDS,
    prove: Callable[[], Proof] | None = None,
) -> Updater:
    """An updater that broadcasts from this process, the only trainer rank."""
    transport = Broadcaster("127.0.0.1", "test", "gloo", BUCKET_BYTES, bounds)
    return Updater(transport, Ranks(), versions, pause_mode, prove=prove, bounds=bounds)


def writing(
    versions: Authority,
    checkpoint: Path,
    pause_mode: str = "retract",
    bounds: Bounds = BOUNDS,
    prove: Callable[[], Proof] | None = None,
) -> Updater:
    """An updater that writes from this process, the only trainer rank, into the memory of engines of `checkpoint`."""
    transport = PeerWriter(
        "127.0.0.1", 0, 1, layouts(checkpoint), timeout=bounds.bucket, stage_bytes=BUCKET_BYTES, bounds=bounds
    )
    return Updater(transport, Ranks(), versions, pause_mode, prove=prove, bounds=bounds)


def publishing(
    versions: Authority,
    checkpoint: Path,
    root: Path,
    pause_mode: str = "retract",
    bounds: Bounds = BOUNDS,
    prove: Callable[[], Proof] | None = None,
) -> Updater:
    """An updater that publishes below `root` from this process, the only trainer rank, where engines of `checkpoint`
    have their own, too."""
    transport = delta_transport(checkpoint, root, bounds=bounds)
    return Updater(transport, Ranks(), versions, pause_mode, prove=prove, delivery=transport, bounds=bounds)


def delta_transport(
    checkpoint: Path, root: Path, rank: int = 0, size: int = 1, bounds: Bounds = BOUNDS
) -> DeltaTransport:
    """Of one trainer rank; rank 0's comes first."""
    storage = open_storage(root / "published")
    publisher = Publisher(storage, rank, size, "sparse", "xxh3-128", checkpoint, anchor_every=3)
    hosts = EngineHosts(storage, Materializer(storage, root / "local", checkpoint), bounds.bucket, bounds.answer)
    return DeltaTransport(storage, publisher, hosts.bring_to, load_seconds=bounds.call)


def layouts(checkpoint: Path) -> Callable[[int], Layout]:
    config = AutoConfig.from_pretrained(checkpoint)
    return lambda ranks: Layout(config, ranks, torch.bfloat16)


def constant(checkpoint: Path, value: float) -> Iterator[NamedTensor]:
    """Weights of the shapes of `checkpoint`, every element `value`."""
    for name, shape in layouts(checkpoint)(1).weights.items():
        yield name, torch.full(shape, value, dtype=torch.bfloat16)


class _Expecting:
    """A `Proof` of engines of `ranks` ranks each, by URL; one where nothing is said."""

    def __init__(self, checkpoint: Path, ranks: Mapping[str, int]) -> None:
        self._ranks = ranks
        self._expected = {size: Expected(layouts(checkpoint)(size)) for size in {1, *ranks.values()}}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        for each in self._expected.values():
            each.add(name, tensor)

    def check(self, engine: SGLangEngine) -> int:
        expected = self._expected[self._ranks.get(engine.url, 1)]
        return compare(expected.checksums(), engine.checksums(), engine.url)


def expecting(checkpoint: Path, engines: Sequence[EngineAddress] = ()) -> Callable[[], Proof]:
    """Makes proofs that engines, of one rank unless `engines` says otherwise, hold what was sent."""
    return lambda: _Expecting(checkpoint, {each.url: each.ranks for each in engines})
