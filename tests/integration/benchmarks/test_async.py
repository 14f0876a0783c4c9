"""`miles-mooncake bench async`: every turn is recorded, and the simulation stands beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mooncake.store", reason="Mooncake is not installed")
pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_every_turn_is_recorded(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("a\n<!-- async: made by the command above -->\nreplaced\n<!-- async: end -->\nb\n")
    command = [sys.executable, "-m", "miles_plugin", "bench", "async", "--quick", "--max-weight-staleness", "1", "none"]
    command += ["--output", str(tmp_path / "one"), "--document", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "one" / "measurements.jsonl").read_text().splitlines()]
    modes = ["synchronous", "asynchronous, bound 1", "asynchronous, no bound"]
    operations = ["generation", "training", "prepare", "update", "step"]
    assert [(line["peer"], line["operation"]) for line in lines] == [
        (mode, each) for mode in modes for each in operations
    ]
    for line in lines:
        assert line["seconds"] > 0
        assert len(line["latencies"] or [0] * 3) >= 3
        if line["operation"] == "step":
            assert sum(count for name, count in line["loop"].items() if name.startswith("staleness_")) == 3 * 4
    assert max(int(name[-1]) for name in lines[9]["loop"] if name.startswith("staleness_")) <= 1
    page = document.read_text()
    assert "replaced" not in page
    for expected in ("| asynchronous, no bound |", "**asynchronous, bound 1**, simulated from", "x synchronous"):
        assert expected in page
    assert (tmp_path / "one" / "async.png").read_bytes().startswith(b"\x89PNG")
    assert "miles-mooncake simulate async --generation-seconds file:" in done.stdout
