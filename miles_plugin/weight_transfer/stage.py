"""Registered memory that weights are written from, and what is to be written from it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

# The Transfer Engine refuses more than 2048 at a time to one peer over TCP (MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER).
MOST_WRITES = 1024


@dataclass
class Writes:
    """Of one session: addresses here, addresses there, bytes."""

    here: list[int] = field(default_factory=list)
    there: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class Stage:
    """Registered memory, and what is to be written from it, by (engine's URL, rank).

    Args:
        nbytes: that are written from it at most, unless one piece is larger.
        in_place: whether what is contiguous in a host's memory is written from where it is, and kept until then.
    """

    def __init__(self, nbytes: int, device: str, register: Callable[[int, int], None], in_place: bool) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        register(self.memory.data_ptr(), nbytes)
        self._in_place = in_place
        self._copied = self._taken = 0
        self._kept: list[torch.Tensor] = []
        self.writes: dict[tuple[str, int], Writes] = {}
        self.writing: dict[str, list[Future[None]]] = {}

    def take(self, source: torch.Tensor) -> int | None:
        """Take in a part; the address to write it from, or None when there is no room."""
        in_place = self._in_place and source.is_cpu and source.is_contiguous()
        begin = -(-self._copied // 64) * 64
        most = max((len(writes.here) for writes in self.writes.values()), default=0)
        is_full = self._taken + source.nbytes > self.memory.numel() or begin + source.nbytes > self.memory.numel()
        if most >= MOST_WRITES or (is_full and self._taken > 0):
            return None
        self._taken += source.nbytes
        if in_place:
            self._kept.append(source)
            return source.data_ptr()
        self._copied = begin + source.nbytes
        self.memory[begin : self._copied].view(source.dtype).view(source.shape).copy_(source)
        return self.memory.data_ptr() + begin

    def clear(self) -> None:
        """Begin anew: all of it was written, or nobody wants it any more."""
        self._copied = self._taken = 0
        self._kept, self.writes, self.writing = [], {}, {}
