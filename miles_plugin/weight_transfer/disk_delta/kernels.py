"""What is done to each value of a tensor: by C, which lets other threads run meanwhile, or by numpy, which is slower.

The extension is built where the package is installed, if there is a C compiler. Both read and write the same bytes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from mooncake_store.arrays import Bytes

Indices = npt.NDArray[np.uint32]

# Positions that `changes` may write behind the last one.
SLACK = 4
# The nibble of a difference that no nibble holds, and the symbol of a gap that goes on in the next one.
ESCAPE, MORE = 15, 255
# Above this share of changed values a block is not collected.
DENSE_SHARE = 0.5


class Kernels(Protocol):
    """Functions over blocks: uint8 arrays of whole values of `width` bytes (1, 2, 4 or 8), contiguous.

    A changed value is coded by the gap, which is the number of values since the last one that changed, and by its
    difference, new - old as a number of its width with a sign, in the order 0, -1, 1, -2, 2 ... (zigzag). The first 15
    that are not 0 make a nibble, two of them a byte, the earlier one in the low half; of others the new value is kept.

    Every function raises ValueError when sizes, indices and bytes do not agree; it has read and written nothing outside
    its arguments then. Addresses of a hash (`hashes.StateHash`) are believed.
    """

    def changes(self, old: Bytes, new: Bytes, width: int, out: Indices, /) -> int:
        """Write the positions of values that differ; how many. out: as many as there are values, and SLACK."""

    def scan(
        self,
        old: Bytes,
        new: Bytes,
        width: int,
        block: int,
        positions: Indices,
        since: int,
        gaps: Indices,
        nibbles: Bytes,
        escapes: Bytes,
        changed: int,
        escaped: int,
        enough: int,
        update: int,
        state: int,
        /,
    ) -> tuple[int, int, int, int, int]:
        """Go through blocks of `block` bytes until there are `enough` changes, or one changes in more than half.

        What changed is appended to gaps, nibbles and escapes, and made so in `old`.

        positions: scratch, as `out` of `changes` for a block. changed: gaps and nibbles that are there; while there are
        none, gaps count from the first block with changes. escaped: values in escapes. since: values before these
        blocks that come after the last change. update, state: addresses, see `hashes.StateHash`, for what was gone
        through of `new`, unless update is 0.

        Returns the bytes that were gone through, those before the first block with changes, and changed, escaped and
        since as they are then.
        """

    def symbols(self, gaps: Indices, out: Bytes, lows: Bytes, /) -> int:
        """Write gaps as bytes, 255 for 255 that are followed by more; how many bytes.

        lows: takes the low byte of each gap, so that `out` has the rest; empty: `out` has all.
        """

    def positions(self, symbols: Bytes, lows: Bytes, limit: int, out: Indices, /) -> int:
        """The reverse: as many positions as `out` has room for, which use up all symbols; the last one, and 1.

        limit: what all positions are below; itself below 2**32.
        """

    def patch(
        self,
        block: Bytes,
        width: int,
        base: int,
        positions: Indices,
        nibbles: Bytes,
        escapes: Bytes,
        changed: int,
        escaped: int,
        touch: bool,
        update: int,
        state: int,
        /,
    ) -> tuple[int, int]:
        """Change the values of a block, which begins at position `base`, from change number `changed` on.

        touch: read the block before. update, state: addresses, see `hashes.StateHash`, for what
        the block is then, unless update is 0. Returns the numbers of the next change and the next escape.
        """

    def spread(self, old: Bytes, new: Bytes, width: int, planes: Bytes, /) -> None:
        """Write the differences of all values to `planes`: all lowest bytes, then all second ones ...; old becomes new.

        planes: as many bytes as `old`."""

    def unspread(self, block: Bytes, planes: Bytes, width: int, /) -> None:
        """Add the differences in `planes` to a block."""


def native() -> Kernels | None:
    """The extension; None where it was not built."""
    try:
        from miles_plugin.weight_transfer.disk_delta import _sparse
    except ImportError:
        return None
    return _sparse


def fastest() -> Kernels:
    """The extension, else numpy."""
    from miles_plugin.weight_transfer.disk_delta import sparse_numpy

    return native() or sparse_numpy
