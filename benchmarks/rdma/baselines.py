"""What carries bytes between the two hosts without a store: Mooncake's own benchmark, iperf3, ib_write_bw, a socket."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.rdma.control import Peer
from benchmarks.rdma.service import engine_command
from benchmarks.rdma.settings import Case, Settings
from miles_plugin.bench_commands import BenchFailed

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Baseline:
    """One of them.

    Attributes:
        name: in the lines and tables.
        operations: which of "put" (to the peer) and "get" (from it) it can.
        bytes_per_second: measures one operation of a case.
    """

    name: str
    operations: tuple[str, ...]
    bytes_per_second: Callable[[Case, str], float]


def available(settings: Settings, peer: Peer, there: Mapping[str, Any]) -> tuple[list[Baseline], list[str]]:
    """Those that both hosts have, their far ends started; and why the others are left out."""
    found = [
        _engine(settings, peer),
        Baseline("socket", ("put", "get"), _Socket(settings, peer).bytes_per_second),
    ]
    left_out = []
    for tool, make, fits in (
        ("iperf3", _iperf3, True),
        ("ib_write_bw", _ib_write_bw, settings.protocol == "rdma"),
    ):
        if not fits:
            continue
        if shutil.which(tool) and tool in there["tools"]:
            found.append(make(settings, peer))
        else:
            left_out.append(f"{tool}: not installed on both hosts")
    return found, left_out


def _engine(settings: Settings, peer: Peer) -> Baseline:
    nbytes = max(case.payload * case.workers for case in settings.cases)
    segment = peer.ask("engine", protocol=settings.protocol, nbytes=2 * nbytes)["segment"]

    def bytes_per_second(case: Case, operation: str) -> float:
        command = engine_command(
            "initiator", settings.protocol, settings.config.device_name, settings.address, 2 * nbytes
        )
        command += [
            f"--segment_id={segment}", f"--operation={'write' if operation == 'put' else 'read'}",
            f"--block_size={case.nbytes}", f"--batch_size={case.batch}", f"--threads={case.workers}",
            f"--duration={max(1, round(settings.baseline_seconds))}", "--report_unit=MB", "--report_precision=3",
        ]  # fmt: skip
        done = _run(command, settings.baseline_seconds + 60)
        found = re.search(r"throughput ([\d.]+) MB/s", done)
        if found is None:
            raise BenchFailed(f"transfer_engine_bench measured nothing; it ended with:\n{done[-1500:]}")
        return float(found[1]) * 1e6

    return Baseline("transfer engine", ("put", "get"), bytes_per_second)


def _iperf3(settings: Settings, peer: Peer) -> Baseline:
    port = peer.ask("iperf3")["port"]
    host = settings.peer.rpartition(":")[0]

    def bytes_per_second(case: Case, operation: str) -> float:
        command = ["iperf3", "--client", host, "--port", str(port), "--json", "--time", str(settings.baseline_seconds)]
        command += ["--parallel", str(case.workers), *(["--reverse"] if operation == "get" else [])]
        return (
            float(json.loads(_run(command, settings.baseline_seconds + 60))["end"]["sum_received"]["bits_per_second"])
            / 8
        )

    return Baseline("iperf3", ("put", "get"), bytes_per_second)


def _ib_write_bw(settings: Settings, peer: Peer) -> Baseline:
    host = settings.peer.rpartition(":")[0]

    def bytes_per_second(case: Case, operation: str) -> float:  # noqa: ARG001
        port = peer.ask("ib_write_bw", nbytes=case.nbytes)["port"]
        device = settings.config.device_name
        command = ["ib_write_bw", "-d", device, "-p", str(port), "-s", str(case.nbytes), "--report_gbits", host]
        lines = _run(command, 120).splitlines()
        numbers = [line.split() for line in lines if re.match(rf"\s*{case.nbytes}\s+\d+", line)]
        if not numbers:
            raise BenchFailed("ib_write_bw measured nothing:\n" + "\n".join(lines[-15:]))
        return float(numbers[-1][3]) * 1e9 / 8

    return Baseline("ib_write_bw", ("put",), bytes_per_second)


class _Socket:
    """Bytes over as many plain TCP connections as there are workers."""

    def __init__(self, settings: Settings, peer: Peer) -> None:
        self._host, self._port = settings.peer.rpartition(":")[0], peer.ask("sink")["port"]
        self._seconds = settings.baseline_seconds

    def bytes_per_second(self, case: Case, operation: str) -> float:
        moved = [0] * case.workers
        until = time.monotonic() + self._seconds

        def exchange(number: int) -> None:
            buffer = bytearray(_CHUNK)
            with socket.create_connection((self._host, self._port), timeout=30) as connection:
                connection.sendall(b"G" if operation == "get" else b"P")
                while time.monotonic() < until:
                    if operation == "get":
                        moved[number] += connection.recv_into(buffer)
                    else:
                        connection.sendall(buffer)
                        moved[number] += len(buffer)

        began = time.monotonic()
        threads = [threading.Thread(target=exchange, args=(number,)) for number in range(case.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(moved) / (time.monotonic() - began)


def _run(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise BenchFailed(f"{command[0]} did not end within {seconds:.0f} s") from error
    if done.returncode:
        raise BenchFailed(f"{command[0]} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-1500:]}")
    return done.stdout + done.stderr
