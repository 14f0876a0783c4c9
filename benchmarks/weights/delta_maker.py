"""Makes weights before and after a step of training: at random, or by torch's AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.weights.delta_pair import CHECKSUM, WIDTH, Pair
from benchmarks.weights.delta_settings import Case
from benchmarks.weights.entropy import Changes
from benchmarks.weights.model import DTYPE, block_bytes, config_of, places
from miles_plugin.weight_transfer.disk_delta.codec import checksum_of

_SPREAD = 0.02  # standard deviation of the weights, as models are initialised and about as they stay
_LEARNING_RATE = 1e-6
_CHUNK = 1 << 22  # values that are made at a time


class Maker:
    """Makes pairs; in a process of its own, whose memory ends with it."""

    def make(self, case: Case, nbytes: int, directory: Path) -> Pair:
        """A model of about `nbytes`, before and after what the case says, in `directory`."""
        config = config_of(nbytes)
        old, new = directory / "old", directory / "new"
        with old.open("wb") as before, new.open("wb") as after:
            for was, now in _chunks(case, block_bytes(config) // WIDTH):
                was.tofile(before)
                now.tofile(after)
        lie = tuple(places(config).values())
        first, second = (np.memmap(path, np.uint8, "r") for path in (old, new))
        changes = Changes()
        for place in lie:
            changes.add(first[place], second[place], WIDTH)
        checksums = tuple(checksum_of(second[place], CHECKSUM) for place in lie)
        return Pair(old, new, lie, checksums, changes.values, changes.changed, changes.bound_bytes)

    def close(self) -> None: ...


def _chunks(case: Case, values: int) -> Iterator[tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]]:
    """The weights are the same in all cases. AdamW treats every value by itself: a chunk at a time gives the same."""
    weights, step = torch.Generator().manual_seed(0), np.random.default_rng(1)
    for start in range(0, values, _CHUNK):
        masters = torch.randn(min(_CHUNK, values - start), generator=weights) * _SPREAD
        old = _bits(masters)
        if case.density is None:
            new = _bits(adamw_step(masters, weights))
        else:
            new = old.copy()
            move(new, case.density, step)
        yield old, new


def adamw_step(masters: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """float32 [n] after torch's first step with random gradients."""
    parameter = torch.nn.Parameter(masters.clone())
    parameter.grad = torch.randn(masters.shape, generator=generator)
    torch.optim.AdamW([parameter], lr=_LEARNING_RATE).step()
    return parameter.detach()


def move(values: npt.NDArray[np.uint16], density: float, generator: np.random.Generator) -> None:
    """Change each value with probability `density`, by one step of its bits either way, as training does mostly."""
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK]
        hit = np.flatnonzero(generator.random(chunk.size, np.float32) < density)
        chunk[hit] += np.where(generator.integers(0, 2, hit.size) == 1, np.uint16(1), np.uint16(0xFFFF))


def _bits(values: torch.Tensor) -> npt.NDArray[np.uint16]:
    found: npt.NDArray[np.uint16] = values.to(DTYPE).view(torch.int16).numpy().view(np.uint16)
    return found
