"""What watches a job: each observer, and that none of them can stop the job."""

import copy
import io
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the extra `train` is not installed")

from rich.cells import cell_len
from rich.console import Console
from rich.progress_bar import ProgressBar

from miles_plugin.arguments_sources import load_config
from miles_plugin.report import files, observers, progress, units
from miles_plugin.report.files import ReportFiles
from miles_plugin.report.jsonlines import JsonLines
from miles_plugin.report.machine import describe_machine
from miles_plugin.report.observer import Observer
from miles_plugin.report.observers import Observers, check_tracking, open_observers
from miles_plugin.report.pace import Pace
from miles_plugin.report.plain import PlainLines, closing_lines, step_line
from miles_plugin.report.progress import LiveProgress
from miles_plugin.report.record import Arm, Report
from mooncake_store.errors import ConfigError, MissingDependency
from tests.report_samples import make_finished_report, make_report, make_reports, make_step, play

REPORTS = make_reports()
EVENTS = ["run_started", "message", "arm_started", "phase_started", "progress", "step_finished", "run_finished"]


@pytest.fixture(params=REPORTS)
def report(request: pytest.FixtureRequest) -> Report:
    return copy.deepcopy(REPORTS[request.param])


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take a second each, and have their own tests."""
    monkeypatch.setattr(files, "_drawer", lambda _path: _draw_nothing)


def _draw_nothing(_report: Report, path: Path) -> None:
    path.write_text("drawn")


class Recorder(Observer):
    """Remembers the events it is told of; raises at one of them, if told to."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.heard: list[str] = []
        for event in EVENTS:
            setattr(self, event, self._hear(event, event == fail_at))

    def _hear(self, event: str, fails: bool) -> Callable[..., None]:
        def hear(*_: Any) -> None:
            self.heard.append(event)
            if fails:
                raise RuntimeError("out of order")

        return hear


@pytest.mark.parametrize("event", EVENTS)
def test_an_observer_that_raises_is_dropped_and_the_others_go_on(
    event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, sound = Recorder(fail_at=event), Recorder()
    report = make_finished_report()
    play(report, Observers(ReportFiles(tmp_path), [failing, sound]), tmp_path)
    assert failing.heard == sound.heard[: sound.heard.index(event) + 1], "told nothing after its failure"
    assert sound.heard[-1] == "run_finished"
    assert set(sound.heard) == set(EVENTS)
    assert Report.read(tmp_path / "report.json").status == "finished"
    assert [record.message for record in caplog.records] == [
        "Recorder failed and is told nothing more: RuntimeError: out of order"
    ]


def test_an_interrupt_while_one_observer_finishes_lets_the_others_finish(tmp_path: Path) -> None:
    class Interrupted(Observer):
        def run_finished(self, _report: Report) -> None:
            raise KeyboardInterrupt

    last = Recorder()
    with pytest.raises(KeyboardInterrupt):
        play(make_finished_report(), Observers(ReportFiles(tmp_path), [Interrupted(), last]), tmp_path)
    assert last.heard[-1] == "run_finished"


def test_the_report_is_written_before_the_others_hear_of_a_step(tmp_path: Path) -> None:
    written = []

    class Reader(Observer):
        def step_finished(self, report: Report, _arm: Arm) -> None:
            written.append(Report.read(tmp_path / "report.json") == report)

        def run_finished(self, _report: Report) -> None:
            written.append((tmp_path / "report.html").exists())

    play(make_finished_report(), Observers(ReportFiles(tmp_path), [Reader()]), tmp_path)
    assert written == [True] * 9


def test_a_report_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        play(make_report(), Observers(ReportFiles(tmp_path), []), tmp_path)


def test_a_report_that_cannot_be_written_later_is_tried_again_and_said_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, attempts = Report.write, iter([False, True, True, False])

    def full_sometimes(self: Report, path: Path) -> None:
        if next(attempts, False):
            raise OSError(28, "No space left on device")
        write(self, path)

    monkeypatch.setattr(Report, "write", full_sometimes)
    play(make_finished_report(), Observers(ReportFiles(tmp_path), []), tmp_path)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert all("No space left on device" in record.message for record in caplog.records)
    assert Report.read(tmp_path / "report.json").status == "finished"


def test_a_picture_that_fails_is_said_and_the_other_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def half_a_picture(_report: Report, path: Path) -> None:
        path.write_text("half")
        raise ImportError("No module named 'matplotlib'")

    def only_html(path: Path) -> Callable[[Report, Path], None]:
        return half_a_picture if path.suffix == ".png" else _draw_nothing

    monkeypatch.setattr(files, "_drawer", only_html)
    play(make_finished_report(), Observers(ReportFiles(tmp_path), []), tmp_path)
    said = [record.message for record in caplog.records]
    assert said == ["no report.png: No module named 'matplotlib'; install the extra `train`"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["report.html", "report.json"]


def lines_of(observer: Callable[[io.StringIO], Observer], report: Report, directory: Path) -> list[str]:
    stream = io.StringIO()
    play(report, Observers(ReportFiles(directory), [observer(stream)]), directory)
    return stream.getvalue().splitlines()


def test_plain_lines_of_any_report(report: Report, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = lines_of(PlainLines, report, tmp_path)
    assert not caplog.records
    assert lines[0] == f"run run-1: report in {tmp_path}"
    steps = [line for line in lines if line.startswith("rollout ")]
    assert len(steps) == sum(len(arm.steps) for arm in report.arms.values())
    assert lines[-1].endswith(f"{tmp_path}/report.json, {tmp_path}/report.png, {tmp_path}/report.html")
    assert lines[-1].startswith("finished" if report.status == "finished" else "stopped")


def test_a_resumed_run_says_how_long_it_took_itself(tmp_path: Path) -> None:
    report = make_finished_report()
    assert closing_lines(report, tmp_path, 0.0)[-1] == "finished after 1 min 40 s: no report was written"
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.run_started(report, tmp_path)  # with the seconds of the run it goes on from
    report.seconds_total += 20
    lines.run_finished(report)
    assert "finished after 20 s (2 min 00 s with what it goes on from): " in stream.getvalue()


def test_a_step_is_one_line_that_is_not_too_long() -> None:
    seconds = {
        "generate": 12.34,
        "put": 0.03,
        "get": 0.01,
        "train": 23.45,
        "update": 1.23,
        "evaluate": 3.21,
        "save": 2.1,
    }
    line = step_line(make_step(123, 0.609, seconds=seconds), 250.0)
    assert line == (
        "rollout 123  reward 0.250  held-out 0.609  332 tok/s  v123>124  s: gen 12.34 put 0.03/322K get 0.01/322K "
        "train 23.45 update 1.23/1.1M eval 3.21 save 2.10  ETA 4m"
    )
    assert len(line) < 170
    assert step_line(make_step(1), None).startswith("rollout   1  reward 0.250"), "what waits for a step looks for this"


def test_plain_lines_are_escaped_where_the_stream_cannot_hold_them() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainLines(stream).message("caf\N{LATIN SMALL LETTER E WITH ACUTE}")
    assert raw.getvalue() == b"caf\\xe9\n"


# Of the docstring of jsonlines.py: what a program may rely on.
KEYS = {
    "run_started": {"report", "started_at", "checkpoint", "config", "machine"},
    "message": {"text"},
    "arm_started": {"arm", "initial_accuracy", "num_rollout", "steps_done"},
    "phase_started": {"arm", "rollout_id", "phase"},
    "step_finished": {
        "arm", "num_rollout", "rollout_id", "reward", "held_out_accuracy", "loss", "clip_fraction", "grad_norm",
        "samples", "tokens", "tokens_per_second", "trained_tokens_per_second", "seconds", "nbytes", "sample_versions",
        "served_version", "version_lag", "updates", "buffer", "eta_seconds",
    },
    "progress": {"phase", "done_bytes", "total_bytes"},
    "run_finished": {"status", "seconds_total", "summary", "files"},
}  # fmt: skip


UPDATE_KEYS = {"version", "nbytes", "density", "seconds", "engines", "left", "proven"}


def test_json_lines_of_any_report(report: Report, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = [json.loads(line, parse_constant=pytest.fail) for line in lines_of(JsonLines, report, tmp_path)]
    assert not caplog.records
    for event in events:
        assert set(event) == KEYS[event["event"]] | {"event", "time", "run_id"}
        assert event["run_id"] == "run-1"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", event["time"])
    assert [events[0]["event"], events[-1]["event"]] == ["run_started", "run_finished"]
    steps = [event for event in events if event["event"] == "step_finished"]
    assert len(steps) == sum(len(arm.steps) for arm in report.arms.values())
    phases = [event["rollout_id"] for event in events if event["event"] == "phase_started"]
    assert phases == [event["rollout_id"] for event in steps for _ in range(4)], "a phase names the rollout it is of"
    told = [(event["phase"], event["done_bytes"], event["total_bytes"]) for event in events if "done_bytes" in event]
    sent = [event["nbytes"].get("update", 0) for event in steps]
    assert told == [("update", done, total) for total in sent for done in (0, total)]
    updates = [update for event in steps for update in event["updates"]]
    assert all(set(update) == UPDATE_KEYS for update in updates)


def test_the_documentation_of_json_lines_names_every_key() -> None:
    from miles_plugin.report import jsonlines

    documented = set(re.findall(r"\w+", jsonlines.__doc__ or ""))
    assert set(KEYS) | set().union(*KEYS.values()) <= documented


def drawn(live: LiveProgress, width: int) -> str:
    """The panel on a console of its own: the live one is redrawn by a thread at any moment."""
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    console.print(live._panel())
    return console.export_text()


@pytest.mark.parametrize("width", [1, 10, 24, 40, 80, 200])
def test_the_panel_fits_any_terminal_and_report(report: Report, width: int, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=True)
    live = LiveProgress(console)
    arms = report.arms
    report.arms = {}
    live.run_started(report, tmp_path)
    try:
        for arm in arms.values():
            live.arm_started(arm, 4)
            live.phase_started("update")
            live.progress(10**9, 2 * 10**9)
            live.step_finished(report, arm)
        panel = drawn(live, width).splitlines()
    finally:
        live.run_finished(report)
    assert max(map(cell_len, panel)) <= width


@pytest.mark.parametrize("step_seconds", [0.05, 4.2, 30.0, 2000.0])
@pytest.mark.parametrize("width", [40, 60, 120])
def test_the_time_left_is_whole_on_a_narrow_terminal_too(
    width: int, step_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "Pace", lambda config: Pace(config, clock=itertools.count(0, step_seconds).__next__))
    report = make_report()
    live = LiveProgress(Console(file=io.StringIO(), width=width, force_terminal=True))
    live.run_started(report, tmp_path)
    try:
        live.arm_started(Arm("real", 0.4, [make_step(i) for i in range(199)]), 300)
        live.step_finished(report, report.arms.setdefault("real", Arm("real", 0.4)))
        panel = drawn(live, width)
    finally:
        live.run_finished(report)
    assert f"ETA {units.seconds(100 * step_seconds)}  200/300" in panel, panel


def test_the_panel_says_what_is_going_on(tmp_path: Path) -> None:
    report = make_finished_report()
    console = Console(file=io.StringIO(), width=120, record=True, force_terminal=True)
    live = LiveProgress(console)
    live.run_started(report, tmp_path)
    live.arm_started(report.arms["shuffled"], 8)
    live.phase_started("train")
    panel = drawn(live, 120)
    live.run_finished(report)
    for expected in (
        "spell_backward · ray · run-1", "4/8", "shuffled control (2 of 2)", "train", "0.250", "0.200 (-0.200)", "▁",
        "2048 generated", "1024 trained on", "v3>4   lag 0", "put 322 KiB", "update 1.1 MiB", "generate 2.00 s",
        "get 10 ms",
    ):  # fmt: skip
        assert expected in panel, panel


@pytest.mark.parametrize(
    ("done", "total", "filled", "words"),
    [
        (0, 1 << 30, 0, "0 B of 1.0 GiB"),
        (1 << 29, 1 << 30, 10, "512 MiB of 1.0 GiB"),
        (1 << 30, 1 << 30, 20, "1.0 GiB of 1.0 GiB"),
        (2 << 30, 1 << 30, 20, "2.0 GiB of 1.0 GiB"),
        (0, 0, 0, "0 B of 0 B"),
    ],
)
def test_the_bar_of_an_update_is_as_long_as_it_says(
    done: int, total: int, filled: int, words: str, tmp_path: Path
) -> None:
    live = LiveProgress(Console(file=io.StringIO(), width=120, force_terminal=True))
    live.run_started(make_report(), tmp_path)
    try:
        live.phase_started("update")
        before = drawn(live, 120)
        live.progress(done, total)
        during = bar_of(live)
        live.phase_started("evaluate")
        after = drawn(live, 120)
    finally:
        live.run_finished(make_report())
    assert "━" not in before + after, "nothing of the last update is left"
    text, lit = during
    assert words in text
    assert lit == filled


def bar_of(live: LiveProgress) -> tuple[str, int]:
    """The panel's row of what goes on, and how many cells of its bar are filled."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    lines = console.render_lines(live._panel(), pad=False)
    (row,) = (line for line in lines if any("of" in part.text.split() for part in line))
    bar = [part for part in row if part.text and set(part.text) <= set("━╸╺")]
    dim = ProgressBar().style
    lit = sum(len(part.text) for part in bar if part.style != console.get_style(dim))
    return "".join(part.text for part in row), lit


def test_the_rest_of_a_run_is_extrapolated_over_both_arms() -> None:
    times: Iterator[float] = iter([0.0, 100.0, 102.0, 106.0, 200.0, 206.0])
    pace = Pace({"reward_control": "both"}, clock=lambda: next(times))
    pace.arm_started(Arm("real", 0.4), 4)
    assert pace.remaining() is None
    pace.step_finished()
    assert pace.remaining() == 2.0 * (3 + 4)
    pace.step_finished()
    assert pace.remaining() == 3.0 * (2 + 4)
    resumed = Arm("shuffled", 0.4, [make_step(0), make_step(1)])
    pace.arm_started(resumed, 4)
    pace.step_finished()
    assert pace.remaining() == 4.0 * 1


def test_what_is_asked_for_is_opened(tmp_path: Path) -> None:
    def kinds(*flags: str) -> list[str]:
        opened = open_observers(load_config(flags), tmp_path)
        assert isinstance(opened._others[0], PlainLines)
        opened._others[0]._release()
        return [type(observer).__name__ for observer in opened._others]

    assert kinds() == ["PlainLines"], "standard output of a test is no terminal"
    assert kinds("--use-tensorboard", "--use-wandb") == ["PlainLines", "TensorBoard", "WandB"]
    assert not list(tmp_path.iterdir()), "nothing is made before the run has started"


@pytest.mark.parametrize(("flag", "package"), [("--use-tensorboard", "tensorboard"), ("--use-wandb", "wandb")])
def test_a_missing_extra_is_named(flag: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "find_spec", lambda name: None if name == package else object())
    check_tracking(load_config([]))
    with pytest.raises(MissingDependency, match=rf"pip install miles-mooncake\[{package}\]"):
        check_tracking(load_config([flag]))


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("tb_project_name", "logs", "--use-tensorboard"),
        ("wandb_mode", "online", "--use-wandb"),
        ("wandb_project", "p", "--use-wandb"),
        ("wandb_group", "g", "--use-wandb"),
        ("wandb_dir", "logs", "--use-wandb"),
    ],
)
def test_a_setting_of_a_logger_that_is_off_is_refused(name: str, value: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is set without .*; add {flag}, or leave {name} out"):
        check_tracking(load_config([f"--{name.replace('_', '-')}", value]))


@pytest.mark.parametrize(
    ("flags", "name"),
    [(["--use-tensorboard", "--tb-project-name"], "tb_project_name"), (["--use-wandb", "--wandb-dir"], "wandb_dir")],
)
def test_a_directory_that_cannot_be_made_is_named(flags: list[str], name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{name}={tmp_path}/file/logs"):
        check_tracking(load_config([*flags, f"{tmp_path}/file/logs"]))
    check_tracking(load_config([*flags, f"{tmp_path}/new/logs"]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `train` is not installed")
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra `tensorboard` is not installed"
    )
    report = make_finished_report("--num-steps-per-rollout", "2")
    opened = open_observers(load_config(["--use-tensorboard", "--num-steps-per-rollout", "2"]), tmp_path)
    play(report, opened, tmp_path)
    assert sorted(entry.name for entry in (tmp_path / "tensorboard").iterdir()) == ["real", "shuffled"]
    for name, arm in report.arms.items():
        events = accumulators.EventAccumulator(str(tmp_path / "tensorboard" / name)).Reload()
        points = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        accuracy = [(step.rollout_id, pytest.approx(step.held_out_accuracy)) for step in arm.steps]
        assert points["eval/spell_backward"] == accuracy
        assert [step for step, _ in points["train/loss"]] == [1, 3, 5, 7]
        assert [value for _, value in points["perf/update_weights_wire_bytes"]] == [1_150_000] * 4
        assert "rollout/step" not in points


def test_tensorboard_has_a_resumed_arm_whole(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `train` is not installed")
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra `tensorboard` is not installed"
    )
    from miles_plugin.report.record import Resume
    from miles_plugin.report.tensorboard import TensorBoard

    report = make_report()
    report.resumed_at = [Resume("run-0", "real", 2)]
    arm = Arm("real", 0.4, [make_step(0), make_step(1)])
    logger = TensorBoard(tmp_path)
    logger.run_started(report, tmp_path)
    logger.arm_started(arm, 4)
    arm.steps.append(make_step(2))
    logger.step_finished(report, arm)
    logger.run_finished(report)
    events = accumulators.EventAccumulator(str(tmp_path / "real-2")).Reload()
    assert [event.step for event in events.Scalars("rollout/raw_reward")] == [0, 1, 2]


def test_the_machine_is_described_by_what_a_report_can_hold() -> None:
    machine = describe_machine()
    assert json.loads(json.dumps(machine)) == machine
    assert machine["cpus"] >= 1
    assert "torch" in machine["versions"] or pytest.importorskip("torch")
