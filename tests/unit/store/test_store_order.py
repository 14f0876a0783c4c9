"""Opening a Mooncake store: what can be decided here comes before the network, that before memory and devices."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake_store import ConfigError, MooncakeConfig, StoreUnavailable, open_store
from mooncake_store.backends import mooncake
from mooncake_store.client import ENVIRONMENT, MooncakeClient

NO_ONE = "127.0.0.1:1"


class Touched(Exception):
    """Mooncake was loaded, or memory was taken."""


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(*_: object, **__: object) -> None:
        raise Touched

    monkeypatch.setattr("mooncake_store.client.load_mooncake", touch)
    monkeypatch.setattr("mooncake_store.pool.mmap.mmap", touch)
    monkeypatch.setattr(mooncake, "BufferPool", touch)
    for variable in ("MASTER", "MASTER_ADDR", "PROTOCOL", "DEVICE", "LOCAL_HOSTNAME", "TE_META_DATA_SERVER"):
        monkeypatch.delenv(f"MOONCAKE_{variable}", raising=False)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def master() -> Iterator[socket.socket]:
    """Something that listens. Its queue tells whether anyone connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def was_probed(server: socket.socket) -> bool:
    server.settimeout(0.05)
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True


def settings(address: str, **more: Any) -> dict[str, Any]:
    return {"master_server_address": address, "protocol": "tcp", "global_segment_size": "32mb", **more}


def test_a_dead_master_is_found_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match=r"'127\.0\.0\.1:1' .*refused.*\(from init_kwargs\)"):
        open_store("mooncake", settings(NO_ONE), contribute_segment=True)
    monkeypatch.setenv("MOONCAKE_MASTER", NO_ONE)
    with pytest.raises(StoreUnavailable, match=r"\(from environment variable MOONCAKE_MASTER\)"):
        open_store("mooncake", {"protocol": "tcp", "global_segment_size": "32mb"}, contribute_segment=True)


def test_a_master_that_answers_is_probed_first(master: socket.socket) -> None:
    with pytest.raises(Touched):
        open_store("mooncake", settings(address_of(master)), contribute_segment=True)
    assert was_probed(master)


def test_a_dead_metadata_server_is_found_before_anything_is_touched(master: socket.socket) -> None:
    for server in ("http://127.0.0.1:1/metadata", "etcd://127.0.0.1:1"):
        wrong = settings(address_of(master), metadata_server=server)
        with pytest.raises(StoreUnavailable, match=rf"metadata_server = '{server}' \(from init_kwargs\).*P2PHANDSHAKE"):
            open_store("mooncake", wrong)


@pytest.mark.parametrize(
    ("wrong", "arguments", "expected"),
    [
        ({"unknown": 1}, {}, "unknown setting 'unknown'"),
        ({"global_segment_size": "-1"}, {}, "global_segment_size = '-1'"),
        ({"global_segment_size": "999999gb"}, {"contribute_segment": True}, "would lend"),
        ({"local_buffer_size": "999999gb"}, {}, "local_buffer_size = '999999gb'"),
        ({"global_segment_size": 0}, {"contribute_segment": True}, r"global_segment_size = 0 .*contribute_segment"),
        ({"metadata_server": "redis://127.0.0.1:1"}, {}, "metadata_server"),
        ({"device_name": "mlx5_0"}, {}, "device_name"),
        ({"local_hostname": "no-such-host.invalid"}, {}, "local_hostname"),
        ({"local_hostname": "127.0.0.1:5"}, {}, "local_hostname"),
        ({}, {"replica_num": 0}, "replica_num"),
    ],
)
def test_what_can_be_decided_here_asks_no_one(
    master: socket.socket, wrong: dict[str, Any], arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        open_store("mooncake", settings(address_of(master), **wrong), **arguments)
    assert not was_probed(master)


def test_a_segment_of_nothing_is_no_contradiction_when_local_rank_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[int] = []

    def connect(_cls: type, config: MooncakeConfig) -> None:
        connected.append(config.global_segment_size)
        raise Touched

    monkeypatch.setattr(MooncakeClient, "connect", classmethod(connect))
    for asked in (None, False):
        with pytest.raises(Touched):
            open_store("mooncake", settings(NO_ONE, global_segment_size=0), contribute_segment=asked)
    assert connected == [0, 0]
