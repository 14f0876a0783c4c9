"""Weight updates of the whole job: proven, with an engine lost, with engines of others, with a trainer rank lost."""

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from miles_plugin.cli import main
from miles_plugin.engines.launch import EngineSpec, RunningEngine, command, environment, start_engines
from miles_plugin.training.policy import WEIGHT_DTYPE
from miles_plugin.version_log import VersionLog
from miles_plugin.weight_transfer.layout import Layout
from miles_plugin.weight_transfer.transfer import PHASES
from mooncake_store.process import ManagedProcess, free_ports
from tests.e2e.jobs import SMALL, Marked, await_output, read_report, run, running, steps_of
from tests.e2e.test_resume import check_versions

pytestmark = [pytest.mark.integration, pytest.mark.e2e]
MODES = ("broadcast", "p2p", "disk-delta")
# Weights that change also where no answer of a policy so small is right.
CHANGING = ["--lr", "0.003", "--lr-warmup-iters", "0", "--weight-decay", "1"]
TWO_ENGINES = [*SMALL, *CHANGING, "--rollout-num-gpus", "2", "--check-weight-update-equal"]


def updates_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    (arm,) = report["arms"].values()
    return [arm["first_update"], *(update for step in arm["steps"] for update in step["updates"])]


def parameters(checkpoint: Path) -> int:
    """How many tensors an engine of one rank holds."""
    from transformers import AutoConfig

    return len(Layout(AutoConfig.from_pretrained(checkpoint), 1, WEIGHT_DTYPE).parameters)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_update_is_proven_on_every_engine(mode: str, checkpoint: Path, tmp_path: Path, marked: Marked) -> None:
    arguments = [
        *TWO_ENGINES, "--num-rollout", "2", "--hf-checkpoint", str(checkpoint), "--report", str(tmp_path / "run"),
        "--update-weight-transfer-mode", mode, "--update-weight-buffer-size", "64kb",
    ]  # fmt: skip
    done = run(arguments, marked)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout
    report = read_report(tmp_path / "run")
    updates = updates_of(report)
    assert [update["version"] for update in updates] == [0, 1, 2]
    if mode == "disk-delta":
        of_all = sum(tensor.nbytes for tensor in load_file(checkpoint / "model.safetensors").values())
        assert updates[0]["density"] == 0, "engines start from what the trainer does"
        assert all(0 < update["density"] < 1 for update in updates[1:])
        assert all(update["density"] == update["nbytes"] / of_all for update in updates)
    else:
        assert len({update["nbytes"] for update in updates}) == 1
        assert all((update["density"], update["nbytes"] > 0) == (1.0, True) for update in updates)
    for update in updates:
        assert set(update["seconds"]) == set(PHASES)
        assert all(update["seconds"][phase] > 0 for phase in ("prepare", "transfer", "verify", "converge"))
        assert (len(set(update["engines"])), update["left"]) == (2, [])
        assert update["proven"] == parameters(checkpoint)
    for step, update in zip(steps_of(report), updates[1:], strict=True):
        assert step["nbytes"]["update"] == update["nbytes"]
        assert step["requested_version"] == step["served_version"] - 1
        assert all(shard["put_digest"] == shard["got_digest"] for shard in step["shards"])
    check_versions(report)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_job_goes_on_without_an_engine_that_is_killed(
    mode: str, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    output, log = tmp_path / "output", tmp_path / "run" / "logs" / "sglang-1.log"
    arguments = [
        *TWO_ENGINES, "--num-rollout", "20", "--hf-checkpoint", str(checkpoint), "--report", str(tmp_path / "run"),
        "--update-weight-transfer-mode", mode,
    ]  # fmt: skip
    with running(arguments, marked, output) as job:
        await_output(job, output, "rollout   1")
        # Engines are started in order; the second one's scheduler.
        pids = sorted(pid for pid, line in marked.processes().items() if line.startswith("sglang::scheduler"))
        os.kill(pids[-1], signal.SIGKILL)
        assert job.wait(timeout=240) == 0, output.read_text()
    said = output.read_text()
    left = re.search(r"warning: an engine left the rotation: (http://127\.0\.0\.1:\d+) failed in [\w ]+: (.*)", said)
    assert left, said
    assert re.fullmatch(rf"SGLang at {left[1]} ended with status \d+; its log (\S+)", left[2]), left[2]
    assert (said.count("left the rotation"), "Traceback" in said) == (1, False)
    assert Path(left[2].split()[-1]).is_file()
    assert log.is_file()
    report = read_report(tmp_path / "run")
    assert (report["status"], len(steps_of(report))) == ("finished", 20)
    updates = updates_of(report)
    assert [len(update["engines"]) for update in (updates[0], updates[-1])] == [2, 1]
    assert left[1] in updates[0]["engines"]
    assert updates[-1]["left"][0].startswith(f"{left[1]} failed in ")
    assert all(update["proven"] == parameters(checkpoint) for update in updates)
    check_versions(report)


class Servers:
    """Two SGLang servers that a job attaches to and does not end."""

    def __init__(self, checkpoint: Path, logs: Path) -> None:
        self._specs = [
            EngineSpec(checkpoint, "127.0.0.1", (), index, logs / f"{index}.log", p2p_protocol="tcp")
            for index in range(2)
        ]
        self._running = start_engines(self._specs)

    @property
    def addresses(self) -> list[str]:
        return [each.engine.url.removeprefix("http://") for each in self._running]

    def kill(self, index: int) -> None:
        self._running[index].process.stop()

    def restart(self, index: int) -> None:
        """At the same address."""
        spec, before = self._specs[index], self._running[index]
        ports = int(before.engine.url.rpartition(":")[2]), *free_ports(2, spec.host)
        process = ManagedProcess("sglang", command(spec, ports), spec.log, environment(spec))
        self._running[index] = RunningEngine(before.engine, process, spec.ranks)

    def versions(self) -> list[str]:
        return [each.engine.weight_version() for each in self._running]

    def stop(self) -> None:
        for each in self._running:
            each.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_runs_by_itself_may_join_late_and_be_restarted_and_outlives_the_job(
    mode: str, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    output = tmp_path / "output"
    servers = Servers(checkpoint, tmp_path)
    arguments = [
        *SMALL, *CHANGING, "--check-weight-update-equal", "--num-rollout", "100000", "--hf-checkpoint", str(checkpoint),
        "--report", str(tmp_path / "run"), "--update-weight-transfer-mode", mode, "--rollout-external",
        "--rollout-external-engine-addrs", servers.addresses[0],
    ]  # fmt: skip
    try:
        url, late = (f"http://{address}" for address in servers.addresses)
        with running(arguments, marked, output) as job:
            await_output(job, output, "rollout   1")
            assert main(["add-engine", str(tmp_path / "run"), "127.0.0.1:1", servers.addresses[1]]) == 0
            await_output(job, output, "warning: add-engine=127.0.0.1:1: the engine cannot be used: ")
            await_output(job, output, f"engine {late} is in rotation, with version ")
            servers.kill(0)
            await_output(job, output, f"warning: an engine left the rotation: {url} failed in ")
            servers.restart(0)
            await_output(job, output, f"engine {url} is back in rotation, with version ")
            went_on = rollouts(output)
            await_condition(lambda: rollouts(output) > went_on + 2)
            job.send_signal(signal.SIGINT)
            assert job.wait(timeout=60) == 130, output.read_text()
        report = read_report(tmp_path / "run")
        engines = [len(update["engines"]) for update in updates_of(report)]
        numbers = [number for number, _ in itertools.groupby(engines)]
        assert numbers == [1, 2, 1, 2], "joined, killed, back"
        check_versions(report)
        assert min(map(int, servers.versions())) >= steps_of(report)[-1]["served_version"], "they run on"
    finally:
        servers.stop()


def rollouts(output: Path) -> int:
    return len(re.findall(r"^rollout +\d+ ", output.read_text(), re.MULTILINE))


def await_condition(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "rank"), [("broadcast", 1), ("p2p", 0), ("disk-delta", 1)])
def test_versions_go_on_above_after_a_trainer_rank_died_in_an_update(
    mode: str, rank: int, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    saved, output = tmp_path / "saved", tmp_path / "output"
    arguments = [
        *SMALL, *CHANGING, "--hf-checkpoint", str(checkpoint), "--save", str(saved), "--load", str(saved),
        "--save-interval", "1", "--update-weight-transfer-mode", mode,
    ]  # fmt: skip
    versions = VersionLog(saved / "versions")

    def is_updating() -> bool:
        record = versions.last().record
        return record.newest >= 2 and record.newest > (record.committed or 0)

    first = [*arguments, "--num-rollout", "100000", "--report", str(tmp_path / "first")]
    with running(first, marked, output) as job:
        await_output(job, output, "iter_0000001")
        pids = trainers(marked, tmp_path / "first" / "logs")
        await_condition(is_updating)
        os.kill(pids[rank], signal.SIGKILL)
        assert job.wait(timeout=90) == 1, output.read_text()
        assert not marked.processes(), "nothing is left when the command returns"
    said = output.read_text()
    assert re.search(rf"trainer rank {rank} ended; its log \S+trainer-{rank}\.log ends", said), said
    assert "Traceback" not in said
    used = versions.last().record.newest
    number = int((saved / "latest_checkpointed_iteration.txt").read_text())
    second = [*arguments, "--num-rollout", str(number + 2), "--report", str(tmp_path / "second")]
    done = run([*second, "--log-format", "json"], marked)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["rollout_id"] for event in events if event["event"] == "step_finished"] == [number, number + 1]
    after = read_report(tmp_path / "second")
    check_versions(after)
    assert min(map(int, steps_of(after)[number]["sample_versions"])) > used, "the number of the update is a hole"


def trainers(marked: Marked, logs: Path) -> list[int]:
    """Pids of the trainer ranks, by which log each writes to."""
    pids = [pid for pid, line in marked.processes().items() if line.startswith("ray::TrainerActor")]
    found = {os.readlink(f"/proc/{pid}/fd/1"): pid for pid in pids}
    return [found[str(logs / f"trainer-{rank}.log")] for rank in range(len(pids))]
