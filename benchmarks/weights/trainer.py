"""What is timed: a trainer rank that updates engines as the job's do, with weights that are in memory already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig

from benchmarks.weights.model import DTYPE, Weights
from miles_plugin.engines.fleet import EngineAddress, Left
from miles_plugin.engines.sglang import SGLangEngine
from miles_plugin.weight_transfer.broadcast import Broadcaster, Bystander
from miles_plugin.weight_transfer.equality import Expected
from miles_plugin.weight_transfer.layout import Layout
from miles_plugin.weight_transfer.p2p import PeerWriter
from miles_plugin.weight_transfer.ranks import Ranks
from miles_plugin.weight_transfer.transfer import Transport, Updater

BROADCAST, P2P = "broadcast", "p2p"
MODES = (BROADCAST, P2P)
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """What a trainer rank is told. port: of rank 0's rendezvous. tp: of the engines."""

    rank: int
    ranks: int
    port: int
    checkpoint: Path
    tp: int
    bucket_bytes: int
    workers: int


@dataclass(frozen=True)
class Took:
    """One update. seconds: by phase. nbytes: of the model."""

    seconds: dict[str, float]
    nbytes: int


class Trainer:
    """One trainer rank; made in a process of its own, on all ranks at once."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://{HOST}:{plan.port}", rank=plan.rank, world_size=plan.ranks)
        config = AutoConfig.from_pretrained(plan.checkpoint)
        layout = cache(lambda tp: Layout(config, tp, DTYPE))
        self._weights = Weights(config)
        self._prove: Callable[[], Expected] = lambda: Expected(layout(plan.tp))
        ranks = Ranks(dist.group.WORLD)
        versions = _Versions() if plan.rank == 0 else None
        transports: dict[str, Transport] = {
            BROADCAST: Broadcaster(HOST, "bench", "gloo", plan.bucket_bytes) if plan.rank == 0 else Bystander(),
            P2P: PeerWriter(HOST, plan.rank, plan.ranks, layout, plan.bucket_bytes, workers=plan.workers),
        }
        served: dict[str, str] = {}  # one for both: engines that the other mode updated were not started anew
        self._updaters = {mode: Updater(transports[mode], ranks, versions, "retract", served=served) for mode in MODES}

    def update(self, mode: str, engines: Sequence[EngineAddress], prove: bool) -> Took | None:
        """Change all weights, and bring the engines to them; on all ranks at once. What it took, on rank 0."""
        self._weights.change()
        updater = self._updaters[mode]
        update = replace(updater, prove=self._prove if prove else None).update(self._weights, engines)
        if update is None:
            return None
        if update.left or update.nbytes != self._weights.nbytes:
            raise RuntimeError(f"{update.nbytes} of {self._weights.nbytes} bytes were sent; left: {update.left}")
        return Took(update.seconds, update.nbytes)

    def verify(self, engines: Sequence[EngineAddress]) -> None:
        """Raise WeightsDiffer unless every engine holds the weights of the last update."""
        proof = self._prove()
        for name, tensor in self._weights():
            proof.add(name, tensor)
        for address in engines:
            engine = SGLangEngine(address.url)
            proof.check(engine)
            engine.close()

    def close(self) -> None:
        for updater in self._updaters.values():
            updater.close()
        dist.destroy_process_group()


class _Versions:
    """Implements `Authority`: counts, and tells nobody."""

    def __init__(self) -> None:
        self._next = 0

    def allocate(self) -> int:
        self._next += 1
        return self._next - 1

    def verify(self, version: int) -> None: ...

    def announce(self, version: int) -> None: ...

    def commit(self, version: int, confirmed: Sequence[str], left: Sequence[Left]) -> None: ...
