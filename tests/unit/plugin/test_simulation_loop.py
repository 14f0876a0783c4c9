"""The simulation beside the same model written the plain way, beside formulas, and what must hold of any system."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_plugin.simulation.distributions import Empirical, Exponential, Fixed, Lognormal
from miles_plugin.simulation.loop import simulate
from miles_plugin.simulation.settings import Settings
from tests.unit.plugin.simulation_reference import Reference
from tests.unit.plugin.simulation_systems import fixed, systems

many = settings(max_examples=150, deadline=None)
seeds = st.integers(0, 1000)


def rate(system: Settings, synchronous: bool = False, steps: int = 60, warmup: int = 20) -> float:
    return simulate(system, 0, steps, warmup, synchronous).samples_per_second


# --- another implementation -------------------------------------------------------------------------------------------


@many
@given(systems(), seeds, st.integers(0, 4), st.booleans())
def test_it_is_what_the_plain_model_says(system: Settings, seed: int, warmup: int, synchronous: bool) -> None:
    interval = system.update_weights_interval
    run = simulate(system, seed, 4 * interval, warmup * interval, synchronous)
    plain = Reference(system, seed, synchronous)
    plain.run(4 * interval, warmup * interval)
    expected = plain.result()
    for name in ("seconds", "samples", "updates", "staleness", "aborted_samples", "finished"):
        assert getattr(run, name) == expected[name], name
    for name in (
        "engines_busy",
        "engines_paused",
        "trainers_busy",
        "trainers_updating",
        "running",
        "buffered",
        "mixed",
    ):
        assert getattr(run, name) == pytest.approx(expected[name]), name
    assert run.trained_sample_seconds == pytest.approx(expected["trained_sample_seconds"])
    assert run.recycled_groups + run.dropped_groups == expected["unused"]
    if run.finished:
        assert run.sample_seconds == pytest.approx(expected["finished_seconds"] / run.finished)


# --- what must hold ---------------------------------------------------------------------------------------------------


@many
@given(systems(), seeds, st.booleans())
def test_no_sample_is_lost_and_none_made_twice(system: Settings, seed: int, synchronous: bool) -> None:
    census = simulate(system, seed, 12, 3, synchronous).census
    assert census.accounted == census.submitted
    assert min(dataclasses.astuple(census)) >= 0
    assert census.running <= system.all_slots
    assert census.buffered <= system.buffer_groups * system.n_samples_per_prompt


@many
@given(systems(), seeds)
def test_staleness_is_never_negative_nor_above_the_bound(system: Settings, seed: int) -> None:
    run = simulate(system, seed, 12, 3)
    assert min(run.staleness) >= 0
    if system.max_weight_staleness is not None:
        assert run.staleness_max <= system.max_weight_staleness
    else:
        assert run.recycled_groups == run.dropped_groups == 0


@many
@given(systems(), seeds)
def test_synchronous_samples_are_never_stale(system: Settings, seed: int) -> None:
    run = simulate(system, seed, 6, 0, synchronous=True)
    assert (set(run.staleness), run.mixed, run.aborted_samples, run.unused) == ({0}, 0, 0, 0)


@many
@given(systems(), seeds, st.booleans(), st.integers(-4, 4))
def test_slower_clocks_change_nothing(system: Settings, seed: int, synchronous: bool, power: int) -> None:
    factor = 2.0**power

    def slower(times: Empirical) -> Empirical:
        return Empirical(tuple(factor * seconds for seconds in times.seconds))

    names = "generation", "training", "prepare", "update"
    scaled = dataclasses.replace(system, **{name: slower(getattr(system, name)) for name in names})
    one, other = (simulate(each, seed, 8, 2, synchronous) for each in (system, scaled))
    assert other.seconds == factor * one.seconds
    assert (other.staleness, other.census, other.updates) == (one.staleness, one.census, one.updates)
    assert other.engines_busy == pytest.approx(one.engines_busy)


@many
@given(systems(), seeds, st.booleans())
def test_a_seed_gives_one_result(system: Settings, seed: int, synchronous: bool) -> None:
    one, other = (simulate(system, seed, 6, 2, synchronous) for _ in range(2))
    assert repr(one) == repr(other)


def test_another_seed_gives_another() -> None:
    system = Settings(Exponential(5), Fixed(3))
    assert len({simulate(system, (0, number), 10, 2).seconds for number in range(5)}) == 5


@many
@given(systems(async_unused_samples_handler="drop"), seeds)
def test_to_drop_or_to_retry_is_a_matter_of_prompts_not_of_speed(system: Settings, seed: int) -> None:
    retrying = dataclasses.replace(system, async_unused_samples_handler="retry")
    dropped, retried = (simulate(each, seed, 10, 2) for each in (system, retrying))
    assert dropped.seconds == retried.seconds
    assert dropped.dropped_groups == retried.recycled_groups
    assert dropped.recycled_groups == retried.dropped_groups == 0


@many
@given(systems(), seeds, st.booleans())
def test_shares_are_shares(system: Settings, seed: int, synchronous: bool) -> None:
    run = simulate(system, seed, 10, 2, synchronous)
    for share in (run.engines_busy, run.engines_paused, run.trainers_busy, run.trainers_updating, run.mixed):
        assert -1e-9 <= share <= 1 + 1e-9
    assert run.engines_busy + run.engines_paused <= 1 + 1e-9
    assert run.trainers_busy + run.trainers_updating <= 1 + 1e-9
    assert run.wasted >= 0
    assert 0 <= run.unused < 1


# --- formulas ---------------------------------------------------------------------------------------------------------


@many
@given(systems(generation=fixed, training=fixed, prepare=Fixed(0.0), update=Fixed(0.0), max_weight_staleness=None,
               async_data_buffer_capacity_factor=1000.0, rollout_submission_granularity="sample"))  # fmt: skip
def test_the_slower_side_sets_the_pace(system: Settings) -> None:
    enough = system.all_slots + 2 * system.n_samples_per_prompt  # so that no slot is without one
    system = dataclasses.replace(system, async_max_concurrent_samples=enough, pause_generation_mode="retract")
    of_engines = system.all_slots / system.generation.mean
    of_trainers = system.batch_samples * system.trainers / system.training.mean
    assert rate(system) == pytest.approx(min(of_engines, of_trainers), rel=0.04)


@pytest.mark.parametrize("seconds", [1.0, 15.0, 16.0, 17.0, 40.0])
@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0])
def test_also_when_the_buffer_is_full_most_of_the_time(seconds: float, factor: float) -> None:
    system = Settings(Fixed(seconds), Fixed(16.0), slots=256, async_data_buffer_capacity_factor=factor)
    assert rate(system) == pytest.approx(256 / max(16.0, seconds), rel=0.02)


@many
@given(systems(generation=fixed, training=fixed, prepare=fixed, update=fixed))
def test_a_synchronous_step_is_its_waves_the_training_and_its_share_of_the_update(system: Settings) -> None:
    waves = -(-system.batch_samples // system.all_slots)
    update = (system.prepare.mean + system.update.mean) / system.update_weights_interval
    expected = waves * system.generation.mean + system.training.mean / system.trainers + update
    assert simulate(system, 0, 12, 0, synchronous=True).seconds_per_step == pytest.approx(expected)


@many
@given(
    systems(
        generation=fixed, training=fixed, prepare=fixed, update=fixed, max_weight_staleness=0, update_weights_interval=1
    )
)
def test_without_staleness_asynchronous_is_no_faster_than_synchronous(system: Settings) -> None:
    assert rate(system) <= rate(system, synchronous=True) * (1 + 1e-9)


@many
@given(systems(generation=fixed, training=fixed, prepare=fixed, update=fixed, max_weight_staleness=None, engines=1,
               async_data_buffer_capacity_factor=2.0, async_max_concurrent_samples=None,
               pause_generation_mode="retract", rollout_submission_granularity="sample"))  # fmt: skip
def test_with_any_staleness_it_is_no_slower(system: Settings) -> None:
    assert rate(system) >= rate(system, synchronous=True) * (1 - 0.04)


def test_the_longest_of_a_batch_holds_up_a_synchronous_step() -> None:
    """Of m exponential times the longest takes 1 + 1/2 + ... + 1/m of their mean, if all run at a time."""
    mean, steps = 10.0, 2000
    system = Settings(
        Exponential(mean), Fixed(3.0), Fixed(2.0), slots=64, rollout_batch_size=16, n_samples_per_prompt=4
    )
    run = simulate(system, 7, steps, 0, synchronous=True)
    harmonic = sum(1 / number for number in range(1, 65))
    error = mean * math.sqrt(sum(1 / number**2 for number in range(1, 65)) / steps)
    assert run.seconds_per_step == pytest.approx(mean * harmonic + 3 + 2, abs=4 * error)
    assert run.engines_busy == pytest.approx(mean / run.seconds_per_step, rel=0.02)


def test_exponential_times_in_full_slots_make_a_poisson_rate() -> None:
    system = Settings(Exponential(8.0), Fixed(0.5), slots=16, rollout_batch_size=16, n_samples_per_prompt=1)
    run = simulate(system, 3, 2000, 50)
    assert run.samples_per_second == pytest.approx(16 / 8.0, rel=4 / math.sqrt(run.samples))
    assert run.engines_busy == pytest.approx(1)


@pytest.mark.parametrize("mode", ["retract", "wait"])
@pytest.mark.parametrize("bound", [None, 1])
def test_littles_law(mode: str, bound: int | None) -> None:
    """Samples in slots = samples finished per second * seconds that each is in one."""
    system = Settings(Lognormal(20, 0.8), Fixed(30.0), Fixed(2.0), slots=48, max_weight_staleness=bound,
                      rollout_batch_size=8, pause_generation_mode=mode)  # fmt: skip
    run = simulate(system, 5, 400, 20)
    assert run.running == pytest.approx(run.finished / run.seconds * run.sample_seconds, rel=0.01)


def test_pauses_count_in_what_a_sample_takes_and_not_in_what_engines_do() -> None:
    system = Settings(Fixed(10.0), Fixed(1.0), Fixed(10.0), slots=8, rollout_batch_size=8, n_samples_per_prompt=1)
    run = simulate(system, 0, 50, 10)
    assert run.sample_seconds == pytest.approx(20)
    assert run.mixed == 1
    assert (run.engines_busy, run.engines_paused) == pytest.approx((0.5, 0.5), abs=0.03)


def test_trainers_wait_for_the_slowest() -> None:
    """Of two exponential shares the longer takes 3/2 of their mean, and the shorter trainer idles meanwhile."""
    system = Settings(Fixed(1.0), Exponential(20.0), trainers=2, slots=512)
    run = simulate(system, 1, 3000, 20)
    assert run.seconds_per_step == pytest.approx(1.5 * 20 / 2, rel=0.05)
    assert run.trainers_busy == pytest.approx(2 / 3, rel=0.02)


def test_staleness_is_what_is_ahead_of_a_group_over_what_an_update_takes() -> None:
    """Trainers set the pace; in flight a batch, in the buffer two: a group waits for the three batches before it."""
    system = Settings(Fixed(1.0), Fixed(50.0), Fixed(0.0), slots=256, rollout_submission_granularity="group")
    run = simulate(system, 0, 50, 20)
    assert run.trainers_busy == pytest.approx(1)
    assert run.staleness == {3: 50 * 32}
    halved = simulate(dataclasses.replace(system, update_weights_interval=2), 0, 50, 20)
    assert halved.staleness_mean == pytest.approx(1.5)


def test_a_long_tail_goes_to_waste_under_a_bound_and_is_missed_in_training() -> None:
    system = Settings(Lognormal(20, 1.0, 200), Fixed(30.0), Fixed(1.0), slots=512, rollout_batch_size=64)
    free, bound = (simulate(dataclasses.replace(system, max_weight_staleness=value), 0, 60, 20) for value in (None, 1))
    assert (free.unused, free.wasted) == (0, 0)
    assert free.trained_sample_seconds == pytest.approx(free.sample_seconds, rel=0.02)
    assert bound.unused > 0.05
    assert bound.wasted > bound.unused  # the groups lost are the long ones
    assert bound.trained_sample_seconds < 0.95 * bound.sample_seconds


def test_interrupting_is_no_slower_than_waiting() -> None:
    system = Settings(Lognormal(20, 1.0, 200), Fixed(15.0), Fixed(1.0), slots=64)
    go_on, wait = (rate(dataclasses.replace(system, pause_generation_mode=mode)) for mode in ("retract", "wait"))
    assert go_on > 1.2 * wait


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_without_interruption_no_sample_has_two_versions(mode: str) -> None:
    system = Settings(Lognormal(20, 0.5), Fixed(15.0), Fixed(1.0), slots=64, pause_generation_mode=mode)
    run = simulate(system, 0, 40, 10)
    assert run.mixed == 0
    assert (run.aborted_samples > 0) == (mode == "abort")


def test_whole_intervals_are_run() -> None:
    system = Settings(Fixed(1.0), Fixed(1.0), update_weights_interval=4)
    run = simulate(system, 0, 10, 3)
    assert (run.steps, run.updates) == (12, 3)


def test_every_step_is_told() -> None:
    told: list[int] = []
    simulate(Settings(Fixed(1.0), Fixed(1.0)), 0, 10, 3, on_step=lambda: told.append(1))
    assert len(told) == 13


def test_a_thousand_engines() -> None:
    system = Settings(Exponential(60), Fixed(30.0), Fixed(1.0), engines=1000, slots=16, rollout_batch_size=1000,
                      n_samples_per_prompt=16)  # fmt: skip
    run = simulate(system, 0, 5, 2)
    assert run.running > 15_000
    assert run.samples_per_second == pytest.approx(16_000 / 60, rel=0.06)
    assert np.isfinite(run.staleness_mean)
