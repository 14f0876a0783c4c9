"""A job that was stopped goes on: the same items, versions that only rise, the curve in the same band."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.e2e.jobs import COMMAND, SMALL, Marked, await_output, read_report, run, running, steps_of

pytestmark = [pytest.mark.integration, pytest.mark.e2e]
# Learns: from the warm-started checkpoint, as in the demo.
LEARNING = ["--config", "configs/local.yaml", "--reward-control", "none", "--num-rollout", "12"]


def without_save(step: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint cannot hold the time that its own saving took."""
    return step | {"seconds": {phase: value for phase, value in step["seconds"].items() if phase != "save"}}


def check_versions(report: dict[str, Any]) -> None:
    """Every sample was made by the version served before it, and no number was served twice."""
    served = [step["served_version"] for step in steps_of(report)]
    assert served == sorted(set(served))
    for step in steps_of(report):
        assert all(int(version) < step["served_version"] for version in step["sample_versions"])


@pytest.mark.slow
def test_an_interrupted_job_goes_on_where_it_saved(checkpoint: Path, tmp_path: Path, marked: Marked) -> None:
    saved, output = tmp_path / "saved", tmp_path / "output"
    arguments = [
        *SMALL, "--hf-checkpoint", str(checkpoint), "--save", str(saved), "--load", str(saved), "--save-interval", "2"
    ]  # fmt: skip
    first = [*arguments, "--num-rollout", "100000", "--report", str(tmp_path / "first")]
    # On a terminal: with the live display, and Ctrl-C as the terminal sends it, to the whole foreground group.
    with output.open("wb") as log:
        terminal = pexpect.spawn(
            COMMAND[0], [*COMMAND[1:], *first], env=marked.environment, logfile=log, dimensions=(40, 120), timeout=240
        )
        terminal.expect(r"saved \S+iter_0000002")
        terminal.sendintr()
        terminal.expect(pexpect.EOF, timeout=60)
        terminal.close()
    assert terminal.exitstatus == 130
    assert not marked.processes(), "one Ctrl-C ends every process before the command returns"
    shown = output.read_text()
    assert "Traceback" not in shown
    assert "held-out" in shown
    assert shown.rstrip().endswith("interrupted; everything it started has been stopped")
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0, "the cursor is shown again"

    before = read_report(tmp_path / "first")
    number = int((saved / "latest_checkpointed_iteration.txt").read_text())
    second = [*arguments, "--num-rollout", str(number + 2), "--report", str(tmp_path / "second")]
    done = run([*second, "--log-format", "json"], marked)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["rollout_id"] for event in events if event["event"] == "step_finished"] == [number, number + 1]
    assert [event["event"] for event in events[:: len(events) - 1]] == ["run_started", "run_finished"]
    after = read_report(tmp_path / "second")
    assert after["resumed_at"] == [{"run_id": before["run_id"], "arm": "real", "rollout_id": number}]
    assert [step["rollout_id"] for step in steps_of(after)] == list(range(number + 2))
    assert list(map(without_save, steps_of(after)[:number])) == list(map(without_save, steps_of(before)[:number]))
    check_versions(after)
    assert min(map(int, steps_of(after)[number]["sample_versions"])) > steps_of(before)[-1]["served_version"]


@pytest.mark.slow
def test_a_job_killed_in_its_second_arm_does_not_repeat_the_first(
    checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    saved, output = tmp_path / "saved", tmp_path / "output"
    arguments = [
        *SMALL, "--hf-checkpoint", str(checkpoint), "--save", str(saved), "--load", str(saved), "--save-interval", "1",
        "--reward-control", "both", "--num-rollout", "3",
    ]  # fmt: skip
    with running([*arguments, "--report", str(tmp_path / "first")], marked, output) as job:
        await_output(job, output, "iter_0000004")  # the first rollout of the second arm
        job.kill()
    done = run(
        [*arguments, "--report", str(tmp_path / "second"), "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1"],
        marked,
    )
    assert done.returncode == 0, done.stderr
    before, after = read_report(tmp_path / "first"), read_report(tmp_path / "second")
    assert {name: len(arm["steps"]) for name, arm in after["arms"].items()} == {"real": 3, "shuffled": 3}
    kept, done_before = after["arms"]["real"]["steps"], before["arms"]["real"]["steps"]
    assert list(map(without_save, kept)) == list(map(without_save, done_before))
    assert [resume["arm"] for resume in after["resumed_at"]] == ["shuffled"]
    check_versions(after)
    for real, shuffled in zip(after["arms"]["real"]["steps"], after["arms"]["shuffled"]["steps"], strict=True):
        assert real["prompts_digest"] == shuffled["prompts_digest"], "the control has the same items"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_job_goes_on_with_the_same_items_and_learns_as_well(tmp_path: Path, marked: Marked) -> None:
    whole = run([*LEARNING, "--report", str(tmp_path / "whole")], marked)
    assert whole.returncode == 0, whole.stderr
    arguments = [*LEARNING, "--save", str(tmp_path / "saved"), "--save-interval", "3"]
    output = tmp_path / "output"
    with running([*arguments, "--report", str(tmp_path / "killed")], marked, output) as job:
        await_output(job, output, "rollout   3")
        delay = random.uniform(0, 8)  # into another save, an update, a rollout
        time.sleep(delay)
        job.kill()
        job.wait()
    resumed = run([*arguments, "--load", str(tmp_path / "saved"), "--report", str(tmp_path / "resumed")], marked)
    assert resumed.returncode == 0, f"killed after {delay:.2f} s: {resumed.stderr}"
    expected, found = read_report(tmp_path / "whole"), read_report(tmp_path / "resumed")
    assert [s["prompts_digest"] for s in steps_of(found)] == [s["prompts_digest"] for s in steps_of(expected)]
    assert len({step["prompts_digest"] for step in steps_of(found)}) == 12
    check_versions(found)
    rises = [report["summary"]["real"]["rise"] for report in (expected, found)]
    assert min(rises) > 0.05, rises
    assert abs(rises[0] - rises[1]) < 0.15, rises
