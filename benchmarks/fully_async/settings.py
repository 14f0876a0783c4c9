"""What a run of asynchronous beside synchronous training was asked for, checked before anything is started."""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_plugin.simulation import from_report
from miles_plugin.simulation.distributions import Distribution, parse
from mooncake_store.errors import ConfigError

SYNCHRONOUS = "synchronous"
_USUAL: dict[str, Any] = {
    "generation_seconds": "lognormal:0.4,0.8,3.2",
    "step_seconds": 1.2,
    "update_seconds": 0.1,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "steps": 8,
    "warmup_steps": 3,
    "repeats": 3,
}
_QUICK: dict[str, Any] = {
    "generation_seconds": "lognormal:0.05,0.8,0.4",
    "step_seconds": 0.1,
    "update_seconds": 0.01,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "steps": 3,
    "warmup_steps": 1,
    "repeats": 1,
}
_LEAST = {
    "rollout_batch_size": 1,
    "n_samples_per_prompt": 2,
    "steps": 1,
    "warmup_steps": 0,
    "repeats": 1,
    "seed": 0,
}


@dataclass(frozen=True)
class Settings:
    """One run. Names are those of the flags, which are the job's where it has them.

    Attributes:
        generation: what a sample's seconds are drawn from; generation_seconds: in words.
        step_seconds, update_seconds: that training, and the weights on their way, take.
        bounds: `max_weight_staleness` of the asynchronous turns.
        capacity_factor: `async_data_buffer_capacity_factor`.
        steps, warmup_steps: of a turn. repeats: rounds.
    """

    run: str
    generation: Distribution
    generation_seconds: str
    step_seconds: float
    update_seconds: float
    rollout_batch_size: int
    n_samples_per_prompt: int
    bounds: tuple[int | None, ...]
    capacity_factor: float
    steps: int
    warmup_steps: int
    repeats: int
    seed: int
    output: Path

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def modes(self) -> dict[str, int | None]:
        """Who takes turns: the bound of each name; the synchronous one has none."""
        return {SYNCHRONOUS: None} | {asynchronous(bound): bound for bound in self.bounds}

    def load(self) -> dict[str, Any]:
        """What two runs must have in common to be compared, and all that the simulation is told."""
        names = ("rollout_batch_size", "n_samples_per_prompt", "capacity_factor", "steps", "warmup_steps", "seed")
        return {
            "what": "async",
            "generation": self.generation_seconds,
            "step": self.step_seconds,
            "update": self.update_seconds,
            "bounds": list(self.bounds),
            **{name: getattr(self, name) for name in names},
        }


def asynchronous(bound: int | None) -> str:
    """What a mode is called."""
    return "asynchronous, no bound" if bound is None else f"asynchronous, bound {bound}"


def resolve(arguments: argparse.Namespace) -> Settings:
    """Check the flags.

    Raises:
        ConfigError: a value that cannot be used, with what is allowed.
    """
    usual = _QUICK if arguments.quick else _USUAL
    found = {name: value if (given := getattr(arguments, name)) is None else given for name, value in usual.items()}
    found |= {"seed": arguments.seed, "capacity_factor": arguments.async_data_buffer_capacity_factor}
    _check(found)
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    return Settings(
        run=run,
        generation=parse(found["generation_seconds"], "--generation-seconds", from_report.samples),
        bounds=tuple(dict.fromkeys(map(_bound, arguments.max_weight_staleness))),
        output=arguments.output or Path("runs") / f"async-{run}",
        **found,
    )


def _check(found: Mapping[str, Any]) -> None:
    for name, least in _LEAST.items():
        if found[name] < least:
            raise ConfigError(f"{_flag(name)} {found[name]}: allowed is a whole number of at least {least}")
    for name in ("step_seconds", "update_seconds"):
        if not 0 <= found[name] <= 600:
            raise ConfigError(f"{_flag(name)} {found[name]}: allowed is 0 to 600")
    factor, size = found["capacity_factor"], found["rollout_batch_size"]
    if not 1 <= factor * size < float("inf"):
        raise ConfigError(
            f"--async-data-buffer-capacity-factor {factor}: the buffer has no place for a group; allowed is a finite "
            f"factor of --rollout-batch-size {size} that gives at least 1"
        )


def _bound(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdigit():
        raise ConfigError(f"--max-weight-staleness {text}: allowed are whole numbers of at least 0, and none")
    return int(text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
