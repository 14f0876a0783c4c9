"""Progress as a user gets it: on a real terminal, in a pipe, with a reader that goes away."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the extra `train` is not installed")

pytestmark = pytest.mark.integration

# A job without its parts: it prints, logs and starts a child, as parts do. argv: directory, flags.
JOB = """
import logging, os, signal, subprocess, sys, time
from pathlib import Path
from miles_plugin.arguments_sources import load_config
from miles_plugin.report.observers import open_observers
from tests.report_samples import make_report, make_step
from miles_plugin.report.record import Arm

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so their children
logging.basicConfig(level=logging.WARNING)
config, directory = load_config(sys.argv[2:]), Path(sys.argv[1])
observers, report = open_observers(config, directory), make_report()
observers.run_started(report, directory)
try:
    observers.message("mooncake_master is up")
    report.arms["real"] = arm = Arm("real", 0.4)
    observers.arm_started(arm, config.num_rollout)
    for rollout_id in range(config.num_rollout):
        observers.phase_started("generate")
        print("printed by a part", flush=True)
        logging.warning("logged by a part")
        if not os.isatty(1):  # nobody can keep a child from writing into the panel
            subprocess.run(["echo", "printed by a child"], check=True)
        arm.steps.append(make_step(rollout_id))
        observers.step_finished(report, arm)
    if config.num_rollout == 3:
        observers.phase_started("update")
        observers.progress(600_000, 1_200_000)
        print("nothing more to do", flush=True)
        time.sleep(60)
    report.status = "finished"
except KeyboardInterrupt:
    report.status = "stopped: KeyboardInterrupt"
finally:
    observers.run_finished(report)
"""
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
FINISHED = ["--num-rollout", "2"]


def environment(**changes: str | None) -> dict[str, str]:
    given = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", "PYTHONUTF8": "1", **changes}
    return {name: value for name, value in given.items() if value}


class Terminal:
    """A pseudo-terminal that a job runs on."""

    def __init__(self, directory: Path, flags: list[str], env: dict[str, str], columns: int = 100) -> None:
        self._master, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (40, columns))
        self.before = termios.tcgetattr(self._slave)
        self.output = b""
        self.job = subprocess.Popen(
            [sys.executable, "-c", JOB, str(directory), *flags],
            stdin=self._slave, stdout=self._slave, stderr=self._slave, env=env, start_new_session=True,
        )  # fmt: skip

    def read_until(self, expected: bytes | None) -> None:
        """Read until the output has `expected`, or to the job's end."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            ended = self.job.poll() is not None
            while select.select([self._master], [], [], 0.05)[0]:
                self.output += os.read(self._master, 65536)
            if ended or (expected is not None and expected in self.output):
                return
        raise AssertionError(f"not within two minutes: {expected!r} in {self.output!r}")

    def settings(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        self.job.kill()
        self.job.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def run_on_terminal(terminals: list[Terminal], directory: Path, columns: int = 100, **changes: str | None) -> Terminal:
    terminals.append(Terminal(directory, FINISHED, environment(**changes), columns))
    terminals[-1].read_until(None)
    assert terminals[-1].job.returncode == 0, terminals[-1].output
    return terminals[-1]


def visible(output: bytes) -> str:
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output.decode())


def screen(output: bytes, columns: int) -> list[str]:
    """The lines that a terminal shows after `output`, those scrolled away too."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", output.decode()):
        if part.startswith("\x1b["):
            if part[-1] == "A":
                row -= int(part[2:-1] or 1)
            elif part[-1] == "K":
                lines[row] = [] if part == "\x1b[2K" else lines[row][:column]
        elif part == "\r":
            column = 0
        else:
            if part == "\n" or column == columns:
                row, column = row + 1, column if part == "\n" else 0
                lines += [[] for _ in range(row + 1 - len(lines))]
            if part != "\n":
                lines[row] += " " * (column + 1 - len(lines[row]))
                lines[row][column] = part
                column += 1
    return ["".join(line).rstrip() for line in lines]


@pytest.mark.parametrize("columns", [100, 30])
def test_a_terminal_shows_a_panel_with_messages_above_it(
    columns: int, terminals: list[Terminal], tmp_path: Path
) -> None:
    terminal = run_on_terminal(terminals, tmp_path, columns)
    assert terminal.output.count(HIDE) == terminal.output.count(SHOW) == 1
    assert terminal.output.rfind(SHOW) > terminal.output.rfind("╰".encode()), (
        "the panel is left before the cursor is back"
    )
    assert terminal.settings() == terminal.before
    shown = screen(terminal.output, columns)
    top, bottom = (next(i for i, line in enumerate(shown) if line.startswith(corner)) for corner in "╭╰")
    assert sum(line.startswith(("╭", "╰")) for line in shown) == 2, "one panel"
    assert all(line.startswith("│") and line.endswith("│") for line in shown[top + 1 : bottom])
    above = "\n".join(shown[:top])
    assert above.count("printed by a part") == above.count("logged by a part") == 2
    assert "mooncake_master is up" in above
    assert "finished after" in "\n".join(shown[bottom:])
    assert "Traceback" not in above
    if columns == 100:
        assert shown[top + 1].startswith("│ rollout   ━")
        assert "ETA 0 s  2/2  real reward" in shown[top + 1]


def test_a_weight_update_that_takes_its_time_has_a_bar(terminals: list[Terminal], tmp_path: Path) -> None:
    terminals.append(Terminal(tmp_path, ["--num-rollout", "3"], environment()))
    terminal = terminals[-1]
    terminal.read_until(b"586 KiB of 1.1 MiB")
    shown = [line for line in visible(terminal.output).splitlines() if "586 KiB of 1.1 MiB" in line][-1]
    assert re.search(r"now +\S update +\d+ s ━+", shown), shown
    terminal.job.send_signal(signal.SIGINT)
    terminal.read_until(None)


def test_a_terminal_is_itself_again_after_an_interrupt(terminals: list[Terminal], tmp_path: Path) -> None:
    terminals.append(Terminal(tmp_path, ["--num-rollout", "3"], environment()))
    terminal = terminals[-1]
    terminal.read_until(b"nothing more to do")
    assert b"3/3" in terminal.output
    assert SHOW not in terminal.output
    terminal.job.send_signal(signal.SIGINT)
    terminal.read_until(None)
    assert terminal.job.returncode == 0
    assert terminal.output.count(SHOW) == 1
    assert terminal.settings() == terminal.before
    assert "stopped: KeyboardInterrupt" in visible(terminal.output)
    assert "stopped after" in visible(terminal.output)


@pytest.mark.parametrize(
    "changes",
    [{"TERM": "dumb"}, {"TERM": None}, {"TERM": "unknown"}, {"PYTHONUTF8": None, "PYTHONIOENCODING": "latin-1"}],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_a_terminal_that_can_do_less_gets_plain_lines(
    changes: dict[str, str | None], terminals: list[Terminal], tmp_path: Path
) -> None:
    terminal = run_on_terminal(terminals, tmp_path, **changes)
    assert b"\x1b" not in terminal.output
    assert b"rollout   1  reward 0.250" in terminal.output


def test_a_terminal_nobody_has_heard_of_does_no_harm(terminals: list[Terminal], tmp_path: Path) -> None:
    assert b"finished after" in run_on_terminal(terminals, tmp_path, TERM="nonsense-9000").output


def run_in_pipe(directory: Path, *flags: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", JOB, str(directory), *FINISHED, *flags]
    return subprocess.run(command, env=environment(**changes), capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize("changes", [{}, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}], ids=["plain", "colours forced"])
def test_a_pipe_gets_lines_without_escape_codes(changes: dict[str, str], tmp_path: Path) -> None:
    done = run_in_pipe(tmp_path, **changes)
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert [line[:11] for line in lines if line.startswith("rollout")] == ["rollout   0", "rollout   1"]
    assert lines[-1].startswith("finished after")
    assert "printed by" not in done.stdout
    assert done.stderr.count("printed by a part") == done.stderr.count("printed by a child") == 2


def test_json_has_standard_output_to_itself(tmp_path: Path) -> None:
    done = run_in_pipe(tmp_path, "--log-format", "json")
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert events == [
        "run_started", "message", "arm_started", *["phase_started", "step_finished"] * 2, "run_finished",
    ]  # fmt: skip
    assert done.stderr.count("printed by a part") == done.stderr.count("printed by a child") == 2


@pytest.mark.parametrize("flags", [[], ["--log-format", "json"]], ids=["text", "json"])
def test_a_reader_that_goes_away_does_not_stop_the_job(flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", JOB.replace("check=True", "check=False"), str(tmp_path), *FINISHED, *flags]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(write)
    assert done.returncode == 0, done.stderr
    assert "failed and is told nothing more: BrokenPipeError" in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == "finished"
    assert len(report["arms"]["real"]["steps"]) == 2
