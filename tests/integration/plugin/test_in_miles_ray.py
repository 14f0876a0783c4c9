"""The plugin in a Ray cluster: a host of miles's shape runs the same job with either backend, and gets the same."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mooncake.store", reason="Mooncake is not installed")
pytest.importorskip("ray", reason="the extra `train` is not installed")

from mooncake_store import MasterProcess

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[3]
HOST = ROOT / "tests" / "miles_host"
OURS = "miles_plugin.in_miles.object_store"


@pytest.fixture(scope="module")
def init_kwargs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with MasterProcess(tmp_path_factory.mktemp("master") / "master.log") as master:
        yield {
            "master_server_address": master.address,
            "protocol": "tcp",
            "local_hostname": "127.0.0.1",
            "global_segment_size": "64mb",
            "local_buffer_size": "16mb",
        }


def run(command: list[str], *flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "LOCAL_RANK")}
    return subprocess.run(
        [*command, str(HOST / "train.py"), *flags],
        capture_output=True,
        text=True,
        timeout=200,
        env={**inherited, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), **(environment or {})},
    )


def steps(*flags: str) -> tuple[list[Any], dict[str, Any]]:
    """What every rank got in each step, and what the processes' stores were; started by the runner."""
    done = run([sys.executable, "-m", "miles_plugin.run"], *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    *got, stores = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return got, stores


@pytest.fixture(scope="module")
def by_ray() -> list[Any]:
    got, stores = steps("--object-store-backend", "ray", "--balance-data")
    assert stores["driver"] == "miles.utils.object_store"  # theirs, untouched
    return got


@pytest.mark.parametrize("share_memory", [True, False], ids=["mapped", "network"])
@pytest.mark.parametrize("late", [False, True], ids=["split early", "split late"])
def test_the_job_gets_what_it_gets_by_ray(
    by_ray: list[Any], init_kwargs: dict[str, Any], late: bool, share_memory: bool
) -> None:
    kwargs = json.dumps({**init_kwargs, "share_memory": share_memory})
    flags = ["--object-store-backend", "mooncake", "--balance-data", "--mooncake-store-init-kwargs", kwargs]
    got, stores = steps(*flags, *(["--delay-split-train-data-by-dp"] if late else []))
    assert stores["driver"] == OURS
    manager, *trainers = stores["workers"]
    assert [manager["class"], *(each["class"] for each in trainers)] == [OURS] * 3
    assert got == by_ray
    assert manager["stats"]["puts"] == len(got) * (1 if late else 2)


def test_ranks_that_split_late_read_their_own_rows_only(init_kwargs: dict[str, Any]) -> None:
    kwargs = json.dumps({**init_kwargs, "share_memory": False})
    flags = ["--object-store-backend", "mooncake", "--delay-split-train-data-by-dp", "--longest", "30000"]
    _, stores = steps(*flags, "--num-rollout", "1", "--mooncake-store-init-kwargs", kwargs)
    manager, *trainers = stores["workers"]
    read = sum(each["stats"]["bytes_received"] for each in trainers)
    assert manager["stats"]["bytes_put"] < read <= 1.1 * manager["stats"]["bytes_put"]


def test_without_the_plugin_in_the_driver_the_job_says_how_to_start_it(init_kwargs: dict[str, Any]) -> None:
    job = {"runtime_env": {"worker_process_setup_hook": "miles_plugin.install"}}
    flags = ["--object-store-backend", "mooncake", "--mooncake-store-init-kwargs", json.dumps(init_kwargs)]
    done = run([sys.executable], *flags, environment={"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})
    assert done.returncode == 1
    assert "structured_object_store" in done.stderr  # of the driver's own store, before the first batch


def test_a_master_that_is_missing_ends_the_job_with_a_typed_error() -> None:
    kwargs = {"master_server_address": "127.0.0.1:1", "protocol": "tcp", "local_hostname": "127.0.0.1"}
    done = run(
        [sys.executable, "-m", "miles_plugin.run"],
        *("--object-store-backend", "mooncake", "--mooncake-store-init-kwargs", json.dumps(kwargs)),
    )
    assert done.returncode == 1
    assert "StoreUnavailable" in done.stderr
