"""What each node runs: the head a master, a holder and Ray's head, the worker a holder and a Ray node."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from examples.two_node_fsdp.background import Background, await_ready
from examples.two_node_fsdp.checks import check_head, check_node, check_ports, interface_of, roles_here
from examples.two_node_fsdp.settings import Settings
from miles_plugin.cluster import ROLLOUT_NODE, trainer_node
from miles_plugin.joined_cluster import hosts
from mooncake_store.addresses import unreachable
from mooncake_store.bounded import attempts
from mooncake_store.errors import ConfigError, StoreUnavailable
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
    ports = [getattr(settings, name) for name in _HEAD_PORTS]
    if len(set(ports)) < len(ports):
        raise ConfigError(f"{', '.join(_HEAD_PORTS)} = {ports}: each needs a port of its own")
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
    os.environ.update(env)
    _leave_other_cluster(settings, background, say)
    command = [*_ray(settings, settings.worker_ip, trainer_node(0)), f"--address={settings.ray_address}"]
    ray = background.start_once(RAY, command, env, say)
    await_ready(ray, lambda: "Ray runtime started" in ray.said(), READY_SECONDS)
    await_ready(ray, lambda: settings.worker_ip in hosts(settings.ray_address), READY_SECONDS)


def _leave_other_cluster(settings: Settings, background: Background, say: Callable[[str], None]) -> None:
    """End a Ray node that belongs to a head of before; refuse one in this cluster that somebody else has started."""
    runs, is_member = background.running(RAY), settings.worker_ip in hosts(settings.ray_address)
    if runs and not is_member:
        say(f"{RAY} runs, pid {runs.pid}, but is not in the cluster at {settings.ray_address}: started anew")
        background.stop(RAY)
    if is_member and not runs:
        say(f"a Ray node of {settings.worker_ip} was there before: waiting for it to be gone")
        for attempt in attempts(READY_SECONDS):
            if settings.worker_ip not in hosts(settings.ray_address):
                return
            if attempt.is_last():
                raise ConfigError(
                    f"a Ray node of {settings.worker_ip} is in the cluster at {settings.ray_address}, and was not "
                    f"started from STATE_DIR = {settings.state_dir}; stop it where it was started"
                )


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
    """Raise ConfigError on another node than the head, and StoreUnavailable when a node is not up."""
    if "head" not in roles_here(settings):
        raise ConfigError(f"jobs are submitted on the head, {settings.head_ip}; this is another host")
    if unreachable(f"127.0.0.1:{settings.dashboard_port}", 2.0) is not None:
        raise StoreUnavailable(
            f"Ray's dashboard does not answer at {settings.dashboard}; run `launch.sh head` on this node first"
        )
    os.environ.update(environment(settings, "head"))
    if settings.worker_ip not in hosts(settings.ray_address):
        raise StoreUnavailable(
            f"the worker {settings.worker_ip} is not in the cluster at {settings.ray_address}; run `launch.sh worker` "
            f"there"
        )
