"""A trainer rank as a Ray actor: takes shards from the object store, trains, sends weights."""

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_plugin.arguments import TrainConfig
from miles_plugin.logs import redirect_output
from miles_plugin.object_store import open_rollout_store
from miles_plugin.rollout.batch import Shard
from miles_plugin.rollout.lanes import ACKNOWLEDGE
from miles_plugin.training.policy import WEIGHT_DTYPE
from miles_plugin.training.trainer import Trainer
from miles_plugin.training.weights import Place, open_updater
from miles_plugin.weight_transfer.sources import full_parameters
from miles_plugin.weight_transfer.transfer import Updater, WeightUpdate
from mooncake_store import ObjectStore, batch_digest
from mooncake_store.config import rdma_devices
from mooncake_store.process import free_ports


class TrainerActor:
    """One rank of the trainer.

    Args:
        log: file that gets what this process prints.
        config: the job's settings.
        run_id: names the run's objects in the store.
        rank: among the trainer ranks of all nodes.
        host: address of this node, reachable from the other ranks and the engines.
    """

    def __init__(self, log: Path, config: TrainConfig, run_id: str, rank: int, host: str) -> None:
        redirect_output(log)
        self._log_dir = log.parent
        self._config, self._run_id, self._rank, self._host = config, run_id, rank, host
        self._device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._opened: ObjectStore | None = None
        self._loaded: Trainer | None = None
        self._checkpoint = Path()
        self._updater: Updater | None = None

    def open_store(self, master: str | None) -> list[str]:
        """Join the store; returns the node's RDMA devices. Local rank 0 starts a segment holder where none serves.

        Not part of the constructor: what fails there reaches the caller as text, what fails here with its type.

        Args:
            master: address of the Mooncake master that the job started, if it did.
        """
        self._opened = open_rollout_store(self._config, master, self._run_id, log_dir=self._log_dir)
        return rdma_devices()

    def rendezvous_port(self) -> int:
        """A free port of this rank's node."""
        return free_ports(1, self._host)[0]

    def join(self, host: str, port: int) -> None:
        """Form the process group of the trainer ranks; collective."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        backend = "cpu:gloo,cuda:nccl" if self._device_type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"tcp://{host}:{port}", rank=self._rank, world_size=self._config.world_size
        )

    def load(self, checkpoint: Path, state: Path | None = None) -> None:
        """Start from `checkpoint` with a fresh optimizer, or go on from a saved `state`; collective."""
        self._checkpoint = checkpoint
        self._loaded = Trainer(self._config, checkpoint, self._device_type)
        if state is not None:
            self._loaded.load(state)

    def save(self, directory: Path) -> None:
        """Write this rank's part of the trainer's state; collective."""
        self._trainer.save(directory)

    def train(self, shard: Shard, manager: Any) -> dict[str, Any]:
        """Get this rank's shard and learn from it; collective. It is acknowledged when its last view is gone.

        Returns the trainer's metrics, the digest of what was got, its bytes, and the seconds of get and train.
        """
        started = time.perf_counter()
        result = self._store.get(
            shard.ref, partition=shard.rank, on_release=lambda: self._acknowledge(shard.ref.key, manager)
        )
        with result as batch:
            got = time.perf_counter()
            digest = batch_digest(batch)
            verified = time.perf_counter()
            metrics = self._trainer.train(batch)
            trained = time.perf_counter()
            del batch
        return {
            **metrics,
            "digest": digest,
            "get_bytes": shard.nbytes,
            "seconds": {"get": got - started, "train": trained - verified},
        }

    def update_weights(self, manager: Any) -> WeightUpdate | None:
        """Bring the engines to this policy under a new version; collective. Rank 0 returns what it did."""
        import ray

        model = self._trainer.model
        if self._updater is None:
            place = Place(self._run_id, self._host, self._device_type, self._log_dir.parent, self._checkpoint)
            self._updater = open_updater(self._config, model, place, manager)
        engines = ray.get(manager.engines.remote()) if self._rank == 0 else ()
        return self._updater.update(lambda: full_parameters(model, WEIGHT_DTYPE), engines)

    def _acknowledge(self, key: str, manager: Any) -> None:
        manager.acknowledge.options(concurrency_group=ACKNOWLEDGE).remote(key, self._rank)

    @property
    def _store(self) -> ObjectStore:
        if self._opened is None:
            raise RuntimeError("open_store() comes first")
        return self._opened

    @property
    def _trainer(self) -> Trainer:
        if self._loaded is None:
            raise RuntimeError("load() comes before training, saving and weight updates")
        return self._loaded

    def close(self) -> None:
        """Leave the engines, the store and the trainers' group."""
        if self._updater is not None:
            self._updater.close()
        if self._opened is not None:
            self._opened.close()
        if dist.is_initialized():
            dist.destroy_process_group()
