"""Find, start, check and stop a mooncake_master. Only ever stops the one it started."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from mooncake_store.addresses import fetch, unreachable
from mooncake_store.errors import MissingDependency, StoreUnavailable
from mooncake_store.process import ManagedProcess, free_ports

EXECUTABLE = "mooncake_master"


def probe_master(address: str, timeout: float = 3.0, source: str = "") -> None:
    """Check that something accepts TCP connections at `address` within `timeout` seconds; nothing is sent.

    For "etcd://" addresses one reachable endpoint is enough. `source` says where the address came from.

    Raises:
        StoreUnavailable: nothing accepts.
        ConfigError: not an address.
    """
    reasons = unreachable(address, timeout)
    if reasons is not None:
        raise StoreUnavailable(
            f"no Mooncake master answers at {address!r} ({reasons}); start mooncake_master there, or correct "
            f"master_server_address{f' (from {source})' if source else ''}"
        )


def find_master() -> Path:
    """Return the mooncake_master executable: next to this Python, on PATH, or inside the mooncake package.

    Raises:
        MissingDependency: there is none.
    """
    beside = Path(sys.executable).parent / EXECUTABLE
    on_path = shutil.which(EXECUTABLE)
    spec = find_spec("mooncake")
    inside = [Path(folder) / EXECUTABLE for folder in (spec.submodule_search_locations or ())] if spec else []
    for candidate in [beside, *([Path(on_path)] if on_path else []), *inside]:
        if os.access(candidate, os.X_OK):
            return candidate
    raise MissingDependency(
        f"{EXECUTABLE} is neither beside {sys.executable}, on PATH, nor in a mooncake package; "
        f"install miles-mooncake with the extra cpu, cuda or cuda13"
    )


def master_command(host: str, rpc_port: int, metrics_port: int, options: Mapping[str, str] | None = None) -> list[str]:
    """The command line of a mooncake_master that keeps what a store acknowledges.

    Args:
        host: address to listen on.
        options: more command-line options, for example {"eviction_high_watermark_ratio": "0.9"}.

    Raises:
        MissingDependency: no executable.
    """
    settings = {
        "rpc_address": host,
        "rpc_port": str(rpc_port),
        "metrics_host": host,
        "metrics_port": str(metrics_port),
        # A read that outlives its lease fails even on pinned objects (measured on mooncake 0.3.13.post1).
        "default_kv_lease_ttl": "10m",
        "allow_evict_soft_pinned_objects": "false",
        # A log whose last lines are statistics says nothing about an end; /metrics has the numbers.
        "enable_metric_reporting": "false",
        **(options or {}),
    }
    return [str(find_master()), *(f"--{name}={value}" for name, value in settings.items())]


class MasterProcess:
    """A mooncake_master of our own, on free loopback ports, that ends with this process at the latest.

    Args:
        log: file to which the master's output is appended.
        start_timeout: seconds to wait for it to become healthy.
        options: more command-line options; see `master_command`.
        ports: for its clients and for its metrics, instead of free ones: those of a master that is to be replaced.

    Attributes:
        address: "host:port" for master_server_address.
        ports: as given or found.
        metrics_url: base of its HTTP endpoints (/health, /metrics, /get_all_keys, ...).

    Raises:
        MissingDependency: no executable.
        StoreUnavailable: it did not become healthy; the error ends with the log's last lines.
    """

    def __init__(
        self,
        log: Path,
        start_timeout: float = 15.0,
        options: dict[str, str] | None = None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        rpc_port, metrics_port = ports or free_ports(2)
        self.ports = rpc_port, metrics_port
        self.address = f"127.0.0.1:{rpc_port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}"
        self._process = ManagedProcess(EXECUTABLE, master_command("127.0.0.1", rpc_port, metrics_port, options), log)
        try:
            self._await_health(start_timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the master; idempotent, bounded to about ten seconds, and touches no other process."""
        self._process.stop()

    def check(self) -> None:
        """Raise StoreUnavailable, with the log's last lines, if the master has ended."""
        status = self._process.exit_status()
        if status is not None:
            raise StoreUnavailable(f"{EXECUTABLE} ended with status {status}; {self._log_tail()}")

    def __enter__(self) -> MasterProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _await_health(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._healthy():
            self.check()
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"{EXECUTABLE} is not healthy after {timeout:g} s; {self._log_tail()}")
            time.sleep(0.05)

    def _healthy(self) -> bool:
        try:
            ready = bool(json.loads(fetch(f"{self.metrics_url}/health", timeout=1.0)).get("service_ready", True))
            probe_master(self.address, timeout=1.0)
        except (OSError, ValueError, StoreUnavailable):
            return False
        return ready

    def _log_tail(self) -> str:
        return f"last lines of {self._process.log}:\n{self._process.log_tail()}"
