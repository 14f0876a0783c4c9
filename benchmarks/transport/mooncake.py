"""Mooncake's own client, as the peers and limits that are built on it use it."""

from __future__ import annotations

import importlib.util
from typing import Any


def missing() -> str:
    """Why Mooncake cannot be measured here."""
    try:
        found = importlib.util.find_spec("mooncake.store")
    except ModuleNotFoundError:
        found = None
    return "" if found else "mooncake is not installed: pip install miles-mooncake[cpu], or [cuda]"


def connected(master: str, segment: int | None, buffer: int = 16 << 20) -> Any:
    """A client of the master that lends `segment` bytes; None for Mooncake's minimal default segment.

    Raises:
        RuntimeError: Mooncake refuses.
    """
    from mooncake.store import MooncakeDistributedStore

    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "local_buffer_size": buffer,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": master,
        **({} if segment is None else {"global_segment_size": segment}),
    }
    store = MooncakeDistributedStore()
    check("setup", store.setup(settings))
    return store


def check(operation: str, code: int, expected: int = 0) -> None:
    """Raise RuntimeError when Mooncake answered something else."""
    if code != expected:
        raise RuntimeError(f"Mooncake's {operation} answered {code}, expected {expected}")
