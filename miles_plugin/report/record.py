"""The report of a run: what each step did, written after every step so that a run that stops early has one too."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class ShardRecord:
    """One shard's way: digest (xxh3-128 of its canonical encoding) of what was put, and of what the rank got."""

    rank: int
    key: str
    rows: int
    put_digest: str
    got_digest: str


@dataclass(frozen=True)
class Step:
    """One rollout, the training on it and the weight update after it.

    reward: mean verifier score of the samples. held_out_accuracy: after the update, None where not measured.
    seconds, nbytes: of generate, put, get, train, update, as far as each has them.
    versions: that made the samples, and that was served after the update.
    prompts_digest: xxh3-128 of the rollout's prompts in order; equal for equal items, whatever was sampled.
    """

    rollout_id: int
    reward: float
    held_out_accuracy: float | None
    loss: float
    clip_fraction: float
    grad_norm: float
    samples: int
    tokens: int
    prompts_digest: str
    seconds: dict[str, float]
    nbytes: dict[str, int]
    sample_versions: list[str]
    served_version: int | None
    shards: list[ShardRecord]


@dataclass
class Arm:
    """One training from the checkpoint: with the real reward, or with the shuffled control.

    initial_accuracy: of the checkpoint on the held-out items.
    """

    reward: str
    initial_accuracy: float
    steps: list[Step] = field(default_factory=list)

    def final_accuracy(self) -> float:
        """Mean of the last three measurements, which moves less with one lucky step than the last alone."""
        measured = [s.held_out_accuracy for s in self.steps if s.held_out_accuracy is not None]
        return sum(measured[-3:]) / len(measured[-3:]) if measured else self.initial_accuracy

    def summary(self) -> dict[str, Any]:
        final = self.final_accuracy()
        return {
            "initial_accuracy": self.initial_accuracy,
            "final_accuracy": final,
            "rise": final - self.initial_accuracy,
            "steps": len(self.steps),
            "digests_equal": all(s.put_digest == s.got_digest for step in self.steps for s in step.shards),
        }


@dataclass
class Report:
    """Everything `report.json` holds.

    object_store: the manager's counts of puts, removes and bytes at the end. resumed_at: run_id, arm and rollouts_done
    of each checkpoint that the run went on from.
    """

    run_id: str
    config: dict[str, Any]
    machine: dict[str, Any]
    checkpoint: str
    arms: dict[str, Arm] = field(default_factory=dict)
    object_store: dict[str, int] = field(default_factory=dict)
    seconds_total: float = 0.0
    status: str = "running"
    resumed_at: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "status": self.status,
            "summary": {name: arm.summary() for name, arm in self.arms.items()},
            "machine": self.machine,
            "checkpoint": self.checkpoint,
            "object_store": self.object_store,
            "seconds_total": self.seconds_total,
            "resumed_at": self.resumed_at,
            "config": self.config,
            "arms": {name: asdict(arm) for name, arm in self.arms.items()},
        }

    @classmethod
    def from_dict(cls, record: Any) -> "Report":
        arms = {
            name: Arm(
                arm["reward"],
                arm["initial_accuracy"],
                [
                    Step(**{**step, "shards": [ShardRecord(**shard) for shard in step["shards"]]})
                    for step in arm["steps"]
                ],
            )
            for name, arm in record["arms"].items()
        }
        return cls(
            record["run_id"],
            record["config"],
            record["machine"],
            record["checkpoint"],
            arms,
            record["object_store"],
            record["seconds_total"],
            record["status"],
            record["resumed_at"],
        )

    def write(self, path: Path) -> None:
        """Replace `path` atomically."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        os.replace(partial, path)
