"""Repetitions of a setting, and settings in every combination of several values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from miles_plugin.simulation.loop import simulate, whole_intervals
from miles_plugin.simulation.result import Outcome, Run
from miles_plugin.simulation.settings import Settings
from mooncake_store.errors import ConfigError

# What may be given several values, and what it is called in tables and on axes.
SWEPT = {
    "engines": "engines",
    "trainers": "trainers",
    "max_weight_staleness": "staleness\nbound",
    "update_weights_interval": "update\ninterval",
    "async_data_buffer_capacity_factor": "buffer\ncapacity",
}
# What a synchronous run does not look at.
_ASYNCHRONOUS_ONLY: Mapping[str, Any] = {
    "max_weight_staleness": None,
    "async_unused_samples_handler": "drop",
    "async_data_buffer_capacity_factor": 1.0,
    "async_max_concurrent_samples": None,
    "rollout_submission_granularity": "sample",
    "pause_generation_mode": "retract",
}
Record = Callable[[str, int, Run], None]


@dataclass(frozen=True)
class Plan:
    """How often and how long. Repetition r of any setting draws from the seed (seed, r).

    Raises:
        ConfigError: a number that is not allowed.
    """

    repetitions: int = 5
    steps: int = 100
    warmup: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("repetitions", 1), ("steps", 1), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}; allowed: {least} or more")


@dataclass(frozen=True)
class Point:
    """One combination: the values of what is swept, and all settings."""

    values: Mapping[str, Any]
    settings: Settings


def points(settings: Settings, swept: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every combination, the last name's values changing first.

    Raises:
        ConfigError: a value that is not allowed.
    """
    combinations = (dict(zip(swept, values, strict=True)) for values in product(*swept.values()))
    return [Point(values, replace(settings, **values)) for values in combinations]


class Sweep:
    """Runs points. A synchronous run that several of them share is made once.

    Args:
        on_step: called after every step of every run.
    """

    def __init__(self, plan: Plan, on_step: Callable[[], None] = lambda: None) -> None:
        self._plan, self._on_step = plan, on_step
        self._synchronous: dict[tuple[Settings, int], Run] = {}

    def outcome(self, settings: Settings, record: Record) -> Outcome:
        """Run the repetitions.

        Args:
            record: told of every run as soon as it is done: "async" or "sync", repetition, what was measured.
        """
        asynchronous, synchronous = [], []
        for repetition in range(self._plan.repetitions):
            asynchronous.append(self._run(settings, repetition, False))
            record("async", repetition, asynchronous[-1])
            key = _synchronous(settings), repetition
            if key not in self._synchronous:
                self._synchronous[key] = self._run(*key, True)
            synchronous.append(self._synchronous[key])
            record("sync", repetition, synchronous[-1])
        return Outcome(asynchronous, synchronous)

    def steps(self, all_settings: Sequence[Settings]) -> int:
        """How many steps `outcome` will take for all of these."""
        runs = [*all_settings, *set(map(_synchronous, all_settings))]
        return self._plan.repetitions * sum(map(self._steps_of, runs))

    def _steps_of(self, settings: Settings) -> int:
        return sum(whole_intervals(settings, self._plan.steps, self._plan.warmup))

    def _run(self, settings: Settings, repetition: int, synchronous: bool) -> Run:
        plan = self._plan
        return simulate(settings, (plan.seed, repetition), plan.steps, plan.warmup, synchronous, self._on_step)


def _synchronous(settings: Settings) -> Settings:
    return replace(settings, **_ASYNCHRONOUS_ONLY)


def repeat(settings: Settings, plan: Plan) -> Outcome:
    """One setting by itself."""
    return Sweep(plan).outcome(settings, _nowhere)


def _nowhere(_mode: str, _repetition: int, _run: Run) -> None:
    pass
