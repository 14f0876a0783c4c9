"""The serving host: lends memory, is the far end of the raw baselines, and says what they cost here."""

from __future__ import annotations

import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.measurements import this_machine
from benchmarks.rdma import counters
from benchmarks.rdma.control import FORMAT, serve_one
from benchmarks.rdma.settings import NO_MASTER, store_config
from mooncake_store.config import fit_to_host, rdma_devices
from mooncake_store.errors import ConfigError, StoreUnavailable
from mooncake_store.holder import RunningHolder, start_holder
from mooncake_store.process import ManagedProcess, free_ports

START_SECONDS = 20.0
_CHUNK = 1 << 20


class Service:
    """What the other host may ask for, by method. Everything started ends with `close`.

    Args:
        address: of this host, as the other one reached it.
        device: RDMA devices of this host; None for MOONCAKE_DEVICE.
        directory: gets logs.
    """

    def __init__(self, address: str, device: str | None, directory: Path) -> None:
        self._address, self._device, self._directory = address, device, directory
        self._stack = ExitStack()
        self._holder: RunningHolder | None = None

    def methods(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {
            "hello": self.hello, "lend": self.lend, "cost": self.cost, "link": self.link,
            "engine": self.engine, "iperf3": self.iperf3, "ib_write_bw": self.ib_write_bw, "sink": self.sink,
        }  # fmt: skip

    def hello(self) -> dict[str, Any]:
        machine, versions = this_machine()
        tools = [tool for tool in ("iperf3", "ib_write_bw") if shutil.which(tool)]
        return {
            "format": FORMAT,
            "machine": msgspec.to_builtins(machine),
            "versions": versions,
            "devices": rdma_devices(),
            "tools": tools,
        }

    def lend(self, master: str, protocol: str, nbytes: int) -> dict[str, Any]:
        """Start a segment holder for this master."""
        config = replace(store_config(protocol, self._device, self._address, master), global_segment_size=nbytes)
        config = fit_to_host(config, contributes=True)
        self._holder = start_holder(config, self._directory / "holder.log")
        self._stack.callback(self._holder.stop)
        return {"segment": self._holder.record.name}

    def cost(self) -> dict[str, Any]:
        """CPU seconds of the process that lends memory, so far."""
        if self._holder is None:
            return {"cpu_seconds": 0.0}
        times = psutil.Process(self._holder.record.pid).cpu_times()
        return {"cpu_seconds": times.user + times.system}

    def link(self, protocol: str) -> dict[str, Any]:
        config = store_config(protocol, self._device, self._address, NO_MASTER)
        return asdict(counters.read(protocol, config.device_name, self._address))

    def engine(self, protocol: str, nbytes: int) -> dict[str, Any]:
        """Start the far end of Mooncake's transfer_engine_bench; its segment's name."""
        config = store_config(protocol, self._device, self._address, NO_MASTER)
        command = engine_command("target", protocol, config.device_name, self._address, nbytes)
        process = self._run("transfer_engine_bench", command)
        return {"segment": said(process, r"listening on (\S+)")}

    def iperf3(self) -> dict[str, Any]:
        (port,) = free_ports(1, self._address)
        process = self._run(
            "iperf3", ["iperf3", "--server", "--bind", self._address, "--port", str(port), "--forceflush"]
        )
        said(process, r"(listening)")
        return {"port": port}

    def ib_write_bw(self, nbytes: int) -> dict[str, Any]:
        (port,) = free_ports(1, self._address)
        device = store_config("rdma", self._device, self._address, NO_MASTER).device_name
        self._run("ib_write_bw", ["ib_write_bw", "-d", device, "-p", str(port), "-s", str(nbytes), "--report_gbits"])
        time.sleep(1.0)  # it says nothing until somebody connects
        return {"port": port}

    def sink(self) -> dict[str, Any]:
        """Accept connections whose bytes are thrown away, or, where one begins with "G", that are sent bytes."""
        server = socket.create_server((self._address, 0))
        self._stack.callback(server.close)
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        return {"port": server.getsockname()[1]}

    def close(self) -> None:
        self._stack.close()

    def _run(self, name: str, command: list[str]) -> ManagedProcess:
        process = ManagedProcess(name, command, self._directory / f"{name}.log")
        self._stack.callback(process.stop)
        return process


def serve(listen: str, device: str | None, directory: Path, say: Callable[[str], None]) -> None:
    """Serve one host after the other until interrupted."""
    host, _, port = listen.rpartition(":")
    try:
        server = socket.create_server((host, int(port)))
    except OSError as error:
        raise ConfigError(f"--listen {listen}: {error}; name an address and a free port of this host") from error
    with server:
        say(f"serving on {listen}; on the other host: miles-mooncake bench rdma --peer THIS_HOST:{port}")
        for number in count():
            connection, (there, *_) = server.accept()
            say(f"measuring with {there}")
            logs = directory / str(number)  # of its own: what a process says there is waited for
            service = Service(str(connection.getsockname()[0]), device, logs)
            try:
                serve_one(connection, service.methods())
            except OSError as error:
                say(f"{there}: {error}")
            finally:
                service.close()
            say(f"{there} is done")


def engine_command(mode: str, protocol: str, device: str, address: str, nbytes: int) -> list[str]:
    """The command line of Mooncake's transfer_engine_bench, beside this Python."""
    (port,) = free_ports(1, address)
    return [
        str(Path(sys.executable).parent / "transfer_engine_bench"), f"--mode={mode}", f"--protocol={protocol}",
        f"--device_name={device}", "--metadata_server=P2PHANDSHAKE", f"--local_server_name={address}:{port}",
        f"--buffer_size={max(nbytes, 64 << 20)}",
    ]  # fmt: skip


def said(process: ManagedProcess, pattern: str) -> str:
    """What a process says first that matches; StoreUnavailable when it ends, or says nothing for long."""
    until = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError):
            if found := re.findall(pattern, process.log.read_text(errors="replace")):
                return str(found[-1])
        if process.exit_status() is not None or time.monotonic() > until:
            raise StoreUnavailable(f"{process.name} did not start; its log {process.log} ends:\n{process.log_tail()}")
        time.sleep(0.05)


def _accept(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_exchange, args=(connection,), daemon=True).start()


def _exchange(connection: socket.socket) -> None:
    buffer = bytearray(_CHUNK)
    with connection, suppress(OSError):
        if connection.recv(1) == b"G":
            while True:
                connection.sendall(buffer)
        while connection.recv_into(buffer):
            pass
