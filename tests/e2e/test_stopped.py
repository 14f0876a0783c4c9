"""Jobs that are stopped, or lose a part: the right status, the part named, no process left."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mooncake_store.addresses import unreachable
from mooncake_store.master import find_master
from mooncake_store.process import free_ports
from tests.e2e.jobs import SMALL, Marked, await_output, read_report, running, steps_of

pytestmark = [pytest.mark.integration, pytest.mark.e2e, pytest.mark.slow]
RAYLET = r"\S+/raylet/raylet "
# What a part's process is called, which of several (by pid), and what the job must say when it dies.
DYING = {
    "a trainer rank": ("ray::TrainerActor", -1, r"trainer rank \d ended; its log (\S+trainer-\d\.log) ends"),
    "the manager": ("ray::RolloutManagerActor", 0, r"the rollout manager ended; its log (\S+manager\.log) ends"),
    "SGLang": ("sglang::scheduler", 0, r"SGLang at http://127\.0\.0\.1:\d+ ended with .*its log (\S+sglang-0\.log)"),
    "the master": (r"\S+/mooncake_master --", 0, r"mooncake_master ended with status 137; last lines of (\S+\.log)"),
    "the holder": (
        r"\S+ -m mooncake_store\.holder",
        0,
        r"segment holder ended with status 137; last lines of (\S+\.log)",
    ),
    "the rollout node": (RAYLET, 0, r"raylet of the rollout node ended with status 137; its log (\S+raylet\S*\.out)"),
    "a trainer node": (RAYLET, -1, r"raylet of the trainer node 0 ended with status 137; its log (\S+raylet\S*\.out)"),
    "Ray's GCS": (r"\S+/gcs_server ", 0, r"gcs_server of the rollout node ended with status 137; its log (\S+\.out)"),
}


def small_job(checkpoint: Path, run: Path) -> list[str]:
    return [*SMALL, "--num-rollout", "100000", "--hf-checkpoint", str(checkpoint), "--report", str(run)]


@pytest.mark.parametrize("part", DYING)
def test_a_part_that_dies_ends_the_job_and_is_named_with_its_log(
    part: str, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    pattern, which, message = DYING[part]
    with running(small_job(checkpoint, run), marked, output) as job:
        await_output(job, output, "rollout   1")
        pids = sorted(pid for pid, command in marked.processes().items() if re.match(pattern, command))
        os.kill(pids[which], signal.SIGKILL)
        assert job.wait(timeout=60) == 1
    last_words = output.read_text()
    named = re.search(message, last_words)
    assert named, last_words
    assert Path(named[1]).is_file()
    assert "Traceback" not in last_words
    report = read_report(run)
    assert report["status"].startswith("stopped")
    assert len(steps_of(report)) >= 2


@contextmanager
def master_at(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A mooncake_master that the job did not start, at an address of its own; killed at exit."""
    (metrics,) = free_ports(1)
    ports = {"rpc_address": "127.0.0.1", "rpc_port": port, "metrics_host": "127.0.0.1", "metrics_port": metrics}
    with log.open("ab") as file:
        master = subprocess.Popen(
            [find_master(), *(f"--{name}={value}" for name, value in ports.items())], stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + 30
        while unreachable(f"127.0.0.1:{port}", timeout=1.0) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield master
    finally:
        master.kill()
        master.wait()


@pytest.mark.parametrize("away", [0, 6])
def test_a_job_goes_on_when_a_master_that_is_not_its_own_is_killed_and_restarted(
    away: int, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    (port,) = free_ports(1)
    store = {"master_server_address": f"127.0.0.1:{port}"}
    arguments = [
        *small_job(checkpoint, run), "--num-rollout", "20", "--mooncake-store-init-kwargs", json.dumps(store)
    ]  # fmt: skip
    with ExitStack() as stack:
        first = stack.enter_context(master_at(port, tmp_path / "first.log"))
        job = stack.enter_context(running(arguments, marked, output))
        await_output(job, output, "rollout   1")
        first.kill()
        first.wait()
        time.sleep(away)  # seconds for the job to meet a master that does not answer
        stack.enter_context(master_at(port, tmp_path / "second.log"))
        assert job.wait(timeout=150) == 0, output.read_text()
    report = read_report(run)
    assert report["status"] == "finished"
    assert len(steps_of(report)) == 20
    assert report["object_store"]["puts"] == report["object_store"]["removes"] == 20
    assert "it was restarted" in (run / "logs" / "segment-holder.log").read_text()


@pytest.mark.parametrize("how", ["ctrl-c twice", "killed"])
def test_a_job_that_is_stopped_at_once_leaves_a_report_and_no_process(
    how: str, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    with running(small_job(checkpoint, run), marked, output) as job:
        await_output(job, output, "rollout   1")
        if how == "ctrl-c twice":
            job.send_signal(signal.SIGINT)
            await_output(job, output, "once more ends everything at once")
            job.send_signal(signal.SIGINT)
            assert job.wait(timeout=60) == 130
            assert not marked.processes(), "at once: nothing is left when the command returns"
        else:
            job.kill()
            assert job.wait(timeout=60) == -signal.SIGKILL
    assert "Traceback" not in output.read_text()
    report = read_report(run)
    assert report["status"] == "running"
    assert len(steps_of(report)) >= 2


@pytest.mark.parametrize("phase", ["generate", "train", "update"])
def test_a_job_that_is_told_to_end_leaves_a_report_no_process_and_no_shared_memory(
    phase: str, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    """In the midst of whatever it does, and without waiting for the end of that."""
    run, output = tmp_path / "run", tmp_path / "output"
    with running([*small_job(checkpoint, run), "--log-format", "json"], marked, output) as job:
        await_output(job, output, f'"rollout_id": 2, "phase": "{phase}"')
        shared = marked.shared_memory()
        assert shared, "SGLang has some"
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=20) == 130
        assert not marked.processes()
        assert not [path for path in shared if path.exists()]
    assert "interrupted" in output.read_text()
    assert "Traceback" not in output.read_text()
    assert "SIGTERM received" not in output.read_text(), "Ray would dump its stacks"
    report = read_report(run)
    assert report["status"] == "stopped: interrupted"
    assert len(steps_of(report)) >= 2


@pytest.mark.parametrize("words", ["Ray: a rollout node", "starting the trainers"])
def test_ctrl_c_while_the_parts_start(words: str, checkpoint: Path, tmp_path: Path, marked: Marked) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    with running(small_job(checkpoint, run), marked, output) as job:
        await_output(job, output, words)
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=60) == 130
        assert not marked.processes()
    assert "Traceback" not in output.read_text()
