"""Settings of the Mooncake backend: explicit kwargs > environment > default, decided field by field.

Field names, environment names and defaults are those of miles, so that one launch script serves both.
"""

from __future__ import annotations

import difflib
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mooncake_store.errors import ConfigError

PROTOCOLS = ("tcp", "rdma")
MASTER_VARIABLE = "MOONCAKE_MASTER"
MISTAKEN_MASTER_VARIABLE = "MOONCAKE_MASTER_ADDR"
_MAX_SEGMENT_BYTES = 1 << 62
MIN_SEGMENT_BYTES = 16 << 20  # setup answers -600 below it (measured on mooncake 0.3.13.post1)
INFINIBAND = Path("/sys/class/infiniband")

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[kmg]b?|b)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE_FORM = "allowed: a whole number of bytes, or a number with k, kb, m, mb, g or gb (powers of 1024)"


def parse_size(size: int | str) -> int:
    """Return a size in bytes from an int (1024) or a string ("8gb", "1.5 GB", " 64k "); units are powers of 1024.

    Raises:
        ConfigError: negative, not finite, a fraction of a byte, or not a size at all.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f"size {size!r} is a {type(size).__name__}; {_SIZE_FORM}")
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"size {size} is negative; {_SIZE_FORM}")
        return size
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ConfigError(f"size {size!r} cannot be read; {_SIZE_FORM}")
    number, factor = match["number"], _UNITS[(match["unit"] or "").lower()[:1]]
    # Whole numbers stay integers: a float would round sizes above 2**53 bytes.
    if number.isdigit():
        return int(number) * factor
    nbytes = float(number) * factor
    if not math.isfinite(nbytes) or (factor == 1 and nbytes != int(nbytes)):
        raise ConfigError(f"size {size!r} is not a whole number of bytes; {_SIZE_FORM}")
    return int(nbytes)


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Checked settings of one Mooncake client.

    Attributes:
        master_server_address: "host:port", or "etcd://host:port[;host:port]" for a highly available master.
        local_hostname: address under which other hosts reach this process.
        metadata_server: "P2PHANDSHAKE", or the URL of a metadata service.
        protocol: "tcp" or "rdma".
        device_name: RDMA devices separated by commas; empty lets Mooncake choose.
        global_segment_size: bytes this process lends to the store when it contributes a segment; 0 lends nothing.
        local_buffer_size: upper bound, in bytes, of the warm buffers through which this process puts and gets.
        chunk_bytes: accepted for launch scripts written for miles; a batch is one object here, so it is not used.
    """

    master_server_address: str
    local_hostname: str
    metadata_server: str
    protocol: str
    device_name: str
    global_segment_size: int
    local_buffer_size: int
    chunk_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Field:
    variable: str | None
    default: str | int | None
    size: bool = False


_FIELDS = {
    "master_server_address": _Field(MASTER_VARIABLE, None),
    "local_hostname": _Field("MOONCAKE_LOCAL_HOSTNAME", None),
    "metadata_server": _Field("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
    "protocol": _Field("MOONCAKE_PROTOCOL", "rdma"),
    "device_name": _Field("MOONCAKE_DEVICE", ""),
    "global_segment_size": _Field("MOONCAKE_GLOBAL_SEGMENT_SIZE", "8gb", size=True),
    "local_buffer_size": _Field("MOONCAKE_LOCAL_BUFFER_SIZE", "32gb", size=True),
    "chunk_bytes": _Field(None, None, size=True),
}
assert set(_FIELDS) == {field.name for field in fields(MooncakeConfig)}


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value together with where it came from, which every complaint about it must say."""

    field: str
    value: Any
    source: str

    def complain(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.field} = {self.value!r} (from {self.source}): {problem}")


def resolve(
    init_kwargs: Mapping[str, Any] | None,
    env: Mapping[str, str],
    *,
    node_ip: Callable[[], str | None] = lambda: None,
    infiniband: Path = INFINIBAND,
) -> MooncakeConfig:
    """Merge explicit kwargs, environment and defaults into a checked MooncakeConfig.

    A kwarg of None and an empty variable count as unset; an explicit 0 does not.

    Args:
        init_kwargs: explicit settings, as given to `open_store`.
        env: the environment, usually `os.environ`.
        node_ip: asks the cluster (Ray) for this node's address; None when there is no cluster.
        infiniband: directory in which the kernel lists RDMA devices.

    Raises:
        ConfigError: an unknown field, a missing master, or a value that cannot be used; names field, value, source.
    """
    kwargs = dict(init_kwargs or {})
    for name in kwargs:
        if name not in _FIELDS:
            raise ConfigError(_unknown_field(name, kwargs[name]))

    settings = {name: _lookup(name, field, kwargs, env) for name, field in _FIELDS.items()}
    master = _master(settings["master_server_address"], env)
    protocol = _protocol(settings["protocol"])
    device = _text(settings["device_name"])
    if protocol == "rdma":
        _check_rdma(settings["protocol"], settings["device_name"], infiniband)
    hostname = settings["local_hostname"]
    return MooncakeConfig(
        master_server_address=master,
        local_hostname=_text(hostname) if hostname.value is not None else node_ip() or _address_towards(master),
        metadata_server=_text(settings["metadata_server"]),
        protocol=protocol,
        device_name=device,
        global_segment_size=_segment(settings["global_segment_size"]),
        local_buffer_size=_bytes(settings["local_buffer_size"]),
        chunk_bytes=None if settings["chunk_bytes"].value is None else _bytes(settings["chunk_bytes"]),
    )


def rdma_devices(infiniband: Path = INFINIBAND) -> list[str]:
    """Names of this host's RDMA devices, sorted; empty without any."""
    return sorted(entry.name for entry in infiniband.iterdir()) if infiniband.is_dir() else []


def master_endpoints(address: str) -> list[tuple[str, int]]:
    """Split "host:port" or "etcd://host:port[;host:port]" into (host, port) pairs, at least one.

    Raises:
        ConfigError: an entry is not host:port with a port of 1 to 65535.
    """
    return list(_endpoints(address))


def _endpoints(address: str) -> Iterator[tuple[str, int]]:
    for entry in re.split("[;,]", address.removeprefix("etcd://")):
        host, _, port = entry.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{entry.strip()!r} in {address!r} is not host:port with a port of 1 to 65535")
        yield host.strip("[]"), int(port)


def _unknown_field(name: str, value: object) -> str:
    close = difflib.get_close_matches(str(name), _FIELDS, n=1)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown setting {name!r} = {value!r} (from init_kwargs): {nearest}allowed: {', '.join(_FIELDS)}"


def _lookup(name: str, field: _Field, kwargs: Mapping[str, Any], env: Mapping[str, str]) -> _Setting:
    if kwargs.get(name) is not None:
        return _Setting(name, kwargs[name], "init_kwargs")
    if field.variable is not None and env.get(field.variable, "").strip():
        return _Setting(name, env[field.variable].strip(), f"environment variable {field.variable}")
    return _Setting(name, field.default, "default")


def _text(setting: _Setting) -> str:
    if not isinstance(setting.value, str):
        raise setting.complain("must be a string")
    return setting.value


def _bytes(setting: _Setting) -> int:
    try:
        return parse_size(setting.value)
    except ConfigError as error:
        raise setting.complain(str(error)) from None


def _segment(setting: _Setting) -> int:
    size = _bytes(setting)
    if 0 < size < MIN_SEGMENT_BYTES:
        raise setting.complain(f"allowed: 0 (lend nothing), or at least {MIN_SEGMENT_BYTES} bytes")
    if size > _MAX_SEGMENT_BYTES:
        raise setting.complain(f"allowed: at most {_MAX_SEGMENT_BYTES} bytes")
    return size


def _master(setting: _Setting, env: Mapping[str, str]) -> str:
    if setting.value is None:
        mistaken = env.get(MISTAKEN_MASTER_VARIABLE)
        hint = f" ({MISTAKEN_MASTER_VARIABLE}={mistaken!r} is set, but it is not read)" if mistaken else ""
        raise ConfigError(
            f"master_server_address is not set: pass master_server_address='host:port' in init_kwargs, or set "
            f"the environment variable {MASTER_VARIABLE}{hint}"
        )
    address = _text(setting).strip()
    try:
        master_endpoints(address)
    except ConfigError as error:
        raise setting.complain(f"{error}; allowed: 'host:port' or 'etcd://host:port'") from None
    return address


def _protocol(setting: _Setting) -> str:
    if setting.value not in PROTOCOLS:
        raise setting.complain(f"allowed: {', '.join(PROTOCOLS)}")
    return str(setting.value)


def _check_rdma(protocol: _Setting, devices: _Setting, infiniband: Path) -> None:
    # Mooncake answers 0 and quietly uses TCP when there is no device (measured on 0.3.13.post1).
    present = rdma_devices(infiniband)
    if not present:
        raise protocol.complain(f"this host has no RDMA device in {infiniband}; use protocol 'tcp', or fix the driver")
    wanted = [name.strip() for name in _text(devices).split(",") if name.strip()]
    missing = [name for name in wanted if name not in present]
    if missing:
        raise devices.complain(f"no such RDMA device: {', '.join(missing)}; allowed: {', '.join(present)}")


def _address_towards(master: str) -> str:
    """Address of the interface that routes to the master; loopback when the master is local or has no route."""
    host, port = master_endpoints(master)[0]
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: picks the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
