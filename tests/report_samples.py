"""Reports as a job would have made them, for the tests of what shows them."""

import math
from typing import Any

from miles_plugin.arguments_sources import load_config
from miles_plugin.report.observers import Observers
from miles_plugin.report.record import Arm, Report, ShardRecord, Step, UpdateRecord

MACHINE = {"cpus": 2, "gpus": [], "platform": "Linux", "python": "3.11.7", "versions": {"torch": "2.13.0"}}
NUM_ROLLOUT = 4


def make_update(version: int) -> UpdateRecord:
    seconds = {"prepare": 0.01, "pause": 0.02, "transfer": 0.4, "resume": 0.01, "converge": 0.5}
    return UpdateRecord(version, 1_150_000, 1.0, seconds, ["http://127.0.0.1:1"], [], 0)


def make_step(rollout_id: int, accuracy: float | None = 0.5, **changes: Any) -> Step:
    values: dict[str, Any] = {
        "rollout_id": rollout_id,
        "reward": 0.25,
        "held_out_accuracy": accuracy,
        "loss": -0.0125,
        "clip_fraction": 0.01,
        "grad_norm": 1.5,
        "samples": 1024,
        "tokens": 4096,
        "prompts_digest": f"{rollout_id:032x}",
        "seconds": {"generate": 2.0, "put": 0.03, "get": 0.01, "train": 4.0, "update": 0.5},
        "nbytes": {"put": 330_000, "get": 330_000, "update": 1_150_000},
        "sample_versions": [str(rollout_id)],
        "served_version": rollout_id + 1,
        "shards": [ShardRecord(0, f"run/r/b/{rollout_id}", 512, "a", "a")],
        "requested_version": rollout_id,
        "newest_version": rollout_id,
        "updates": [make_update(rollout_id + 1)],
    }
    return Step(**(values | changes))


def make_report(*flags: str, run_id: str = "run-1") -> Report:
    """A report before its first step."""
    config = load_config(["--num-rollout", str(NUM_ROLLOUT), *flags]).model_dump(mode="json")
    return Report(run_id, config, dict(MACHINE), "/checkpoint")


def make_finished_report(*flags: str) -> Report:
    """Both arms, every rollout done."""
    report = make_report("--reward-control", "both", *flags)
    for name, change in (("real", 0.1), ("shuffled", -0.05)):
        steps = [make_step(index, 0.4 + change * (index + 1)) for index in range(NUM_ROLLOUT)]
        report.arms[name] = Arm(name, 0.4, steps)
    report.status, report.seconds_total = "finished", 100.0
    return report


def make_async_report(*flags: str) -> Report:
    """Of a job that generated beside training."""
    report = make_report("--fully-async", "--max-weight-staleness", "2", *flags)
    report.arms["real"] = Arm(
        "real", 0.4, [make_step(index, buffer=make_buffer(index)) for index in range(NUM_ROLLOUT)]
    )
    return report


def make_buffer(rollout_id: int) -> dict[str, float]:
    """What the buffer says after a rollout: nothing is measured of an empty one."""
    metrics: dict[str, float] = {
        "queue_size": 16 * rollout_id,
        "consumed_groups": 32,
        "recycled_groups": rollout_id,
        "dropped_groups": 0,
        "lost_groups": 0,
        "aborted_groups_filtered": 1,
        "stale_groups_filtered": max(0, rollout_id - 1),
        "consumed_avg_staleness": 0.5 * rollout_id,
        "consumed_max_staleness": min(rollout_id, 2),
        "put_wait_seconds": 64.0 * rollout_id,
        "get_wait_seconds": 1.5,
        "version_steps_back": 0,
    }
    if rollout_id:
        metrics |= {"buffer_avg_staleness": 0.75 * rollout_id, "buffer_max_staleness": rollout_id}
    return {f"rollout/fully_async/{name}": value for name, value in metrics.items()}


def make_reports() -> dict[str, Report]:
    """Reports that anything which shows one must cope with, by what is special about them."""
    one, updated_seldom, not_finite = make_report(), make_report(), make_report()
    one.arms["real"] = Arm("real", 0.3, [make_step(0)])
    updated_seldom.arms["real"] = Arm(
        "real", 0.3, [make_step(i, None, sample_versions=["0", "1"], served_version=None) for i in range(3)]
    )
    broken = {
        "loss": math.nan,
        "reward": math.inf,
        "grad_norm": -math.inf,
        "nbytes": {},
        "sample_versions": ["default"],
    }
    not_finite.arms["real"] = Arm(
        "real", math.nan, [make_step(0, math.nan, **broken), make_step(1, 0.5, seconds={"train": math.nan}, tokens=0)]
    )
    not_finite.status = "stopped: KeyboardInterrupt"
    hostile = make_finished_report("--task", "</script><script>boom()</script>&$x$")
    hostile.arms["</script><script>boom()</script>"] = Arm("</script><script>boom()</script>", 0.4, [make_step(0)])
    hostile.status = "stopped: <b>no</b> $\n'quoted' \N{SNOWMAN}" + "long " * 200
    nothing_buffered = make_report("--fully-async")
    nothing_buffered.arms["real"] = Arm(
        "real",
        0.3,
        [make_step(0, seconds={}, buffer={}), make_step(1, buffer={"rollout/fully_async/put_wait_seconds": math.inf})],
    )
    no_arm_yet = make_report()
    no_step_yet = make_report()
    no_step_yet.arms["real"] = Arm("real", 0.3)
    return {
        "finished": make_finished_report(),
        "no arm yet": no_arm_yet,
        "no step yet": no_step_yet,
        "one step": one,
        "updated seldom": updated_seldom,
        "not finite": not_finite,
        "hostile text": hostile,
        "fully async": make_async_report(),
        "fully async, no step yet": make_report("--fully-async"),
        "fully async, nothing buffered": nothing_buffered,
    }


def play(report: Report, observers: Observers, directory: Any) -> None:
    """Tell `observers` of the run that `report` is the end of, event by event."""
    arms, report.arms = report.arms, {}
    observers.run_started(report, directory)
    observers.message("a part has come up")
    for name, finished in arms.items():
        report.arms[name] = arm = Arm(name, finished.initial_accuracy)
        observers.arm_started(arm, NUM_ROLLOUT)
        for step in finished.steps:
            for phase in ("generate", "train", "update", "evaluate"):
                observers.phase_started(phase)
                if phase == "update":
                    for done in (0, step.nbytes.get("update", 0)):
                        observers.progress(done, step.nbytes.get("update", 0))
            arm.steps.append(step)
            observers.step_finished(report, arm)
    observers.run_finished(report)
