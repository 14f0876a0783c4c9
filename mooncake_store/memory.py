"""How much memory a process of this host may use: what the host has, and the limit of every cgroup it is in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A bound on memory.

    Attributes:
        nbytes: the bound in bytes.
        source: where it is written, e.g. "MemTotal in /proc/meminfo" or the path of a cgroup's file.
    """

    nbytes: int
    source: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Return the tightest bound on this process's memory.

    What is free now is not considered: it changes while a job starts, and file caches give way.

    Args:
        root: directory under which proc/ and sys/ are read.
    """
    unknown = MemoryLimit(sys.maxsize, "nothing known")
    return min([*_host(root), *_cgroups(root)], key=lambda limit: limit.nbytes, default=unknown)


def available_bytes(root: Path = Path("/")) -> int:
    """What this host can give now without swapping, caches included; a large number where it is not known."""
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return sys.maxsize


def _host(root: Path) -> Iterator[MemoryLimit]:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                yield MemoryLimit(int(line.split()[1]) * 1024, "MemTotal in /proc/meminfo")


def _cgroups(root: Path) -> Iterator[MemoryLimit]:
    """Limits from this process's cgroup up to the mount, in version 2 (also of a hybrid host) and version 1.

    In a container the path may be the host's while the mount shows the container's own group: then only the mount
    itself exists, and it is the right one.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _walk(root, "sys/fs/cgroup", path, "memory.max")
                yield from _walk(root, "sys/fs/cgroup/unified", path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _walk(root, "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")


def _walk(root: Path, mount: str, path: str, name: str) -> Iterator[MemoryLimit]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        file = root.joinpath(mount, *parts[:depth], name)
        with suppress(OSError, ValueError):  # absent, or "max"
            yield MemoryLimit(int(file.read_text()), f"/{file.relative_to(root)}")
