"""A trainer rank as a Ray actor: takes shards from the object store, trains, sends weights."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.sglang import SGLangEngine
from miles_plugin.object_store import open_rollout_store
from miles_plugin.rollout.batch import Shard
from miles_plugin.training.policy import WEIGHT_DTYPE
from miles_plugin.training.trainer import Trainer
from miles_plugin.weight_transfer.broadcast import Broadcaster, EngineRanks
from miles_plugin.weight_transfer.sources import buckets, full_parameters
from miles_plugin.weight_transfer.transfer import update_weights
from mooncake_store import batch_digest
from mooncake_store.process import free_ports


class TrainerActor:
    """One rank of the trainer.

    Args:
        config: the job's settings.
        rank, world_size: among the trainer ranks.
    """

    def __init__(self, config: TrainConfig, rank: int, world_size: int) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._broadcaster: Broadcaster | None = None

    def open_store(self, master: str | None, run_id: str) -> None:
        """Join the store. Rank 0 of a node contributes the node's segment (by LOCAL_RANK)."""
        self._run_id = run_id
        self._store = open_rollout_store(self._config, master, run_id)

    def rendezvous_port(self, host: str) -> int:
        """A free port of rank 0's node."""
        return free_ports(1, host)[0]

    def join(self, host: str, port: int) -> None:
        """Form the process group of the trainer ranks; collective."""
        self._host = host
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        backend = "cpu:gloo,cuda:nccl" if self._device_type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"tcp://{host}:{port}", rank=self._rank, world_size=self._world_size
        )

    def load(self, checkpoint: Path) -> None:
        """Start from `checkpoint` with a fresh optimizer; collective."""
        self._trainer = Trainer(self._config, checkpoint, self._device_type)

    def train(self, shard: Shard, manager: Any) -> dict[str, Any]:
        """Get this rank's shard, learn from it, acknowledge it; collective.

        Returns the trainer's metrics, the digest of what was got, its bytes, and the seconds of get and train.
        """
        import ray

        started = time.perf_counter()
        with self._store.get(shard.ref) as batch:
            got = time.perf_counter()
            digest = batch_digest(batch)
            verified = time.perf_counter()
            metrics = self._trainer.train(batch)
            trained = time.perf_counter()
            del batch
        ray.get(manager.acknowledge.remote(shard.ref.key, self._rank))
        return {
            **metrics,
            "digest": digest,
            "get_bytes": shard.ref.nbytes,
            "seconds": {"get": got - started, "train": trained - verified},
        }

    def connect_engines(self, engines: list[tuple[str, int]]) -> None:
        """On rank 0, form the process group that weights travel over."""
        if self._rank != 0:
            return
        members = [EngineRanks(SGLangEngine(url), ranks) for url, ranks in engines]
        backend = "nccl" if self._device_type == "cuda" else "gloo"
        self._broadcaster = Broadcaster(members, self._host, f"weights-{self._run_id}", backend)

    def update_weights(self, manager: Any) -> dict[str, Any] | None:
        """Bring the engines to this policy under a new version; collective. Rank 0 returns what it did."""
        import ray

        tensors = full_parameters(self._trainer.model, WEIGHT_DTYPE)
        if self._broadcaster is None:
            for _ in tensors:  # the other ranks take part in each gather
                pass
            return None
        update = update_weights(
            self._broadcaster,
            buckets(tensors, self._config.update_weight_buffer_size),
            version=ray.get(manager.allocate_version.remote()),
            pause_mode=self._config.pause_generation_mode,
            announce=lambda version: ray.get(manager.announce_version.remote(version)),
        )
        return {"version": update.version, "nbytes": update.nbytes, "seconds": update.seconds}

    def close(self) -> None:
        """Leave the engines' group, the store and the trainers' group."""
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._store.close()
        if dist.is_initialized():
            dist.destroy_process_group()
