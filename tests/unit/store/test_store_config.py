"""Settings: precedence, sizes, and complaints that name field, value, source and what is allowed."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store import ConfigError, MooncakeConfig, parse_size
from mooncake_store.config import master_endpoints, resolve

MASTER = "127.0.0.1:50051"


def tcp(init_kwargs: dict[str, Any] | None = None, env: dict[str, str] | None = None, **rest: Any) -> MooncakeConfig:
    return resolve({"master_server_address": MASTER, "protocol": "tcp", **(init_kwargs or {})}, env or {}, **rest)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        ("0", 0),
        (1024, 1024),
        ("1024", 1024),
        ("8gb", 8 << 30),
        ("8G", 8 << 30),
        ("1.5 GB", 3 << 29),
        (" 64k ", 64 << 10),
        ("64kb", 64 << 10),
        ("3m", 3 << 20),
        ("3MB", 3 << 20),
        (".5g", 1 << 29),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse_size(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    "size", [-1, "-1", "", " ", "gb", "8tb", "8 g b", "1e3", "nan", "1.5", None, True, 1.5, "8gbb"]
)
def test_parse_size_refuses(size: Any) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        parse_size(size)


@given(st.integers(0, 1 << 60))
def test_parse_size_of_whole_numbers_is_exact(size: int) -> None:
    assert parse_size(str(size)) == parse_size(size) == size


def test_defaults() -> None:
    config = tcp()
    assert config.global_segment_size == 8 << 30
    assert config.local_buffer_size == 32 << 30
    assert config.metadata_server == "P2PHANDSHAKE"
    assert config.chunk_bytes is None


def test_kwargs_win_over_environment_over_default() -> None:
    env = {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "2gb", "MOONCAKE_TE_META_DATA_SERVER": "http://meta:8080"}
    assert tcp(env=env).global_segment_size == 2 << 30
    assert tcp(env=env).metadata_server == "http://meta:8080"
    assert tcp({"global_segment_size": "1gb"}, env).global_segment_size == 1 << 30


@pytest.mark.parametrize("unset", ["", "  "])
def test_an_empty_variable_masks_nothing(unset: str) -> None:
    env = {"MOONCAKE_GLOBAL_SEGMENT_SIZE": unset, "MOONCAKE_LOCAL_BUFFER_SIZE": unset}
    assert tcp(env=env).global_segment_size == 8 << 30
    assert tcp({"local_buffer_size": 5}, env).local_buffer_size == 5


def test_zero_is_not_unset() -> None:
    assert tcp({"global_segment_size": 0}, {"MOONCAKE_GLOBAL_SEGMENT_SIZE": "2gb"}).global_segment_size == 0
    assert tcp(env={"MOONCAKE_GLOBAL_SEGMENT_SIZE": "0"}).global_segment_size == 0


def test_none_is_unset() -> None:
    assert tcp({"global_segment_size": None}).global_segment_size == 8 << 30


def test_protocol_defaults_to_rdma(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    config = resolve({"master_server_address": MASTER}, {}, infiniband=tmp_path)
    assert config.protocol == "rdma"


def test_rdma_without_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"protocol = 'rdma' \(from default\).*no RDMA device.*'tcp'"):
        resolve({"master_server_address": MASTER}, {}, infiniband=tmp_path / "absent")


def test_unknown_rdma_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(
        ConfigError, match=r"device_name = 'mlx5_9' \(from environment variable MOONCAKE_DEVICE\).*mlx5_0"
    ):
        resolve({"master_server_address": MASTER}, {"MOONCAKE_DEVICE": "mlx5_9"}, infiniband=tmp_path)


@pytest.mark.parametrize(
    ("kwargs", "env", "expected"),
    [
        ({"global_segment_size": "8tb"}, {}, ["global_segment_size", "'8tb'", "init_kwargs", "allowed"]),
        ({}, {"MOONCAKE_LOCAL_BUFFER_SIZE": "-3"}, ["local_buffer_size", "'-3'", "MOONCAKE_LOCAL_BUFFER_SIZE"]),
        ({"global_segment_size": "1mb"}, {}, ["global_segment_size", "'1mb'", "init_kwargs", "16777216"]),
        ({"protocol": "ib"}, {}, ["protocol", "'ib'", "init_kwargs", "tcp, rdma"]),
        ({"master_server_address": "host"}, {}, ["master_server_address", "'host'", "host:port"]),
        ({"master_server_address": "host:0"}, {}, ["master_server_address", "host:0"]),
        ({"local_hostname": 7}, {}, ["local_hostname", "7", "string"]),
        ({"gobal_segment_size": 1}, {}, ["gobal_segment_size", "did you mean 'global_segment_size'", "allowed"]),
        ({"zzz": 1}, {}, ["'zzz'", "allowed", "chunk_bytes"]),
    ],
)
def test_complaints_name_everything(kwargs: dict[str, Any], env: dict[str, str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        tcp(kwargs, env)
    for part in expected:
        assert part in str(caught.value)


def test_missing_master() -> None:
    with pytest.raises(ConfigError, match="MOONCAKE_MASTER") as caught:
        resolve({"protocol": "tcp"}, {})
    assert "is not read" not in str(caught.value)


def test_mistaken_master_variable_is_pointed_out() -> None:
    with pytest.raises(ConfigError, match=r"MOONCAKE_MASTER .*MOONCAKE_MASTER_ADDR='h:1' is set, but it is not read"):
        resolve({"protocol": "tcp"}, {"MOONCAKE_MASTER_ADDR": "h:1"})


def test_local_hostname_order() -> None:
    env = {"MOONCAKE_LOCAL_HOSTNAME": "from-env"}
    assert tcp({"local_hostname": "explicit"}, env, node_ip=lambda: "10.0.0.9").local_hostname == "explicit"
    assert tcp({}, env, node_ip=lambda: "10.0.0.9").local_hostname == "from-env"
    assert tcp({}, {}, node_ip=lambda: "10.0.0.9").local_hostname == "10.0.0.9"
    assert tcp({}, {}, node_ip=lambda: None).local_hostname == "127.0.0.1"  # the master is on loopback


@pytest.mark.parametrize(
    ("address", "endpoints"),
    [
        ("host:1", [("host", 1)]),
        ("[::1]:2", [("::1", 2)]),
        ("etcd://a:1;b:2", [("a", 1), ("b", 2)]),
    ],
)
def test_master_endpoints(address: str, endpoints: list[tuple[str, int]]) -> None:
    assert master_endpoints(address) == endpoints
