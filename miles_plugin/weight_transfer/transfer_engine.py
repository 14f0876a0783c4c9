"""Mooncake's Transfer Engine in this process, and the network that it uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mooncake_store.config import rdma_devices
from mooncake_store.errors import ConfigError
from mooncake_store.wheel import load_mooncake


def protocol_of(init_kwargs: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """ "tcp" or "rdma": what the object store is told, and where nobody says, RDMA if this host has a device."""
    said = init_kwargs.get("protocol") or environment.get("MOONCAKE_PROTOCOL")
    return str(said) if said else ("rdma" if rdma_devices() else "tcp")


def start_transfer_engine(host: str, protocol: str, device_name: str = "") -> Any:
    """A Transfer Engine of this process.

    Raises:
        ConfigError: it does not start, or Mooncake is not installed.
    """
    load_mooncake()
    from mooncake.engine import TransferEngine

    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")  # it prefers RDMA wherever it sees a device
    engine = TransferEngine()
    code = engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)
    if code != 0:
        raise ConfigError(
            f"Mooncake's Transfer Engine did not start on {host} over {protocol} (device {device_name or 'any'}): code "
            f"{code}; see the process's log, or use --update-weight-transfer-mode broadcast"
        )
    return engine
