"""What `bench rdma` believes: the counters of the kernel, and the answers of the other host."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psutil", reason="the extra `bench` is not installed")

from benchmarks.rdma import command, counters, report
from benchmarks.rdma.command import check_counters
from benchmarks.rdma.control import FORMAT, Peer, serve_one
from benchmarks.rdma.counters import Link
from benchmarks.rdma.report import Context
from benchmarks.rdma.settings import Case, host_and_port
from benchmarks.rdma.worker import Round, Worker
from miles_plugin.bench_commands import BenchFailed
from mooncake_store import ConfigError
from mooncake_store.client import MooncakeClient


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device as the kernel shows it, with one port; its counters count words of four bytes."""
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (port / "counters" / "port_xmit_data").write_text("1000\n")
    (port / "counters" / "port_rcv_data").write_text("10\n")
    monkeypatch.setattr(counters, "INFINIBAND", tmp_path)
    return port


@pytest.mark.parametrize("devices", ["mlx5_0", "", " mlx5_0 , mlx5_9"])
def test_the_counters_of_rdma_devices_are_read(device: Path, devices: str) -> None:
    link = counters.read("rdma", devices, "127.0.0.1")
    assert (link.sent, link.received, link.rate) == (4000, 40, 25e9)
    assert link.moved == 4040


def test_what_the_kernel_does_not_say_is_not_known(device: Path) -> None:
    (device / "rate").unlink()
    (device / "counters" / "port_xmit_data").write_text("N/A")
    link = counters.read("rdma", "mlx5_0", "127.0.0.1")
    assert (link.sent, link.rate) == (0, None)
    assert counters.read("tcp", "", "127.0.0.1").rate is None, "a virtual interface's rate means nothing"
    assert counters.read("tcp", "", "203.0.113.1").name == "an unknown interface"


def test_bytes_that_took_another_way_are_not_called_rdma() -> None:
    before = Link("mlx5_0", 100, 100, None)
    check_counters("rdma", before, Link("mlx5_0", 100, 1100, None), 1000)
    check_counters("tcp", before, before, 1000)
    with pytest.raises(
        BenchFailed, match=r"counters of mlx5_0 grew by 899 bytes while 1000 were moved.*MOONCAKE_DEVICE"
    ):
        check_counters("rdma", before, Link("mlx5_0", 999, 100, None), 1000)


# --- the other host ---------------------------------------------------------------------------------------------------


@pytest.fixture
def there() -> Iterator[str]:
    """A host that can be greeted, counts, and fails."""

    def fail() -> dict[str, Any]:
        raise ValueError("no device")

    does = {"hello": lambda: {"format": FORMAT}, "add": lambda a, b: {"sum": a + b}, "fail": fail}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                serve_one(connection, does)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_question_is_answered_or_refused_in_words(there: str) -> None:
    peer = Peer(there)
    assert peer.ask("add", a=1, b=2) == {"sum": 3}
    with pytest.raises(BenchFailed, match=f"{there}: ValueError: no device"):
        peer.ask("fail")
    with pytest.raises(BenchFailed, match="can hello, add, fail"):
        peer.ask("format the disk")
    with pytest.raises(BenchFailed, match="TypeError"):
        peer.ask("add", a=1)
    assert peer.ask("add", a=1, b=2) == {"sum": 3}
    peer.close()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [(b'{"format": 99}\n', "format 99, this host 1"), (b"", "ended the connection at 'hello'")],
)
def test_a_host_of_another_version_or_none_is_refused(reply: bytes, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                json.loads(connection.makefile("rb").readline())
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(BenchFailed, match=expected):
            Peer(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_the_link_is_the_hosts_word_or_else_the_fastest_that_crossed_it() -> None:
    from benchmarks.measurements import Machine, Measurement

    machine = Machine("cpu", 2, 1, "Linux")

    def measured(peer: str, seconds: float) -> Measurement:
        return Measurement(
            run="r", settings={"placement": "peer"}, variant="v", peer=peer, operation="put", round=0,
            seconds=seconds, bytes=1000,
            machine=machine, versions={},
        )  # fmt: skip

    found = [measured("store", 2.0), measured("socket", 0.5)]
    context = Context("r", "tcp", "here", "there", {}, "veth0", None, ())
    assert report.link_rate(found, context) == (2000.0, "as measured, by socket")
    known = Context("r", "tcp", "here", "there", {}, "veth0", 4000.0, ())
    assert report.link_rate(found, known) == (4000.0, "by the hosts' word")


# --- a round ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("placement", "asked"), [("peer", [("rdma", 2000)]), ("here", [])])
def test_the_counters_are_asked_after_every_round_that_crossed_the_link(
    placement: str, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(1000, 1, 2, placement, "warm")
    worker = SimpleNamespace(start=lambda *_: lambda: Round(1.0, [1.0], 0.5, 1000))
    run = object.__new__(command._Run)
    settings = SimpleNamespace(protocol="rdma", round_bytes=1000, run="r", load=lambda _: {})
    added: list[Any] = []
    peer = SimpleNamespace(ask=lambda _: {"cpu_seconds": 1.0})
    vars(run).update(_settings=settings, _workers={placement: [worker] * 3}, _peer=peer)
    monkeypatch.setattr(command._Run, "_link", lambda _: Link("mlx5_0", 0, 0, None))
    monkeypatch.setattr(command._Run, "_add", lambda _, *given, **more: added.append((given, more)))
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(command, "check_counters", lambda protocol, _b, _a, moved: seen.append((protocol, moved)))
    run._measure_store(case, "put", 0)
    assert seen == asked
    assert added[0][0][-2:] == (1.0, 2000)


def test_other_bytes_than_were_put_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(
        allocate=lambda *_: None, write=lambda *_: None, commit=lambda *_: None, register=lambda *_: None,
        unregister=lambda *_: None, remove=lambda *_: None, read=lambda *_, **__: None, close=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(MooncakeClient, "connect", lambda _: client)
    worker = Worker(SimpleNamespace(), "segment")  # type: ignore[arg-type]
    assert worker.run(Case(100, 2, 1, "peer", "cold"), "put", 1000).nbytes == 1000
    with pytest.raises(RuntimeError, match="other bytes came back than were put"):
        worker.run(Case(100, 1, 1, "peer", "warm"), "get", 1000)  # this client reads nothing


@pytest.mark.parametrize("given", ["host:0", "host:99999", "host:x", ":50", "::1", ""])
def test_an_address_that_is_none_is_refused(given: str) -> None:
    assert host_and_port("--peer", "host") == "host:50060"
    with pytest.raises(ConfigError, match=f"--peer {given}: allowed is HOST or HOST:PORT"):
        host_and_port("--peer", given)
