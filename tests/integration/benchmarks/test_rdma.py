"""`miles-mooncake bench rdma`, both hosts being this one: the whole path over TCP, and every way it can go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mooncake.store", reason="Mooncake is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from mooncake_store.process import free_ports

pytestmark = pytest.mark.integration
COMMAND = [sys.executable, "-m", "miles_plugin", "bench", "rdma"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}


@pytest.fixture(scope="module")
def peer() -> Iterator[str]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    serving = subprocess.Popen(
        [*COMMAND, "--serve", "--listen", address], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        assert f"serving on {address}" in serving.stdout.readline()
        yield address
    finally:
        serving.terminate()
        assert serving.wait(30) == 130


def measure(peer: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--peer", peer, "--protocol", "tcp", "--quick", *flags],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_every_way_to_move_objects_is_measured_and_can_be_compared(peer: str, tmp_path: Path) -> None:
    flags = [
        "--sizes", "64kb", "--batch", "2", "--workers", "2", "--placement", "peer", "here", "--registration", "cold",
        "--repeats", "1", "--warmup", "0", "--round-bytes", "1mb",
    ]  # fmt: skip
    document = tmp_path / "page.md"
    document.write_text("a\n<!-- rdma: made by the command above -->\nreplaced\n<!-- rdma: end -->\nb\n")
    done = measure(peer, *flags, "--output", str(tmp_path / "one"), "--document", str(document))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "one" / "measurements.jsonl").read_text().splitlines()]
    found = {(line["variant"], line["peer"], line["operation"]) for line in lines}
    there, here = "2 x 64 KiB, 2 workers, cold", "2 x 64 KiB, 2 workers, cold, memory here"
    by = {("transfer engine", "put"), ("transfer engine", "get"), ("socket", "put"), ("socket", "get")}
    expected = {(there, *each) for each in by} | {
        (case, "store", op) for case in (there, here) for op in ("put", "get")
    }
    assert expected <= found
    for line in lines:
        assert line["seconds"] > 0
        assert line["bytes"] == 2 << 20
        if line["peer"] == "store":
            assert len(line["latencies"]) == 16
            assert set(line["cpu_seconds"]) == {"here", "there"}
    assert "| 2 x 64 KiB, 2 workers, cold" in done.stdout
    assert "replaced" not in document.read_text()
    assert (tmp_path / "one" / "rdma.png").read_bytes().startswith(b"\x89PNG")
    again = measure(
        peer, *flags, "--output", str(tmp_path / "two"), "--compare", str(tmp_path / "one" / "measurements.jsonl")
    )
    assert again.returncode == 0, again.stderr
    assert "Compared with" in again.stdout
    other = measure(peer, "--sizes", "1mb", "--compare", str(tmp_path / "one" / "measurements.jsonl"))
    assert other.returncode == 2
    assert "none of the variants" in other.stderr


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--output", "/proc/nowhere"], 2, "--output /proc/nowhere"),
        (["--sizes", "0"], 2, "size '0'"),
        (["--placement", "there"], 2, "--placement there: allowed are peer, here"),
        (["--registration", "hot"], 2, "--registration hot: allowed are warm, cold"),
        (["--workers", "0"], 2, "--workers 0"),
        (["--protocol", "udp"], 2, "--protocol udp: allowed are tcp, rdma"),
        (["--protocol", "rdma"], 2, "no RDMA device"),
        (["--peer", "no.such.host.invalid"], 2, "no.such.host.invalid"),
        (["--peer", "127.0.0.1:1"], 1, "is `miles-mooncake bench rdma --serve` running there?"),
    ],
)
def test_what_cannot_be_measured_is_said(flags: list[str], status: int, said: str, peer: str, tmp_path: Path) -> None:
    done = measure(peer, *(["--output", str(tmp_path / "out")] if "--output" not in flags else []), *flags)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_peer_it_says_how_to_get_one() -> None:
    done = subprocess.run(COMMAND, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "bench rdma --serve" in done.stderr
