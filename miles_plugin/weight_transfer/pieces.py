"""What of a weight goes where in an engine's memory, in pieces of a size that can be shared out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from miles_plugin.weight_transfer.layout import Layout, Placement


@dataclass(frozen=True)
class Place:
    """Where the same part of a weight goes on one rank of an engine."""

    rank: int
    parameter: str
    offset: int


@dataclass(frozen=True)
class Piece:
    """Part of a weight, contiguous in the memory of each rank that holds it.

    source: a view of the weight. places: offsets in elements.
    """

    source: torch.Tensor
    places: tuple[Place, ...]


def pieces(layout: Layout, name: str, tensor: torch.Tensor, most: int) -> Iterator[Piece]:
    """What of a weight goes where, each part once however many ranks hold a copy, in pieces of at most `most` bytes
    (a row of a matrix is never cut)."""
    ranks: dict[tuple[int | None, int, int], list[tuple[int, Placement]]] = {}
    for rank, placements in enumerate(layout.placements(name, tensor.shape)):
        for placement in placements:
            ranks.setdefault((placement.axis, placement.start, placement.length), []).append((rank, placement))
    for copies in ranks.values():
        part = copies[0][1].part(tensor)
        width = part[0].numel() if part.dim() > 1 else 1
        rows = max(1, most // (width * part.element_size()))
        for first in range(0, len(part), rows):
            places = (Place(rank, placement.parameter, placement.offset + first * width) for rank, placement in copies)
            yield Piece(part[first : first + rows], tuple(places))
