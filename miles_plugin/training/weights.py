"""How a trainer rank sends its weights: the updater that the settings ask for, with versions from the manager."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.fleet import Left
from miles_plugin.rollout.lanes import CONTROL
from miles_plugin.training.policy import WEIGHT_DTYPE
from miles_plugin.weight_transfer.broadcast import Broadcaster, Bystander
from miles_plugin.weight_transfer.disk_delta.hosts import Brought
from miles_plugin.weight_transfer.disk_delta.opened import open_publisher, post_write, published_in
from miles_plugin.weight_transfer.disk_delta.publish import Publisher
from miles_plugin.weight_transfer.disk_delta.storage import open_storage
from miles_plugin.weight_transfer.disk_delta.transport import DeltaTransport
from miles_plugin.weight_transfer.equality import Expected, checksum_of
from miles_plugin.weight_transfer.layout import Layout
from miles_plugin.weight_transfer.p2p import PeerWriter
from miles_plugin.weight_transfer.ranks import Ranks
from miles_plugin.weight_transfer.transfer import Transport, Updater
from miles_plugin.weight_transfer.transfer_engine import protocol_of

# A rank that hangs holds the others for this long at most.
_RANK_TIMEOUT = timedelta(minutes=10)
_PROGRESS_SECONDS = 0.5


class ManagedVersions:
    """The rollout manager's version authority, as trainer rank 0 calls it under the name `trainer`.

    Raises:
        WriterRefused: another trainer updates this run.
    """

    def __init__(self, manager: Any, trainer: str) -> None:
        self._manager, self._trainer = manager, trainer
        _get(manager.register_trainer.remote(trainer))

    def allocate(self) -> int:
        return int(_get(self._manager.allocate_version.remote(self._trainer)))

    def verify(self, version: int) -> None:
        _get(self._manager.verify_version.remote(version, self._trainer))

    def announce(self, version: int) -> None:
        _get(self._manager.announce_version.remote(version, self._trainer))

    def commit(self, version: int, confirmed: Sequence[str], left: Sequence[Left]) -> None:
        _get(self._manager.commit_version.remote(version, self._trainer, confirmed, left))


@dataclass(frozen=True)
class Place:
    """Where a trainer rank is.

    host: address of its node, reachable from the engines. device_type: of trainers and engines: "cuda" or "cpu".
    run_dir: of the run's report. checkpoint: that trainers and engines started from.
    """

    run_id: str
    host: str
    device_type: str
    run_dir: Path
    checkpoint: Path


def open_updater(config: TrainConfig, model: PreTrainedModel, place: Place, manager: Any) -> Updater:
    """The updater of this trainer rank, as the settings ask for it; collective.

    Args:
        model: what will be sent, for its config and size.
    """
    ranks = Ranks(dist.new_group(backend="gloo", timeout=_RANK_TIMEOUT) if dist.get_world_size() > 1 else None)
    is_first = ranks.rank == 0
    layout = cache(lambda tp: Layout(model.config, tp, WEIGHT_DTYPE))
    checksum = checksum_of(place.device_type) if config.check_weight_update_equal else None
    total = sum(parameter.numel() for parameter in model.parameters()) * WEIGHT_DTYPE.itemsize
    transport = _transport(config, layout, ranks, place, manager)
    return Updater(
        transport,
        ranks,
        ManagedVersions(manager, f"{place.run_id}/trainer-0@{place.host}:{os.getpid()}") if is_first else None,
        config.pause_generation_mode,
        prove=(lambda: Expected(layout(config.rollout_num_gpus_per_engine), checksum)) if checksum else None,
        delivery=transport if isinstance(transport, DeltaTransport) else None,
        progress=_Progress(manager, total) if is_first else None,
    )


def _transport(
    config: TrainConfig, layout: Callable[[int], Layout], ranks: Ranks, place: Place, manager: Any
) -> Transport:
    if config.update_weight_transfer_mode == "disk-delta":
        return _delta_transport(config, ranks, place, manager)
    if config.update_weight_transfer_mode == "p2p":
        protocol = protocol_of(config.mooncake_store_init_kwargs, os.environ)
        return PeerWriter(
            place.host,
            ranks.rank,
            ranks.size,
            layout,
            config.update_weight_buffer_size,
            workers=config.p2p_transfer_num_workers,
            timeout=config.p2p_transfer_timeout,
            protocol=protocol,
            device=place.device_type if protocol == "rdma" else "cpu",
            device_name=_device_name(config) if protocol == "rdma" else "",
        )
    if ranks.rank > 0:
        return Bystander()
    backend = "nccl" if place.device_type == "cuda" else "gloo"
    return Broadcaster(place.host, f"weights-{place.run_id}", backend, config.update_weight_buffer_size)


def _delta_transport(config: TrainConfig, ranks: Ranks, place: Place, manager: Any) -> DeltaTransport:
    def bring(version: int | None, engines: Sequence[str]) -> Brought:
        brought: Brought = _get(manager.bring_weights.remote(version, engines))
        return brought

    def publisher() -> Publisher:
        return open_publisher(config, place.run_dir, place.checkpoint, ranks.rank, ranks.size)

    # Rank 0's comes first.
    made = publisher() if ranks.rank == 0 else None
    if ranks.size > 1:
        dist.barrier()
    return DeltaTransport(
        open_storage(published_in(config, place.run_dir)),
        made or publisher(),
        bring,
        post_write(config, place.run_dir, place.checkpoint),
        config.update_weight_disk_budget,
    )


def _device_name(config: TrainConfig) -> str:
    return str(config.mooncake_store_init_kwargs.get("device_name") or os.environ.get("MOONCAKE_DEVICE", ""))


class _Progress:
    """Tells the manager how much was sent, not too often, and the first and the last of an update always; nobody waits
    for that."""

    def __init__(self, manager: Any, total_bytes: int) -> None:
        self._note: Callable[[int, int], Any] = manager.note_progress.options(concurrency_group=CONTROL).remote
        self._total, self._told_at, self._last = total_bytes, 0.0, 0

    def __call__(self, nbytes: int) -> None:
        now = time.monotonic()
        begins_or_ends = nbytes <= self._last or nbytes >= self._total
        self._last = nbytes
        if begins_or_ends or now > self._told_at + _PROGRESS_SECONDS:
            self._told_at = now
            self._note(nbytes, self._total)


def _get(reference: Any) -> Any:
    import ray

    return ray.get(reference)
