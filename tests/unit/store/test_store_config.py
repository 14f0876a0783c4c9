"""Settings: precedence, sizes, and complaints that name field, value, source and what is allowed."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store import ConfigError, MooncakeConfig, addresses, config, parse_size
from mooncake_store.addresses import endpoints, is_host
from mooncake_store.config import fit_to_host, resolve
from mooncake_store.memory import MemoryLimit, memory_limit

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
    assert "counts" not in str(caught.value)


def test_mistaken_master_variable_is_pointed_out() -> None:
    complaint = r"MOONCAKE_MASTER\. MOONCAKE_MASTER_ADDR='h:1' is set, but MOONCAKE_MASTER is the one that counts"
    with pytest.raises(ConfigError, match=complaint):
        resolve({"protocol": "tcp"}, {"MOONCAKE_MASTER_ADDR": "h:1"})


def test_local_hostname_order() -> None:
    env = {"MOONCAKE_LOCAL_HOSTNAME": "from-env"}
    assert tcp({"local_hostname": "explicit"}, env, node_ip=lambda: "10.0.0.9").local_hostname == "explicit"
    assert tcp({}, env, node_ip=lambda: "10.0.0.9").local_hostname == "from-env"
    assert tcp({}, {}, node_ip=lambda: "10.0.0.9").local_hostname == "10.0.0.9"
    assert tcp({}, {}, node_ip=lambda: None).local_hostname == "127.0.0.1"  # the master is on loopback


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host:1", [("host", 1)]),
        ("[::1]:2", [("::1", 2)]),
        ("etcd://a:1;b:2", [("a", 1), ("b", 2)]),
        ("etcd://a:1,b:2", [("a", 1), ("b", 2)]),
        ("http://meta:8080/metadata", [("meta", 8080)]),
        ("https://meta/metadata", [("meta", 443)]),
    ],
)
def test_endpoints(address: str, expected: list[tuple[str, int]]) -> None:
    assert endpoints(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        ":1",
        "host:",
        "host:x",
        "host:65536",
        "a:1;b:2",
        "a b:1",
        "redis://a:1",
        "http://",
        "http://h:x",
        "etcd://",
    ],
)
def test_endpoints_refuse(address: str) -> None:
    with pytest.raises(ConfigError):
        endpoints(address)


def test_hosts_have_no_port() -> None:
    assert all(map(is_host, ["node-1.cluster", "10.0.0.1", "::1", "fe80::1%eth0", "node_7"]))
    assert not any(map(is_host, ["", "node:1", "10.0.0.1:1", "[::1]:1", "a b", "a/b", "tcp://a"]))


def test_a_lookup_that_does_not_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = threading.Event()
    monkeypatch.setattr(addresses, "LOOKUP_SECONDS", 0.05)
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: leave.wait(60) and [])
    assert addresses.not_of_this_host("slow") == "this name has no address here"
    assert addresses.address_towards("slow", 1) == "127.0.0.1"
    assert addresses.unreachable("slow:1", 0.05) == "slow:1: no answer in 0.05 s"
    leave.set()


# --- where each value came from -------------------------------------------------------------------------------------


def test_every_setting_says_where_it_came_from() -> None:
    env = {"MOONCAKE_GLOBAL_SEGMENT_SIZE": " 2gb ", "MOONCAKE_LOCAL_BUFFER_SIZE": "1gb", "MOONCAKE_DEVICE": "mlx5_0"}
    settings = tcp({"local_buffer_size": "64mb"}, env).settings
    assert {name: setting.source for name, setting in settings.items()} == {
        "master_server_address": "init_kwargs",
        "local_hostname": "this node's address",
        "metadata_server": "default",
        "protocol": "init_kwargs",
        "device_name": "protocol tcp",
        "global_segment_size": "environment variable MOONCAKE_GLOBAL_SEGMENT_SIZE",
        "local_buffer_size": "init_kwargs",
        "chunk_bytes": "default",
        "share_memory": "default",
        "compact": "default",
        "verify": "default",
    }
    assert (settings["global_segment_size"].value, settings["local_buffer_size"].value) == ("2gb", "64mb")


@pytest.mark.parametrize("name", sorted(config._FIELDS))
def test_each_setting_falls_back_key_by_key(name: str, tmp_path: Path) -> None:
    """kwarg over environment over default, for this setting alone: the others keep theirs."""
    for device in ("mlx5_0", "mlx5_1"):
        (tmp_path / device).mkdir()
    values = {
        "master_server_address": ("a:1", "b:2"),
        "local_hostname": ("a", "b"),
        "metadata_server": ("http://a:1", "etcd://b:2"),
        "protocol": ("tcp", "rdma"),
        "device_name": ("mlx5_0", "mlx5_1"),
        "global_segment_size": ("1gb", "2gb"),
        "local_buffer_size": ("3gb", "4gb"),
        "chunk_bytes": ("5mb", "6mb"),
        "share_memory": (False, True),
        "compact": ("always", "auto"),
        "verify": ("always", "network"),
    }
    asked, in_environment = values[name]
    variable = config._FIELDS[name].variable
    base = {"master_server_address": MASTER} if name != "master_server_address" else {}
    env = {variable: in_environment} if variable else {}

    def value(kwargs: dict[str, Any], environment: dict[str, str]) -> Any:
        found = resolve({**base, **kwargs}, environment, infiniband=tmp_path)
        others = {other: setting.source for other, setting in found.settings.items() if other not in (name, *base)}
        assert set(others.values()) <= {"default", "this node's address", "protocol tcp"}
        return getattr(found, name)

    def read(text: Any) -> Any:
        return parse_size(text) if str(text)[-2:] in ("gb", "mb") else text

    assert value({name: asked}, env) == value({name: asked}, {}) == read(asked)
    if variable:
        assert value({}, env) == read(in_environment)


# --- handed on to another process -------------------------------------------------------------------------------------

words = st.text(max_size=20).filter(lambda text: "\0" not in text)
environments = st.dictionaries(
    st.sampled_from([*config.VARIABLES.values(), "MOONCAKE_MASTER_ADDR"]),
    st.sampled_from(["redis://x:1", "-1", "0", "rdma", "tcp", "mlx5_9", "a b", "16mb", "http://m:1", "elsewhere:9"])
    | words,
)


@given(
    given_kwargs=st.fixed_dictionaries(
        {"master_server_address": st.sampled_from(["a:1", " a:1 ", "[::1]:2", "etcd://a:1;b:2"])},
        optional={
            "local_hostname": st.sampled_from(["node-1", "10.0.0.1", "fe80::1%eth0"]),
            "metadata_server": st.sampled_from(["P2PHANDSHAKE", "http://meta:8080/x", "etcd://a:1"]),
            "protocol": st.sampled_from(["tcp", "rdma"]),
            "device_name": st.sampled_from(["", "mlx5_0", "mlx5_1, mlx5_0,"]),
            "global_segment_size": st.sampled_from([0, "16mb", 1 << 40, "1.5gb"]),
            "local_buffer_size": st.sampled_from([1, "7mb", 1 << 50]),
            "chunk_bytes": st.sampled_from([None, 1, "5mb"]),
            "share_memory": st.booleans(),
            "compact": st.sampled_from(["auto", "always", "never"]),
            "verify": st.sampled_from(["network", "always"]),
        },
    ),
    contributes=st.booleans(),
    other_env=environments,
)
def test_what_a_holder_is_given_means_the_same_whatever_its_environment(
    tmp_path_factory: pytest.TempPathFactory, given_kwargs: dict[str, Any], contributes: bool, other_env: dict[str, str]
) -> None:
    root = tmp_path_factory.getbasetemp() / "host"
    for device in ("mlx5_0", "mlx5_1"):
        (root / "infiniband" / device).mkdir(parents=True, exist_ok=True)
    if given_kwargs.get("protocol") == "tcp":
        given_kwargs.pop("device_name", None)
    found = resolve(given_kwargs, {}, node_ip=lambda: "10.0.0.9", infiniband=root / "infiniband")
    as_json = json.loads(json.dumps(found.as_kwargs()))
    again = resolve(as_json, other_env, node_ip=lambda: "10.9.9.9", infiniband=root / "infiniband")
    assert again == found
    assert again.as_kwargs() == found.as_kwargs()
    assert set(found.as_kwargs()) == set(config._FIELDS)


# --- contradictions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "env", "expected"),
    [
        ({"device_name": "mlx5_0"}, {}, ["device_name = 'mlx5_0' (from init_kwargs)", "protocol = 'tcp'"]),
        ({"protocol": None}, {"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_DEVICE": "m"}, ["MOONCAKE_DEVICE", "PROTOCOL"]),
        ({"master_server_address": "a:1;b:2"}, {}, ["master_server_address", "'a:1;b:2'", "only etcd://"]),
        ({"master_server_address": "http://a:1"}, {}, ["master_server_address", "'http://a:1'", "'host:port'"]),
        ({"metadata_server": "meta:8080"}, {}, ["metadata_server", "'meta:8080'", "P2PHANDSHAKE", "http://"]),
        ({"metadata_server": "redis://m:1"}, {}, ["metadata_server", "'redis://m:1'", "P2PHANDSHAKE", "etcd://"]),
        ({"metadata_server": "p2phandshake"}, {}, ["metadata_server", "P2PHANDSHAKE"]),
        ({"metadata_server": "http://"}, {}, ["metadata_server", "'http://'", "names no host"]),
        ({"local_hostname": "node:17000"}, {}, ["local_hostname", "'node:17000'", "without a port"]),
        ({}, {"MOONCAKE_LOCAL_HOSTNAME": "a b"}, ["local_hostname", "'a b'", "MOONCAKE_LOCAL_HOSTNAME"]),
        ({"chunk_bytes": 0}, {}, ["chunk_bytes = 0 (from init_kwargs)", "at least 1"]),
        ({"local_buffer_size": 0}, {}, ["local_buffer_size = 0 (from init_kwargs)", "at least one batch"]),
        ({"chunk_bytes": "x"}, {}, ["chunk_bytes", "'x'"]),
        ({"share_memory": "false"}, {}, ["share_memory = 'false' (from init_kwargs)", "true, false"]),
        ({"share_memory": 0}, {}, ["share_memory = 0", "true, false"]),
        ({"verify": "never"}, {}, ["verify = 'never' (from init_kwargs)", "network, always"]),
        ({"verify": True}, {}, ["verify = True", "network, always"]),
        ({"device_name": ["mlx5_0"]}, {}, ["device_name", "string"]),
        ({"protocol": ["tcp"]}, {}, ["protocol", "tcp, rdma"]),
        ({3: "x"}, {}, ["unknown setting 3"]),
    ],
)
def test_contradictions_name_everything(kwargs: dict[Any, Any], env: dict[str, str], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        tcp(kwargs, env)
    for part in expected:
        assert part in str(caught.value)


def test_a_device_set_for_a_whole_cluster_yields_to_an_explicit_protocol() -> None:
    assert tcp({}, {"MOONCAKE_DEVICE": "mlx5_0"}).device_name == ""


# --- memory ---------------------------------------------------------------------------------------------------------

GIB = 1 << 30


def host(root: Path, total: int, cgroup: str = "", limits: dict[str, object] | None = None) -> Path:
    files = {"proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 5 kB\n", "proc/self/cgroup": cgroup}
    for name, text in {**files, **(limits or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n" if text != "" else "")
    return root


V1 = "4:memory:/pod/container\n3:cpuset,cpu:/\n0::/"
V2 = "0::/pod/container"


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("", {}, (64 * GIB, "MemTotal in /proc/meminfo")),
        (V2, {"sys/fs/cgroup/pod/container/memory.max": "max"}, (64 * GIB, "MemTotal in /proc/meminfo")),
        (V2, {"sys/fs/cgroup/pod/container/memory.max": 5}, (5, "/sys/fs/cgroup/pod/container/memory.max")),
        (V2, {"sys/fs/cgroup/pod/container/memory.max": 5, "sys/fs/cgroup/pod/memory.max": 4},
         (4, "/sys/fs/cgroup/pod/memory.max")),
        (V2, {"sys/fs/cgroup/memory.max": 9}, (9, "/sys/fs/cgroup/memory.max")),  # a namespaced mount
        ("0::/../other", {"sys/fs/cgroup/memory.max": 9}, (9, "/sys/fs/cgroup/memory.max")),
        (V2, {"sys/fs/cgroup/elsewhere/memory.max": 9}, (64 * GIB, "MemTotal in /proc/meminfo")),
        (V2, {"sys/fs/cgroup/pod/memory.max": "garbage"}, (64 * GIB, "MemTotal in /proc/meminfo")),
        (V1, {"sys/fs/cgroup/memory/pod/container/memory.limit_in_bytes": 2**63 - 4096},
         (64 * GIB, "MemTotal in /proc/meminfo")),
        (V1, {"sys/fs/cgroup/memory/pod/memory.limit_in_bytes": 7},
         (7, "/sys/fs/cgroup/memory/pod/memory.limit_in_bytes")),
        (V1, {"sys/fs/cgroup/memory/memory.limit_in_bytes": 7}, (7, "/sys/fs/cgroup/memory/memory.limit_in_bytes")),
    ],
)  # fmt: skip
def test_memory_limits(cgroup: str, limits: dict[str, object], expected: tuple[int, str], tmp_path: Path) -> None:
    assert memory_limit(host(tmp_path, 64 * GIB, cgroup, limits)) == MemoryLimit(*expected)


def test_this_host_has_a_limit_and_an_unknown_one_has_none(tmp_path: Path) -> None:
    assert 0 < memory_limit().nbytes < 1 << 50
    assert memory_limit(tmp_path).nbytes == sys.maxsize


def test_a_segment_beyond_the_memory_is_refused_the_default_too(tmp_path: Path) -> None:
    root = host(tmp_path, 64 * GIB, V2, {"sys/fs/cgroup/pod/memory.max": 8 * GIB})
    expected = (
        r"global_segment_size = '8gb' \(from default\).*8589934592.*/sys/fs/cgroup/pod/memory.max"
        r".*MOONCAKE_GLOBAL_SEGMENT_SIZE.*contribute_segment=False"
    )
    with pytest.raises(ConfigError, match=expected):
        fit_to_host(tcp(), True, root)
    assert fit_to_host(tcp(), False, root).local_buffer_size == 8 * GIB  # lends nothing
    with pytest.raises(ConfigError, match=r"global_segment_size = '9gb' \(from init_kwargs\)"):
        fit_to_host(tcp({"global_segment_size": "9gb"}), True, root)
    assert fit_to_host(tcp({"global_segment_size": "7gb"}), True, root).global_segment_size == 7 * GIB


def test_the_default_of_the_buffers_fits_itself_an_explicit_bound_is_refused(tmp_path: Path) -> None:
    root = host(tmp_path, 16 * GIB)
    assert fit_to_host(tcp(), True, root).local_buffer_size == 8 * GIB
    assert fit_to_host(tcp({"local_buffer_size": "8gb"}), True, root).local_buffer_size == 8 * GIB
    for size, contributes in (("17gb", False), ("9gb", True)):
        asked = tcp({"local_buffer_size": size})
        with pytest.raises(ConfigError, match=rf"local_buffer_size = '{size}' \(from init_kwargs\).*MemTotal"):
            fit_to_host(asked, contributes, root)
        from_env = tcp({}, {"MOONCAKE_LOCAL_BUFFER_SIZE": size})
        with pytest.raises(ConfigError, match="from environment variable MOONCAKE_LOCAL_BUFFER_SIZE"):
            fit_to_host(from_env, contributes, root)


def test_a_hostname_without_an_address_is_refused() -> None:
    unknown = tcp({"local_hostname": "no-such-host.invalid", "global_segment_size": "16mb"})
    with pytest.raises(ConfigError, match=r"local_hostname = 'no-such-host.invalid' \(from init_kwargs\).*no address"):
        fit_to_host(unknown, True)
    fit_to_host(tcp({"local_hostname": "localhost", "global_segment_size": "16mb"}), True)


# Reserved for documents: nobody's.
@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7"])
def test_a_hostname_of_another_host_is_refused(address: str) -> None:
    foreign = tcp({}, {"MOONCAKE_LOCAL_HOSTNAME": address, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "16mb"})
    expected = (
        rf"local_hostname = '{address}' \(from environment variable MOONCAKE_LOCAL_HOSTNAME\): {address} is no .*"
    )
    with pytest.raises(ConfigError, match=f"{expected}allowed: .*leave it out"):
        fit_to_host(foreign, True)
    with pytest.raises(ConfigError, match="is no address of this host"):
        fit_to_host(foreign, False)
