"""`miles-mooncake bench weights --deltas`: all is measured, one wrong byte ends the run, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("transformers", reason="the extra `train` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.weights.delta_settings import CASES, FEW
from benchmarks.weights.delta_turns import (
    APPLY,
    BASELINE,
    ENCODE,
    FLUSH,
    HASH,
    LIMIT,
    MAPPED,
    MEMCPY,
    memory_of,
    process_of,
)
from benchmarks.weights.delta_whole import FIRST_COPY, MATERIALIZE, PUBLISH
from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS

pytestmark = pytest.mark.integration
FLAGS = ("bench", "weights", "--deltas", "--quick", "--size", "5mb")
# The command, with a codec in the place of sparse that changes one byte too many, where no checksum sees it.
WRONG = """
import sys
from benchmarks.weights import delta_command
from miles_plugin.bench_commands import bench_parser
from tests.unit.benchmarks.test_deltas_parts import Lying
delta_command.run(bench_parser().parse_args(sys.argv[2:]), {"sparse": Lying})
"""


def expected() -> set[tuple[str, str, str, int]]:
    """Variant, peer, operation and round of all lines of two processes with one turn each."""
    found = set()
    for case in CASES:
        peers = dict.fromkeys(ENCODINGS, (0, 1)) | {process_of(BASELINE, n): (n,) for n in (0, 1)}
        for peer, processes in peers.items():
            for number in processes:
                for operation in (ENCODE, APPLY, MAPPED, FLUSH, memory_of((ENCODE, APPLY)[number])):
                    found.add((case.name, peer, operation, number))
        found |= {(case.name, limit, LIMIT, number) for limit in (MEMCPY, HASH) for number in (0, 1)}
    return found | {
        (FEW.name, encoding, operation, 0) for encoding in ENCODINGS for operation in (PUBLISH, MATERIALIZE, FIRST_COPY)
    }


def directories_in(log: str) -> list[Path]:
    """Where the run said that its files lie."""
    (line,) = [line for line in log.splitlines() if line.startswith("files lie in ")]
    fast, _, local = line.removeprefix("files lie in ").partition(", those that are mapped in ")
    return [Path(fast), Path(local)]


def command(output: Path, *flags: str, code: Sequence[str] = ("-m", "miles_plugin")) -> list[str]:
    return [sys.executable, *code, *FLAGS, "--output", str(output), *flags]


def test_all_is_measured_and_written(tmp_path: Path) -> None:
    document, output = tmp_path / "page.md", tmp_path / "one"
    document.write_text("a\n<!-- deltas: made by the command above -->\nreplaced\n<!-- deltas: end -->\nb\n")
    done = subprocess.run(command(output, "--document", str(document)), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (output / "measurements.jsonl").read_text().splitlines()]
    found = [(line["variant"], line["peer"], line["operation"], line["round"]) for line in lines]
    assert len(found) == len(set(found))
    assert set(found) == expected()
    for line in lines:
        assert line["bytes"] == lines[0]["bytes"] > 4_000_000
        assert line["settings"] == {"what": "deltas", "case": line["variant"], "size": 5 << 20, "threads": 2}
        is_memory = line["operation"].startswith("memory of")
        assert (line["seconds"] is None) is is_memory
        assert (line["extra_bytes"] is not None) is is_memory
        if line["operation"] == ENCODE:
            assert 0 < line["delta"]["bound"] < line["delta"]["wire"] < line["bytes"]
    assert "replaced" not in document.read_text()
    assert "| sparse " in document.read_text()
    for picture in (output / "deltas.png", tmp_path / "deltas.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert not [path for path in directories_in(done.stderr) if path.exists()]


def test_one_wrong_byte_ends_the_run(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path / "one", code=("-c", WRONG)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "sparse: tensor 0 is not what it should be, bit by bit" in done.stderr
    assert not [path for path in directories_in(done.stderr) if path.exists()]
    assert not (tmp_path / "one" / "deltas.md").exists()


def test_ctrl_c_leaves_lines_and_nothing_else(tmp_path: Path) -> None:
    output, log = tmp_path / "one", tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command(output), stdout=file, stderr=file) as running:
        deadline = time.monotonic() + 240
        lines = output / "measurements.jsonl"
        while running.poll() is None and time.monotonic() < deadline and not (lines.exists() and lines.read_bytes()):
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    assert [json.loads(line)["format"] for line in lines.read_text().splitlines()]
    assert not [path for path in directories_in(log.read_text()) if path.exists()]
    assert "Traceback" not in log.read_text()
