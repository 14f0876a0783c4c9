"""The batch that is moved: miles's columns, made from a seed, in the four forms in which their values arrive.

The numbers lie in one memfd that every writer maps, so that a batch of a gigabyte exists once however many writers are
measured. Rows are scattered in it: as in a rollout no row lies behind the one before, so nothing can be merged.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_store.memory import available_bytes

VARIANTS = ("numpy", "torch", "lists", "routed")
LAYERS, TOP_K, EXPERTS = 16, 8, 128
VOCABULARY = 150_000
ROUTED = "rollout_routed_experts"
# Columns with a row of numbers per sample, and the dtype that a trainer needs.
RAGGED = {"tokens": "<i4", "loss_masks": "<i4", "rollout_log_probs": "<f4", ROUTED: "<i4"}
# Columns with a number per sample. Floats are made so that float32 holds them: some peers narrow them.
NUMBERS = {
    "partition": "<i8",
    "response_lengths": "<i8",
    "rewards": "<f8",
    "truncated": "<i8",
    "sample_indices": "<i8",
    "rollout_ids": "<i8",
    "rollout_mask_sums": "<i8",
    "raw_reward": "<f8",
    "total_lengths": "<i8",
}
_PAGE = 4096
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Workload:
    """One batch, by what determines it.

    Attributes:
        variant: one of VARIANTS. "routed" is numpy with int32 [tokens - 1, LAYERS, TOP_K] beside the other columns.
        samples: number of rows.
        shortest, longest: tokens of a sample, uniform between them, both included.
        seed: of the lengths and of every value.
    """

    variant: str
    samples: int
    shortest: int
    longest: int
    seed: int

    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens and, among them, tokens of the response, of each sample: int64 [samples, 2]."""
        rng = np.random.default_rng([self.seed, 0])
        tokens = rng.integers(self.shortest, self.longest + 1, self.samples)
        prompts = np.minimum(rng.integers(64, 512, self.samples), tokens // 2)
        return np.stack([tokens, tokens - prompts], axis=1)

    def places(self) -> list[_Place]:
        """Every row of numbers, in the order of columns and samples."""
        lengths = self.lengths().tolist()
        shapes: list[tuple[str, int, tuple[int, ...]]] = []
        for name in RAGGED:
            if name == ROUTED and self.variant != "routed":
                continue
            for row, (tokens, response) in enumerate(lengths):
                length = tokens if name == "tokens" else response
                shapes.append((name, row, (tokens - 1, LAYERS, TOP_K) if name == ROUTED else (length,)))
        offsets = np.empty(len(shapes), dtype=np.int64)
        position = 0
        for index in np.random.default_rng([self.seed, 1]).permutation(len(shapes)).tolist():
            offsets[index] = position
            position += 4 * math.prod(shapes[index][2]) + 64
            position += -position % 64
        return [_Place(*shape, offset) for shape, offset in zip(shapes, offsets.tolist(), strict=True)]

    def texts(self) -> dict[str, Any]:
        """The columns that are not rows of numbers."""
        rng = np.random.default_rng([self.seed, 2])
        n, lengths = self.samples, self.lengths()
        tokens, responses = lengths[:, 0].tolist(), lengths[:, 1].tolist()
        rewards, raw = (rng.random(n, dtype=np.float32).tolist() for _ in range(2))
        padding = rng.integers(50, 800, n).tolist()
        return {
            "partition": list(range(n)),
            "response_lengths": responses,
            "rewards": rewards,
            "truncated": [0] * n,
            "sample_indices": list(range(n)),
            "rollout_ids": [row // 8 for row in range(n)],
            "rollout_mask_sums": list(responses),
            "prompt": [f"prompt {row // 8} " + "x" * padding[row // 8] for row in range(n)],
            "metadata": [
                {"id": row, "source": "gsm8k", "answer": str(7 * row), "tags": ["a", "b"]} for row in range(n)
            ],
            "weight_versions": [[str(3 + row % 2)] for row in range(n)],
            "raw_reward": raw,
            "total_lengths": tokens,
            "dynamic_global_batch_size": n,
        }

    def load(self) -> dict[str, int]:
        """What determines the batch beside its variant, by name."""
        return {name: value for name, value in asdict(self).items() if name != "variant"}

    def as_numpy(self) -> Workload:
        """The same values as numpy arrays."""
        return self if self.variant == "routed" else replace(self, variant="numpy")

    @property
    def nbytes(self) -> int:
        """Of the payload: the ragged columns' numbers as a trainer needs them, and the rest as JSON."""
        return self.number_bytes() + len(json.dumps(self.texts()))

    @property
    def stored_bytes(self) -> int:
        """Of a stored copy, at most: of lists some peers keep numbers of eight bytes."""
        return self.nbytes + (self.number_bytes() if self.variant == "lists" else 0)

    def number_bytes(self) -> int:
        """The same of the ragged columns alone."""
        tokens, responses = self.lengths().sum(axis=0).tolist()
        routed = (tokens - self.samples) * LAYERS * TOP_K if self.variant == "routed" else 0
        return int(4 * (tokens + 2 * responses + routed))


@dataclass(frozen=True, slots=True)
class _Place:
    """A row of numbers: column, sample, shape, and offset in bytes in the shared memory. All are 4 bytes an item."""

    column: str
    row: int
    shape: tuple[int, ...]
    offset: int

    def of(self, memory: Bytes) -> npt.NDArray[Any]:
        stop = self.offset + 4 * math.prod(self.shape)
        return memory[self.offset : stop].view(RAGGED[self.column]).reshape(self.shape)


class SharedNumbers:
    """The numbers of a workload in a memfd of this process.

    Attributes:
        path: under which other processes of this host can map it, while this object is open.
    """

    def __init__(self, workload: Workload) -> None:
        """Make them.

        Raises:
            MemoryError: there is not so much memory now; the kernel would end a process instead.
        """
        places = workload.places()
        end = max(place.offset + 4 * math.prod(place.shape) for place in places)
        nbytes = -(-max(end, workload.nbytes) // _PAGE) * _PAGE
        if nbytes > available_bytes():
            raise MemoryError(f"the batch takes {nbytes} bytes, {available_bytes()} are available")
        self._descriptor = os.memfd_create("benchmark_numbers", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, nbytes)
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            memory = _mapped(self._descriptor, mmap.MAP_SHARED)
            rng = np.random.default_rng([workload.seed, 3])
            for place in places:
                _fill(place.of(memory), place.column, rng)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back, once the last process has unmapped it."""
        os.close(self._descriptor)

    def __enter__(self) -> SharedNumbers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mapped(path: str) -> Bytes:
    """The shared memory, uint8; writable as torch wants it, but what is written here stays here."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _mapped(descriptor, mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)


def batch_of(workload: Workload, memory: Bytes) -> dict[str, Any]:
    """The batch as a rollout manager would put it: rows are views of `memory`, except for lists.

    Needs torch for the variant "torch".
    """
    rows: dict[str, list[Any]] = {}
    for place in workload.places():
        rows.setdefault(place.column, []).append(place.of(memory))
    convert = _CONVERT.get(workload.variant)
    if convert is not None:
        rows = {name: list(map(convert, column)) for name, column in rows.items()}
    texts = workload.texts()
    return dict(chain(rows.items(), texts.items()))


def stamp(batch: dict[str, Any], number: int) -> None:
    """Change the first value of every row of numbers, so that a reader's older bytes cannot pass for this put's."""
    for name, dtype in RAGGED.items():
        first = {"loss_masks": number % 2, ROUTED: number % EXPERTS}.get(name, number)
        for row in batch.get(name, ()):
            row[(0,) * row.ndim if hasattr(row, "ndim") else 0] = -float(first) if dtype == "<f4" else first


def _as_tensor(row: npt.NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(row)


_CONVERT: dict[str, Any] = {"torch": _as_tensor, "lists": np.ndarray.tolist}


def _fill(row: npt.NDArray[Any], column: str, rng: np.random.Generator) -> None:
    if column == "loss_masks":
        row[:] = 1
    elif column == "rollout_log_probs":
        rng.random(out=row, dtype=np.float32)
        np.negative(row, out=row)
    else:
        row[:] = rng.integers(0, EXPERTS if column == ROUTED else VOCABULARY, row.shape, dtype=np.int32)


def _mapped(descriptor: int, flags: int) -> Bytes:
    size = os.fstat(descriptor).st_size
    memory = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(memory, dtype=np.uint8)


def samples_for(gib: float, variant: str, shortest: int, longest: int) -> int:
    """Samples of a batch whose numbers take about so many GiB."""
    some = Workload(variant, 4096, shortest, longest, seed=0)
    return max(1, round(gib * 2**30 * some.samples / some.number_bytes()))
