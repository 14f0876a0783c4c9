"""What a host's own counters say of the link: its rate, and how many bytes went over it.

They are read from the kernel and not from what moves the bytes, so that a transport which quietly took another way is
found out.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

INFINIBAND, NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")
_WORD = 4  # bytes in a unit of an InfiniBand port's data counters


@dataclass(frozen=True)
class Link:
    """sent, received: bytes so far. rate: bytes per second, None where nobody knows. name: for a table.

    A virtual interface says a rate, too, which means nothing.
    """

    name: str
    sent: int
    received: int
    rate: float | None

    @property
    def moved(self) -> int:
        return self.sent + self.received


def read(protocol: str, devices: str, address: str) -> Link:
    """The RDMA devices, or for another protocol the interface that has the address."""
    return _infiniband(devices) if protocol == "rdma" else _interface(address)


def _infiniband(devices: str) -> Link:
    names = [name.strip() for name in devices.split(",") if name.strip()] or sorted(
        path.name for path in INFINIBAND.glob("*")
    )
    sent = received = 0
    rates: list[float] = []
    for port in (port for name in names for port in sorted((INFINIBAND / name / "ports").glob("*"))):
        sent += _WORD * _number(port / "counters" / "port_xmit_data")
        received += _WORD * _number(port / "counters" / "port_rcv_data")
        found = re.match(r"([\d.]+) Gb/sec", _text(port / "rate"))
        if found:
            rates.append(float(found[1]) * 1e9 / 8)
    return Link(", ".join(names) or "no RDMA device", sent, received, sum(rates) or None)


def _interface(address: str) -> Link:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address and each.family in (socket.AF_INET, socket.AF_INET6) for each in addresses):
            counted = psutil.net_io_counters(pernic=True)[name]
            stats = psutil.net_if_stats().get(name)
            is_physical = (NETWORK / name / "device").exists()
            rate = stats.speed * 1e6 / 8 if stats and stats.speed and is_physical else None
            return Link(name, counted.bytes_sent, counted.bytes_recv, rate)
    return Link("an unknown interface", 0, 0, None)


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
