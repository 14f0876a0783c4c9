"""The report of a run: its file, what is read from it, and the pictures drawn of it."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="the extra `train` is not installed")
pytest.importorskip("plotly", reason="the extra `train` is not installed")

from miles_plugin.report import html, series, units
from miles_plugin.report.files import redraw
from miles_plugin.report.metrics import STEP_KEYS, step_metrics, track_name
from miles_plugin.report.panel import Label, Line, Panel, counting
from miles_plugin.report.plot import draw
from miles_plugin.report.record import FORMAT, Arm, Report, Resume, ShardRecord, Step, UpdateRecord, finite
from mooncake_store.errors import ConfigError
from tests.report_samples import (
    make_async_report,
    make_buffer,
    make_finished_report,
    make_report,
    make_reports,
    make_step,
)

REPORTS = make_reports()
each_report = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)

_floats = st.floats(allow_nan=True, allow_infinity=True)
_texts = st.text(max_size=8)
_updates = st.builds(
    UpdateRecord,
    nbytes=st.integers(0, 2**60),
    density=_floats,
    seconds=st.dictionaries(_texts, _floats, max_size=3),
    engines=st.lists(_texts, max_size=2),
    left=st.lists(_texts, max_size=2),
)
_steps = st.builds(
    Step,
    reward=_floats,
    held_out_accuracy=st.none() | st.floats(0, 1),
    loss=_floats,
    clip_fraction=_floats,
    grad_norm=_floats,
    seconds=st.dictionaries(_texts, _floats, max_size=3),
    nbytes=st.dictionaries(_texts, st.integers(0, 2**60), max_size=3),
    sample_versions=st.lists(st.integers(0, 99).map(str), max_size=2),
    shards=st.lists(st.builds(ShardRecord), max_size=2),
    requested_version=st.none() | st.integers(0, 99),
    updates=st.lists(_updates, max_size=2),
)
_reports = st.builds(
    Report,
    config=st.dictionaries(_texts, st.none() | st.integers() | _texts, max_size=3),
    machine=st.dictionaries(_texts, _texts, max_size=3),
    arms=st.dictionaries(
        _texts,
        st.builds(Arm, initial_accuracy=_floats, steps=st.lists(_steps, max_size=2), first_update=st.none() | _updates),
        max_size=2,
    ),
    object_store=st.dictionaries(_texts, st.integers(0, 2**60), max_size=2),
    seconds_total=st.floats(0, 1e9),
    resumed_at=st.lists(st.builds(Resume), max_size=2),
)


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@given(report=_reports)
@settings(max_examples=50)
def test_a_report_is_read_back_as_it_was_written(report: Report, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("report") / "report.json"
    report.write(path)
    written = strict_json(path.read_text())
    assert written == finite(report.to_dict())
    assert finite(Report.read(path).to_dict()) == written
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"], "replaced whole, nothing left behind"


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Keys and indices in a report whose value has a type of its own to be checked, one of each kind."""
    free = ("config", "machine", "summary", "shuffled", 1, 2, 3)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    inner = [found for key, item in items if key not in free for found in _places(item, (*place, key))]
    return [place, *inner] if place else inner


_VALID = finite(make_finished_report().to_dict()) | {
    "resumed_at": [{"run_id": "run-0", "arm": "real", "rollout_id": 2}]
}


@pytest.mark.parametrize("place", _places(_VALID), ids=lambda place: ".".join(map(str, place)))
def test_a_damaged_field_is_named_with_its_file(place: tuple[Any, ...], tmp_path: Path) -> None:
    data = json.loads(json.dumps(_VALID))
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = str(holder[place[-1]]) if not isinstance(holder[place[-1]], str) else 7
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        Report.read(path)
    assert str(path) in str(caught.value)
    assert ".".join(map(str, place)) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", f"format None, this version reads {FORMAT}"),
        ('{"format": 1}', f"format 1, this version reads {FORMAT}"),
        ('{"format": "2"}', f"format '2', this version reads {FORMAT}"),
        (json.dumps({"format": FORMAT}), "run_id: Field required"),
        (json.dumps(_VALID | {"colour": "blue"}), "colour: Unexpected"),
    ],
)
def test_what_is_no_report_of_this_version_is_refused(text: str | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        Report.read(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match=expected):
        redraw(tmp_path)


def test_the_summary_says_rise_and_digests() -> None:
    steps = [make_step(i, accuracy) for i, accuracy in enumerate([0.5, None, 0.6, 0.7])]
    summary = Arm("real", 0.4, steps).summary()
    assert summary["final_accuracy"] == pytest.approx(0.6)
    assert summary["rise"] == pytest.approx(0.2)
    assert summary["digests_equal"]
    changed = make_step(0, 0.3, shards=[ShardRecord(0, "k", 4, "a", "b")])
    assert not Arm("shuffled", 0.4, [changed]).summary()["digests_equal"]


def test_the_lag_is_from_the_newest_version_served_before_the_rollout_was_trained_on() -> None:
    made = [(["0"], 1), (["0"], None), (["0", "1"], 2), (["2"], 3), (["default"], 4)]
    arm = Arm("real", 0.4, [make_step(i, sample_versions=v, served_version=s) for i, (v, s) in enumerate(made)])
    assert [arm.version_lag(index) for index in range(len(made))] == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("made", "requested", "lag"),
    [
        (["7"], 7, 0),
        (["5", "7"], 7, 2),
        (["7", "8"], 7, 0),  # an update while it was generated
        (["8"], 7, 0),
        (["default", "6"], 7, 1),
        (["default"], 7, 0),
        (["0"], None, 0),
        ([], 7, 0),
    ],
)
def test_the_requested_lag_is_from_the_version_that_was_current_when_the_rollout_began(
    made: list[str], requested: int | None, lag: int
) -> None:
    report = make_report()
    step = make_step(0, sample_versions=made, requested_version=requested)
    arm = report.arms["real"] = Arm("real", 0.4, [step])
    assert arm.requested_lag(0) == lag
    metrics = step_metrics(arm, 0, report.config)
    assert metrics["rollout/weight_version/requested_lag"] == lag
    assert metrics.get("rollout/weight_version/requested") == requested


def test_the_newest_lag_counts_numbers_that_no_engine_served() -> None:
    report = make_report()
    arm = report.arms["real"] = Arm("real", 0.4, [make_step(0, sample_versions=["4"], requested_version=4)])
    assert (arm.newest_lag(0), arm.requested_lag(0)) == (0, 0)
    arm.steps = [make_step(0, sample_versions=["4"], requested_version=4, newest_version=6)]
    metrics = step_metrics(arm, 0, report.config)
    assert metrics["rollout/weight_version/newest"] == 6
    assert metrics["rollout/weight_version/newest_lag"] == 2
    assert metrics["rollout/weight_version/requested_lag"] == 0


@each_report
def test_every_report_can_be_drawn(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "report.json")
    assert redraw(tmp_path) == [tmp_path / "report.png", tmp_path / "report.html"]
    image = (tmp_path / "report.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert (int.from_bytes(image[16:20], "big"), int.from_bytes(image[20:24], "big")) == (1920, 1080)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script") == 3, "text of the run must not become script"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["report.html", "report.json", "report.png"]


@each_report
def test_every_figure_of_the_page_is_what_plotly_knows(report: Report) -> None:
    from plotly import graph_objects

    for panel in series.panels(report):
        figure = html.figure(panel)
        json.dumps(figure, allow_nan=False)
        graph_objects.Figure(figure)  # raises for a property or value that plotly does not have
        assert [trace["name"] for trace in figure["data"]] == [line.label for line in panel.lines]
        for line in panel.lines:
            assert len(line.x) == len(line.y)
        if panel.y_ticks:
            assert panel.y_range is not None
            assert all(panel.y_range[0] <= value <= panel.y_range[1] for value, _ in panel.y_ticks)


def test_the_picture_differs_from_that_of_an_empty_run(tmp_path: Path) -> None:
    draw(make_report(), tmp_path / "empty.png")
    draw(make_finished_report(), tmp_path / "full.png")
    assert (tmp_path / "full.png").stat().st_size > (tmp_path / "empty.png").stat().st_size


@given(heights=st.lists(st.floats(-3, 3), max_size=4))
@example(heights=[-3.0, 3.0, 3.0, 3.0])
def test_labels_do_not_touch_and_stay_inside(heights: list[float]) -> None:
    labels = series._apart([Label(height, "", "") for height in heights], -3.0, 3.0)
    placed = sorted(label.y for label in labels)
    gap = series._LABEL_GAP * 6
    assert all(high - low >= gap - 1e-9 for low, high in pairwise(placed))
    assert all(-3 <= height <= 3 for height in placed)


@given(values=st.lists(st.integers(0, 10**7), min_size=1, max_size=5))
def test_ticks_of_counts_are_few_and_whole_and_cover_the_data(values: list[int]) -> None:
    line = Line("", list(range(len(values))), [float(value) for value in values], "")
    panel = counting(Panel("", "", "", "", [line]))
    ticks = [value for value, _ in panel.y_ticks]
    assert 2 <= len(ticks) <= 8
    assert all(tick == int(tick) and text == str(int(tick)) for tick, text in panel.y_ticks)
    assert ticks[0] <= min(values)
    assert ticks[-1] >= max(values)


@given(values=st.lists(st.integers(1, 2**50), min_size=1, max_size=5))
def test_ticks_of_bytes_are_few_and_different_and_around_the_data(values: list[int]) -> None:
    ticks = series._binary_ticks(min(values), max(values))
    assert 3 <= len(ticks) <= 9
    assert len({text for _, text in ticks}) == len(ticks)
    assert ticks[0][0] < min(values) <= max(values) < ticks[-1][0]


def test_the_title_says_what_came_of_the_run() -> None:
    report = make_finished_report("--task", "basic_arithmetic")
    assert series.title(report) == "basic_arithmetic: held-out accuracy 0.40 → 0.70 in 4 rollouts of GRPO"
    assert "control with shuffled rewards 0.40 → 0.25" in series.subtitle(report)
    report.arms["real"].steps.append(make_step(4, shards=[ShardRecord(0, "k", 4, "a", "b")]))
    assert "DIGESTS DIFFER" in series.subtitle(report)
    assert series.title(make_report("--prompt-data", "/data/questions.jsonl")) == "questions: no rollout was finished"


def drawn(report: Report, key: str) -> dict[str, list[float]]:
    """The lines of a panel, by label."""
    (panel,) = (panel for panel in series.panels(report) if panel.key == key)
    return {line.label: line.y for line in panel.lines}


def test_an_asynchronous_run_shows_how_stale_its_groups_were_against_the_bound() -> None:
    lines = drawn(make_async_report(), "staleness")
    assert lines["consumed max"] == [0, 1, 2, 2]
    assert lines["consumed avg"] == [0.0, 0.5, 1.0, 1.5]
    assert lines["buffered max"] == pytest.approx([math.nan, 1, 2, 3], nan_ok=True)
    assert lines["buffered avg"] == pytest.approx([math.nan, 0.75, 1.5, 2.25], nan_ok=True)
    assert lines["bound 2"] == [2, 2]
    unbounded = make_report("--fully-async")
    assert not [label for label in drawn(unbounded, "staleness") if "bound" in label]


def test_an_asynchronous_run_shows_who_waited_for_whom() -> None:
    """A step of 6.54 seconds, 4 of them training, 1.5 waiting; room for 64 groups, 32 in flight. Between two rollouts
    the buffer counts the 4.54 seconds of the step before that are no generation, and the 2 of its own."""
    lines = drawn(make_async_report(), "utilisation")
    assert list(lines) == ["training 61 %", "waiting 23 %", "buffer filled 50 %", "held back 61 %"]
    train, wait, filled, held_back = lines.values()
    assert train == pytest.approx([100 * 4 / 6.54] * 4)
    assert wait == pytest.approx([100 * 1.5 / 6.54] * 4)
    assert filled == [0, 25, 50, 75]
    assert held_back == pytest.approx([0, *(100 * 64 * index / (32 * 6.54) for index in (1, 2, 3))])
    few = drawn(make_async_report("--async-max-concurrent-samples", "64"), "utilisation")
    assert [label for label in few if "held back" in label] == ["held back 245 %"], "8 in flight"


def test_an_asynchronous_run_says_what_became_of_its_groups() -> None:
    report = make_async_report()
    said = "128 consumed, 6 recycled, 0 dropped, 4 aborted, 3 stale, 0 steps back"
    assert dict(series.facts(report))["groups"] == said
    assert series.footer(report)[-1].endswith(said)
    lost = make_buffer(0) | {"rollout/fully_async/lost_groups": 2, "rollout/fully_async/version_steps_back": 1}
    report.arms["shuffled"] = Arm("shuffled", 0.4, [make_step(0, buffer=lost)])
    said = "160 consumed, 6 recycled, 0 dropped, 5 aborted, 3 stale, 1 steps back, 2 lost"
    assert dict(series.facts(report))["groups"] == said, "of both arms"


def test_a_synchronous_run_says_nothing_of_a_buffer() -> None:
    report = make_finished_report()
    assert "groups" not in dict(series.facts(report))
    assert "groups" not in "".join(series.footer(report))
    assert {panel.key for panel in series.panels(report)} == {"learning", "time", "bytes", "versions", "lag", "update"}


def test_metrics_have_miles_names() -> None:
    report = make_finished_report("--rollout-num-gpus", "2", "--num-steps-per-rollout", "4")
    assert step_metrics(report.arms["real"], 1, report.config) == pytest.approx(
        {
            "rollout/step": 1,
            "rollout/raw_reward": 0.25,
            "rollout/response_len/mean": 4.0,
            "rollout/samples": 1024,
            "rollout/weight_version/min": 1,
            "rollout/weight_version/served": 2,
            "rollout/weight_version/requested": 1,
            "rollout/weight_version/requested_lag": 0,
            "rollout/weight_version/newest": 1,
            "rollout/weight_version/newest_lag": 0,
            "rollout/weight_version/lag": 0,
            "perf/rollout_time": 2.0,
            "perf/store_put_time": 0.03,
            "perf/data_preprocess_time": 0.01,
            "perf/actor_train_time": 4.0,
            "perf/update_weights_time": 0.5,
            "perf/update_weights_prepare_time": 0.01,
            "perf/update_weights_pause_time": 0.02,
            "perf/update_weights_transfer_time": 0.4,
            "perf/update_weights_resume_time": 0.01,
            "perf/update_weights_converge_time": 0.5,
            "perf/update_weights_density": 1.0,
            "perf/update_weights_requested_lag": 0,
            "perf/update_weights_served_lag": 0,
            "perf/update_weights_newest_lag": 0,
            "rollout/engines": 1,
            "rollout/engines_left": 0,
            "perf/step_time": 6.54,
            "perf/tokens_per_gpu_per_sec": 1024.0,
            "perf/train_tokens_per_sec": 1024.0,
            "perf/store_put_bytes": 330_000,
            "perf/store_get_bytes": 330_000,
            "perf/update_weights_wire_bytes": 1_150_000,
            "train/step": 7,
            "train/loss": -0.0125,
            "train/pg_clipfrac": 0.01,
            "train/grad_norm": 1.5,
            "eval/step": 1,
            "eval/spell_backward": 0.6,
        }
    )


@each_report
def test_every_metric_has_a_step(report: Report) -> None:
    for arm in report.arms.values():
        for index in range(len(arm.steps)):
            metrics = step_metrics(arm, index, report.config)
            assert all(STEP_KEYS[name.split("/")[0]] in metrics for name in metrics)


def test_what_was_not_measured_is_no_metric() -> None:
    report = make_report()
    arm = Arm("real", 0.4, [make_step(0, None, served_version=None, sample_versions=["default"])])
    names = step_metrics(arm, 0, report.config).keys()
    assert not names & {"eval/spell_backward", "rollout/weight_version/served", "rollout/weight_version/min"}


def test_a_resumed_arm_is_tracked_under_a_new_name() -> None:
    report = make_report()
    report.resumed_at = [Resume("run-0", "real", 2), Resume("run-0", "real", 3)]
    assert [track_name(report, arm) for arm in ("real", "shuffled")] == ["real-3", "shuffled"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (units.nbytes(0), "0 B"),
        (units.nbytes(1023), "1023 B"),
        (units.nbytes(1_253_376), "1.2 MiB"),
        (units.nbytes(15 * 2**30), "15 GiB"),
        (units.short_nbytes(1_253_376), "1.2M"),
        (units.seconds(None), "?"),
        (units.seconds(math.nan), "?"),
        (units.seconds(0), "0 s"),
        (units.seconds(0.0254), "25 ms"),
        (units.seconds(100), "1 min 40 s"),
        (units.seconds(3700), "1 h 01 min"),
        (units.short_seconds(40.3), "40s"),
        (units.short_seconds(250), "4m"),
        (units.short_seconds(7300), "2h02m"),
        (units.count(4812.3), "4812"),
        (units.count(48_123), "48.1k"),
        (units.count(units.per_second(5, 0)), "?"),
        (units.sparkline([0, 1, 2, 3], 3), "▁▅█"),
        (units.sparkline([1.0, math.nan, 1.0], 9), "▁ ▁"),
        (units.sparkline([math.inf], 9), ""),
        (units.sparkline([1, 2], -3), ""),
    ],
)
def test_numbers_as_people_read_them(given: str, expected: str) -> None:
    assert given == expected
