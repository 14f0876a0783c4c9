"""A local Ray cluster of two raylets on loopback: a rollout node and a trainer node, told apart by resources."""

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ROLLOUT_NODE, TRAINER_NODE = "rollout_node", "trainer_node"
LOOPBACK = "127.0.0.1"
# Ray replaces 127.0.0.1 and localhost by an outside address of the machine; any other loopback address it keeps.
_RAY_ADDRESS = "127.0.0.2"
# The Ray object store carries refs, or with the ray backend a few shards: small on purpose, since it is /dev/shm.
_OBJECT_STORE_BYTES = 128 * 1024**2


@dataclass(frozen=True)
class NodeSpec:
    """cpus: worker processes Ray may keep warm. gpus: CUDA device ids the node owns."""

    cpus: int
    gpus: Sequence[int] = ()


@contextlib.contextmanager
def local_cluster(rollout: NodeSpec, trainer: NodeSpec) -> Iterator[None]:
    """Start both raylets and connect this process; at exit, disconnect and end every process of the cluster.

    Ray's reaper ends them too if this process is killed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args=_node_args(ROLLOUT_NODE, rollout))
    try:
        cluster.add_node(**_node_args(TRAINER_NODE, trainer))
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
        )
        # Ray's own SIGTERM handler dumps native stacks; the caller's ends the job in order.
        signal.signal(signal.SIGTERM, on_sigterm)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def _node_args(resource: str, node: NodeSpec) -> dict[str, object]:
    # Both raylets see the machine's GPUs; each is shown only its own, or Ray would hand out the same one twice.
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, node.gpus))} if node.gpus else {}
    return {
        "num_cpus": node.cpus,
        "num_gpus": len(node.gpus),
        "resources": {resource: 1.0},
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "node_ip_address": _RAY_ADDRESS,
        "env_vars": visible,
    }
