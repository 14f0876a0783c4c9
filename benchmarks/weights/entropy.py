"""How few bytes can say what changed, when all that is known beforehand is how many values do, and by how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log2

import numpy as np

from mooncake_store.arrays import Bytes


@dataclass
class Changes:
    """What changed in any number of tensors.

    Attributes:
        values: of all tensors.
        differences: how often each occurs, of the values that changed: new - old as signed integers of the element's
            width, which wrap around.
    """

    values: int = 0
    differences: Counter[int] = field(default_factory=Counter)

    def add(self, old: Bytes, new: Bytes, width: int) -> None:
        """Count one tensor: uint8 [n] each, n a multiple of `width`, which is 1, 2, 4 or 8 bytes."""
        before, after = old.view(f"<i{width}"), new.view(f"<i{width}")
        changed = np.flatnonzero(before != after)
        found, counts = np.unique(after[changed] - before[changed], return_counts=True)
        self.values += before.size
        self.differences.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    @property
    def changed(self) -> int:
        """Values that did."""
        return self.differences.total()

    @property
    def bound_bytes(self) -> float:
        """n * H2(density) + changed * H(difference): which values change, and by how much each of them does."""
        where = self.values * entropy([self.changed, self.values - self.changed])
        return (where + self.changed * entropy(self.differences.values())) / 8


def entropy(counts: Iterable[int]) -> float:
    """Bits of one symbol that occurs as often as its count says; 0 of none."""
    present = [count for count in counts if count]
    total = sum(present)
    return sum(count / total * log2(total / count) for count in present)
