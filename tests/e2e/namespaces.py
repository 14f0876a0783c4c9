"""Two hosts on one machine: network namespaces joined by a veth pair, each with PIDs, /dev/shm and /tmp/ray of its own.

No path of shared memory leads from one to the other: a process of one cannot see those of the other, and so cannot map
their memory. Needs root, or the right to make namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_INSIDE = "veth0"


@dataclass(frozen=True)
class Namespace:
    """pid: of its first process, seen from outside."""

    pid: int

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` in it."""
        return ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", "-i", "--", *arguments]

    def do(self, *arguments: str) -> None:
        subprocess.run(self.command(arguments), check=True, capture_output=True, text=True, timeout=30)


@dataclass(frozen=True)
class Host(Namespace):
    """One of the two. address: in the network between them. switch: what it is plugged into, by a port of its name."""

    name: str
    address: str
    switch: Namespace

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None, seconds: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it to its end."""
        return subprocess.run(
            self.command(arguments), env=env, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )

    def link(self, up: bool) -> None:
        """Take its port down or up, as a cable that is pulled."""
        self.switch.do("ip", "link", "set", self.name, "up" if up else "down")

    def shape(self, rate: str | None) -> None:
        """Bound what it sends to `rate`, e.g. "100mbit"; None for no bound."""
        if rate is None:
            self.do("tc", "qdisc", "del", "dev", _INSIDE, "root")
        else:
            bound = ["rate", rate, "burst", "256kb", "latency", "50ms"]
            self.do("tc", "qdisc", "replace", "dev", _INSIDE, "root", "tbf", *bound)


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
        return f"namespaces cannot be made here: {getattr(error, 'stderr', None) or error}".strip()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """The two; at exit, or when this process ends in any way, everything in them ends."""
    with ExitStack() as stack:
        switch = Namespace(stack.enter_context(_namespace()))
        switch.do("ip", "link", "add", "switch", "type", "bridge")
        switch.do("ip", "link", "set", "switch", "up")
        hosts = []
        for index, name in enumerate(("head", "worker"), start=1):
            host = Host(stack.enter_context(_namespace()), name, f"10.77.0.{index}", switch)
            switch.do("ip", "link", "add", name, "type", "veth", "peer", "name", f"to{name}")
            # From out here, where the host's PID means something.
            subprocess.run(
                ["nsenter", "-t", str(switch.pid), "-n", "--",
                 "ip", "link", "set", f"to{name}", "netns", str(host.pid)],
                check=True, capture_output=True, text=True, timeout=30,
            )  # fmt: skip
            switch.do("ip", "link", "set", name, "master", "switch", "up")
            for arguments in (
                ["hostname", f"{name}-of-test"],
                ["ip", "link", "set", "lo", "up"],
                ["ip", "link", "set", f"to{name}", "name", _INSIDE],
                ["ip", "address", "add", f"{host.address}/24", "dev", _INSIDE],
                ["ip", "link", "set", _INSIDE, "up"],
                ["mkdir", "-p", "/tmp/ray"],
                ["mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", "/dev/shm"],
                ["mount", "-t", "tmpfs", "tmpfs", "/tmp/ray"],
            ):
                host.do(*arguments)
            hosts.append(host)
        head, worker = hosts
        yield head, worker


@contextmanager
def _namespace() -> Iterator[int]:
    """A process that is the first of a PID namespace, in namespaces of its own; its pid out here."""
    flags = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    with tempfile.TemporaryFile() as errors:
        outer = subprocess.Popen(
            ["unshare", *flags, sys.executable, "-S", "-E", __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
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


def _first_process() -> NoReturn:
    """Ends with the test that made it, and with it all of its namespace; takes in what ends meanwhile."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.pause()


if __name__ == "__main__":
    _first_process()
