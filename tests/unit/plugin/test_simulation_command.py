"""`miles-mooncake simulate async`: its table, lines, picture and messages; the prediction of a real run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_plugin import cli
from miles_plugin.simulation import sweep
from miles_plugin.simulation.distributions import Empirical, Exponential, Fixed, Lognormal
from miles_plugin.simulation.predict import Measured, predict, settings_of
from miles_plugin.simulation.result import Run
from miles_plugin.simulation.settings import Settings
from miles_plugin.simulation.sweep import Plan, Sweep, points, repeat
from mooncake_store.errors import ConfigError
from tests.report_samples import make_finished_report, make_report, make_step, make_update

TIMES = ["--generation-seconds", "exponential:10", "--step-seconds", "20", "--update-seconds", "1"]
SHORT = [*TIMES, "--steps", "6", "--warmup-steps", "2", "--repetitions", "2"]
SECONDS = 60.0


def simulate(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    try:
        status = cli.main(["simulate", "async", *argv])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "simulation.jsonl").read_text().splitlines()]


# --- the command ------------------------------------------------------------------------------------------------------


def test_one_setting_is_shown_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = simulate([*SHORT, "--output", str(tmp_path)], capsys)
    assert status == 0
    for words in (
        "asynchronous",
        "synchronous",
        "samples/s",
        "speed-up",
        "trainers: busy, %",
        "staleness  of the groups",
    ):
        assert words in out
    assert error == f"written: {tmp_path / 'simulation.jsonl'}\n"
    assert [(line["mode"], line["repetition"]) for line in lines(tmp_path)] == [
        ("async", 0), ("sync", 0), ("async", 1), ("sync", 1),
    ]  # fmt: skip
    line = lines(tmp_path)[0]
    assert line["settings"]["generation"] == "exponential:10"
    assert line["result"]["samples"] == 6 * 32 * 8
    assert line["result"]["samples_per_second"] == pytest.approx(line["result"]["samples"] / line["result"]["seconds"])
    assert sum(line["result"]["staleness"].values()) == 6 * 32


def test_several_values_make_every_combination_a_row_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `train` is not installed")
    argv = [*SHORT, "--output", str(tmp_path), "--max-weight-staleness", "0", "2", "none", "--engines", "1", "4"]
    status, out, error = simulate(argv, capsys)
    assert status == 0
    rows = [line.split()[:2] for line in out.splitlines()[2:]]
    assert rows == [[engines, bound] for engines in "14" for bound in ("0", "2", "none")]
    values = [line["values"] for line in lines(tmp_path)[::4]]
    assert values == [{"engines": e, "max_weight_staleness": b} for e in (1, 4) for b in (0, 2, None)]
    assert (tmp_path / "simulation.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "simulation.png") in error
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "swept",
    [
        ["--update-weights-interval", "1", "3"],
        ["--async-data-buffer-capacity-factor", "1", "1.5", "40"],
        ["--trainers", "1", "2", "--engines", "1", "2", "--max-weight-staleness", "1", "2"],
        ["--max-weight-staleness", "none", "3"],
        ["--engines", "1", "10", "100", "--update-weights-interval", "2", "1"],
    ],
)
def test_anything_that_is_swept_can_be_drawn(
    swept: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `train` is not installed")
    status, _, _ = simulate([*SHORT, "--output", str(tmp_path), *swept], capsys)
    assert status == 0
    assert (tmp_path / "simulation.png").exists()


def test_json_lines_are_what_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = simulate([*SHORT, "--json", "--output", str(tmp_path)], capsys)
    assert status == 0
    assert out == (tmp_path / "simulation.jsonl").read_text()


def test_the_same_command_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for name in ("a", "b"):
        _, out, _ = simulate([*SHORT, "--seed", "5", "--output", str(tmp_path / name)], capsys)
        texts.append((out, (tmp_path / name / "simulation.jsonl").read_text()))
    assert texts[0] == texts[1]
    _, out, _ = simulate([*SHORT, "--seed", "6", "--output", str(tmp_path / "c")], capsys)
    assert out != texts[0][0]


def test_slots_that_cannot_be_filled_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, error = simulate([*SHORT, "--output", str(tmp_path), "--engines", "8"], capsys)
    assert error.startswith("note: 512 slots, of which no more than 256 are used at a time")
    more = ["--async-max-concurrent-samples", "512", "--steps", "40"]
    _, _, error = simulate([*SHORT, "--output", str(tmp_path), "--engines", "8", *more], capsys)
    assert "note" not in error


def test_a_run_that_is_too_short_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--generation-seconds", "16", "--step-seconds", "20", "--slots", "128", "--output", str(tmp_path)]
    argv += ["--steps", "10", "--async-data-buffer-capacity-factor", "4"]
    _, _, error = simulate([*argv, "--warmup-steps", "2", "--engines", "1", "2"], capsys)
    assert "note: not steady: --engines 2: 30 % more was generated than trained on" in error
    _, _, error = simulate([*argv, "--warmup-steps", "60"], capsys)
    assert "note" not in error


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps", "0"], "steps = 0; allowed: 1 or more"),
        (["--warmup-steps", "-1"], "warmup = -1; allowed: 0 or more"),
        (["--repetitions", "0"], "repetitions = 0; allowed: 1 or more"),
        (["--seed", "-1"], "seed = -1; allowed: 0 or more"),
        (["--engines", "1", "0"], "engines = 0; allowed: 1 or more"),
        (["--max-weight-staleness", "-1"], "max_weight_staleness = -1; allowed: 0 or more, or none"),
        (
            ["--pause-generation-mode", "stop"],
            "pause_generation_mode = 'stop'; allowed: retract, in_place, abort, wait",
        ),
        (["--generation-seconds", "0"], "generation = 0: takes no time"),
        (["--step-seconds", "soon"], "--step-seconds soon: not understood; allowed: SECONDS, exponential:MEAN"),
        (["--update-seconds", "file:/nowhere"], "/nowhere cannot be read"),
        (["--update-seconds", "file:/nowhere/report.json"], "name the directory of a run"),
        (["--output", "/dev/null/here"], "--output /dev/null/here"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    argv: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, error = simulate([*SHORT, "--output", str(tmp_path / "out"), *argv], capsys)
    assert (status, out) == (2, "")
    assert expected in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_what_is_no_number_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = simulate([*SHORT, "--max-weight-staleness", "few"], capsys)
    assert status == 2
    assert "invalid number or none value: 'few'" in error
    status, _, error = simulate(["--step-seconds", "1"], capsys)
    assert status == 2
    assert "--generation-seconds" in error


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_the_points_that_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, real = [], sweep.simulate

    def stopped(*args: Any) -> Run:
        if len(runs) == 9:
            raise KeyboardInterrupt
        runs.append(real(*args))
        return runs[-1]

    monkeypatch.setattr(sweep, "simulate", stopped)
    argv = [*SHORT, "--output", str(tmp_path), "--engines", "1", "2", "3", "4"]
    status, out, error = simulate(argv, capsys)
    assert status == 130
    assert "interrupted" in error
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["1", "2"]  # four runs each
    assert len(lines(tmp_path)) == 9
    assert (tmp_path / "simulation.png").exists()


def test_a_real_ctrl_c_ends_it_at_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    argv = [*TIMES, "--steps", "100000", "--engines", "1", "2", "--repetitions", "50", "--output", str(tmp_path)]
    short = ["--rollout-batch-size", "1", "--n-samples-per-prompt", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "miles_plugin", "simulate", "async", *argv, *short],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    try:
        path, give_up = tmp_path / "simulation.jsonl", time.monotonic() + SECONDS
        while not (path.exists() and path.read_text()) and time.monotonic() < give_up:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert out == ""
    assert lines(tmp_path)[0]["mode"] == "async"


# --- repetitions and sweeps -------------------------------------------------------------------------------------------


def test_points_are_every_combination_the_last_changing_first() -> None:
    made = points(Settings(Fixed(1), Fixed(1)), {"engines": [1, 2], "trainers": [3, 4]})
    assert [(point.settings.engines, point.settings.trainers) for point in made] == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_what_only_asynchronous_runs_differ_in_is_run_once_in_turn() -> None:
    told: list[int] = []
    made = Sweep(Plan(repetitions=2, steps=5, warmup=1), on_step=lambda: told.append(1))
    base = Settings(Exponential(5), Fixed(5))
    every = [point.settings for point in points(base, {"max_weight_staleness": [0, 1, None], "engines": [1, 2]})]
    outcomes = [made.outcome(settings, lambda *_: None) for settings in every]
    assert outcomes[0].synchronous == outcomes[2].synchronous == outcomes[4].synchronous
    assert outcomes[0].synchronous != outcomes[1].synchronous
    assert len(told) == made.steps(every) == 2 * 6 * (6 + 2)


def test_a_bound_costs_speed_and_an_outcome_says_so() -> None:
    base = Settings(Lognormal(20, 0.8), Fixed(20), slots=128)
    tight, loose = (repeat(point.settings, Plan(3, 40, 10)) for point in points(base, {"max_weight_staleness": [1, 3]}))
    assert tight.speed_up.median < loose.speed_up.median
    assert tight.speed_up.low <= tight.speed_up.median <= tight.speed_up.high
    assert sum(tight.histogram().values()) == pytest.approx(1)
    assert max(tight.histogram()) == 1
    assert len({run.seconds for run in tight.asynchronous}) == 3  # no repetition is another's


# --- what was measured ------------------------------------------------------------------------------------------------


def test_a_report_has_the_seconds_of_steps_and_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_finished_report().write(tmp_path / "report.json")
    for named in (tmp_path, tmp_path / "report.json"):
        flags = [f"--{of}-seconds=file:{named}" for of in ("step", "prepare", "update")]
        argv = ["--generation-seconds", "9", *flags, "--steps", "4", "--repetitions", "1", "--output", str(tmp_path)]
        assert simulate(argv, capsys)[0] == 0
    result = lines(tmp_path)[0]["result"]
    assert result["trainers_busy"] * result["seconds"] == pytest.approx(4 * 4.01)
    assert result["engines_paused"] * result["seconds"] == pytest.approx(4 * 0.49)
    assert result["trainers_updating"] * result["seconds"] == pytest.approx(4 * 0.5)
    status, _, error = simulate(["--generation-seconds", f"file:{tmp_path}", "--step-seconds", "1"], capsys)
    assert status == 2
    assert "the seconds of whole rollouts, not of their samples" in error


def test_engines_serve_during_a_transfer_by_disk_delta(tmp_path: Path) -> None:
    from miles_plugin.report.record import Arm
    from miles_plugin.simulation import from_report

    report = make_report("--update-weight-transfer-mode", "disk-delta")
    report.arms["real"] = Arm(
        "real", 0.3, [make_step(0), make_step(1, updates=[]), make_step(2, updates=[make_update(3)] * 2)]
    )
    report.write(tmp_path / "report.json")
    assert from_report.preparations(tmp_path).seconds == pytest.approx((0.41,) * 3)
    assert from_report.pauses(tmp_path).seconds == pytest.approx((0.09,) * 3)
    assert from_report.steps(tmp_path).seconds == pytest.approx((4.01,) * 3)


def test_a_report_without_a_step_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_report().write(tmp_path / "report.json")
    status, _, error = simulate(["--generation-seconds", "9", "--step-seconds", f"file:{tmp_path}"], capsys)
    assert status == 2
    assert "no seconds" in error


def test_a_prediction_from_what_was_measured_is_what_the_system_does() -> None:
    """The system is itself a simulated one, of which only draws are known."""
    system = Settings(Exponential(20), Lognormal(25, 0.2), Fixed(2), engines=3, slots=32, max_weight_staleness=2)
    rng = np.random.default_rng(1)
    plan = Plan(repetitions=3, steps=100)
    measured = Measured(
        generation_seconds=system.generation.sample(rng, 3000).tolist(),
        step_seconds=system.training.sample(rng, 300).tolist(),
        update_seconds=[2.0, 2.0],
        settings={"engines": 3, "slots": 32, "max_weight_staleness": 2},
    )
    truth, prediction = repeat(system, plan), predict(measured, plan)
    for spread in ("spread", "synchronous_spread"):
        expected, found = (getattr(each, spread)(lambda run: run.samples_per_second) for each in (truth, prediction))
        assert found.median == pytest.approx(expected.median, rel=0.06)
    assert prediction.spread(lambda run: run.staleness_mean).median == pytest.approx(
        truth.spread(lambda run: run.staleness_mean).median, abs=0.15
    )


def test_measured_steps_are_of_all_trainers_together() -> None:
    made = settings_of(Measured([1.0], [2.0], settings={"trainers": 8, "engines": 2}))
    assert (made.trainers, made.engines, made.training) == (1, 2, Empirical((2.0,), "step_seconds"))
    assert made.update == made.prepare == Fixed(0.0)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (Measured([], [1.0]), "generation_seconds: no seconds"),
        (Measured([1.0], []), "step_seconds: no seconds"),
        (Measured([1.0], [-1.0]), "step_seconds: value 1 = -1"),
        (Measured([1.0], [1.0], settings={"engines": 0}), "engines = 0; allowed: 1 or more"),
        (Measured([1.0], [1.0], settings={"slot": 1}), "settings: there is no 'slot'; allowed: async_data_buffer"),
        (Measured([1.0], [1.0], settings={"training": Fixed(1.0)}), "there is no 'training'"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(measured: Measured, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        predict(measured)
