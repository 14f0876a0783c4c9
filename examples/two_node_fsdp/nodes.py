"""What each node runs: the head a master, a holder and Ray's head, the worker a holder and a Ray node."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from examples.two_node_fsdp.background import Background, await_ready
from examples.two_node_fsdp.checks import check_head, check_node, check_ports, interface_of
from examples.two_node_fsdp.settings import Settings
from miles_plugin.cluster import ROLLOUT_NODE, trainer_node
from mooncake_store.addresses import unreachable
from mooncake_store.errors import StoreUnavailable
from mooncake_store.master import master_command

MASTER, HOLDER, RAY = "mooncake_master", "holder", "ray"
READY_SECONDS = 60.0
JOB_STOP_SECONDS = 60
_HEAD_PORTS = ("master_port", "metrics_port", "ray_port", "dashboard_port")


def start_head(settings: Settings, background: Background, say: Callable[[str], None]) -> None:
    """Start what of the head does not run yet.

    Raises:
        ConfigError, StoreUnavailable: found before anything is started.
        NotReady: a process did not come up; what did stays, and `stop` ends it.
    """
    env = environment(settings, "head")
    check_node(settings, "head", env)
    ip = settings.head_ip
    if background.running(MASTER) is None:
        check_ports(ip, {name: getattr(settings, name) for name in ("master_port", "metrics_port")})
    if background.running(RAY) is None:
        check_ports(ip, {"ray_port": settings.ray_port})
        check_ports("127.0.0.1", {"dashboard_port": settings.dashboard_port})
    master = background.start_once(MASTER, master_command(ip, settings.master_port, settings.metrics_port), env, say)
    await_ready(master, lambda: unreachable(settings.master_address, 1.0) is None, READY_SECONDS)
    _start_holder(background, env, say)
    command = [
        *_ray(settings, ip, ROLLOUT_NODE), "--head", f"--port={settings.ray_port}", "--include-dashboard=true",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={settings.dashboard_port}",
    ]  # fmt: skip
    ray = background.start_once(RAY, command, env, say)
    dashboard = f"127.0.0.1:{settings.dashboard_port}"
    for address in (settings.ray_address, dashboard):
        await_ready(ray, lambda address=address: unreachable(address, 1.0) is None, READY_SECONDS)  # type: ignore[misc]


def start_worker(settings: Settings, background: Background, say: Callable[[str], None]) -> None:
    """Start what of the worker does not run yet; raises as `start_head`, and StoreUnavailable without a head."""
    env = environment(settings, "worker")
    check_node(settings, "worker", env)
    check_head(settings)
    _start_holder(background, env, say)
    command = [*_ray(settings, settings.worker_ip, trainer_node(0)), f"--address={settings.ray_address}"]
    ray = background.start_once(RAY, command, env, say)
    await_ready(ray, lambda: "Ray runtime started" in ray.said(), READY_SECONDS)


def environment(settings: Settings, role: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of every process of a node: what differs between nodes is set before Ray starts, whose workers inherit it."""
    ip = settings.ip_of(role)
    interface = interface_of(ip, role)
    chosen = {
        "MOONCAKE_MASTER": settings.master_address,
        "MOONCAKE_PROTOCOL": settings.protocol,
        "MOONCAKE_DEVICE": settings.device if settings.protocol == "rdma" else "",
        "MOONCAKE_LOCAL_HOSTNAME": ip,
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": settings.segment_size,
        "MOONCAKE_LOCAL_BUFFER_SIZE": settings.buffer_size,
        # Otherwise gloo and NCCL choose an interface by the host's name.
        "GLOO_SOCKET_IFNAME": environ.get("GLOO_SOCKET_IFNAME") or interface,
        "NCCL_SOCKET_IFNAME": environ.get("NCCL_SOCKET_IFNAME") or interface,
        # Ray turns tokens on where it finds one at home, on one node and perhaps not on the other.
        "RAY_AUTH_MODE": environ.get("RAY_AUTH_MODE") or "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Seconds between SIGTERM and SIGKILL for a job that is stopped: Ray's own 3 are too few to end one in order.
        "RAY_JOB_STOP_WAIT_TIME_S": environ.get("RAY_JOB_STOP_WAIT_TIME_S") or str(JOB_STOP_SECONDS),
    }
    return {**environ, **{name: value for name, value in chosen.items() if value}}


def _start_holder(background: Background, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    holder = background.start_once(HOLDER, [sys.executable, "-m", "miles_plugin", "holder"], env, say)
    await_ready(holder, lambda: "lending" in holder.said(), READY_SECONDS)


def _ray(settings: Settings, ip: str, resource: str) -> list[str]:
    """`ray start` in the foreground: what it starts ends with it, and nothing else does."""
    ray = str(Path(sys.executable).parent / "ray")
    gpus = [] if settings.gpus is None else [f"--num-gpus={settings.gpus}"]
    return [ray, "start", "--block", f"--node-ip-address={ip}", f'--resources={{"{resource}": 1}}', *gpus]


def require_nodes(settings: Settings) -> None:
    """Raise StoreUnavailable when the head does not answer."""
    if unreachable(f"127.0.0.1:{settings.dashboard_port}", 2.0) is not None:
        raise StoreUnavailable(
            f"Ray's dashboard does not answer at {settings.dashboard}; run `launch.sh head` on this node first"
        )
