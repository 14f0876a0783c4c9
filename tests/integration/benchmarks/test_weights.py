"""`miles-mooncake bench weights`: every turn is recorded, and other bytes than were sent end the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mooncake.store", reason="Mooncake is not installed")
pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.weights.settings import Case
from benchmarks.weights.turns import LIMITS, PROVEN, stage
from miles_plugin.bench_commands import BenchFailed
from miles_plugin.weight_transfer.transfer import PHASES
from tests.unit.benchmarks.test_weights_parts import settings

pytestmark = pytest.mark.integration
SMALL = ["--size", "4mb", "--repeats", "2", "--warmup", "1"]


def test_every_turn_is_recorded(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("a\n<!-- weights: made by the command above -->\nreplaced\n<!-- weights: end -->\nb\n")
    command = [sys.executable, "-m", "miles_plugin", "bench", "weights", *SMALL, "--tp", "2", "--ranks", "2"]
    command += ["--output", str(tmp_path / "one"), "--document", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "one" / "measurements.jsonl").read_text().splitlines()]
    found = {(line["peer"], line["operation"], line["round"]) for line in lines}
    modes = [*PROVEN, *PROVEN.values()]
    limits = [name for names in LIMITS.values() for name in names] + ["socket", "memcpy"]
    expected = {(mode, phase) for mode in modes for phase in PHASES} | {(limit, "transfer") for limit in limits}
    assert found == {(*each, number) for each in expected for number in (0, 1)}
    assert {line["variant"] for line in lines} == {"1 engine, tp 2, 2 trainer ranks"}
    for line in lines:
        assert line["bytes"] == lines[0]["bytes"] > 4_000_000
        assert line["settings"]["what"] == "full"
        if line["operation"] == "transfer" or (line["peer"] in PROVEN.values() and line["operation"] == "verify"):
            assert line["seconds"] > 0
    assert "replaced" not in document.read_text()
    assert "| p2p " in document.read_text()
    assert (tmp_path / "one" / "weights.png").read_bytes().startswith(b"\x89PNG")


def test_weights_that_did_not_arrive_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = settings(*SMALL, "--output", str(tmp_path / "run"))
    with stage(run, Case(1, 1, 1), 0) as running:
        for turn in running.turns.values():
            turn()
        trainer = running._trainers[0]
        trainer.call("update", "p2p", running._engines, False)
        trainer.call("verify", running._engines)
        running._near.call("write", running._engines, "pieces")
        with pytest.raises(BenchFailed, match="does not hold the trainer's weights"):
            trainer.call("verify", running._engines)
        running._near.call("verify", running._engines)
        running.turns["p2p"]()
        with pytest.raises(BenchFailed, match="does not hold the trainer's weights"):
            running._near.call("verify", running._engines)
        monkeypatch.setattr(running, "_change", lambda: "of other bytes")
        for name in ("raw broadcast", "socket"):
            with pytest.raises(BenchFailed, match="other bytes arrived than were sent"):
                running.turns[name]()
