"""What is checked on a node before anything is started there."""

import contextlib
import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from examples.two_node_fsdp.settings import ROLES, Settings
from miles_plugin.plan import missing_files
from mooncake_store.addresses import unreachable
from mooncake_store.config import fit_to_host, resolve
from mooncake_store.errors import ConfigError, StoreUnavailable
from mooncake_store.master import find_master
from mooncake_store.wheel import load_mooncake

REACH_SECONDS = 5.0


def check_node(settings: Settings, role: str, env: Mapping[str, str]) -> None:
    """Raise ConfigError for what this host lacks as the `role` (head or worker) of the launch.

    Args:
        env: that its processes will get.
    """
    ip = settings.ip_of(role)
    interface_of(ip, role)
    if settings.head_ip == settings.worker_ip:
        raise ConfigError(f"HEAD_IP and WORKER_IP are both {ip}; on one machine use `miles-mooncake train` alone")
    load_mooncake()
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray is not installed: pip install miles-mooncake[train] 'ray[default]'")
    if role == "head":
        find_master()
        if importlib.util.find_spec("aiohttp_cors") is None:
            raise ConfigError("Ray's dashboard, which takes jobs, is not installed: pip install 'ray[default]'")
    fit_to_host(resolve({}, env), contributes=True)  # devices, memory
    check_files(settings, role)


def check_files(settings: Settings, role: str) -> None:
    """Raise ConfigError for a path of the settings that is not on this host."""
    if settings.model_path is not None and (missing := missing_files(Path(settings.model_path))):
        raise ConfigError(
            f"MODEL_PATH = {settings.model_path!r} on this host ({role}): no {' and no '.join(missing)} there; every "
            f"node needs a complete Hugging Face checkpoint under that path"
        )
    if settings.dataset_path is not None and role == "head" and not Path(settings.dataset_path).exists():
        raise ConfigError(f"DATASET_PATH = {settings.dataset_path!r} is not on this host, the head")
    if settings.trainer == "miles":
        home = settings.miles_home
        if home is None or not (Path(home) / "train.py").is_file():
            raise ConfigError(f"TRAINER=miles needs MILES_HOME, a miles checkout with its train.py; it is {home!r}")


def check_ports(ip: str, ports: Mapping[str, int]) -> None:
    """Raise ConfigError for a port that another process has."""
    for name, port in ports.items():
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ip, port))
            except OSError as error:
                raise ConfigError(
                    f"{name} = {port} on {ip}: {error.strerror}, another process may have it; stop that, or set {name} "
                    f"under `cluster`"
                ) from error


def check_head(settings: Settings) -> None:
    """Raise StoreUnavailable when the head's services are not reached from here."""
    for name, address in (("mooncake_master", settings.master_address), ("Ray", settings.ray_address)):
        reasons = unreachable(address, REACH_SECONDS)
        if reasons is not None:
            raise StoreUnavailable(
                f"{name} of the head does not answer at {address} ({reasons}); run `launch.sh head` on "
                f"{settings.head_ip} first, and open its ports to this node"
            )


def roles_here(settings: Settings) -> list[str]:
    """Which of the two nodes this host is."""
    return [role for role in ROLES if settings.ip_of(role) in _interfaces()]


def interface_of(ip: str, role: str) -> str:
    """The network interface of this host that has the address; ConfigError when none has."""
    found = _interfaces()
    if ip not in found:
        raise ConfigError(
            f"{role.upper()}_IP = {ip} is no address of this host, which has {', '.join(sorted(found))}; run this on "
            f"the other node, or correct it"
        )
    return found[ip]


def _interfaces() -> dict[str, str]:
    """Of this host, by address."""
    return {
        address.address.partition("%")[0]: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
