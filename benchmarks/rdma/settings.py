"""What is measured between two hosts, checked."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from miles_plugin.report.units import nbytes
from mooncake_store.config import PROTOCOLS, MooncakeConfig, parse_size, resolve
from mooncake_store.errors import ConfigError

CONTROL_PORT = 50060
PLACEMENTS, REGISTRATIONS, OPERATIONS = ("peer", "here"), ("warm", "cold"), ("put", "get")
NO_MASTER = "127.0.0.1:1"  # stands for one that is not started yet, or not needed
_BUFFER = "16mb"  # of Mooncake's own; what is sent lies in buffers of ours


@dataclass(frozen=True)
class Case:
    """One way to move objects.

    Attributes:
        nbytes: of an object.
        batch: objects that an operation moves together.
        workers: processes that do it side by side.
        placement: "peer": in the other host's memory; "here": in this host's, so that nothing crosses the link.
        registration: "warm": of memory that was registered before; "cold": registered and forgotten each time.
    """

    nbytes: int
    batch: int
    workers: int
    placement: str
    registration: str

    @property
    def name(self) -> str:
        more = [f"{self.workers} workers"] if self.workers > 1 else []
        more += [self.registration] if self.registration == "cold" else []
        more += ["memory here"] if self.placement == "here" else []
        return ", ".join([f"{self.batch} x {nbytes(self.nbytes)}", *more])

    @property
    def payload(self) -> int:
        """Bytes of an operation of one worker."""
        return self.nbytes * self.batch


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        peer: "host:port" of the other host's `--serve`.
        address: of this host, in the network that leads there.
        cases: what is measured.
        round_bytes: that each worker moves in a round, about.
        baseline_seconds: that each raw baseline takes in a round.
    """

    peer: str
    address: str
    config: MooncakeConfig
    cases: tuple[Case, ...]
    repeats: int
    warmup: int
    round_bytes: int
    baseline_seconds: float
    output: Path
    run: str

    @property
    def protocol(self) -> str:
        return self.config.protocol

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    def load(self, case: Case) -> dict[str, Any]:
        """What two runs must have in common to be compared."""
        return {"protocol": self.protocol, **vars_of(case), "round_bytes": self.round_bytes}

    @property
    def segment_bytes(self) -> int:
        """Memory that is lent: what all workers of the largest case have in it at once, twice."""
        return 2 * max(case.payload * case.workers for case in self.cases) + (64 << 20)


def vars_of(case: Case) -> dict[str, Any]:
    """The case by field."""
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def resolve_settings(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Settings:
    """Check the flags.

    Raises:
        ConfigError: a value that cannot be used, with what is allowed.
    """
    if not arguments.peer:
        raise ConfigError(
            "name the other host, --peer HOST[:PORT], after `miles-mooncake bench rdma --serve` was started there"
        )
    peer = host_and_port("--peer", arguments.peer)
    quick = arguments.quick
    sizes = arguments.sizes or (["64kb", "1mb"] if quick else ["64kb", "1mb", "16mb", "64mb"])
    for name, given, allowed in (
        ("placement", arguments.placement, PLACEMENTS),
        ("registration", arguments.registration, REGISTRATIONS),
    ):
        if unknown := [each for each in given if each not in allowed]:
            raise ConfigError(f"--{name} {' '.join(unknown)}: allowed are {', '.join(allowed)}")
    repeats = arguments.repeats if arguments.repeats is not None else (2 if quick else 5)
    warmup = arguments.warmup if arguments.warmup is not None else 1
    for name, value, least in (
        ("repeats", repeats, 1),
        ("warmup", warmup, 0),
        *(("batch", each, 1) for each in arguments.batch),
        *(("workers", each, 1) for each in arguments.workers),
    ):
        if value < least:
            raise ConfigError(f"--{name} {value}: allowed is a whole number of at least {least}")
    cases = tuple(
        Case(_size(size), batch, workers, placement, registration)
        for placement, registration, workers, batch, size in product(
            arguments.placement, arguments.registration, arguments.workers, arguments.batch, sizes
        )
    )
    address = _address(arguments.address, peer)
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid() % 65536:04x}"
    return Settings(
        peer=peer,
        address=address,
        config=store_config(arguments.protocol, arguments.device, address, NO_MASTER, environ),
        cases=cases,
        repeats=repeats,
        warmup=warmup,
        round_bytes=_size(arguments.round_bytes) if arguments.round_bytes else (8 << 20 if quick else 256 << 20),
        baseline_seconds=1.0 if quick else 2.0,
        output=arguments.output or Path("runs") / f"rdma-{run}",
        run=run,
    )


def host_and_port(flag: str, given: str) -> str:
    """HOST:PORT, with the port that is there without one; ConfigError for anything else."""
    host, colon, port = given.rpartition(":")
    if not colon:
        host, port = given, str(CONTROL_PORT)
    if not host or ":" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag} {given}: allowed is HOST or HOST:PORT, an IPv4 address or a name, below 65536")
    return f"{host}:{port}"


def store_config(
    protocol: str | None, device: str | None, address: str, master: str, environ: Mapping[str, str] = os.environ
) -> MooncakeConfig:
    """Mooncake's settings of a process of this host.

    Raises:
        ConfigError: a protocol or device that is not there.
    """
    if protocol is not None and protocol not in PROTOCOLS:
        raise ConfigError(f"--protocol {protocol}: allowed are {', '.join(PROTOCOLS)}")
    given = {"protocol": protocol, "device_name": device}
    asked = {name: value for name, value in given.items() if value is not None}
    fixed = {
        "local_hostname": address,
        "master_server_address": master,
        "local_buffer_size": _BUFFER,
        "share_memory": False,
    }
    return resolve({**asked, **fixed}, environ)


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"size {text!r}: {error}") from error
    if size < 1:
        raise ConfigError(f"size {text!r}: allowed is at least one byte")
    return size


def _address(given: str | None, peer: str) -> str:
    """This host's address in the network that leads to the peer; nothing is sent."""
    if given:
        return given
    host, _, port = peer.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--peer {peer}: {error}; allowed is HOST or HOST:PORT of a host that can be reached"
        ) from error
