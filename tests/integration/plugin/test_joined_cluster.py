"""A Ray cluster that was there before: whom it offers, who is missing, in use or gone; what its nodes must share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")
ray = pytest.importorskip("ray", reason="the extra `train` is not installed")

from miles_plugin.arguments import TrainConfig  # noqa: E402
from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.cluster import NodeFailed  # noqa: E402
from miles_plugin.joined_cluster import HEAD_RESOURCE, JoinedCluster, find_nodes, hosts, joined_cluster  # noqa: E402
from miles_plugin.shared_files import share  # noqa: E402
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402
from mooncake_store.errors import ConfigError, StoreUnavailable  # noqa: E402

pytestmark = pytest.mark.integration
HEAD, WORKER = "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two raylets that nobody's job has started."""
    from ray.cluster_utils import Cluster

    shared = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    running = Cluster(
        initialize_head=True, head_node_args={**shared, "node_ip_address": HEAD, "resources": {"rollout_node": 1}}
    )
    try:
        running.worker = running.add_node(**shared, node_ip_address=WORKER, resources={"trainer_node_0": 1})
        yield running
    finally:
        ray.shutdown()
        running.shutdown()


def test_nodes_are_found_by_what_they_offer(cluster: Any) -> None:
    rollout, trainers = find_nodes(cluster.address, [2], 1)
    assert (rollout.host, [node.host for node in trainers]) == (HEAD, [WORKER])
    assert (rollout.gpus, trainers[0].cpus) == ((), 2)
    assert hosts(cluster.address) == {HEAD: ["rollout_node"], WORKER: ["trainer_node_0"]}
    assert not ray.is_initialized()


def test_what_is_missing_or_in_use_is_named(cluster: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"no node .* offers 'trainer_node_1' .*--resources='\{\"trainer_node_1\": 1\}'"
    ):
        find_nodes(cluster.address, [1, 1], 1)
    with pytest.raises(StoreUnavailable, match=r"ray_address=127\.0\.0\.1:1: no Ray cluster answers there"):
        find_nodes("127.0.0.1:1", [1], 1)


def test_a_manager_on_the_head_needs_no_offer_there_unless_it_starts_engines(cluster: Any) -> None:
    """The cluster's head offers rollout_node; of one whose worker does, it is the head all the same."""
    assert find_nodes(cluster.address, [2], 1, on_head=True)[0].host == HEAD
    with joined_cluster(cluster.address, 1):
        nodes = ray.nodes()
    swapped = [dict(node, Resources=dict(node["Resources"])) for node in nodes]
    for node in swapped:
        node["Resources"].pop("rollout_node", None)
        if node["NodeManagerAddress"] == WORKER:
            node["Resources"]["rollout_node"] = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "nodes", lambda: swapped)
        assert find_nodes(cluster.address, [2], 0, on_head=True)[0].host == HEAD
        assert find_nodes(cluster.address, [2], 1)[0].host == WORKER
        expected = rf"pin_rollout_manager_to_head=True: .*head node at {HEAD} is not .*--head --resources.*external"
        with pytest.raises(ConfigError, match=expected):
            find_nodes(cluster.address, [2], 1, on_head=True)
        for on_head, host in ((True, HEAD), (False, WORKER)):
            with joined_cluster(cluster.address, 1, on_head) as joined:
                assert joined.on_each_node(lambda: True).keys() == {host, WORKER}


def test_an_actor_is_put_on_the_head_by_what_only_that_has(cluster: Any) -> None:
    class Where:
        def host(self) -> str:
            return str(ray.util.get_node_ip_address())

    with joined_cluster(cluster.address, 1):
        actor = ray.remote(Where).options(resources={HEAD_RESOURCE: 0.001}, num_cpus=1).remote()
        assert ray.get(actor.host.remote()) == HEAD
        ray.kill(actor)


def test_what_another_job_has_is_in_use(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "available_resources", lambda: {"rollout_node": 1.0, "trainer_node_0": 0.5})
    with pytest.raises(ConfigError, match="trainer_node_0 is in use by another job"):
        find_nodes(cluster.address, [1], 1)


def config(**more: Any) -> TrainConfig:
    return load_config([]).model_copy(update=more)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_checkpoint(build_model(32, 1, seed=0), build_tokenizer(), directory)
    return directory


class Elsewhere(JoinedCluster):
    """Whose nodes see another file system: paths are looked for under `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def on_each_node(self, function: Any, *arguments: Any) -> dict[str, Any]:
        first, *others = arguments
        there = self._root / first.relative_to("/") if isinstance(first, Path) else first
        return {WORKER: function(there, *others)}


def test_a_checkpoint_must_be_on_every_node_and_a_tiny_policy_is_sent(checkpoint: Path, tmp_path: Path) -> None:
    away = Elsewhere(tmp_path)
    with pytest.raises(ConfigError, match=rf"hf_checkpoint={checkpoint} on {WORKER}: no config.json and no weights"):
        share(away, config(hf_checkpoint=checkpoint), checkpoint)
    (tmp_path / checkpoint.relative_to("/")).mkdir(parents=True)  # an empty directory is no checkpoint
    with pytest.raises(ConfigError, match=r"no config\.json"):
        share(away, config(hf_checkpoint=checkpoint), checkpoint)
    share(away, config(), checkpoint)
    assert (tmp_path / checkpoint.relative_to("/") / "config.json").read_text() == (
        checkpoint / "config.json"
    ).read_text()
    share(away, config(hf_checkpoint=checkpoint), checkpoint)


def test_the_save_directory_must_be_one(checkpoint: Path, tmp_path: Path, cluster: Any) -> None:
    save = tmp_path / "save"
    with joined_cluster(cluster.address, 1) as joined:
        share(joined, config(save=save), checkpoint)
        assert not list(save.iterdir())
        assert joined.on_each_node(lambda: True) == {HEAD: True, WORKER: True}
    away = Elsewhere(tmp_path / "away")
    share(away, config(), checkpoint)
    with pytest.raises(ConfigError, match=rf"save={save} is another directory on {WORKER}"):
        share(away, config(save=save), checkpoint)


def test_a_node_that_is_gone_is_noticed(cluster: Any) -> None:
    with joined_cluster(cluster.address, 1) as joined:
        joined.check()
        cluster.remove_node(cluster.worker)
        with pytest.raises(NodeFailed, match=rf"the trainer node 0 at {WORKER} is gone"):
            joined.check()
