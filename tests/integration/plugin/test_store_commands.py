"""`miles-mooncake holder`, `ls` and `sweep` on a real master: a living run, a dead one, and every exit status."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mooncake.store", reason="Mooncake is not installed")

from miles_plugin import cli
from mooncake_store import MasterProcess, ObjectStore, open_store

pytestmark = pytest.mark.integration
COMMAND = [sys.executable, "-m", "miles_plugin"]
BATCH = {"tokens": np.zeros((10, 1000), np.int32)}
# Ends without giving its run up, as a killed process does.
DIES = """
import os, sys, numpy
from mooncake_store import open_store

store = open_store("mooncake", contribute_segment=False, run_id="dead.run")
for _ in range(3):
    store.put({"tokens": numpy.zeros((10, 1000), numpy.int32)})
os._exit(0)
"""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    with MasterProcess(tmp_path_factory.mktemp("master") / "master.log") as running:
        yield running


@pytest.fixture(autouse=True)
def environment(master: MasterProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MASTER": master.address, "PROTOCOL": "tcp", "LOCAL_HOSTNAME": "127.0.0.1", "LOCAL_BUFFER_SIZE": "16mb"
    }.items():  # fmt: skip
        monkeypatch.setenv(f"MOONCAKE_{name}", value)


@contextmanager
def running_holder() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A holder in the foreground of its own process, and the line that it said."""
    command = [*COMMAND, "holder", "--global-segment-size", "64mb"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        yield holder, holder.stdout.readline()
    finally:
        holder.kill()
        holder.communicate()


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output, and what the command itself said on standard error."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    return (
        done.returncode,
        done.stdout,
        "".join(line for line in done.stderr.splitlines(True) if "miles-mooncake" in line),
    )


def listed(master: MasterProcess) -> dict[str, Any]:
    status, out, error = run("ls", "--json", "--metrics-url", master.metrics_url)
    assert status == 0, error
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_holder_says_what_it_lends_and_takes_it_back_when_it_is_ended(
    number: signal.Signals, status: int, master: MasterProcess
) -> None:
    with running_holder() as (holder, line):
        (segment,) = listed(master)["segments"]
        assert line == f"lending 64 MiB as segment {segment['name']} to the master {master.address}\n"
        assert (segment["size"], segment["pid"], segment["epoch"]) == (64 << 20, holder.pid, 0)
        os.kill(holder.pid, number)
        assert holder.wait(30) == status
        assert holder.stderr is not None
        assert "Traceback" not in holder.stderr.read()
    assert listed(master) == {"runs": [], "segments": []}


@pytest.fixture
def stores() -> Iterator[ObjectStore]:
    """A living run with one batch, beside a dead one with three, in the memory of one holder."""
    with running_holder(), open_store("mooncake", contribute_segment=False, run_id="living.run") as living:
        living.put(BATCH)
        subprocess.run([sys.executable, "-c", DIES], check=True, capture_output=True, timeout=60)
        yield living


def test_only_what_the_dead_left_is_swept(stores: ObjectStore, master: MasterProcess) -> None:
    found = listed(master)
    runs = {item["run_id"]: item for item in found["runs"]}
    assert {name: (item["alive"], item["batches"]) for name, item in runs.items()} == {
        "dead.run": (False, 3), "living.run": (True, 1)
    }  # fmt: skip
    assert f"process {os.getpid()} of " in runs["living.run"]["owner"]
    assert runs["dead.run"]["nbytes"] > 3 * BATCH["tokens"].nbytes > runs["living.run"]["nbytes"]
    assert found["segments"][0]["used"] >= sum(item["nbytes"] for item in runs.values())
    metrics = ("--metrics-url", master.metrics_url)
    status, out, _ = run("ls", *metrics)
    assert status == 0
    assert [line.split()[:3] for line in out.splitlines()[:3]] == [
        ["run", "state", "batches"], ["dead.run", "dead", "3"], ["living.run", "alive", "1"]
    ]  # fmt: skip

    for flags in (["--run", "living.run"], ["--run", "living.run", "--dry-run", *metrics]):
        status, out, error = run("sweep", *flags)
        assert (status, out) == (2, "")
        assert f"run 'living.run' is alive (process {os.getpid()} of " in error
    assert run("sweep", "--dead", "--dry-run", *metrics)[1] == "run dead.run: 3 batches, 118 KiB would be freed\n"
    assert listed(master)["runs"][0] == found["runs"][0], "nothing was freed so far"
    assert run("sweep", "--dead", *metrics)[1] == "run dead.run: 5 objects freed\n"
    assert run("sweep", "--dead", *metrics)[1] == "nothing to free\n"
    assert run("sweep", "--run", "dead.run")[1] == "run dead.run left nothing\n"
    assert [item["run_id"] for item in listed(master)["runs"]] == ["living.run"]
    with stores.get(stores.put(BATCH)) as batch:
        assert batch["tokens"].shape == (10, 1000)


@pytest.mark.parametrize(
    ("url", "kind"),
    [("http://127.0.0.1:1", "StoreUnavailable"), ("127.0.0.1:1", "ConfigError"), ("RPC", "StoreUnavailable"),
     ("http://127.0.0.1:port", "StoreUnavailable")],
)  # fmt: skip
def test_a_metrics_port_that_does_not_answer_is_named_with_its_flag(url: str, kind: str, master: MasterProcess) -> None:
    url = url.replace("RPC", f"http://{master.address}")
    for command in (["ls"], ["sweep", "--dead"]):
        status, out, error = run(*command, "--metrics-url", url)
        assert (status, out) == (2, "")
        assert error.startswith(f"miles-mooncake: {kind}: ")
        assert "--metrics-url" in error
        assert url in error


def test_the_metrics_port_of_another_master_is_noticed(
    stores: ObjectStore, master: MasterProcess, tmp_path: Path
) -> None:
    with MasterProcess(tmp_path / "other.log") as other:
        command = ["ls", "--master-server-address", other.address, "--metrics-url"]
        status, _, error = run(*command, other.metrics_url)
        assert status == 0, error
        status, _, error = run(*command, master.metrics_url)
        assert status == 2
        assert "it is another master's" in error


@pytest.mark.parametrize("command", [["holder"], ["ls"], ["sweep", "--dead"]])
def test_a_master_that_nobody_names_is_asked_for_by_its_flag(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER")
    assert cli.main(command) == 2
    assert "give --master-server-address HOST:PORT, or set MOONCAKE_MASTER" in capsys.readouterr().err
