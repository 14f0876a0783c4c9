"""Two hosts on one machine: network namespaces joined by a veth pair, each with PIDs, /dev/shm and /tmp/ray of its own.

No path of shared memory leads from one to the other: a process of one cannot see those of the other, and so cannot map
their memory. Needs root, or the right to make namespaces.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_INSIDE = "veth0"
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One of the two. address: in the network between them. pid: of its first process, seen from outside."""

    name: str
    address: str
    pid: int
    outside: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` in it."""
        return ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", "-i", "--", *arguments]

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None, seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it to its end."""
        return subprocess.run(
            self.command(arguments), env=env, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )

    def link(self, up: bool) -> None:
        """Take its end of the link down or up, as a cable that is pulled."""
        _do("ip", "link", "set", self.outside, "up" if up else "down")

    def shape(self, rate: str | None) -> None:
        """Bound what it sends to `rate`, e.g. "100mbit"; None for no bound."""
        tc = self.command(["tc", "qdisc"])
        if rate is None:
            _do(*tc, "del", "dev", _INSIDE, "root")
        else:
            _do(*tc, "replace", "dev", _INSIDE, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
        return f"namespaces cannot be made here: {getattr(error, 'stderr', None) or error}".strip()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """The two; at exit everything in them ends."""
    number = next(_numbers)
    tag = f"{os.getpid() % 100000}{chr(97 + number % 26)}"
    bridge = f"mbr{tag}"
    with ExitStack() as stack:
        _do("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(subprocess.run, ["ip", "link", "del", bridge], capture_output=True)
        _do("ip", "link", "set", bridge, "up")
        hosts = []
        for index, name in enumerate(("head", "worker"), start=1):
            init = stack.enter_context(_namespace())
            outside = f"m{name[0]}{tag}"
            _do("ip", "link", "add", outside, "type", "veth", "peer", "name", _INSIDE, "netns", str(init))
            host = Host(name, f"10.77.0.{index}", init, outside)
            _do("ip", "link", "set", outside, "master", bridge, "up")
            for arguments in (
                ["hostname", f"{name}-of-test"],
                ["ip", "link", "set", "lo", "up"],
                ["ip", "address", "add", f"{host.address}/24", "dev", _INSIDE],
                ["ip", "link", "set", _INSIDE, "up"],
                ["mkdir", "-p", "/tmp/ray"],
                ["mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", "/dev/shm"],
                ["mount", "-t", "tmpfs", "tmpfs", "/tmp/ray"],
            ):
                _do(*host.command(arguments))
            hosts.append(host)
        head, worker = hosts
        _do(*head.command(["ping", "-c", "1", "-W", "5", worker.address])) if _has_ping() else None
        yield head, worker


@contextmanager
def _namespace() -> Iterator[int]:
    """A process that is the first of a PID namespace, in namespaces of its own; its pid out here."""
    flags = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    with tempfile.TemporaryFile() as errors:
        outer = subprocess.Popen(
            ["unshare", *flags, sys.executable, "-S", "-E", __file__],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            assert outer.stdout is not None
            if not outer.stdout.readline():
                errors.seek(0)
                raise RuntimeError(errors.read().decode().strip())
            yield int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
        finally:
            outer.kill()
            outer.wait()


def _has_ping() -> bool:
    return any((Path(folder) / "ping").exists() for folder in os.environ.get("PATH", "").split(os.pathsep))


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


def _first_process() -> NoReturn:
    """Ends with the test that made it, and with it all of its namespace; takes in what ends meanwhile."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()


if __name__ == "__main__":
    _first_process()
