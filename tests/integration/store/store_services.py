"""What the tests of the transport start and look at: settings, stores with short waits, holders, the master's books."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_store import MasterProcess, ObjectStore
from mooncake_store.backends.mooncake import MooncakeCarrier
from mooncake_store.client import Limits, MooncakeClient
from mooncake_store.config import resolve
from mooncake_store.holder import RunningHolder, start_holder

HANG = 60.0  # seconds; far above every bound of ours, far below the measured hangs (90 s and for ever)
MIB = 1 << 20
QUICK = Limits(put=2.0, get=8.0, remove=2.0)
PATIENT = Limits(put=HANG, get=HANG, remove=HANG)  # where something heals, however busy the machine is


def settings(address: str, **more: Any) -> dict[str, Any]:
    return {
        "master_server_address": address,
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "global_segment_size": "32mb",
        "local_buffer_size": "64mb",
        **more,
    }


def store_with(
    address: str, run_id: str = "run1", limits: Limits = QUICK, replica_num: int = 1, **more: Any
) -> ObjectStore:
    """A store of this process that lends nothing."""
    config = resolve(settings(address, **more), {})
    client = MooncakeClient.connect(config, limits)
    return ObjectStore("mooncake", run_id, MooncakeCarrier(client, config, run_id, replica_num, limits))


def carrier_of(store: ObjectStore) -> MooncakeCarrier:
    carrier = store._carrier
    assert isinstance(carrier, MooncakeCarrier)
    return carrier


@contextmanager
def holding(address: str, directory: Path, size: str = "32mb") -> Iterator[RunningHolder]:
    holder = start_holder(resolve(settings(address, global_segment_size=size), {}), directory / "holder.log")
    try:
        yield holder
    finally:
        holder.stop()


def batch_of(nbytes: int, seed: int = 0) -> dict[str, Any]:
    return {"tokens": [np.random.default_rng(seed).integers(0, 1 << 30, nbytes // 4, dtype=np.int32)]}


def same(got: dict[str, Any], nbytes: int, seed: int = 0) -> bool:
    return np.array_equal(got["tokens"][0], batch_of(nbytes, seed)["tokens"][0])


def metric(master: MasterProcess, name: str) -> float:
    lines = _ask(master, "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def batches(master: MasterProcess, run_id: str = "") -> list[str]:
    """Keys of the parts of batches that the master knows, of one run or of all."""
    return sorted(key for key in keys(master) if "/b/" in key and key.startswith(f"run/{run_id}"))


def keys(master: MasterProcess) -> list[str]:
    """All keys that the master knows."""
    return _ask(master, "/get_all_keys").split()


def lies_at(master: MasterProcess, key: str) -> int:
    """Address of an object in its owner's memory, as the master says."""
    return int(json.loads(_ask(master, f"/query_key?key={key}"))["data"][0]["buffer_address_"])


def _ask(master: MasterProcess, path: str) -> str:
    with urllib.request.urlopen(f"{master.metrics_url}{path}", timeout=5) as answer:
        text: str = answer.read().decode()
    return text
