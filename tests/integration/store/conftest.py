"""Real services for the transport's tests: a mooncake_master of our own, a local Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_store import MasterProcess, ObjectStore, open_store


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    # A dead owner is forgotten after client_ttl; ten seconds by default.
    log: Path = tmp_path_factory.mktemp("master") / "master.log"
    with MasterProcess(log, options={"client_ttl": "4"}) as process:
        yield process


@pytest.fixture(scope="module")  # no longer, since tests of other modules start a Ray of their own
def local_ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def stores(master: MasterProcess, local_ray: Any) -> Iterator[dict[str, ObjectStore]]:
    """One open store of each backend, in this process."""
    settings = {
        "master_server_address": master.address,
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "global_segment_size": "64mb",
        "local_buffer_size": "32mb",
    }
    with open_store("mooncake", settings, contribute_segment=True) as mooncake, open_store("ray") as ray:
        yield {"mooncake": mooncake, "ray": ray}


@pytest.fixture(params=["mooncake", "ray"])
def store(stores: dict[str, ObjectStore], request: pytest.FixtureRequest) -> ObjectStore:
    found: ObjectStore = stores[request.param]
    return found
