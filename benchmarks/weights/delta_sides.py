"""Making and applying deltas of a whole model in one process, timed and then compared with what they should give."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import xxhash

from benchmarks.weights.delta_pair import CHECKSUM, WIDTH, Pair, same
from miles_plugin.bench_commands import BenchFailed
from miles_plugin.weight_transfer.disk_delta.codec import Decoder, Encoder
from mooncake_store.arrays import Bytes

T = TypeVar("T")


class Codec(Protocol):
    """What makes and applies the delta of one tensor; every thread has its own."""

    def encode(self, old: Bytes, new: Bytes) -> tuple[bytes | None, str]:
        """What makes `new` of `old` (None: nothing does), and the checksum of `new`. `old` is `new` afterwards."""

    def apply(self, payload: bytes | None, tensor: Bytes) -> str:
        """Change the tensor in place; its checksum then."""


class Ours:
    """Implements `Codec` by the package."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._encoder, self._decoder = Encoder(encoding, CHECKSUM), Decoder(CHECKSUM)

    def encode(self, old: Bytes, new: Bytes) -> tuple[bytes | None, str]:
        return self._encoder.encode(old, new, WIDTH)

    def apply(self, payload: bytes | None, tensor: Bytes) -> str:
        return self._decoder.apply([] if payload is None else [(self._encoding, payload)], tensor, WIDTH)


@dataclass(frozen=True)
class Places:
    """Files that the processes of a case share, one of which runs at a time.

    Attributes:
        mapped: that is changed in place, of the file system that is measured.
        payloads: made by one process and applied by the next.
    """

    mapped: Path
    payloads: Path


@dataclass(frozen=True)
class Took:
    """seconds: of the operation. flush: of writing to the device what it changed. wire: bytes of what was made."""

    seconds: float
    flush: float | None = None
    wire: int | None = None


class Sides:
    """Both sides of one codec, with all weights in memory; made in a process of its own.

    Args:
        make: a codec, for each thread.
    """

    def __init__(self, name: str, make: Callable[[], Codec], pair: Pair, places: Places, threads: int) -> None:
        self._name, self._pair, self._places = name, pair, places
        self._old = np.memmap(pair.old, np.uint8, "r")
        self._new = np.fromfile(pair.new, np.uint8)
        self._tensor = np.fromfile(pair.old, np.uint8)
        self._changed: Bytes = self._tensor  # what the last operation changed
        self._checksums: Sequence[str] = ()
        self._payloads: list[bytes | None] = []
        self._codecs = [make() for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        list(self._pool.map(time.sleep, [0.001] * threads))  # so that they have begun

    def encode(self) -> Took:
        """Every tensor; the snapshot of the old ones follows."""
        np.copyto(self._tensor, self._old)
        self._payloads = []
        self._changed = self._tensor
        seconds, found = self._timed(
            lambda codec, index: codec.encode(self._at(self._tensor, index), self._at(self._new, index))
        )
        self._payloads = [payload for payload, _ in found]
        self._checksums = [checksum for _, checksum in found]
        return Took(seconds, wire=sum(len(payload) for payload in self._payloads if payload is not None))

    def apply(self) -> Took:
        """To every tensor in memory."""
        np.copyto(self._tensor, self._old)
        return Took(self._apply_to(self._tensor))

    def apply_mapped(self) -> Took:
        """To every tensor of a file whose pages are cached and clean, mapped anew as by every update of a reader."""
        self._changed = self._tensor
        if not self._places.mapped.exists():
            self._tensor.tofile(self._places.mapped)
        before = _map(self._places.mapped)
        np.copyto(np.frombuffer(before, np.uint8), self._old)
        before.flush()
        mapped = _map(self._places.mapped)
        seconds = self._apply_to(np.frombuffer(mapped, np.uint8))
        began = time.perf_counter()
        mapped.flush()
        return Took(seconds, flush=time.perf_counter() - began)

    def verify(self) -> None:
        """Raise BenchFailed unless the last operation made every tensor, and its checksum, what they should be."""
        for index, wanted in enumerate(self._pair.checksums):
            if self._checksums[index] != wanted:
                raise BenchFailed(f"{self._name}: tensor {index} has checksum {self._checksums[index]}, not {wanted}")
            if not same(self._at(self._changed, index), self._at(self._new, index)):
                raise BenchFailed(f"{self._name}: tensor {index} is not what it should be, bit by bit")

    def save(self) -> None:
        """The payloads, for the next process."""
        self._places.payloads.write_bytes(msgspec.msgpack.encode(self._payloads))

    def load(self) -> None:
        """Those that the process before saved."""
        self._payloads = msgspec.msgpack.decode(self._places.payloads.read_bytes(), type=list[bytes | None])

    def close(self) -> None:
        self._pool.shutdown()

    def _apply_to(self, block: Bytes) -> float:
        self._changed = block
        seconds, self._checksums = self._timed(
            lambda codec, index: codec.apply(self._payloads[index], self._at(block, index))
        )
        return seconds

    def _timed(self, job: Callable[[Codec, int], T]) -> tuple[float, list[T]]:
        """Seconds of one job per tensor, the largest first, on all threads; what they returned, in tensors' order."""
        queue = deque(sorted(range(len(self._pair.places)), key=self._size, reverse=True))
        found: dict[int, T] = {}

        def work(codec: Codec) -> None:
            while queue:
                try:
                    index = queue.popleft()
                except IndexError:  # another thread took the last one
                    return
                found[index] = job(codec, index)

        began = time.perf_counter()
        list(self._pool.map(work, self._codecs))
        return time.perf_counter() - began, [found[index] for index in range(len(found))]

    def _size(self, index: int) -> int:
        place = self._pair.places[index]
        return int(place.stop - place.start)

    def _at(self, block: Bytes, index: int) -> Bytes:
        return block[self._pair.places[index]]


class Limits:
    """What this machine does at most with the same bytes and threads; made in a process of its own."""

    def __init__(self, pair: Pair, threads: int) -> None:
        self._pair = pair
        self._bytes = np.fromfile(pair.new, np.uint8)
        self._copy = self._bytes.copy()
        parts = np.linspace(0, self._bytes.size, threads + 1, dtype=np.int64).tolist()
        self._parts = [slice(*ends) for ends in pairwise(parts)]
        self._pool = ThreadPoolExecutor(threads)

    def copy(self) -> float:
        """Seconds to copy all bytes between warm pages, each thread a part."""
        return self._each(lambda part: np.copyto(self._copy[part], self._bytes[part]))

    def hash(self) -> float:
        """Seconds of xxh3-128 over all bytes, each thread a part."""
        return self._each(lambda part: xxhash.xxh3_128_digest(self._bytes[part].data))

    def close(self) -> None:
        self._pool.shutdown()

    def _each(self, work: Callable[[slice], object]) -> float:
        began = time.perf_counter()
        list(self._pool.map(work, self._parts))
        return time.perf_counter() - began


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
