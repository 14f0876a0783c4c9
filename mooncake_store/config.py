"""Settings of the Mooncake backend: explicit kwargs > environment > default, decided field by field.

Field names, environment names and defaults are those of miles, so that one launch script serves both.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mooncake_store.addresses import address_towards, endpoints, is_host, not_of_this_host
from mooncake_store.errors import ConfigError
from mooncake_store.memory import memory_limit

PROTOCOLS = ("tcp", "rdma")
VERIFY = ("network", "always")
COMPACT = ("auto", "always", "never")
MASTER_VARIABLE = "MOONCAKE_MASTER"
MISTAKEN_MASTER_VARIABLE = "MOONCAKE_MASTER_ADDR"
P2P_METADATA = "P2PHANDSHAKE"
# Any other scheme, redis:// too, makes Mooncake abort the process (measured on mooncake 0.3.13.post1).
METADATA_SCHEMES = ("http://", "https://", "etcd://")
MIN_SEGMENT_BYTES = 16 << 20  # setup answers -600 below it (measured on mooncake 0.3.13.post1)
INFINIBAND = Path("/sys/class/infiniband")
KWARGS, DEFAULT, NODE = "init_kwargs", "default", "this node's address"  # sources of a setting

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
class Setting:
    """One value as it was given, and where: every complaint about it says both.

    Attributes:
        field: name of the setting.
        value: what was given, before it was read.
        source: "init_kwargs", "environment variable NAME", "default", or what else decided it.
    """

    field: str
    value: Any
    source: str

    def complain(self, problem: str) -> ConfigError:
        """Build the error for this setting; it is returned, not raised."""
        return ConfigError(f"{self.field} = {self.value!r} (from {self.source}): {problem}")


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Checked settings of one Mooncake client.

    Attributes:
        master_server_address: "host:port", or "etcd://host:port[;host:port]" for a highly available master.
        local_hostname: name or address, without a port, under which other hosts reach this process; by default Ray's
            address of this node, or without Ray that of the interface that leads to the master.
        metadata_server: "P2PHANDSHAKE", or the http, https or etcd URL of a metadata service.
        protocol: "tcp" or "rdma"; "rdma" is refused on a host without an RDMA device.
        device_name: RDMA devices of this host separated by commas; empty lets Mooncake choose. Refused with
            "tcp", unless it comes from the environment and the protocol from init_kwargs.
        global_segment_size: bytes that the segment holder lends which this process starts, when it contributes and none
            serves its node: 0 lends nothing, else at least 16mb, and less than this host's or cgroup's memory.
        local_buffer_size: upper bound, in bytes, of the warm buffers through which this process puts and gets. The
            default is lowered to the memory there is; a value that was given and does not fit is refused.
        chunk_bytes: largest part, in bytes, in which a batch is stored; None stores it in one part wherever it fits. A
            batch of more than 65536 such parts is stored in 65536 larger ones.
            Batches of several parts are copied on every get, those of one part are not where readers share memory.
        share_memory: whether processes of one node look into a segment's memory instead of moving its bytes over the
            network; where that is impossible they fall back by themselves.
        compact: whether integers are stored as the narrowest that hold them, and widened by readers: "auto" does it
            where bytes travel by TCP, which takes longer than widening them.
        verify: "network" checks the digests of bytes that moved, "always" also of those seen in shared memory.
        settings: by field, what was given and where it came from.
    """

    master_server_address: str
    local_hostname: str
    metadata_server: str
    protocol: str
    device_name: str
    global_segment_size: int
    local_buffer_size: int
    chunk_bytes: int | None
    share_memory: bool
    compact: str
    verify: str
    settings: Mapping[str, Setting] = field(compare=False, repr=False)

    def as_kwargs(self) -> dict[str, Any]:
        """The settings as init_kwargs that `resolve` reads back, whatever the environment says then."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "settings"}


@dataclass(frozen=True, slots=True)
class _Field:
    variable: str | None
    default: str | int | None


_FIELDS = {
    "master_server_address": _Field(MASTER_VARIABLE, None),
    "local_hostname": _Field("MOONCAKE_LOCAL_HOSTNAME", None),
    "metadata_server": _Field("MOONCAKE_TE_META_DATA_SERVER", P2P_METADATA),
    "protocol": _Field("MOONCAKE_PROTOCOL", "rdma"),
    "device_name": _Field("MOONCAKE_DEVICE", ""),
    "global_segment_size": _Field("MOONCAKE_GLOBAL_SEGMENT_SIZE", "8gb"),
    "local_buffer_size": _Field("MOONCAKE_LOCAL_BUFFER_SIZE", "32gb"),
    "chunk_bytes": _Field(None, None),
    "share_memory": _Field(None, True),
    "compact": _Field(None, COMPACT[0]),
    "verify": _Field(None, VERIFY[0]),
}
# The variable that each setting falls back to, for those that have one.
VARIABLES = {name: field.variable for name, field in _FIELDS.items() if field.variable is not None}
DEFAULTS = {name: field.default for name, field in _FIELDS.items()}
assert {*_FIELDS, "settings"} == {field.name for field in fields(MooncakeConfig)}


def resolve(
    init_kwargs: Mapping[str, Any] | None,
    env: Mapping[str, str],
    *,
    node_ip: Callable[[], str | None] = lambda: None,
    infiniband: Path = INFINIBAND,
    given_by: str = KWARGS,
) -> MooncakeConfig:
    """Merge explicit kwargs, environment and defaults into a checked MooncakeConfig.

    A kwarg of None and an empty variable count as unset; an explicit 0 does not. What the settings ask of this host's
    memory and names is checked by `fit_to_host`.

    Args:
        init_kwargs: explicit settings, as given to `open_store`.
        env: the environment, usually `os.environ`.
        node_ip: asks the cluster (Ray) for this node's address; None when there is no cluster.
        infiniband: directory in which the kernel lists RDMA devices.
        given_by: what messages call the source of `init_kwargs`.

    Raises:
        ConfigError: an unknown field, a missing master, a value that cannot be used, or values that contradict each
            other; names field, value, source and what is allowed.
    """
    kwargs = dict(init_kwargs or {})
    for name in kwargs:
        if name not in _FIELDS:
            raise ConfigError(_unknown_field(name, kwargs[name], given_by))

    settings = {name: _lookup(name, field, kwargs, env, given_by) for name, field in _FIELDS.items()}
    master = _master(settings["master_server_address"], env)
    metadata = _metadata(settings["metadata_server"])
    segment_bytes = _segment(settings["global_segment_size"])
    buffer_bytes = _positive(settings["local_buffer_size"], "at least one batch, since all go through a buffer")
    chunk_bytes = None if settings["chunk_bytes"].value is None else _positive(settings["chunk_bytes"], "at least 1")
    protocol = _one_of(settings["protocol"], PROTOCOLS)
    settings["device_name"] = _device(settings["device_name"], settings["protocol"], infiniband, given_by)
    settings["local_hostname"] = _hostname(settings["local_hostname"], master, node_ip)
    return MooncakeConfig(
        master_server_address=master,
        local_hostname=settings["local_hostname"].value,
        metadata_server=metadata,
        protocol=protocol,
        device_name=settings["device_name"].value,
        global_segment_size=segment_bytes,
        local_buffer_size=buffer_bytes,
        chunk_bytes=chunk_bytes,
        share_memory=_switch(settings["share_memory"]),
        compact=_one_of(settings["compact"], COMPACT),
        verify=_one_of(settings["verify"], VERIFY),
        settings=settings,
    )


def rdma_devices(infiniband: Path = INFINIBAND) -> list[str]:
    """Names of this host's RDMA devices, sorted; empty without any."""
    return sorted(entry.name for entry in infiniband.iterdir()) if infiniband.is_dir() else []


def fit_to_host(config: MooncakeConfig, contributes: bool, root: Path = Path("/")) -> MooncakeConfig:
    """Check what the settings ask of this host; return them with the buffers bounded by its memory.

    A segment is memory taken for good, so one that this host or its cgroup does not have is refused, the default too.
    Buffers are made as needed and local_buffer_size is only their bound: its default, made for large hosts, is
    lowered to what the segment leaves; a bound that was asked for and cannot be reached is refused.

    Args:
        config: what `resolve` returned.
        contributes: whether this process lends its segment.
        root: directory under which proc/ and sys/ are read.

    Raises:
        ConfigError: more memory than there is, or a local_hostname that is no name or address of this host.
    """
    hostname, segment, buffers = (
        config.settings[name] for name in ("local_hostname", "global_segment_size", "local_buffer_size")
    )
    limit = memory_limit(root)
    lent = config.global_segment_size if contributes else 0
    if lent >= limit.nbytes:
        raise segment.complain(
            f"this process would lend {lent} bytes of memory; allowed: less than {limit.nbytes} ({limit.source}). Set "
            f"global_segment_size or {_FIELDS['global_segment_size'].variable}; a process that opens a store may also "
            f"lend nothing, with contribute_segment=False"
        )
    left = limit.nbytes - lent
    if config.local_buffer_size > left and buffers.source != DEFAULT:
        beside = f" beside a segment of {lent} bytes" if lent else ""
        raise buffers.complain(f"allowed: at most {left} bytes{beside} ({limit.nbytes} bytes: {limit.source})")
    if hostname.source != NODE and (reason := not_of_this_host(config.local_hostname)):
        raise hostname.complain(
            f"{reason}; allowed: a name or address of this host that other hosts can reach, or leave it out, which "
            "takes the node's own on every node"
        )
    return replace(config, local_buffer_size=min(config.local_buffer_size, left))


def _unknown_field(name: str, value: object, given_by: str) -> str:
    close = difflib.get_close_matches(str(name), _FIELDS, n=1)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown setting {name!r} = {value!r} (from {given_by}): {nearest}allowed: {', '.join(_FIELDS)}"


def _lookup(name: str, field: _Field, kwargs: Mapping[str, Any], env: Mapping[str, str], given_by: str) -> Setting:
    if kwargs.get(name) is not None:
        return Setting(name, kwargs[name], given_by)
    if field.variable is not None and env.get(field.variable, "").strip():
        return Setting(name, env[field.variable].strip(), f"environment variable {field.variable}")
    return Setting(name, field.default, DEFAULT)


def _text(setting: Setting) -> str:
    if not isinstance(setting.value, str):
        raise setting.complain("must be a string")
    return setting.value.strip()


def _bytes(setting: Setting) -> int:
    try:
        return parse_size(setting.value)
    except ConfigError as error:
        raise setting.complain(str(error)) from None


def _positive(setting: Setting, allowed: str) -> int:
    size = _bytes(setting)
    if size == 0:
        raise setting.complain(f"allowed: {allowed}")
    return size


def _segment(setting: Setting) -> int:
    size = _bytes(setting)
    if 0 < size < MIN_SEGMENT_BYTES:
        raise setting.complain(f"allowed: 0 (lend nothing), or at least {MIN_SEGMENT_BYTES} bytes")
    return size


def _master(setting: Setting, env: Mapping[str, str]) -> str:
    if setting.value is None:
        mistaken = env.get(MISTAKEN_MASTER_VARIABLE)
        hint = f". {MISTAKEN_MASTER_VARIABLE}={mistaken!r} is set, but {MASTER_VARIABLE} is the one that counts"
        raise ConfigError(
            f"master_server_address is not set: pass master_server_address='host:port' in init_kwargs, or set "
            f"the environment variable {MASTER_VARIABLE}{hint if mistaken else ''}"
        )
    address = _text(setting)
    try:
        endpoints(address)
        if address.startswith(("http://", "https://")):
            raise ConfigError("a master is not reached by a URL")
    except ConfigError as error:
        raise setting.complain(f"{error}; allowed: 'host:port' or 'etcd://host:port[;host:port]'") from None
    return address


def _metadata(setting: Setting) -> str:
    server = _text(setting)
    if server == P2P_METADATA:
        return server
    allowed = f"allowed: {P2P_METADATA}, or a URL of {', '.join(METADATA_SCHEMES)}"
    if not server.startswith(METADATA_SCHEMES):
        raise setting.complain(allowed)
    try:
        endpoints(server)
    except ConfigError as error:
        raise setting.complain(f"{error}; {allowed}") from None
    return server


def _one_of(setting: Setting, allowed: Sequence[str]) -> str:
    if setting.value not in allowed:
        raise setting.complain(f"allowed: {', '.join(allowed)}")
    return str(setting.value)


def _switch(setting: Setting) -> bool:
    if not isinstance(setting.value, bool):
        raise setting.complain("allowed: true, false")
    return setting.value


def _device(device: Setting, protocol: Setting, infiniband: Path, given_by: str) -> Setting:
    wanted = [name.strip() for name in _text(device).split(",") if name.strip()]
    if protocol.value == "tcp":
        # MOONCAKE_DEVICE may be set for a whole cluster; a kwarg protocol='tcp' outranks it.
        if wanted and (device.source == given_by or protocol.source != given_by):
            raise device.complain(
                f"contradicts protocol = 'tcp' (from {protocol.source}), which uses no RDMA device; set one of them"
            )
        return Setting(device.field, "", f"protocol {protocol.value}")
    # Mooncake answers 0 and quietly uses TCP when there is no device (measured on 0.3.13.post1).
    present = rdma_devices(infiniband)
    if not present:
        raise protocol.complain(f"this host has no RDMA device in {infiniband}; use protocol 'tcp', or fix the driver")
    missing = [name for name in wanted if name not in present]
    if missing:
        raise device.complain(f"no such RDMA device: {', '.join(missing)}; allowed: {', '.join(present)}")
    return Setting(device.field, ",".join(wanted), device.source)


def _hostname(setting: Setting, master: str, node_ip: Callable[[], str | None]) -> Setting:
    if setting.value is None:
        return Setting(setting.field, node_ip() or address_towards(*endpoints(master)[0]), NODE)
    hostname = _text(setting)
    if not is_host(hostname):
        # A port would give all processes of a host one segment name, though Mooncake takes it (0.3.13.post1).
        raise setting.complain("allowed: a host name or an IP address, without a port")
    return Setting(setting.field, hostname, setting.source)
