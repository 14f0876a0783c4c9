"""A local Ray cluster on loopback: a rollout node and trainer nodes, each a raylet, told apart by their resources.

A cluster of several machines that is there already is joined instead: see `joined_cluster.py`.
"""

import atexit
import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_store.process import tail

ROLLOUT_NODE = "rollout_node"
LOOPBACK = "127.0.0.1"
# Ray replaces 127.0.0.1 and localhost by an outside address of the machine; any other loopback address it keeps.
_RAY_ADDRESS = "127.0.0.2"
# The Ray object store carries refs, or with the ray backend a few shards: small on purpose, since it is /dev/shm.
OBJECT_STORE_BYTES = 128 * 1024**2


class NodeFailed(RuntimeError):
    """A process of Ray's own (a raylet, the GCS) ended; the message names it and ends with its log's last lines."""


@dataclass(frozen=True)
class NodeSpec:
    """A raylet: worker processes it may keep warm, CUDA device ids it owns, bytes of /dev/shm for its objects.

    host: where its processes are reached by those of other nodes.
    """

    cpus: int
    gpus: Sequence[int] = ()
    object_store_bytes: int = OBJECT_STORE_BYTES
    host: str = LOOPBACK


def trainer_node(index: int) -> str:
    """The Ray resource that only trainer node `index` has."""
    return f"trainer_node_{index}"


class LocalCluster:
    """The running cluster. Made by `local_cluster`."""

    def __init__(self, nodes: dict[str, Any]) -> None:
        self._nodes = nodes

    def check(self) -> None:
        """Raise NodeFailed for a process of Ray's own that has ended.

        Ray itself tells of a dead raylet only by what it did to the actors there, and of a dead GCS not at all for a
        minute (measured on ray 2.60).
        """
        for name, node in self._nodes.items():
            for kind, processes in node.all_processes.items():
                for info in processes:
                    status = info.process.poll()
                    if status is not None:
                        log = _log_of(info.process.args)
                        raise NodeFailed(
                            f"{kind} of the {name.replace('_', ' ')} ended with status "
                            f"{status if status >= 0 else 128 - status}; its log {log} ends:\n{tail(log)}"
                        )


@contextlib.contextmanager
def local_cluster(rollout: NodeSpec, trainers: Sequence[NodeSpec]) -> Iterator[LocalCluster]:
    """Start every raylet and connect this process; at exit, disconnect and end every process of the cluster.

    Ray's reaper ends them too if this process is killed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    _keep_sigterm()
    cluster = Cluster(initialize_head=True, head_node_args=_node_args(ROLLOUT_NODE, rollout))
    nodes = {ROLLOUT_NODE: cluster.head_node}
    try:
        for index, trainer in enumerate(trainers):
            nodes[trainer_node(index)] = cluster.add_node(**_node_args(trainer_node(index), trainer))
        connect(cluster.address)
        yield LocalCluster(nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()


def connect(address: str) -> None:
    """Make this process a driver of the cluster at `address`."""
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # or what Ray says of a dead worker has escape codes, in files too
    import ray

    _keep_colorama_quiet()
    _keep_sigterm()
    logging.getLogger("ray").setLevel(logging.ERROR)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
    )
    # Ray's native code has put a handler of its own below Python's, which dumps stacks and aborts.
    signal.signal(signal.SIGTERM, on_sigterm)


def _keep_sigterm() -> None:
    """Leave SIGTERM to this process, which ends the job in order.

    Ray takes it whenever it starts a node, to wait half a minute for that node to drain, and then exit with status 1.
    Given back afterwards, it would be Ray's for the seconds that a node takes to start.
    """
    from ray._private import utils

    utils.set_sigterm_handler = lambda _handler: None


def _keep_colorama_quiet() -> None:
    """Ray's copy of colorama resets the colours of a terminal when Python ends, also of one that has none."""
    from colorama.initialise import reset_all  # type: ignore[import-untyped]

    atexit.unregister(reset_all)


def _log_of(command: Sequence[str]) -> Path:
    """Where a process of Ray's own logs to, by its command line."""
    prefix = "--stdout_filepath="
    named = [argument.removeprefix(prefix) for argument in command if argument.startswith(prefix)]
    return Path(named[0] if named else os.devnull)


def _node_args(resource: str, node: NodeSpec) -> dict[str, object]:
    # All raylets see the machine's GPUs; each is shown only its own, or Ray would hand out the same one twice.
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, node.gpus))} if node.gpus else {}
    return {
        "num_cpus": node.cpus,
        "num_gpus": len(node.gpus),
        "resources": {resource: 1.0},
        "object_store_memory": node.object_store_bytes,
        "include_dashboard": False,
        "node_ip_address": _RAY_ADDRESS,
        "env_vars": visible,
    }
