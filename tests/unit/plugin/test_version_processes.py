"""Versions that real processes ask for, which are killed, stopped, and take over from each other."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_plugin.version import WriterRefused, newest_version
from tests.unit.plugin.version_writers import ROOT, TRAINER, directory_in_memory, open_versions, update


def run_processes(command: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.plugin.version_processes", command, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=250, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def memory() -> Iterator[Path]:
    directory = directory_in_memory()
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("moment", ["first", "later"])
def test_a_kill_between_any_two_lines_loses_nothing_that_was_told(moment: str, memory: Path) -> None:
    """SIGKILL at each line of the log's and the authority's code in turn, from opening to leaving."""
    points = int(run_processes("crash", moment, memory))
    assert points > 200


def test_processes_that_take_over_from_each_other_get_distinct_numbers(memory: Path) -> None:
    numbers = [int(line) for line in run_processes("storm", memory / "versions", 8, 200).split()]
    assert len(numbers) == 8 * 200
    assert len(set(numbers)) == len(numbers)
    assert newest_version(memory / "versions") >= max(numbers)
    assert not list((memory / "versions").glob("*.partial"))


def test_an_owner_that_was_stopped_is_alive_and_fenced_when_it_wakes(tmp_path: Path, impatient: None) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.plugin.version_processes", "hold", str(tmp_path / "versions")],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert owner.stdout is not None
        assert owner.stdin is not None
        assert owner.stdout.readline() == "0\n"
        os.kill(owner.pid, signal.SIGSTOP)
        with pytest.raises(WriterRefused, match=rf"run held, process {owner.pid} of"):
            open_versions(tmp_path / "versions")
        versions = open_versions(tmp_path / "versions", "next", takeover=True)
        versions.register_trainer(TRAINER)
        assert update(versions) == 1
        os.kill(owner.pid, signal.SIGCONT)
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert f"run next, process {os.getpid()}" in owner.stdout.readline()
        assert update(versions) == 2
        versions.close()
    finally:
        owner.kill()
        owner.wait()
