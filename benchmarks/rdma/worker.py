"""What is timed: objects put into memory of another host, and got from it, by the store's own guarded client."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.rdma.settings import Case
from mooncake_store.client import MooncakeClient, Range
from mooncake_store.config import MooncakeConfig


class Round(NamedTuple):
    """One worker's part of a round.

    Attributes:
        seconds: from the first operation to the end of the last.
        latencies: seconds of each operation.
        cpu_seconds: of this process meanwhile, all its threads.
        nbytes: moved.
    """

    seconds: float
    latencies: list[float]
    cpu_seconds: float
    nbytes: int


class Worker:
    """One process that moves objects; made in it.

    Args:
        config: of this host.
        segment: whose memory the objects lie in.
    """

    def __init__(self, config: MooncakeConfig, segment: str) -> None:
        self._client, self._segment = MooncakeClient.connect(config), segment
        self._buffer = np.empty(0, dtype=np.uint8)
        self._rounds = 0

    def run(self, case: Case, operation: str, round_bytes: int) -> Round:
        """Move about `round_bytes`, then free what was put. What was got is compared with what was put."""
        self._take_buffer(case.payload, registered=case.registration == "warm")
        count = max(1, round_bytes // case.payload)
        self._rounds += 1
        keys = [
            [f"bench/{os.getpid()}/{self._rounds}/{number}/{each}" for each in range(case.batch)]
            for number in range(count if operation == "put" else 1)
        ]
        if operation == "get":
            self._register(case, True)
            self._put(keys[0], case)
            self._register(case, False)
            self._buffer[: case.payload] = 0
        latencies, moved = [], 0
        cpu, began = time.process_time(), time.perf_counter()
        for number in range(count):
            start = time.perf_counter()
            self._register(case, True)
            if operation == "put":
                self._put(keys[number], case)
            else:
                self._get(keys[0], case)
            self._register(case, False)
            latencies.append(time.perf_counter() - start)
            moved += case.payload
            if operation == "put" and number:  # what is lent is bounded; the removal is not timed
                began += self._free(keys[number - 1])
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        self._free(keys[-1])
        if operation == "get" and not np.array_equal(self._buffer[: case.payload], _pattern(case.payload)):
            raise RuntimeError(f"{case.name}: other bytes came back than were put")
        return Round(seconds, latencies, cpu, moved)

    def close(self) -> None:
        self._client.close()

    def _put(self, keys: list[str], case: Case) -> None:
        self._client.allocate(keys, [case.nbytes] * len(keys), self._segment)
        for number, key in enumerate(keys):
            self._client.write(key, 0, self._address + number * case.nbytes, case.nbytes)
        self._client.commit(keys)

    def _get(self, keys: list[str], case: Case) -> None:
        self._client.read(
            self._address,
            [Range(key, number * case.nbytes, 0, case.nbytes) for number, key in enumerate(keys)],
            seconds=0,
        )

    def _free(self, keys: list[str]) -> float:
        began = time.perf_counter()
        for key in keys:
            self._client.remove(key)
        return time.perf_counter() - began

    @property
    def _address(self) -> int:
        return int(self._buffer.ctypes.data)

    def _take_buffer(self, nbytes: int, registered: bool) -> None:
        """Memory of the size, filled; registered for good, or not at all."""
        if self._buffer.size:
            self._client.unregister(self._address)
        self._buffer = _pattern(nbytes)
        if registered:
            self._client.register(self._address, nbytes)

    def _register(self, case: Case, on: bool) -> None:
        if case.registration == "cold":
            if on:
                self._client.register(self._address, self._buffer.size)
            else:
                self._client.unregister(self._address)


def _pattern(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
