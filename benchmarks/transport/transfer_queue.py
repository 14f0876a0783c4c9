"""TransferQueue over Mooncake Store: a key per sample and column, found through a controller, as its users put batches.

Its own start of a mooncake_master is never used: it ends every other one on the machine.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transport import mooncake, ray_objects
from benchmarks.transport.peers import Held, Loaded, Peer, Room
from benchmarks.transport.workload import RAGGED
from mooncake_store import MasterProcess

_PARTITION = "train"
_ROOM = 1.2  # of a segment and of a buffer; each process has both
_EXTRA = 256 << 20


class QueueWriter:
    """Implements `Writer`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._queue = _joined(settings)
        self._batch: dict[str, Any] = {}
        self._puts = 0

    def prepare(self, loaded: Loaded) -> None:
        self._batch = loaded.batch

    def put(self) -> Any:
        from tensordict import TensorDict

        self._puts += 1
        samples = len(self._batch["tokens"])
        fields = TensorDict(
            {name: _field(name, values, samples) for name, values in self._batch.items()}, batch_size=[samples]
        )
        keys = [f"{os.getpid()}-{self._puts}-{row}" for row in range(samples)]
        return self._queue.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=fields)

    def remove(self, ref: Any) -> None:
        self._queue.kv_clear(keys=ref.keys, partition_id=_PARTITION)

    def close(self) -> None:
        self._queue.close()  # the controller, too


class QueueReader:
    """Implements `Reader`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._queue = _joined(settings)

    def get(self, ref: Any) -> Held:
        fields = self._queue.kv_batch_get_by_meta(ref)
        batch = {name: _column(name, fields[name]) for name in fields.keys()}  # noqa: SIM118  # not a Mapping
        return Held(batch, lambda: None)

    def close(self) -> None:
        """Nothing: what a reader closes is the controller."""


def missing() -> str:
    """Why TransferQueue cannot be measured here."""
    if importlib.util.find_spec("transfer_queue") is None:
        return "TransferQueue is not installed: pip install TransferQueue"
    return ray_objects.missing() or mooncake.missing()


@contextmanager
def serve(room: Room, directory: Path) -> Iterator[dict[str, Any]]:
    """A master; yields TransferQueue's settings."""
    with MasterProcess(directory / "mooncake_master-transfer-queue.log") as master:
        yield {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master.address,
            "local_hostname": "127.0.0.1",
            "global_segment_size": int(_ROOM * room.stored) + _EXTRA,
            "local_buffer_size": int(_ROOM * room.moved) + _EXTRA,
        }


def _joined(settings: Mapping[str, Any]) -> Any:
    import transfer_queue
    from omegaconf import OmegaConf

    transfer_queue.init(
        OmegaConf.create({"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": dict(settings)}})
    )
    return transfer_queue


def _field(name: str, values: Any, samples: int) -> Any:
    import torch
    from tensordict import NonTensorStack

    if name in RAGGED:
        rows = [_tensor(row, RAGGED[name]) for row in values]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    if not isinstance(values, list):
        values = [values] * samples
    if isinstance(values[0], int | float):
        return torch.tensor(values, dtype=torch.int64 if isinstance(values[0], int) else torch.float64)
    return NonTensorStack(*values)


def _tensor(row: Any, dtype: str) -> Any:
    import torch

    if isinstance(row, torch.Tensor):
        return row
    return torch.from_numpy(row) if isinstance(row, np.ndarray) else torch.from_numpy(np.array(row, dtype))


def _column(name: str, found: Any) -> Any:
    import torch

    if isinstance(found, torch.Tensor):
        rows = found.unbind()
        if name in RAGGED:
            return [row.numpy() for row in rows]
        values = found.values() if found.is_nested else found
        return int(values[0]) if name == "dynamic_global_batch_size" else values.numpy().reshape(-1)
    return list(found)


PEERS = (
    Peer(
        "transfer-queue",
        "TransferQueue, over Mooncake",
        QueueWriter,
        QueueReader,
        4.6,
        "transfer-queue",
        serve,
        on_ray=True,
        missing=missing,
    ),
)
