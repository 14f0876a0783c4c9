"""What becomes of a run, whichever benchmark it is of."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.outcome import Outcome, full_disk_told, tell
from benchmarks.statistics import Spread
from benchmarks.targets import Result, check, section
from miles_plugin.bench_commands import BenchFailed
from tests.unit.benchmarks.made import measured


def outcome(directory: Path) -> Outcome:
    def draw(where: Path) -> Sequence[Path]:
        (where / "speed.png").write_text("a picture")
        return [where / "speed.png"]

    lines = directory / "measurements.jsonl"
    return Outcome(directory, lines, "speed", measured("ours", "put", [1.0]), ["ours"], "| a table |", draw)


@pytest.mark.parametrize(("text", "copied"), [("[it](speed.png)", True), ("no picture", False)])
def test_a_document_has_the_table_and_the_picture_that_it_names(
    text: str, copied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, out = tmp_path / "docs" / "page.md", tmp_path / "out"
    for directory in (document.parent, out):
        directory.mkdir()
    document.write_text(f"{text}\n<!-- speed: made by the command above --><!-- speed: end -->\n")
    tell(argparse.Namespace(document=document, compare=None), outcome(out), [])
    assert "| a table |" in document.read_text()
    assert (out / "speed.md").read_text() == "| a table |\n"
    assert (document.parent / "speed.png").exists() is copied
    printed = capsys.readouterr().out
    assert printed.startswith("| a table |")
    assert (str(document.parent / "speed.png") in printed) is copied
    assert "Compared" not in printed


def test_an_earlier_run_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = measured("ours", "put", [2.0])
    tell(argparse.Namespace(document=None, compare="there"), outcome(tmp_path), old)
    assert "Compared with there:" in capsys.readouterr().out


def test_only_a_disk_that_is_full_or_broken_is_told_as_such() -> None:
    with pytest.raises(BenchFailed, match="--output there: No space left on device"), full_disk_told(Path("there")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(PermissionError), full_disk_told(Path("there")):
        raise PermissionError(errno.EACCES, "no")


def test_a_missed_target_is_named() -> None:
    met = Result("numpy", "put", "x Ray", 2.0, Spread(2, 1, 3))
    missed = Result("a", "b", "c", 1.0, Spread(2, 2, 2), at_most=True)
    check([met])
    with pytest.raises(BenchFailed, match=r"^1 of 2 targets were missed: a b c$"):
        check([met, missed])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section([met, missed]).splitlines()]
    assert ["numpy put", "x Ray", ">= 2", "2.00 (1.00 to 3.00)", "yes"] in lines
    assert ["a b", "c", "<= 1", "2.00", "no"] in lines
