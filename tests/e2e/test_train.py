"""The whole job through its command line, on real Mooncake, Ray, SGLang and torch ranks; too small to learn."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("ray", reason="the extra `train` is not installed")

from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.e2e]
COMMAND = [sys.executable, "-m", "miles_plugin.cli", "train"]
SMALL = [
    "--num-rollout",
    "2",
    "--rollout-batch-size",
    "8",
    "--num-steps-per-rollout",
    "2",
    "--n-samples-per-prompt",
    "4",
    "--held-out-size",
    "16",
]
MARK = "JOB_OF_TEST"
# What a part's process is called, and what the job must say when it dies.
DYING = {
    "a trainer rank dies": ("ray::TrainerActor", "TrainerActor"),
    "the master dies": (r"\S+/mooncake_master --", "mooncake_master ended with status 137"),
    "SGLang dies": ("sglang::scheduler", r"SGLang at http://127\.0\.0\.1:\d+ ended with status"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(build_model(32, 1, seed=0), build_tokenizer(), directory)
    return directory


@pytest.fixture
def marked() -> Iterator[dict[str, str]]:
    """An environment that every process of a job inherits, so that those left over can be found; none may be."""
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}
    yield environment | {MARK: mark}
    # Ray's own agents notice within about a minute that their raylet was killed.
    deadline = time.monotonic() + 90
    while (left := _processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes outlived their job: {left}"


def _processes_with(mark: str) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        except OSError:
            continue
    return found


def _run(
    arguments: list[str], environment: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=280, cwd=cwd)


def _refused_before_anything_starts(arguments: list[str], cwd: Path, environment: dict[str, str]) -> str:
    """Run a job that must not start, in the empty directory `cwd`; return its message."""
    done = _run(arguments, environment, cwd)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not list(cwd.iterdir()), "a job that did not start leaves nothing behind"
    return done.stderr


def _steps(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for arm in report["arms"].values() for step in arm["steps"]]


@pytest.mark.parametrize("backend", ["ray", "mooncake"])
def test_a_short_job_ends_with_a_complete_report(
    backend: str, checkpoint: Path, tmp_path: Path, marked: dict[str, str]
) -> None:
    arguments = [
        "--config", "configs/local.yaml", *SMALL, "--hf-checkpoint", str(checkpoint), "--report", str(tmp_path / "run"),
        "--object-store-backend", backend, "--reward-control", "both" if backend == "mooncake" else "none",
    ]  # fmt: skip
    expected = load_config(arguments)
    done = _run(arguments, marked)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["status"] == "finished"
    assert list(report["arms"]) == (["real", "shuffled"] if backend == "mooncake" else ["real"])
    shards = 2 * len(_steps(report))
    assert report["object_store"]["puts"] == report["object_store"]["removes"] == shards, "acknowledged means removed"
    assert report["object_store"]["bytes_put"] == sum(step["nbytes"]["put"] for step in _steps(report))
    version = 0
    for arm in report["arms"].values():
        # Version `version` is the checkpoint, served before the arm's first rollout; each step serves the next.
        for step in arm["steps"]:
            assert step["sample_versions"] == [str(version)]
            version += 1
            assert step["served_version"] == version
        version += 1
    for step in _steps(report):
        assert [shard["rank"] for shard in step["shards"]] == [0, 1]
        assert all(shard["put_digest"] == shard["got_digest"] for shard in step["shards"])
        assert len({shard["key"] for shard in step["shards"]}) == 2
        assert sum(shard["rows"] for shard in step["shards"]) == step["samples"] == 32
        assert set(step["seconds"]) == {"generate", "put", "get", "train", "update"}
        assert step["nbytes"]["put"] == step["nbytes"]["get"] > 0
        assert step["nbytes"]["update"] > 0
        assert 0 <= step["held_out_accuracy"] <= 1
    assert (tmp_path / "run" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert load_config(["--config", str(tmp_path / "run" / "config.yaml")]) == expected


def test_a_master_that_does_not_answer_ends_the_job_at_once(tmp_path: Path, marked: dict[str, str]) -> None:
    kwargs = '{"protocol":"tcp","master_server_address":"127.0.0.1:1"}'
    arguments = ["--object-store-backend", "mooncake", "--mooncake-store-init-kwargs", kwargs]
    message = _refused_before_anything_starts(arguments, tmp_path, marked)
    assert "127.0.0.1:1" in message
    assert len(message.strip().splitlines()) == 1


def test_a_listener_that_is_no_master_is_found_before_anything_starts(tmp_path: Path, marked: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kwargs = json.dumps({"protocol": "tcp", "master_server_address": f"127.0.0.1:{listener.getsockname()[1]}"})
        arguments = ["--object-store-backend", "mooncake", "--mooncake-store-init-kwargs", kwargs]
        message = _refused_before_anything_starts(arguments, tmp_path, marked)
    assert "does not serve as a Mooncake master" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--num-rolout", "3"], "--num-rollout"),
        (["--rollout-batch-size", "7"], "rollout_batch_size=7"),
        (["--hf-checkpoint", "/nowhere"], "hf_checkpoint=/nowhere"),
        (["--task", "spell_backwards"], "spell_backward"),
        (["--report", "/dev/null/x"], "report=/dev/null/x"),
        (["--object-store-backend", "mooncake", "--mooncake-store-init-kwargs", '{"protocl": "tcp"}'], "protocol"),
    ],
)
def test_a_wrong_setting_is_one_readable_line(
    arguments: list[str], expected: str, tmp_path: Path, marked: dict[str, str]
) -> None:
    message = _refused_before_anything_starts(arguments, tmp_path, marked)
    assert expected in message
    assert len(message.strip().splitlines()) == 1


@pytest.mark.parametrize("how", ["ctrl-c", "terminated", "killed", *DYING])
def test_a_job_that_is_stopped_leaves_a_report_and_no_process(
    how: str, checkpoint: Path, tmp_path: Path, marked: dict[str, str]
) -> None:
    run = tmp_path / "run"
    arguments = ["--config", "configs/local.yaml", *SMALL, "--num-rollout", "1000", "--hf-checkpoint", str(checkpoint)]
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen([*COMMAND, *arguments, "--report", str(run)], env=marked, stdout=output, stderr=output)
    deadline = time.monotonic() + 240
    while "rollout   1" not in (tmp_path / "output").read_text():
        assert job.poll() is None, (tmp_path / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.5)
    if how in DYING:
        parts = [pid for pid, name in _processes_with(marked[MARK]).items() if re.match(DYING[how][0], name)]
        os.kill(parts[-1], signal.SIGKILL)
    else:
        job.send_signal({"ctrl-c": signal.SIGINT, "terminated": signal.SIGTERM, "killed": signal.SIGKILL}[how])
    status = job.wait(timeout=60)
    last_words = (tmp_path / "output").read_text()
    if how in DYING:
        assert status == 1
        assert re.search(DYING[how][1], last_words), last_words
    elif how == "killed":
        assert status == -signal.SIGKILL
    else:
        assert status == 130
        assert "interrupted" in last_words
    assert "Traceback" not in last_words
    report = json.loads((run / "report.json").read_text())
    assert report["status"] == "running" if how == "killed" else report["status"].startswith("stopped")
    assert len(_steps(report)) >= 2


def test_a_report_is_never_overwritten(tmp_path: Path, marked: dict[str, str]) -> None:
    (tmp_path / "report.json").write_text("{}")
    done = _run(["--report", str(tmp_path)], marked)
    assert done.returncode == 2
    assert "holds the report of another run" in done.stderr
    assert (tmp_path / "report.json").read_text() == "{}"
