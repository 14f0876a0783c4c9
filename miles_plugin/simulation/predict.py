"""What a real run should reach, from what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from miles_plugin.simulation.distributions import Distribution, Empirical
from miles_plugin.simulation.result import Outcome
from miles_plugin.simulation.settings import NO_TIME, Settings
from miles_plugin.simulation.sweep import Plan, repeat
from mooncake_store.errors import ConfigError


@dataclass(frozen=True)
class Measured:
    """A real run.

    Attributes:
        generation_seconds: of samples, each from its slot's taking it to its end, at the load that the run had.
        step_seconds: of training steps as the trainers took them together, with all that a step waits for but samples.
        update_seconds: of weight updates, from the pause of the engines to their going on; none: no time.
        prepare_seconds: the same before the pause, while engines generate.
        settings: of the cluster and the loop, under the names that `Settings` has.
    """

    generation_seconds: Sequence[float]
    step_seconds: Sequence[float]
    update_seconds: Sequence[float] = ()
    prepare_seconds: Sequence[float] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def predict(measured: Measured, plan: Plan | None = None) -> Outcome:
    """Simulate the run, asynchronous and synchronous.

    Raises:
        ConfigError: nothing was measured, or a setting is not allowed.
    """
    return repeat(settings_of(measured), plan or Plan())


def settings_of(measured: Measured) -> Settings:
    """The run as settings: one trainer stands for all, whose step was measured.

    Raises:
        ConfigError: as `predict` does.
    """
    unknown = sorted(set(measured.settings) - _NAMES)
    if unknown:
        raise ConfigError(f"settings: there is no {unknown[0]!r}; allowed: {', '.join(sorted(_NAMES))}")
    return Settings(
        generation=Empirical(tuple(measured.generation_seconds), "generation_seconds"),
        training=Empirical(tuple(measured.step_seconds), "step_seconds"),
        prepare=_empirical(measured.prepare_seconds, "prepare_seconds"),
        update=_empirical(measured.update_seconds, "update_seconds"),
        **{**measured.settings, "trainers": 1},
    )


_NAMES = {field.name for field in fields(Settings)} - {"generation", "training", "update", "prepare"}


def _empirical(seconds: Sequence[float], named: str) -> Distribution:
    return Empirical(tuple(seconds), named) if seconds else NO_TIME
