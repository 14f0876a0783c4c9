"""Small systems for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from miles_plugin.simulation.distributions import Empirical, Fixed
from miles_plugin.simulation.settings import GRANULARITIES, HANDLERS, PAUSE_MODES, Settings

# Powers of two, so that a step shared among them is exact, and whole seconds: many things happen at one moment.
trainers = st.sampled_from([1, 2, 4])
some_seconds = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=6)
times = some_seconds.map(lambda values: Empirical(tuple(values)))
update_times = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=3).map(lambda some: Empirical(tuple(some)))


def systems(**given: Any) -> st.SearchStrategy[Settings]:
    """Any of them, with what is given: values or strategies."""
    drawn: dict[str, Any] = {
        "generation": times,
        "training": times,
        "prepare": update_times,
        "update": update_times,
        "engines": st.integers(1, 3),
        "slots": st.integers(1, 4),
        "trainers": trainers,
        "rollout_batch_size": st.integers(1, 4),
        "n_samples_per_prompt": st.integers(1, 3),
        "update_weights_interval": st.integers(1, 3),
        "max_weight_staleness": st.none() | st.integers(0, 3),
        "async_unused_samples_handler": st.sampled_from(HANDLERS),
        "async_data_buffer_capacity_factor": st.sampled_from([1.0, 1.5, 2.0, 4.0]),
        "async_max_concurrent_samples": st.none() | st.integers(1, 20),
        "rollout_submission_granularity": st.sampled_from(GRANULARITIES),
        "pause_generation_mode": st.sampled_from(PAUSE_MODES),
    }
    for name, value in given.items():
        drawn[name] = value if isinstance(value, st.SearchStrategy) else st.just(value)
    return st.builds(Settings, **drawn)


fixed = st.integers(1, 9).map(lambda seconds: Fixed(float(seconds)))
