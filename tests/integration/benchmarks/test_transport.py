"""`miles-mooncake bench transport --quick`, whole, on real Mooncake and Ray; and a batch that is not the one put."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("mooncake.store", reason="Mooncake is not installed")
pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from benchmarks import measurements
from benchmarks.transport import command
from benchmarks.transport.ours import OurReader, OurWriter
from benchmarks.transport.peers import Held, Room
from benchmarks.transport.settings import PEERS
from benchmarks.transport.workload import Workload
from miles_plugin.bench_commands import BenchFailed, bench_parser

pytestmark = pytest.mark.integration
SMALL = ["transport", "--quick", "--variants", "numpy"]


def children() -> list[psutil.Process]:
    return [
        process for process in psutil.Process().children(recursive=True) if "tracker" not in " ".join(process.cmdline())
    ]


def test_a_quick_run_measures_every_peer_in_every_round_and_shows_it(tmp_path: Path) -> None:
    peers = ["ours", "ours-network", "ray", "raw", "memcpy"]
    document = tmp_path / "page.md"
    document.write_text((Path(__file__).parents[3] / "docs/benchmarks.md").read_text())
    flags = ["--peers", *peers, "--output", str(tmp_path / "out"), "--document", str(document)]
    done = subprocess.run(
        [sys.executable, "-m", "miles_plugin", "bench", *SMALL, *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = measurements.read(tmp_path / "out/measurements.jsonl")
    counted = Counter((item.peer, item.operation) for item in found)
    assert counted == {
        **{(peer, "put"): 3 for peer in peers},
        **{(peer, "get"): 3 for peer in peers if peer != "memcpy"},
        **{(peer, "memory"): 1 for peer in peers},
    }
    assert {item.round for item in found} == {0, 1, 2}
    assert all(item.seconds and item.seconds > 0 for item in found if item.operation != "memory")
    assert len({(item.run, item.bytes, item.variant, str(item.settings), str(item.versions)) for item in found}) == 1
    table = (tmp_path / "out/transport.md").read_text()
    assert "ray.put / ray.get" in table
    assert table in done.stdout
    assert table.strip() in document.read_text()
    for picture, magic in (("transport.png", b"\x89PNG"), ("transport.svg", b"<?xml")):
        assert (tmp_path / "out" / picture).read_bytes().startswith(magic)

    flags = ["--peers", "ours", "memcpy", "--output", str(tmp_path / "again"), "--check", "--compare"]
    command.run(bench_parser().parse_args([*SMALL, *flags, str(tmp_path / "out/measurements.jsonl")]))
    assert not children()


class LoggingWriter(OurWriter):
    """Writes down what it is asked for."""

    def __init__(self, log: Path, service: Any) -> None:
        super().__init__(service)
        self._log = log

    def put(self) -> Any:
        note(self._log, "put")
        return super().put()

    def remove(self, ref: Any) -> None:
        note(self._log, "remove")
        super().remove(ref)


def logging_serve(log: Path, room: Room, directory: Path) -> Any:
    note(log, f"serve {room.stored}")
    return PEERS["ours"].serve(room, directory)


def note(log: Path, words: str) -> None:
    with log.open("a") as file:
        file.write(f"{words} ")


def test_a_fresh_run_keeps_every_batch_in_services_that_are_new_for_each_variant(tmp_path: Path) -> None:
    document, log = tmp_path / "page.md", tmp_path / "calls"
    document.write_text((Path(__file__).parents[3] / "docs/benchmarks.md").read_text())

    ours = replace(PEERS["ours"], writer=partial(LoggingWriter, log), serve=partial(logging_serve, log))
    names = ["ours", "ours-network", "ray", "memcpy"]
    flags = ["--quick", "--fresh", "--repeats", "2", "--peers", *names, "--output", str(tmp_path / "out")]
    command.run(bench_parser().parse_args(["transport", *flags, "--document", str(document)]), {**PEERS, "ours": ours})
    found = measurements.read(tmp_path / "out/measurements.jsonl")
    assert log.read_text().split() == [
        word
        for variant in ("numpy", "lists")
        for stored in [2 * 3 * Workload(variant, 32, 128, 1024, seed=0).stored_bytes]  # two peers share the segment
        for word in ["serve", str(stored), *["put"] * 3, *["remove"] * 3]
    ]
    assert all(item.settings["fresh"] is True for item in found)
    counted = Counter((item.variant, item.peer, item.operation) for item in found)
    for variant in ("numpy", "lists"):
        assert all(counted[variant, name, "put"] == 2 for name in names)
        assert all(counted[variant, name, "get"] == 2 for name in names if name != "memcpy")
    table = (tmp_path / "out/fresh.md").read_text()
    assert "Into memory never used" in table
    assert table.strip() in document.read_text()
    assert (tmp_path / "out/fresh.png").exists()
    assert not children()


class WrongReader(OurReader):
    """Changes one value of one row of what was read."""

    def get(self, ref: Any) -> Held:
        held = super().get(ref)
        rows = held.batch["rollout_log_probs"]
        rows[7] = rows[7].copy()
        rows[7][-1] = np.nextafter(rows[7][-1], np.float32(1))
        return held


@pytest.mark.parametrize(("more", "mark"), [([], "transport"), (["--scaling"], "scaling")])
def test_a_reader_that_got_one_value_wrong_ends_the_run(tmp_path: Path, more: list[str], mark: str) -> None:
    peers = {"ours": replace(PEERS["ours"], reader=WrongReader)}
    arguments = bench_parser().parse_args([*SMALL, *more, "--peers", "ours", "--output", str(tmp_path)])
    with pytest.raises(BenchFailed, match="what was read is not what was put in columns rollout_log_probs"):
        command.run(arguments, peers)
    assert not (tmp_path / f"{mark}.md").exists()
    assert not children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_ended_no_process_stays(number: signal.Signals, tmp_path: Path) -> None:
    flags = ["--peers", "ours", "raw", "--repeats", "1000000", "--output", str(tmp_path)]
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transport", *SMALL[1:], *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        assert running.stderr is not None
        assert "starting what ours, raw need" in running.stderr.readline()
        measured = tmp_path / "measurements.jsonl"
        while not measured.exists():
            assert running.poll() is None
            time.sleep(0.05)
        started = psutil.Process(running.pid).children(recursive=True)
        assert len(started) > 6
        running.send_signal(number)
        assert running.wait(60) == (-9 if number == signal.SIGKILL else 130)
        assert not psutil.wait_procs(started, timeout=30)[1]
    finally:
        running.kill()
        running.communicate()


class DeadReader(OurReader):
    """Ends in the midst of a get."""

    def get(self, ref: Any) -> Held:
        psutil.Process().kill()
        return super().get(ref)


def test_a_process_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    peers = {"ours": replace(PEERS["ours"], reader=DeadReader)}
    arguments = bench_parser().parse_args([*SMALL, "--peers", "ours", "--output", str(tmp_path)])
    with pytest.raises(
        BenchFailed, match=r"ours-reader-numpy ended with status -9; its log is .*ours-reader-numpy.log"
    ):
        command.run(arguments, peers)
    assert not children()
