"""A step as metrics for loggers, under the names that miles (radixark/miles, August 2026) logs.

Each prefix has its own step: `rollout/*` and `perf/*` count rollouts, `eval/*` too, `train/*` optimizer steps. What
miles has no name for is ours, under the same prefixes: perf/train_tokens_per_sec, perf/store_*, rollout/samples,
rollout/weight_version/* (requested: when the rollout began; served: after the update; newest: the newest number given
out when the samples were ready, served or not; lag: of the oldest sample behind the newest served when it was trained
on; requested_lag, newest_lag: behind those), perf/update_weights_<phase>_time, with an update also the lags that it
answers, perf/update_weights_{requested,served,newest}_lag, rollout/engines and /engines_left.
"""

from pathlib import Path
from typing import Any

from miles_plugin.report import units
from miles_plugin.report.record import Arm, Report

STEP_KEYS = {"rollout": "rollout/step", "perf": "rollout/step", "train": "train/step", "eval": "eval/step"}

_SECONDS = {
    "generate": "perf/rollout_time",
    "put": "perf/store_put_time",
    "get": "perf/data_preprocess_time",
    "train": "perf/actor_train_time",
    "update": "perf/update_weights_time",
    "evaluate": "eval/duration_seconds",
    "save": "perf/save_model_time",
}
_NBYTES = {"put": "perf/store_put_bytes", "get": "perf/store_get_bytes", "update": "perf/update_weights_wire_bytes"}


def step_metrics(arm: Arm, index: int, config: dict[str, Any]) -> dict[str, float]:
    """Metrics of `arm.steps[index]`, with the step keys among them; a value that was not measured has no key.

    config: the run's settings, as the report holds them.
    """
    step = arm.steps[index]
    rate = units.per_second(step.tokens, step.seconds.get("generate"))
    metrics: dict[str, float | None] = {
        "rollout/step": step.rollout_id,
        "rollout/raw_reward": step.reward,
        "rollout/response_len/mean": step.tokens / step.samples if step.samples else None,
        "rollout/samples": step.samples,
        "rollout/weight_version/min": min((int(v) for v in step.sample_versions if v.isdigit()), default=None),
        "rollout/weight_version/served": step.served_version,
        "rollout/weight_version/requested": step.requested_version,
        "rollout/weight_version/newest": step.newest_version,
        "rollout/weight_version/newest_lag": arm.newest_lag(index),
        "rollout/weight_version/lag": arm.version_lag(index),
        "rollout/weight_version/requested_lag": arm.requested_lag(index),
        "perf/step_time": sum(step.seconds.values()),
        "perf/tokens_per_gpu_per_sec": rate / config["rollout_num_gpus"],
        "perf/train_tokens_per_sec": units.per_second(step.tokens, step.seconds.get("train")),
        # Of the rollout's optimizer steps the last: the losses are means over all of them.
        "train/step": (step.rollout_id + 1) * config["num_steps_per_rollout"] - 1,
        "train/loss": step.loss,
        "train/pg_clipfrac": step.clip_fraction,
        "train/grad_norm": step.grad_norm,
        "eval/step": step.rollout_id,
        f"eval/{held_out_name(config)}": step.held_out_accuracy,
    }
    metrics |= {_SECONDS.get(phase, f"perf/{phase}_time"): value for phase, value in step.seconds.items()}
    metrics |= step.buffer
    if step.updates:
        update = step.updates[-1]
        metrics |= {
            f"perf/update_weights_{phase}_time": sum(each.seconds.get(phase, 0.0) for each in step.updates)
            for phase in update.seconds
        }
        metrics["perf/update_weights_density"] = update.density
        metrics["perf/update_weights_requested_lag"] = arm.requested_lag(index)
        metrics["perf/update_weights_served_lag"] = arm.version_lag(index)
        metrics["perf/update_weights_newest_lag"] = arm.newest_lag(index)
        metrics["rollout/engines"] = len(update.engines)
        metrics["rollout/engines_left"] = len(update.left)
    metrics |= {_NBYTES.get(kind, f"perf/{kind}_bytes"): value for kind, value in step.nbytes.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def held_out_name(config: dict[str, Any]) -> str:
    """What the held-out items are called: the name of their file, or of the task."""
    path = config.get("eval_prompt_data") or config.get("prompt_data")
    return Path(path).stem if path else str(config["task"])


def track_name(report: Report, arm: str) -> str:
    """Where a logger records an arm: "real", and after a resume "real-2".

    A resumed arm is logged anew from its first step, since what the earlier process logged beyond its last checkpoint
    was undone.
    """
    resumes = sum(resume.arm == arm for resume in report.resumed_at)
    return arm if resumes == 0 else f"{arm}-{resumes + 1}"
