"""A Ray cluster that was there before the job: which of its nodes the job uses, and whether they are still there.

A node offers itself by a resource, as `ray start --resources='{"rollout_node": 1}'`; `trainer_node_0`, `trainer_node_1`
and so on for trainers. One node may offer several.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from miles_plugin.cluster import ROLLOUT_NODE, NodeFailed, NodeSpec, connect, trainer_node
from mooncake_store.addresses import unreachable
from mooncake_store.errors import ConfigError, StoreUnavailable

_Result = TypeVar("_Result")
REACH_SECONDS = 5.0
# What Ray says that its head node has (ray 2.60).
HEAD_RESOURCE = "node:__internal_head__"
_OFFER = re.compile(rf"{ROLLOUT_NODE}|{trainer_node(0)[:-1]}\d+")
_CALL_SECONDS = 120.0  # for a worker process to start on each node


class JoinedCluster:
    """The nodes that a job uses, by resource. Made by `joined_cluster`."""

    def __init__(self, nodes: dict[str, str]) -> None:
        self._nodes = nodes

    def on_each_node(self, function: Callable[..., _Result], *arguments: Any) -> dict[str, _Result]:
        """Call a function once on every node; the results by host."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
        calls = {
            hosts[node_id]: ray.remote(function)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
            .remote(*arguments)
            for node_id in sorted(set(self._nodes.values()))
        }
        return dict(zip(calls, ray.get(list(calls.values()), timeout=_CALL_SECONDS), strict=True))

    def check(self) -> None:
        """Raise NodeFailed for a node that Ray has given up.

        Ray does that when its raylet has ended, or has not been heard of for about half a minute (ray 2.60).
        """
        import ray

        alive = {node["NodeID"]: node["Alive"] for node in ray.nodes()}
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        for name, node_id in self._nodes.items():
            if not alive.get(node_id, False):
                raise NodeFailed(
                    f"the {name.replace('_', ' ')} at {hosts.get(node_id, 'an unknown address')} is gone: its raylet "
                    f"ended, or the network to it; Ray's logs are there, by default in /tmp/ray/session_latest/logs"
                )


def hosts(address: str) -> dict[str, list[str]]:
    """What the living nodes of the cluster at `address` (HOST:PORT) offer a job, by host.

    By Ray's own client of its GCS: a driver can only look at a cluster from a host that is in it (ray 2.60).

    Raises:
        StoreUnavailable: no cluster answers there.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.gcs_pb2 import GcsNodeInfo
    from ray.exceptions import RpcError

    _check_reachable(address)
    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=REACH_SECONDS)
    except RpcError as error:
        raise StoreUnavailable(f"ray_address={address}: what answers there is no Ray cluster ({error})") from error
    return {
        node.node_manager_address: sorted(name for name in node.resources_total if _OFFER.fullmatch(name))
        for node in nodes.values()
        if node.state == GcsNodeInfo.ALIVE
    }


def find_nodes(
    address: str, world: Sequence[int], engine_gpus: int, on_head: bool = False
) -> tuple[NodeSpec, list[NodeSpec]]:
    """What the cluster at `address` has for a job: the rollout node and the trainer nodes.

    Args:
        world: trainer ranks on each trainer node.
        engine_gpus: GPUs of all engines that the job starts, where the cluster has any; 0 when it starts none.
        on_head: the rollout node has to be Ray's head; one that starts no engines need not offer itself.

    Raises:
        StoreUnavailable: no cluster answers there.
        ConfigError: a node, or GPUs on one, are missing; says how to start it.
    """
    import ray

    with _joined(address):
        nodes = _nodes()
        free = ray.available_resources()
    if on_head and engine_gpus and _node(nodes, ROLLOUT_NODE) is not _head(nodes):
        raise ConfigError(
            f"pin_rollout_manager_to_head=True: engines start where the manager runs, and the head node at "
            f"{_head(nodes)['NodeManagerAddress']} is not the one that offers {ROLLOUT_NODE}; start it with "
            f"ray start --head --resources='{{\"{ROLLOUT_NODE}\": 1}}', or use engines that run already "
            "(--rollout-external)"
        )
    rollout = _spec(nodes, ROLLOUT_NODE, _head(nodes) if on_head else _node(nodes, ROLLOUT_NODE), engine_gpus, 1)
    trainers = [
        _spec(nodes, trainer_node(index), _node(nodes, trainer_node(index)), ranks, ranks)
        for index, ranks in enumerate(world)
    ]
    claimed = [*map(trainer_node, range(len(world))), *([] if on_head and not engine_gpus else [ROLLOUT_NODE])]
    for name in claimed:
        if free.get(name, 0.0) < 1.0:
            raise ConfigError(
                f"ray_address={address}: {name} is in use by another job; wait for it or stop it (`ray job list`)"
            )
    return rollout, trainers


@contextlib.contextmanager
def joined_cluster(address: str, trainers: int, on_head: bool = False) -> Iterator[JoinedCluster]:
    """Connect this process; at exit, disconnect. The cluster stays.

    Args:
        on_head: the rollout node is Ray's head, as `find_nodes` has found possible.

    Raises what `find_nodes` does.
    """
    with _joined(address):
        nodes = _nodes()
        used = {ROLLOUT_NODE: _head(nodes) if on_head else _node(nodes, ROLLOUT_NODE)}
        used |= {name: _node(nodes, name) for name in map(trainer_node, range(trainers))}
        yield JoinedCluster({name: node["NodeID"] for name, node in used.items()})


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    import ray

    if address != "auto":
        _check_reachable(address)
    try:
        connect(address)
    except (ConnectionError, ray.exceptions.RaySystemError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise StoreUnavailable(
            f"ray_address={address}: no Ray cluster can be joined there ({reason}); start one with `ray start --head`"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself tries for more than a minute."""
    reasons = unreachable(address, REACH_SECONDS)
    if reasons is not None:
        raise StoreUnavailable(
            f"ray_address={address}: no Ray cluster answers there ({reasons}); start one with `ray start --head`"
        )


def _nodes() -> list[dict[str, Any]]:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    return [node for node in ray.nodes() if node["Alive"]]


def _node(nodes: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    for node in nodes:
        if node["Resources"].get(name):
            return node
    there = ", ".join(node["NodeManagerAddress"] for node in nodes)
    raise ConfigError(
        f"no node of the Ray cluster offers {name!r} (its nodes: {there}); start one with "
        f"ray start --address=... --resources='{{\"{name}\": 1}}'"
    )


def _head(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(node for node in nodes if node["Resources"].get(HEAD_RESOURCE))


def _spec(nodes: Sequence[dict[str, Any]], name: str, node: dict[str, Any], gpus: int, cpus: int) -> NodeSpec:
    host, there = node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0))
    if any(each["Resources"].get("GPU") for each in nodes) and there < gpus:
        raise ConfigError(
            f"{name} at {host} has {there} GPUs, {gpus} are needed; lower the layout, or use another node"
        )
    return NodeSpec(cpus, gpus=range(gpus) if there else (), host=host)
