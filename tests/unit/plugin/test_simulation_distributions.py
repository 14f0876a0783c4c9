"""Seconds that are drawn: their means and tails, what describes them, and what is refused."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_plugin.simulation.distributions import (
    Distribution,
    Empirical,
    Exponential,
    Fixed,
    Lognormal,
    Pareto,
    Uniform,
    parse,
    stream,
)
from miles_plugin.simulation.settings import Settings
from mooncake_store.errors import ConfigError

DRAWS = 200_000
EVERY = [
    Fixed(3.0),
    Exponential(20.0),
    Lognormal(20.0, 0.8),
    Lognormal(20.0, 0.8, 60.0),
    Lognormal(20.0, 0.8, 10.0),
    Pareto(10.0, 3.5),
    Pareto(10.0, 1.2, 300.0),
    Pareto(10.0, 1.0, 300.0),
    Pareto(10.0, 0.5, 300.0),
    Uniform(5.0, 25.0),
    Empirical((1.0, 2.0, 9.0)),
]
each = pytest.mark.parametrize("distribution", EVERY, ids=str)


def no_report(path: Path) -> Empirical:
    raise AssertionError(path)


def draw(distribution: Distribution, seed: int = 0) -> np.ndarray:
    return distribution.sample(np.random.default_rng(seed), DRAWS)


@each
def test_the_mean_is_the_mean_of_what_is_drawn(distribution: Distribution) -> None:
    drawn = draw(distribution)
    assert drawn.shape == (DRAWS,)
    assert drawn.dtype == np.float64
    assert drawn.min() >= 0
    assert drawn.mean() == pytest.approx(distribution.mean, abs=5 * drawn.std() / math.sqrt(DRAWS) + 1e-12)


@each
def test_a_seed_gives_the_same_draws_and_a_stream_has_them_one_by_one(distribution: Distribution) -> None:
    one, other = (list(islice(stream(distribution, np.random.default_rng(5)), 10_000)) for _ in range(2))
    assert one == other
    assert all(type(value) is float for value in one)


@pytest.mark.parametrize(
    ("distribution", "at", "share_above"),
    [
        (Exponential(20.0), 40.0, math.exp(-2)),
        (Lognormal(20.0, 0.8), 20.0, 0.5),
        (Lognormal(20.0, 0.8), 20.0 * math.exp(0.8), 0.158655),
        (Pareto(10.0, 3.5), 20.0, 2**-3.5),
        (Pareto(10.0, 1.0, 40.0), 20.0, (1 / 2 - 1 / 4) / (1 - 1 / 4)),
        (Uniform(5.0, 25.0), 20.0, 0.25),
        (Empirical((1.0, 2.0, 9.0)), 5.0, 1 / 3),
    ],
    ids=str,
)
def test_so_much_takes_longer(distribution: Distribution, at: float, share_above: float) -> None:
    error = math.sqrt(share_above * (1 - share_above) / DRAWS)
    assert (draw(distribution) > at).mean() == pytest.approx(share_above, abs=5 * error)


def test_none_takes_longer_than_the_longest() -> None:
    assert draw(Pareto(10.0, 0.5, 300.0)).max() <= 300
    cut = draw(Lognormal(20.0, 0.8, 60.0))
    assert cut.max() == 60
    assert (cut == 60).mean() == pytest.approx((draw(Lognormal(20.0, 0.8)) >= 60).mean())


@each
def test_what_describes_it_makes_it_again(distribution: Distribution) -> None:
    if not isinstance(distribution, Empirical):
        assert parse(str(distribution), "--step-seconds", no_report) == distribution


@given(st.floats(0.1, 1e3), st.floats(0.2, 6), st.floats(1.1, 1e3))
@settings(deadline=None)
def test_the_mean_of_any_pareto_is_within_its_ends(low: float, alpha: float, times: float) -> None:
    assert low <= Pareto(low, alpha, low * times).mean * (1 + 1e-9) <= low * times * (1 + 1e-6)


@given(st.floats(0.1, 1e3), st.floats(0.01, 4), st.floats(0.01, 1e3))
@settings(deadline=None)
def test_the_mean_of_any_cut_lognormal_is_below_its_cut_and_its_whole(median: float, sigma: float, cut: float) -> None:
    mean = Lognormal(median, sigma, median * cut).mean
    assert -1e-9 <= mean <= min(median * cut, Lognormal(median, sigma).mean) * (1 + 1e-9)


@pytest.mark.parametrize("text", ["20", "fixed:20", "2e1"])
def test_a_number_is_fixed(text: str) -> None:
    assert parse(text, "--step-seconds", no_report) == Fixed(20.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("soon", "not understood"),
        ("", "not understood"),
        ("-1", "seconds = -1, it must be 0 or more"),
        ("nan", "seconds = nan"),
        ("inf", "seconds = inf, it must be 0 or more, and finite"),
        ("exponential:", "not understood"),
        ("exponential:0", "mean = 0, it must be more than 0"),
        ("exponential:1,2", "not understood"),
        ("lognormal:20", "not understood"),
        ("lognormal:0,1", "median = 0"),
        ("lognormal:20,0", "sigma = 0"),
        ("lognormal:20,9", "sigma = 9, it must be more than 0, to 5"),
        ("lognormal:20,1,0", "longest = 0"),
        ("pareto:0,2", "low = 0"),
        ("pareto:1,0", "alpha = 0"),
        ("pareto:1,1", "alpha = 1, it must be more than 1, or a third number"),
        ("pareto:5,2,4", "high = 4, it must be more than the lowest, 5"),
        ("pareto:5,2,nan", "high = nan"),
        ("uniform:5,4", "high = 4, it must be not less than the lowest, 5"),
        ("gamma:1,2", "not understood"),
    ],
)
def test_what_is_no_distribution_is_said_with_the_forms(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "--generation-seconds", no_report)
    assert f"--generation-seconds {text}: {expected}" in str(caught.value)
    assert "allowed: SECONDS, exponential:MEAN" in str(caught.value)


def test_measured_seconds_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "seconds.txt"
    path.write_text("# of samples\n1.5\n\n 2.5e0 \n4\n")
    read = parse(f"file:{path}", "--generation-seconds", no_report)
    assert isinstance(read, Empirical)
    assert read.seconds == (1.5, 2.5, 4.0)
    assert str(read) == f"3 values of {path}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("1\n2 s\n", "line 2 is '2 s', not a number"),
        ("# nothing\n", "no seconds"),
        ("1\n-2\n", "value 2 = -2, it must be 0 or more"),
        ("1\nnan\n", "value 2 = nan"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_named(content: str | bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "seconds.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=f"{path}.*{expected}"):
        parse(f"file:{path}", "--generation-seconds", no_report)
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(f"file:{tmp_path / 'nothing'}", "--generation-seconds", no_report)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("engines", 0, "1 or more"),
        ("slots", 0, "1 or more"),
        ("trainers", -1, "1 or more"),
        ("rollout_batch_size", 0, "1 or more"),
        ("n_samples_per_prompt", 0, "1 or more"),
        ("update_weights_interval", 0, "1 or more"),
        ("max_weight_staleness", -1, "0 or more, or none"),
        ("async_max_concurrent_samples", 0, "1 or more"),
        ("async_data_buffer_capacity_factor", 0.01, "one group or more of rollout_batch_size = 32"),
        ("async_data_buffer_capacity_factor", math.nan, "one group or more"),
        ("async_unused_samples_handler", "keep", "drop, retry"),
        ("rollout_submission_granularity", "token", "sample, group"),
        ("pause_generation_mode", "stop", "retract, in_place, abort, wait"),
        ("generation", Fixed(0.0), "more than 0 seconds"),
        ("training", Empirical((0.0,)), "more than 0 seconds"),
    ],
)
def test_a_setting_out_of_range_is_named_with_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**({"generation": Fixed(1.0), "training": Fixed(1.0)} | {name: value}))  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{name} = ")
    assert allowed in str(caught.value)
