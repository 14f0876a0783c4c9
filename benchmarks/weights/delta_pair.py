"""Weights before and after a step of training, in two files. Imported by every process, and so needs little itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_store.arrays import Bytes

CHECKSUM = "xxh3-128"
WIDTH = 2  # bytes of a bfloat16
_BLOCK = 1 << 22  # bytes that are compared at a time


@dataclass(frozen=True)
class Pair:
    """The same weights twice; picklable.

    Attributes:
        old, new: files of all tensors' bytes.
        places: of each tensor in both.
        checksums: of the new ones, in that order, computed apart from all that is measured.
        values, changed: of all tensors. bound_bytes: see `entropy.Changes`.
    """

    old: Path
    new: Path
    places: tuple[slice, ...]
    checksums: tuple[str, ...]
    values: int
    changed: int
    bound_bytes: float

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(place.stop - place.start for place in self.places)


def same(one: Bytes, other: Bytes) -> bool:
    """Whether uint8 [n] each are equal, bit by bit; block by block, since comparing takes memory."""
    return one.size == other.size and all(
        np.array_equal(one[at : at + _BLOCK], other[at : at + _BLOCK]) for at in range(0, one.size, _BLOCK)
    )
