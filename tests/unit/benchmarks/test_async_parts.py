"""What `bench async` makes of flags and measurements, that its engine takes the same times in all modes; its loop."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.fully_async import loop, plot, prediction, report
from benchmarks.fully_async.engine import MAX_TOKENS, EngineProcess, LongTail, Plan, Sample, Tail
from benchmarks.fully_async.settings import SYNCHRONOUS, Settings, asynchronous, resolve
from benchmarks.fully_async.turn import Step, seconds_of, summary
from benchmarks.measurements import Measurement
from benchmarks.targets import check
from miles_plugin.bench_commands import BenchFailed, bench_parser
from miles_plugin.engines.stand_in import messages
from miles_plugin.engines.stand_in.engine import Settings as EngineSettings
from miles_plugin.engines.stand_in.scheduler import Latency
from miles_plugin.rollout import manager as manager_module
from miles_plugin.simulate_command import run_simulate
from miles_plugin.simulation.distributions import Lognormal
from mooncake_store.errors import ConfigError
from tests.unit.benchmarks.made import measured
from tests.unit.plugin.test_rollout_manager import MemoryStore

BUFFER = "rollout/fully_async/"


def settings(*flags: str) -> Settings:
    return resolve(bench_parser().parse_args(["async", *flags]))


# --- flags ------------------------------------------------------------------------------------------------------------


def test_a_run_without_flags_has_a_synchronous_mode_and_two_bounds() -> None:
    found = settings()
    assert found.modes == {SYNCHRONOUS: None, "asynchronous, bound 2": 2, "asynchronous, bound 4": 4}
    assert (found.samples, found.generation, found.repeats) == (32, Lognormal(0.4, 0.8, 3.2), 3)
    assert settings("--quick", "--steps", "2").steps == 2
    assert settings("--quick").generation == Lognormal(0.05, 0.8, 0.4)
    assert settings("--max-weight-staleness", "none", "0", "none").bounds == (None, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--generation-seconds", "lognormal:0"], "--generation-seconds lognormal:0: .*allowed: SECONDS"),
        (["--step-seconds", "-1"], "--step-seconds -1.0: allowed is 0 to 600"),
        (["--update-seconds", "nan"], "--update-seconds nan: allowed is 0 to 600"),
        (["--rollout-batch-size", "0"], "--rollout-batch-size 0: allowed is a whole number of at least 1"),
        (["--n-samples-per-prompt", "1"], "--n-samples-per-prompt 1: allowed is a whole number of at least 2"),
        (["--steps", "0"], "--steps 0: allowed is a whole number of at least 1"),
        (["--warmup-steps", "-1"], "--warmup-steps -1"),
        (["--repeats", "0"], "--repeats 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--max-weight-staleness", "2", "-1"], "--max-weight-staleness -1: allowed are whole numbers"),
        (["--async-data-buffer-capacity-factor", "0.01"], "capacity-factor 0.01: the buffer has no place for a group"),
        (["--async-data-buffer-capacity-factor", "inf"], "capacity-factor inf: the buffer has no place"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_what_is_allowed(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*flags)


def test_the_modes_differ_in_how_they_generate_alone() -> None:
    found = settings("--max-weight-staleness", "2", "none")
    names = list(found.modes)
    dumped = [loop.config_of(found, mode, 1, "127.0.0.1:1").model_dump() for mode in names]
    differing = [{name for name in each if each[name] != dumped[0][name]} for each in dumped]
    own = {"fully_async", "async_data_buffer_capacity_factor"}
    assert differing == [set(), own | {"max_weight_staleness"}, own]
    assert dumped[0]["seed"] != loop.config_of(found, names[0], 0, "127.0.0.1:1").seed, "a round has prompts of its own"


# --- the engine -------------------------------------------------------------------------------------------------------


def tail(seed: int = 0, group: int = 3) -> Tail:
    return Tail(Plan(Path(), Lognormal(1.0, 1.0), group, seed))


def test_a_prompt_takes_the_same_times_whoever_asks_and_when() -> None:
    prompts = [[1, 2], [1], [7, 7, 7]]
    in_a_row = {tuple(prompt): [one.tokens(prompt) for _ in range(3)] for one in [tail()] for prompt in prompts}
    one = tail()
    mixed = [one.tokens(prompt) for _ in range(6) for prompt in reversed(prompts)]
    for place, prompt in enumerate(reversed(prompts)):
        assert mixed[place::3] == in_a_row[tuple(prompt)] * 2, "again when its group is generated again"
    assert len({tuple(lengths) for lengths in in_a_row.values()}) == 3
    assert all(len(set(lengths)) > 1 for lengths in in_a_row.values()), "samples of a prompt have their own"
    assert [tail(seed=1).tokens(prompt) for prompt in prompts] != [tail().tokens(prompt) for prompt in prompts]


def test_lengths_follow_the_distribution_and_stay_within_the_context() -> None:
    one = tail()
    lengths = [one.tokens([number]) for number in range(2000)]
    assert min(lengths) >= 1
    assert max(lengths) == MAX_TOKENS
    assert sorted(lengths)[1000] * one.token_seconds == pytest.approx(1.0, rel=0.1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async") / "checkpoint"


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[EngineProcess]:
    """In this process."""
    running = EngineProcess(Plan(checkpoint, Lognormal(0.03, 0.5, 0.1), 2, 0))
    yield running
    running.close()


def long_tail(checkpoint: Path, token_seconds: float) -> tuple[LongTail, Tail]:
    """An engine, and another tail like its own."""
    plan = Plan(checkpoint, Lognormal(1.0, 1.0), 2, 0)
    settings = EngineSettings(checkpoint, "", 1, Latency(token=token_seconds), False, timedelta(minutes=1))
    return LongTail(settings, Tail(plan)), Tail(plan)


@pytest.mark.usefixtures("engine")
def test_the_engine_ends_each_response_by_itself_and_notes_when(checkpoint: Path) -> None:
    own, expected = long_tail(checkpoint, 1e-6)
    prompts: list[int | list[int]] = [[5, 6], [7], [5, 6]]
    status, answers = own.generate(messages.Generate(input_ids=prompts, sampling_params={"max_new_tokens": 1}))
    assert status == 200
    assert [len(each["output_ids"]) for each in answers] == [
        expected.tokens(prompt) for prompt in ([5, 6], [7], [5, 6])
    ]
    status, answer = own.generate(messages.Generate(input_ids=[7, 8]))
    assert (status, len(answer["output_ids"])) == (200, expected.tokens([7, 8]))
    taken = own.take()
    assert len(taken) == 4
    assert all(sample.ended is not None and sample.ended >= sample.began for sample in taken)
    assert own.take() == []


@pytest.mark.usefixtures("engine")
def test_what_is_still_generated_at_the_end_of_a_turn_is_given_up(checkpoint: Path) -> None:
    own, expected = long_tail(checkpoint, 0.05)
    prompt = next([number] for number in range(99) if expected.tokens([number]) > 100)
    asking = threading.Thread(target=own.generate, args=(messages.Generate(input_ids=list(prompt)),))
    asking.start()
    while not own._scheduler._running:
        time.sleep(0.001)
    (sample,) = own.take()
    asking.join(10.0)
    assert not asking.is_alive()
    assert sample.ended is None, "of a part of a sample the seconds say nothing"


# --- the loop ---------------------------------------------------------------------------------------------------------


class ReadableStore(MemoryStore):
    """Of which a batch can be got, too."""

    @contextmanager
    def _got(self, on_release: Callable[[], None]) -> Iterator[None]:
        yield
        on_release()

    def get(self, ref: Any, partition: int, on_release: Callable[[], None]) -> Any:
        assert ref.key in self.batches
        assert partition == 0
        return self._got(on_release)


@pytest.mark.parametrize("mode", [SYNCHRONOUS, asynchronous(2)])
def test_a_turn_is_the_jobs_loop_with_its_manager(
    mode: str, engine: EngineProcess, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ReadableStore()
    for module in (manager_module, loop):
        monkeypatch.setattr(module, "open_rollout_store", lambda *_args, **_kwargs: store)
    flags = ["--quick", "--step-seconds", "0.01", "--update-seconds", "0", "--output", str(tmp_path)]
    found = settings(*flags, "--max-weight-staleness", "2")
    found.logs.mkdir()
    job = loop.Job(found, engine.address(), "", checkpoint)
    engine.take()
    job.begin(mode, 0)
    try:
        steps = [job.step(number) for number in range(3)]
    finally:
        job.close()
    assert not store.batches, "every batch was acknowledged"
    samples = engine.take()
    assert len(samples) >= 3 * found.samples
    came_to = summary(steps, samples, found.rollout_batch_size, found.n_samples_per_prompt)
    assert sum(count for name, count in came_to.items() if name.startswith("staleness_")) == 3 * 4
    assert 0 < came_to["engines_busy"] <= 1
    assert [bool(step.buffer) for step in steps] == [mode != SYNCHRONOUS] * 3
    for step in steps:
        assert step.trained >= 0.01
        assert min(step.waited, step.prepared, step.paused) > 0


def rollout(**changes: Any) -> Any:
    return SimpleNamespace(
        **{"samples": 8, "left_out": 0, "weight_version": 5, "weight_versions": ["3", "5"]} | changes
    )


def test_a_rollout_that_is_short_or_too_old_ends_the_run() -> None:
    loop.check(rollout(), 8, 2)
    loop.check(rollout(), 8, None)
    for wrong, bound, said in (
        ({"samples": 7}, 2, "7 samples"),
        ({"left_out": 1}, 2, "1 left out"),
        ({}, 1, "samples of version 3 at version 5; allowed are 1 behind"),
        ({"weight_versions": ["4"]}, 0, "samples of version 4 at version 5"),
    ):
        with pytest.raises(RuntimeError, match=said):
            loop.check(rollout(**wrong), 8, bound)


# --- the numbers ------------------------------------------------------------------------------------------------------


def buffer(unused: int, **consumed: int) -> dict[str, float]:
    names = [*(f"consumed_staleness_{each}" for each in range(8)), "consumed_staleness_8_or_more"]
    counts = dict.fromkeys(names, 0) | {f"consumed_staleness_{name[1:]}": count for name, count in consumed.items()}
    return {BUFFER + name: float(count) for name, count in (counts | {"stale_groups_filtered": unused}).items()}


def test_a_turn_is_summed_up_over_its_measured_steps() -> None:
    """Two steps of 10 seconds: 4 waited, 3 trained, 1 prepared, 2 paused at the end; 2 groups of 2 samples."""
    steps = [
        Step(10.0, 20.0, 4.0, 100, 1.0, 2.0, buffer(1, _0=1, _2=1)),
        Step(20.0, 30.0, 4.0, 300, 1.0, 2.0, buffer(0, _1=1, _8_or_more=1)),
    ]
    samples = [
        Sample(0.0, 5.0),
        Sample(5.0, 15.0),
        Sample(15.0, 25.0),
        Sample(18.5, 19.5),
        Sample(29.0),
        Sample(19, None),
    ]
    assert summary(steps, samples, 2, 2) == pytest.approx(
        {
            "samples": 4, "tokens": 200, "waited": 4.0, "trained": 3.0, "updated": 3.0, "unused": 1,
            "staleness_0": 1, "staleness_1": 1, "staleness_2": 1, "staleness_8": 1,
            # Of 4 x 20 seconds; what falls into 18 to 20 and 28 to 30 is paused.
            "engines_busy": (5 + 8 + 0 + 0 + 8) / 80,
        }
    )  # fmt: skip
    assert seconds_of(samples, steps) == pytest.approx([5.0, 10.0, 8.0, 0.0]), "of those that finished, without pauses"
    synchronous = [replace(step, buffer={}) for step in steps]
    came_to = summary(synchronous, samples, 2, 2)
    assert (came_to["staleness_0"], came_to["unused"]) == (4, 0)


LOAD: dict[str, Any] = {
    "what": "async", "generation": "2", "step": 1.0, "update": 0.5, "bounds": [2, None], "rollout_batch_size": 2,
    "n_samples_per_prompt": 2, "capacity_factor": 1.0, "steps": 4, "warmup_steps": 8, "seed": 0,
}  # fmt: skip
BOUND_2, NO_BOUND = asynchronous(2), asynchronous(None)


def run_of(asynchronous_step: float) -> list[Measurement]:
    """Three rounds, the last of which takes twice as long. Generation 2 seconds, training 1, updates 0.25 and 0.25."""
    found = []
    for mode, step, waited in ((SYNCHRONOUS, 3.5, 2.0), (BOUND_2, asynchronous_step, 0.1), (NO_BOUND, 2.5, 0.0)):
        came_to: dict[str, float] = {"samples": 4, "tokens": 40.0, "waited": waited, "trained": 1.0, "updated": 0.5}
        came_to |= {"engines_busy": 0.5, "unused": 0.0}
        came_to |= {"staleness_0": 8} if mode == SYNCHRONOUS else {"staleness_1": 6, "staleness_2": 2, "tokens": 30.0}
        lines = measured(mode, "step", [step, step, 2 * step], "2", 0, LOAD)
        found += [_with(line, loop=came_to) for line in lines]
        for name, seconds in (("generation", 2.0), ("training", 1.0), ("prepare", 0.25), ("update", 0.25)):
            # What was measured beside an asynchronous rollout must not get into the simulation.
            each = [seconds if mode == SYNCHRONOUS else 100.0] * 3
            found += [_with(line, latencies=each) for line in measured(mode, name, each, "2", 0, LOAD)]
    return found


def _with(line: Measurement, **changes: Any) -> Measurement:
    return Measurement(**{name: getattr(line, name) for name in line.__struct_fields__} | changes)


def table(text: str, title: str) -> dict[str, list[str]]:
    """The cells of the table after a bold title, by their first one."""
    lines = text[text.index(f"**{title}**") :].splitlines()[2:]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines[: lines.index("") if "" in lines else None]
    ]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(("step", "times", "met"), [(2.5, 1.4, True), (3.5, 1.0, False)])
def test_samples_per_second_are_compared_round_by_round(step: float, times: float, met: bool) -> None:
    results = report.results(run_of(step))
    assert [result.variant for result in results] == [BOUND_2, NO_BOUND]
    assert results[0].found == pytest.approx((times, times, times))
    assert (results[0].met, results[1].met) == (met, True)
    if not met:
        with pytest.raises(BenchFailed, match="1 of 2 targets were missed: asynchronous, bound 2"):
            check(results)


def test_fixed_times_are_simulated_as_they_must_come_out_and_stand_beside_what_was_measured(tmp_path: Path) -> None:
    """In turn a step takes 2 + 1 + 0.5 seconds. All at a time generation is the slower side: 2 seconds of which the
    pauses are none."""
    found = run_of(2.5)
    outcomes = prediction.outcomes(found)
    text = report.text(found, outcomes, report.results(found))
    assert table(text, SYNCHRONOUS)["samples/s"] == [
        "1.14 (0.857 to 1.14)", "1.14", "+0.0 %",
    ]  # fmt: skip
    beside = table(text, BOUND_2)
    assert beside["seconds of a step"][1:] == ["2.25", "-10.0 %"]
    assert beside["x synchronous"] == ["1.40", "1.56", "+11.1 %"]
    assert beside["staleness: mean"][0] == "1.25"
    assert beside["groups beyond the bound, %"][0] == "0.00"
    assert beside["engines busy, %"][2].endswith("points")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {NO_BOUND}") and "yes" not in line]
    assert [cell.strip() for cell in row.split("|")[3:6]] == ["1.40", "12.0 (9.00 to 12.0)", "1.05"]
    assert "2 of 2 met" in text
    for path in plot.draw(found, outcomes, tmp_path):
        assert path.stat().st_size > 10_000


def test_the_command_that_is_named_simulates_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [_with(line, latencies=[1.0, 1.5, 4.0]) if line.latencies else line for line in run_of(2.5)]
    prediction.write(found, tmp_path)
    words = shlex.split(prediction.command(found, tmp_path))
    assert words[:2] == ["miles-mooncake", "simulate"]
    run_simulate([*words[2:], "--output", str(tmp_path / "out")])
    said = capsys.readouterr().out
    for outcome in prediction.outcomes(found).values():
        assert f"{outcome.spread(lambda run: run.samples_per_second).median:.3g}" in said
