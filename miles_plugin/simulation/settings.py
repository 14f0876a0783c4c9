"""What is simulated: the cluster, the times and the loop's settings, under the names that miles and `train` have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from miles_plugin.simulation.distributions import Distribution, Fixed
from mooncake_store.errors import ConfigError

# `wait` is no mode of a job: engines take nothing new and end what runs before the update, for comparison.
PAUSE_MODES = ("retract", "in_place", "abort", "wait")
HANDLERS = ("drop", "retry")
GRANULARITIES = ("sample", "group")
NO_TIME = Fixed(0.0)


@dataclass(frozen=True)
class Settings:
    """One cluster and one way to run it.

    Attributes:
        engines, slots: engines, and the samples that each generates at a time. All slots share one queue.
        generation: seconds of a sample in its slot, at the load that the slots make.
        training: seconds that one trainer would take for a rollout batch. `trainers` share it evenly and wait for the
            slowest of them.
        prepare: seconds of a weight update before its pause: trainers wait, engines generate.
        update: seconds of its pause: trainers wait, engines generate nothing.
        rollout_batch_size: groups of a step.
        n_samples_per_prompt: samples of a group.
        update_weights_interval: steps between updates.
        max_weight_staleness: of a group when it is taken for training; None: no bound.
        async_unused_samples_handler: what becomes of a group beyond that: "drop", or "retry" its prompt.
        async_data_buffer_capacity_factor: finished groups that the buffer holds, in rollout batches. When it is full
            nothing new is submitted.
        async_max_concurrent_samples: submitted and not finished; None: a rollout batch.
        rollout_submission_granularity: whether a group follows when as many "sample"s have finished, or a "group" has.
        pause_generation_mode: what an update does to running samples: "retract" and "in_place", they go on; "abort",
            they begin anew; "wait", it begins when they have ended.

    Raises:
        ConfigError: a value that is not allowed.
    """

    generation: Distribution
    training: Distribution
    update: Distribution = NO_TIME
    prepare: Distribution = NO_TIME
    engines: int = 1
    slots: int = 64
    trainers: int = 1
    rollout_batch_size: int = 32
    n_samples_per_prompt: int = 8
    update_weights_interval: int = 1
    max_weight_staleness: int | None = None
    async_unused_samples_handler: str = "drop"
    async_data_buffer_capacity_factor: float = 2.0
    async_max_concurrent_samples: int | None = None
    rollout_submission_granularity: str = "sample"
    pause_generation_mode: str = "retract"

    def __post_init__(self) -> None:
        counts = ("engines", "slots", "trainers", "rollout_batch_size", "n_samples_per_prompt")
        for name in (*counts, "update_weights_interval"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        self._check("max_weight_staleness", (self.max_weight_staleness or 0) >= 0, "0 or more, or none")
        concurrent = self.async_max_concurrent_samples
        self._check("async_max_concurrent_samples", concurrent is None or concurrent >= 1, "1 or more")
        factor = self.async_data_buffer_capacity_factor
        self._check(
            "async_data_buffer_capacity_factor",
            math.isfinite(factor) and int(factor * self.rollout_batch_size) >= 1,
            f"as much as makes one group or more of rollout_batch_size = {self.rollout_batch_size}",
        )
        for name, allowed in (
            ("async_unused_samples_handler", HANDLERS),
            ("rollout_submission_granularity", GRANULARITIES),
            ("pause_generation_mode", PAUSE_MODES),
        ):
            self._check(name, getattr(self, name) in allowed, ", ".join(allowed))
        for name in ("generation", "training"):
            if not getattr(self, name).mean > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: takes no time; allowed: more than 0 seconds")

    @property
    def batch_samples(self) -> int:
        """Samples of a step."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def all_slots(self) -> int:
        return self.engines * self.slots

    @property
    def concurrent_groups(self) -> int:
        """Groups that may be in flight, as many as the samples allowed make."""
        return max(1, (self.async_max_concurrent_samples or self.batch_samples) // self.n_samples_per_prompt)

    @property
    def buffer_groups(self) -> int:
        return int(self.async_data_buffer_capacity_factor * self.rollout_batch_size)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; distributions in the words that the command takes."""
        return {name: str(value) if not isinstance(value, _PLAIN) else value for name, value in vars(self).items()}

    def _check(self, name: str, fits: bool, allowed: str) -> None:
        if not fits:
            raise ConfigError(f"{name} = {getattr(self, name)!r}; allowed: {allowed}")


_PLAIN = (int, float, str, type(None))
