"""The plugin in a Ray cluster: a host of miles's shape runs the same job with either backend, and gets the same."""

import json
import os
import shutil
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
    inherited = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    inherited["RAY_ADDRESS"] = "local"  # or it would join a cluster of another test's
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
    assert "mooncake.store" in manager["mooncake"]
    assert "mooncake.structured_object_store" not in {*manager["mooncake"], *trainers[0]["mooncake"]}
    assert got == by_ray
    assert manager["stats"]["puts"] == len(got) * (1 if late else 2)


def test_ranks_that_split_late_read_their_own_rows_only(init_kwargs: dict[str, Any]) -> None:
    kwargs = json.dumps({**init_kwargs, "share_memory": False})
    flags = ["--object-store-backend", "mooncake", "--delay-split-train-data-by-dp", "--longest", "30000"]
    _, stores = steps(*flags, "--num-rollout", "1", "--mooncake-store-init-kwargs", kwargs)
    manager, *trainers = stores["workers"]
    read = sum(each["stats"]["bytes_received"] for each in trainers)
    assert manager["stats"]["bytes_put"] < read <= 1.1 * manager["stats"]["bytes_put"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that has the package as a wheel brings it: an editable install has no file beside its packages."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "setup.py", "README.md", "miles_mooncake.pth"):
        shutil.copy(ROOT / name, source)
    for package in ("mooncake_store", "miles_plugin"):
        shutil.copytree(ROOT / package, source / package)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", target, source], check=True, timeout=200)
    return target


# The interpreter reads the files of a directory of packages when it starts; here they are read by name.
AS_INSTALLED = """
import runpy, site, sys
site.addsitedir({site!r})
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, {host!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_hook_alone_is_enough_for_a_submitted_job(installed: Path, init_kwargs: dict[str, Any]) -> None:
    job = {"runtime_env": {"worker_process_setup_hook": "miles_plugin.install"}}
    flags = ["--object-store-backend", "mooncake", "--mooncake-store-init-kwargs", json.dumps(init_kwargs)]
    code = AS_INSTALLED.format(site=str(installed), host=str(HOST))
    done = run([sys.executable, "-c", code], *flags, environment={"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})
    assert done.returncode == 0, done.stderr[-3000:]
    stores = json.loads(done.stdout.splitlines()[-1])
    assert {stores["driver"], *(each["class"] for each in stores["workers"])} == {OURS}


@pytest.mark.parametrize(
    "job", [None, {"runtime_env": {}}, {"runtime_env": {"worker_process_setup_hook": "theirs.hook"}}]
)
def test_python_starts_as_ever_where_nobody_asks_for_the_hook(installed: Path, job: dict[str, Any] | None) -> None:
    code = f"import site, sys; site.addsitedir({str(installed)!r}); assert 'miles_plugin' not in sys.modules"
    environment = {} if job is None else {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_hook_that_cannot_be_installed_ends_python_at_its_start(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "miles").mkdir()
    (tmp_path / "miles" / "__init__.py").touch()  # a miles without what is looked for
    job = {"runtime_env": {"worker_process_setup_hook": "miles_plugin.install"}}
    code = f"import site, sys; sys.path.insert(0, {str(tmp_path)!r}); site.addsitedir({str(installed)!r}); print('on')"
    environment = {**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert not done.stdout
    assert "looked for miles.utils.object_store" in done.stderr


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
