"""What this machine can do at most with as many bytes: raw writes, one broadcast, a socket, a copy in memory."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.weights.model import count_up, random_bytes
from benchmarks.weights.trainer import HOST
from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.sglang import SGLangEngine
from miles_plugin.weight_transfer.equality import compare
from miles_plugin.weight_transfer.p2p import PIECE_BYTES
from miles_plugin.weight_transfer.transfer_engine import start_transfer_engine

_TIMEOUT = timedelta(minutes=5)
_CHUNK = 1 << 20
# How raw bytes are written, in one call to each rank of an engine: the bytes of one of its entries.
FORMS = {"one entry": 1 << 62, "pieces": PIECE_BYTES}


class _Target(NamedTuple):
    """The registered memory of one rank of an engine. memory: parameter -> (address, elements, bytes per element)."""

    session: str
    memory: dict[str, tuple[int, int, int]]

    @property
    def begin(self) -> int:
        return min(address for address, _, _ in self.memory.values())

    @property
    def nbytes(self) -> int:
        end = max(address + elements * width for address, elements, width in self.memory.values())
        return end - self.begin


class Near:
    """The sending side of every limit; made in a process of its own.

    Args:
        nbytes: of the model.
        port: of the rendezvous with `Far`.
    """

    def __init__(self, nbytes: int, port: int) -> None:
        torch.set_num_threads(1)
        self._nbytes = nbytes
        self._memory = random_bytes(
            -(-nbytes // _CHUNK) * _CHUNK + _CHUNK, seed=1
        )  # an engine has gaps between its parameters
        self._copy = self._memory[:nbytes].copy()  # so that its pages are there
        self._engine = start_transfer_engine(HOST, "tcp")
        if self._engine.register_memory(self._memory.ctypes.data, self._memory.size) != 0:
            raise RuntimeError(f"the Transfer Engine refused to register {self._memory.size} bytes")
        self._targets: dict[str, list[_Target]] = {}
        dist.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=0, world_size=2, timeout=_TIMEOUT)

    def change(self) -> str:
        """Make every byte another one; the digest of what `Far` will receive."""
        count_up(self._memory)
        return _digest(self._memory[: self._nbytes])

    def write(self, engines: Sequence[EngineAddress], form: str) -> float:
        """Seconds to write into the memory of every engine rank from one buffer; see `FORMS`."""
        here, step = self._memory.ctypes.data, FORMS[form]
        jobs = []
        for target in (target for engine in engines for target in self._of(engine)):
            offsets = range(0, target.nbytes, step)
            sizes = [min(step, target.nbytes - offset) for offset in offsets]
            jobs.append(
                (target.session, [here + each for each in offsets], [target.begin + each for each in offsets], sizes)
            )
        with ThreadPoolExecutor(len(jobs)) as pool:
            began = time.perf_counter()
            codes = list(pool.map(lambda job: int(self._engine.batch_transfer_sync_write(*job)), jobs))
            took = time.perf_counter() - began
        if any(codes):
            raise RuntimeError(f"batch_transfer_sync_write answered {codes}")
        return took

    def verify(self, engines: Sequence[EngineAddress]) -> None:
        """Raise WeightsDiffer unless every engine holds what was written last."""
        for each in engines:
            expected = [
                {
                    name: _digest(self._memory[address - target.begin :][: elements * width])[:16]
                    for name, (address, elements, width) in target.memory.items()
                }
                for target in self._of(each)
            ]
            client = SGLangEngine(each.url)
            compare(expected, client.checksums(), each.url)
            client.close()

    def broadcast(self) -> float:
        """Seconds to broadcast all bytes as one tensor, until `Far` has them."""
        tensor = torch.from_numpy(self._memory[: self._nbytes])
        dist.barrier()
        began = time.perf_counter()
        dist.broadcast(tensor, 0)
        dist.barrier()
        return time.perf_counter() - began

    def send(self, port: int) -> float:
        """Seconds to send all bytes over a connection, until `Far` says that it has them."""
        view = self._memory[: self._nbytes].data
        with socket.create_connection((HOST, port), timeout=_TIMEOUT.total_seconds()) as connection:
            began = time.perf_counter()
            connection.sendall(view)
            connection.recv(1)
            return time.perf_counter() - began

    def copy(self) -> float:
        """Seconds to copy all bytes between warm pages."""
        began = time.perf_counter()
        np.copyto(self._copy, self._memory[: self._nbytes])
        return time.perf_counter() - began

    def close(self) -> None:
        dist.destroy_process_group()

    def _of(self, engine: EngineAddress) -> list[_Target]:
        if engine.url not in self._targets:
            client = SGLangEngine(engine.url)
            self._targets[engine.url] = [_Target(*client.registered_memory(rank)) for rank in range(engine.ranks)]
            client.close()
        return self._targets[engine.url]


class Far:
    """The receiving side of what is not written into an engine; made in a process of its own."""

    def __init__(self, nbytes: int, port: int) -> None:
        torch.set_num_threads(1)
        self._memory = torch.full((nbytes,), 1, dtype=torch.uint8)  # so that its pages are there
        self._server = socket.create_server((HOST, 0))
        dist.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=1, world_size=2, timeout=_TIMEOUT)

    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def join_broadcast(self) -> None:
        dist.barrier()
        dist.broadcast(self._memory, 0)
        dist.barrier()

    def receive(self) -> None:
        """Take one connection's bytes, and say so."""
        connection, _ = self._server.accept()
        view, filled = self._memory.numpy().data, 0
        with connection:
            while filled < len(view):
                count = connection.recv_into(view[filled : filled + _CHUNK])
                if not count:
                    raise RuntimeError(f"the connection ended after {filled} of {len(view)} bytes")
                filled += count
            connection.sendall(b".")

    def digest(self) -> str:
        return _digest(self._memory.numpy())

    def close(self) -> None:
        self._server.close()
        dist.destroy_process_group()


def _digest(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    return hashlib.sha256(memory.data).hexdigest()
