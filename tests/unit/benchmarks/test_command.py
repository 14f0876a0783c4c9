"""The flags of `miles-mooncake bench transport`, its tables and its place in a document."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from benchmarks import markdown
from benchmarks.measurements import Measurement
from benchmarks.transport import command, plot, report, scaling, targets
from benchmarks.transport.memory import PeakMemory, check_fits
from benchmarks.transport.settings import PEERS, Settings, resolve
from miles_plugin import bench_commands, cli
from mooncake_store.errors import ConfigError
from tests.unit.benchmarks.made import LOAD, measured, memory

ROOT = Path(__file__).parents[3]


def settings(*flags: str) -> Settings:
    present = {name: replace(peer, missing=lambda: "") for name, peer in PEERS.items()}
    return resolve(bench_commands.bench_parser().parse_args(["transport", *flags]), present)


def test_the_defaults_are_the_load_that_the_targets_are_meant_for() -> None:
    found = settings()
    assert [workload.variant for workload in found.workloads] == ["numpy", "torch", "lists", "routed"]
    assert {tuple((workload.load() | targets.LOAD).items()) for workload in found.workloads} == {
        tuple(workload.load().items()) for workload in found.workloads
    }
    assert [peer.name for peer in found.peers] == list(PEERS)


def test_flags_win_over_what_quick_and_scaling_bring() -> None:
    assert settings("--quick").workloads[0].samples == 32
    found = settings("--quick", "--samples", "7", "--tokens", "5", "9", "--repeats", "1", "--peers", "ray", "ours")
    assert found.workloads[0].load() == {"samples": 7, "shortest": 5, "longest": 9, "seed": 0}
    assert (found.repeats, found.warmup, [peer.name for peer in found.peers]) == (1, 1, ["ours", "ray"])
    assert [peer.name for peer in settings("--scaling").peers] == ["ours", "ours-network", "ray"]
    assert scaling.turns(settings("--scaling", "--quick")) == 6 * 3 * 4


def test_a_fresh_run_is_another_load_with_few_rounds_and_the_peers_of_the_targets() -> None:
    for flags, samples in (([], 512), (["--quick"], 32)):
        found = settings("--fresh", *flags)
        assert (found.repeats, found.warmup, found.workloads[0].samples) == (3, 1, samples)
        assert [peer.name for peer in found.peers] == ["ours", "ray", "bundle", "memcpy"]
        (workload, *_), used = found.workloads, settings(*flags)
        assert found.load(workload) == workload.load() | {"fresh": True}
        assert used.load(workload) == workload.load(), "lines of before there was this flag are compared as they were"
    found = settings("--fresh", "--repeats", "5", "--warmup", "2", "--peers", "raw", "ours-network")
    assert (found.repeats, found.warmup, [peer.name for peer in found.peers]) == (5, 2, ["ours-network", "raw"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--samples", "0"], "--samples 0: allowed is at least 1"),
        (["--repeats", "0"], "--repeats 0"),
        (["--warmup", "0"], "--warmup 0"),
        (["--tokens", "1", "5"], "--tokens 1 5: allowed is 2 <="),
        (["--tokens", "9", "5"], "--tokens 9 5"),
        (["--variants", "nunpy"], "--variants nunpy: allowed are numpy, torch, lists, routed"),
        (["--peers", "rai"], "--peers rai: allowed are ours, "),
        (["--payload-gib", "0"], "--payload-gib 0"),
        (["--payload-gib", "1", "--samples", "5"], "--samples and --payload-gib"),
        (["--fresh", "--scaling"], "--fresh and --scaling are two kinds of run"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_flag(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(*flags)
    assert said in str(refused.value)


def test_a_peer_that_is_missing_is_left_out_unless_it_was_asked_for() -> None:
    known = {**PEERS, "ray": replace(PEERS["ray"], missing=lambda: "ray is not installed: install it")}
    parse = bench_commands.bench_parser().parse_args
    found = resolve(parse(["transport", "--variants", "numpy"]), known)
    assert "ray" not in [peer.name for peer in found.peers]
    assert "ray: ray is not installed: install it" in found.skipped
    with pytest.raises(ConfigError, match="--peers ray: ray is not installed: install it"):
        resolve(parse(["transport", "--peers", "ours", "ray"]), known)


def test_without_a_checkout_the_next_step_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_commands, "_CHECKOUT", tmp_path)
    assert cli.main(["bench", "transport"]) == 2
    assert "Clone the repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--compare", "{dir}/none.jsonl"], "none.jsonl: No such file"),
        (["--document", "{dir}/none.md"], "none.md: No such file"),
        (["--scaling", "--check"], "--scaling has no targets"),
        (
            ["--variants", "routed", "--samples", "4000", "--tokens", "1000000", "1000000"],
            "are available; measure fewer --peers",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [flag.format(dir=tmp_path) for flag in flags]
    assert cli.main(["bench", "transport", "--peers", "memcpy", "--output", str(tmp_path / "out"), *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_measurements_of_another_run_are_not_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measurements.jsonl").write_text("")
    assert cli.main(["bench", "transport", "--peers", "memcpy", "--output", str(tmp_path)]) == 2
    assert "name another directory" in capsys.readouterr().err


RUN: list[Measurement] = [
    *measured("ours", "put", [0.002, 0.004, 0.003]),
    *measured("ours", "get", [0.001, 0.001, 0.001]),
    memory("ours", 1_400_000),
    *measured("ray", "put", [0.02, 0.04, 0.03]),
    *measured("ray", "get", [0.001, 0.002, 0.001]),
    *measured("memcpy", "put", [0.001, 0.001, 0.001]),
]


def test_the_table_says_what_was_measured() -> None:
    peers = [PEERS[name] for name in ("ours", "ray", "memcpy")]
    text = report.text(RUN, peers, targets.results(RUN), ["raw: not today"])
    rows = {cells[0]: cells[1:] for line in text.splitlines() if line.startswith("|") for cells in [cells_of(line)]}
    assert rows["ours"] == ["3.00 (2.50 to 3.50)", "9.33", "", "1.00 (1.00 to 1.00)", "28.00", "", "0.05"]
    assert rows["ray.put / ray.get"][2] == "10.0"
    assert rows["memcpy"][3:] == ["", "", "", ""]
    assert "**Targets**: 3 of 3 met" in text
    assert "Not measured: raw: not today." in text
    assert "2 cores of a CPU, 24 GiB" in text
    assert "are what the targets are meant for" not in text


def test_another_load_than_the_targets_own_is_said() -> None:
    load = {"samples": 8, "shortest": 2, "longest": 4, "seed": 0}
    run = measured("ours", "put", [1.0], load=load) + measured("ray", "put", [1.0], load=load)
    text = report.text(run, [PEERS["ours"], PEERS["ray"]], targets.results(run), [])
    assert "512 samples of 1024 to 8192 tokens are what the targets are meant for" in text
    assert "no |" in text


def test_the_state_of_the_memory_is_said_and_in_which_the_targets_were_set() -> None:
    peers, elsewhere = [PEERS["ours"], PEERS["ray"]], "set for memory never used, which --fresh measures"
    for load, said, other in ((LOAD, "Into used memory", elsewhere), (LOAD | {"fresh": True}, "Into memory never", "")):
        run = measured("ours", "put", [1.0], load=load) + measured("ray", "put", [9.0], load=load)
        text = report.text(run, peers, targets.results(run), [])
        assert said in text
        assert (elsewhere in text) is bool(other)
        assert "**Targets**: 1 of 1 met" in text
        assert "are what the targets are meant for" not in text
    alone = measured("ours", "put", [1.0], "routed") + measured("memcpy", "put", [1.0], "routed")
    assert elsewhere not in report.text(alone, peers, targets.results(alone), []), "a memcpy is the same in both"


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_is_inserted_between_its_marks_and_again(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text((ROOT / "docs/benchmarks.md").read_text())
    for name in ("transport", "fresh", "scaling"):
        markdown.check_document(path, name)
    before = path.read_text()
    markdown.insert(path, "transport", "| the first |")
    markdown.insert(path, "transport", "| second |\n")
    text = path.read_text()
    assert "| second |" in text
    assert "| the first |" not in text
    begin, end = markdown._marks("transport")
    assert text.partition(begin)[0] == before.partition(begin)[0]
    assert text.partition(end)[2] == before.partition(end)[2]


BEGIN, END = markdown._marks("transport")


@pytest.mark.parametrize("text", ["# A page\n", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_document_without_the_marks_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ConfigError, match="once each"):
        markdown.insert(path, "transport", "text")
    assert path.read_text() == text


def take_memory(connection: Connection, nbytes: int) -> None:
    connection.send("ready")
    connection.recv()
    private = np.ones(nbytes, dtype=np.uint8)
    connection.send(int(private[0]))
    connection.recv()
    del private
    connection.send("given back")
    connection.recv()


def test_memory_is_measured_at_its_peak() -> None:
    context = multiprocessing.get_context("spawn")
    connection, remote = context.Pipe()
    process = context.Process(target=take_memory, args=(remote, 64 << 20), daemon=True)
    process.start()
    try:
        assert connection.recv() == "ready"
        assert process.pid
        with PeakMemory(process.pid) as peak:
            connection.send("go")
            connection.recv()
            deadline = time.monotonic() + 30
            while peak._peak - peak._before < 60 << 20 and time.monotonic() < deadline:
                time.sleep(0.01)
            connection.send("give it back")
            connection.recv()
        assert 60 << 20 < peak.extra < 80 << 20
    finally:
        process.kill()
        process.join()


def test_a_run_that_does_not_fit_is_refused_with_the_numbers() -> None:
    check_fits(1 << 20, 1 << 18, [PEERS["ours"]], "numpy")
    with pytest.raises(ConfigError, match=r"a batch of 1.0 TiB takes about 2.2 TiB with 1 peers"):
        check_fits(1 << 40, 1, [PEERS["ours"]], "numpy")
    with pytest.raises(ConfigError, match=r"a batch of 4.0 GiB"):
        check_fits(4 << 30, 1 << 30, [PEERS["ours"]], "lists")


def test_a_full_disk_takes_no_table_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Done:
        measurements = measured("memcpy", "put", [0.1, 0.2])
        path = tmp_path / "measurements.jsonl"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(command, "_measure", lambda _: Done())
    monkeypatch.setattr(plot, "draw", full)
    arguments = bench_commands.bench_parser().parse_args(["transport", "--peers", "memcpy", "--output", str(tmp_path)])
    with pytest.raises(bench_commands.BenchFailed, match=r"--output .*: No space left on device; what is there"):
        command.run(arguments)
    assert "**numpy**" in capsys.readouterr().out
    assert "**numpy**" in (tmp_path / "transport.md").read_text()
