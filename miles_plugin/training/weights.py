"""How a trainer rank sends its weights: the updater that the settings ask for, with versions from the manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.fleet import Left
from miles_plugin.rollout.lanes import CONTROL
from miles_plugin.weight_transfer.broadcast import Broadcaster, Bystander
from miles_plugin.weight_transfer.ranks import Ranks
from miles_plugin.weight_transfer.transfer import Transport, Updater

# A rank that hangs holds the others for this long at most.
_RANK_TIMEOUT = timedelta(minutes=10)
_PROGRESS_SECONDS = 0.5


class ManagedVersions:
    """The rollout manager's version authority, as trainer rank 0 calls it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def allocate(self) -> int:
        return int(_get(self._manager.allocate_version.remote()))

    def announce(self, version: int) -> None:
        _get(self._manager.announce_version.remote(version))

    def commit(self, version: int, confirmed: Sequence[str], left: Sequence[Left]) -> None:
        _get(self._manager.engines_updated.remote(version, confirmed, left))


def open_updater(
    config: TrainConfig, run_id: str, host: str, device_type: str, manager: Any, total_bytes: int
) -> Updater:
    """The updater of this trainer rank; collective.

    Args:
        host: address of this rank's node, reachable from the engines.
        total_bytes: of all weights.
    """
    group = dist.new_group(backend="gloo", timeout=_RANK_TIMEOUT) if dist.get_world_size() > 1 else None
    is_first = dist.get_rank() == 0
    transport: Transport
    if is_first:
        backend = "nccl" if device_type == "cuda" else "gloo"
        transport = Broadcaster(host, f"weights-{run_id}", backend, config.update_weight_buffer_size)
    else:
        transport = Bystander()
    return Updater(
        transport,
        Ranks(group),
        ManagedVersions(manager) if is_first else None,
        config.pause_generation_mode,
        progress=_Progress(manager, total_bytes) if is_first else None,
    )


class _Progress:
    """Tells the manager how much was sent, not too often; nobody waits for that."""

    def __init__(self, manager: Any, total_bytes: int) -> None:
        self._note: Callable[[int, int], Any] = manager.note_progress.options(concurrency_group=CONTROL).remote
        self._total, self._told_at = total_bytes, 0.0

    def __call__(self, nbytes: int) -> None:
        now = time.monotonic()
        if now > self._told_at + _PROGRESS_SECONDS:
            self._told_at = now
            self._note(nbytes, self._total)


def _get(reference: Any) -> Any:
    import ray

    return ray.get(reference)
