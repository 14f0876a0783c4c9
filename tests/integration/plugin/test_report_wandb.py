"""Weights & Biases by the real client: offline it writes its file and asks nobody."""

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("wandb", reason="the extra `wandb` is not installed")

pytestmark = pytest.mark.integration

JOB = """
import sys
from pathlib import Path
from miles_plugin.arguments_sources import load_config
from miles_plugin.report.observers import check_tracking, open_observers
from tests.report_samples import make_finished_report, play

flags = ["--use-wandb", "--wandb-project", "arithmetic"]
config = load_config(flags)
check_tracking(config)
directory = Path(sys.argv[1])
play(make_finished_report(*flags), open_observers(config, directory), directory)
"""
ONLINE = """
from miles_plugin.arguments_sources import load_config
from miles_plugin.report.observers import check_tracking
check_tracking(load_config(["--use-wandb", "--wandb-mode", "online"]))
"""


class Proxy:
    """Stands where any way out of the machine would lead, and counts who comes."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.visits = 0
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        while True:
            try:
                visitor, _ = self._server.accept()
            except OSError:
                return
            self.visits += 1
            visitor.close()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()


def run(code: str, proxy: Proxy, home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=isolated(proxy, home) | environment, cwd=home,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def isolated(proxy: Proxy, home: Path) -> dict[str, str]:
    """An environment without this user's settings, from which every way out leads to `proxy`."""
    ways_out = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), proxy.address)
    return {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": ":".join(sys.path), **ways_out}


def test_offline_a_run_per_arm_is_written_and_nothing_is_sent(proxy: Proxy, tmp_path: Path) -> None:
    home, directory = tmp_path / "home", tmp_path / "report"
    home.mkdir()
    directory.mkdir()
    done = run(JOB, proxy, home, str(directory))
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    files = sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == ["run-run-1-real.wandb", "run-run-1-shuffled.wandb"]
    assert [_logged(path, "eval/spell_backward") for path in files] == [
        pytest.approx([0.5, 0.6, 0.7, 0.8]),
        pytest.approx([0.35, 0.3, 0.25, 0.2]),
    ]
    assert proxy.visits == 0


def _logged(path: Path, name: str) -> list[float]:
    """The values of a metric, read back from W&B's own file."""
    from wandb.proto import wandb_internal_pb2

    values = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            if name in (item.key, *item.nested_key):
                values.append(float(item.value_json))
    return values


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB with pieces of a header (checksum, length, kind) and bytes."""
    position, pieces, block = 7, b"", 32768
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, position)
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""


def test_online_without_a_key_is_refused_before_anything_starts(proxy: Proxy, tmp_path: Path) -> None:
    done = run(ONLINE, proxy, tmp_path)
    assert "ConfigError: wandb_mode=online: no API key is configured" in done.stderr
    assert not [entry for entry in tmp_path.iterdir() if not entry.name.startswith(".")]


def test_online_with_a_key_is_checked_without_asking_the_server(proxy: Proxy, tmp_path: Path) -> None:
    done = run(ONLINE, proxy, tmp_path, WANDB_API_KEY="0" * 40, WANDB_ERROR_REPORTING="false")
    assert done.returncode == 0, done.stderr
    assert proxy.visits == 0


def test_online_goes_the_way_on_which_offline_was_not_seen(proxy: Proxy, tmp_path: Path) -> None:
    environment = isolated(proxy, tmp_path) | {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://wandb.invalid"}
    command = [sys.executable, "-c", JOB.replace('"arithmetic"', '"arithmetic", "--wandb-mode", "online"'), "."]
    job = subprocess.Popen(command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while proxy.visits == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        job.kill()  # it would try again for a minute; W&B's own process ends with it
        job.wait()
    assert proxy.visits > 0
