"""The report of a run: what each step did, written after every step so that a run that stops early has one too.

`report.json` is strict JSON: a number that is not finite is written as null, and read back as NaN.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from mooncake_store.errors import ConfigError

FORMAT = 3

_CHECKED = ConfigDict(extra="forbid", strict=True)
# A measured number: null stands for one that was not finite.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True)
class ShardRecord:
    """One shard's way: digest (xxh3-128 of its canonical encoding) of what was put, and of what the rank got."""

    __pydantic_config__ = _CHECKED

    rank: int
    key: str
    rows: int
    put_digest: str
    got_digest: str


@dataclass(frozen=True)
class UpdateRecord:
    """One weight update.

    nbytes: sent once, whatever the number of engines. density: share of the model's bytes that travelled. seconds: by
    phase. engines: that confirmed it. left: that failed, and why. proven: tensors that each engine was proven to hold.
    """

    __pydantic_config__ = _CHECKED

    version: int
    nbytes: int
    density: Number
    seconds: dict[str, Number]
    engines: list[str]
    left: list[str]
    proven: int


@dataclass(frozen=True)
class Step:
    """One rollout, the training on it and the weight update after it.

    reward: mean verifier score of the samples. held_out_accuracy: after the update, None where not measured.
    tokens: generated. seconds, nbytes: of generate, put, get, train, update, as far as each has them.
    versions: that made the samples, and that was served after the update (None: there was no update).
    requested_version: the current one when the rollout began (None: there was none yet). newest_version: the newest
    number given out when its samples were ready, served or a hole (None: not noted).
    updates: of weights, in order: the one after the training comes last; one before the rollout brought engines that
    had left the rotation back. buffer: metrics of a fully asynchronous rollout's buffer, under their names.
    prompts_digest: xxh3-128 of the rollout's prompts in order; equal for equal items, whatever was sampled.
    """

    __pydantic_config__ = _CHECKED

    rollout_id: int
    reward: Number
    held_out_accuracy: float | None
    loss: Number
    clip_fraction: Number
    grad_norm: Number
    samples: int
    tokens: int
    prompts_digest: str
    seconds: dict[str, Number]
    nbytes: dict[str, int]
    sample_versions: list[str]
    served_version: int | None
    shards: list[ShardRecord]
    requested_version: int | None = None
    newest_version: int | None = None
    updates: list[UpdateRecord] = field(default_factory=list)
    buffer: dict[str, Number] = field(default_factory=dict)


@dataclass
class Arm:
    """One training from the checkpoint: with the real reward, or with the shuffled control.

    initial_accuracy: of the checkpoint on the held-out items. first_update: before any training.
    """

    __pydantic_config__ = _CHECKED

    reward: str
    initial_accuracy: Number
    steps: list[Step] = field(default_factory=list)
    first_update: UpdateRecord | None = None

    def final_accuracy(self) -> float:
        """Mean of the last three measurements, which moves less with one lucky step than the last alone."""
        measured = [s.held_out_accuracy for s in self.steps if s.held_out_accuracy is not None]
        return sum(measured[-3:]) / len(measured[-3:]) if measured else self.initial_accuracy

    def version_lag(self, index: int) -> int:
        """How many versions behind the newest served one the oldest sample of `steps[index]` was when trained on."""
        made = [int(version) for version in self.steps[index].sample_versions if version.isdigit()]
        served = [step.served_version for step in self.steps[:index] if step.served_version is not None]
        return max(served + made) - min(made) if made else 0

    def requested_lag(self, index: int) -> int:
        """How many versions behind the one that was current when it began the oldest sample of `steps[index]` is."""
        return self._behind(self.steps[index].requested_version, index)

    def newest_lag(self, index: int) -> int:
        """How many numbers behind the newest, which no engine may ever have served, its oldest sample is."""
        return self._behind(self.steps[index].newest_version, index)

    def _behind(self, version: int | None, index: int) -> int:
        made = [int(made) for made in self.steps[index].sample_versions if made.isdigit()]
        return max(0, version - min(made)) if made and version is not None else 0

    def digests_equal(self) -> bool:
        """Whether every rank got what was put for it."""
        return all(s.put_digest == s.got_digest for step in self.steps for s in step.shards)

    def summary(self) -> dict[str, Any]:
        final = self.final_accuracy()
        return {
            "initial_accuracy": self.initial_accuracy,
            "final_accuracy": final,
            "rise": final - self.initial_accuracy,
            "steps": len(self.steps),
            "digests_equal": self.digests_equal(),
        }


@dataclass(frozen=True)
class Resume:
    """The run goes on from a checkpoint that `run_id` saved: `rollout_id` is the first rollout of `arm` after that."""

    __pydantic_config__ = _CHECKED

    run_id: str
    arm: str
    rollout_id: int


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Report:
    """Everything `report.json` holds.

    object_store: the manager's counts of puts, removes and bytes at the end. started_at: ISO 8601, UTC.
    """

    __pydantic_config__ = _CHECKED

    run_id: str
    config: dict[str, Any]
    machine: dict[str, Any]
    checkpoint: str
    arms: dict[str, Arm] = field(default_factory=dict)
    object_store: dict[str, int] = field(default_factory=dict)
    seconds_total: float = 0.0
    status: str = "running"
    started_at: str = field(default_factory=_now)
    resumed_at: list[Resume] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As `report.json` has it, but with numbers that are not finite still in place."""
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "status": self.status,
            "started_at": self.started_at,
            "resumed_at": [asdict(resume) for resume in self.resumed_at],
            "summary": {name: arm.summary() for name, arm in self.arms.items()},
            "machine": self.machine,
            "checkpoint": self.checkpoint,
            "object_store": self.object_store,
            "seconds_total": self.seconds_total,
            "config": self.config,
            "arms": {name: asdict(arm) for name, arm in self.arms.items()},
        }

    @classmethod
    def from_dict(cls, data: Any, source: str = "report") -> "Report":
        """What `to_dict` gave, checked field by field; the summary is computed anew.

        Raises:
            ConfigError: another format, or a field that is missing, unknown or of another type; names `source`.
        """
        found = data.get("format") if isinstance(data, dict) else None
        if found != FORMAT:
            raise ConfigError(
                f"{source}: format {found!r}, this version reads {FORMAT}; read it with the version that wrote it"
            )
        fields = {name: value for name, value in data.items() if name not in ("format", "summary")}
        try:
            return _REPORT.validate_json(json.dumps(finite(fields)))  # strict checks take dataclasses only from JSON
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{source}: {where}: {first['msg']}, found {first['input']!r:.80}; it was changed or is damaged"
            ) from error

    @classmethod
    def read(cls, path: Path) -> "Report":
        """The report in `path`. Raises ConfigError when it cannot be read, see `from_dict`."""
        try:
            return cls.from_dict(json.loads(path.read_text()), str(path))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: {error}; name the directory of a run, which has its report.json") from error

    def write(self, path: Path) -> None:
        """Replace `path` atomically."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(finite(self.to_dict()), indent=1, allow_nan=False) + "\n")
        os.replace(partial, path)


_REPORT = TypeAdapter(Report)


def finite(value: Any) -> Any:
    """`value` with None for every float in it that JSON has no notation for (NaN, infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
