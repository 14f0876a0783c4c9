"""What a trainer rank last sent of its share of the weights, in its host's memory, and what changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from miles_plugin.weight_transfer.disk_delta.base import BaseCheckpoint
from miles_plugin.weight_transfer.disk_delta.codec import Encoder, checksum_of
from miles_plugin.weight_transfer.disk_delta.format import WIDTHS, Layout, nbytes_of
from miles_plugin.weight_transfer.disk_delta.split import Split, WeightsChanged, layout_of
from miles_plugin.weight_transfer.disk_delta.workers import Workers
from miles_plugin.weight_transfer.sources import NamedTensor
from mooncake_store.arrays import Bytes


@dataclass(frozen=True)
class Changes:
    """payloads: of tensors that changed, by name. checksums: of all tensors of this rank."""

    payloads: Mapping[str, bytes]
    checksums: Mapping[str, str]


class Snapshot:
    """The bytes of a rank's tensors.

    A call that raises leaves some tensors as they were and others new: `capture` is then the only one that helps.
    Every call takes its source to the end, also when it fails, since other ranks gather with this one.

    Args:
        base: the checkpoint that readers start from.
        most_bytes: of tensors that wait to be encoded, beside the one that the source has just made.

    Raises:
        WeightsChanged: by `capture` and `changes`, when the trainer does not send what it sent the first time.
    """

    def __init__(
        self, rank: int, size: int, encoding: str, checksum: str, base: Path, threads: int, most_bytes: int
    ) -> None:
        self._rank, self._size, self._checksum, self._base_directory = rank, size, checksum, base
        self._base: BaseCheckpoint | None = None
        self._split: Split | None = None
        self._digest = ""
        self._unsent: frozenset[str] = frozenset()
        self._unsent_checksums: Mapping[str, str] | None = None  # they never change
        self._bytes: dict[str, Bytes] = {}
        self._workers = Workers(threads, most_bytes)
        self._encoders: SimpleQueue[Encoder] = SimpleQueue()
        for _ in range(threads):
            self._encoders.put(Encoder(encoding, checksum))

    @property
    def split(self) -> Split:
        """All tensors and their ranks; known once `capture` has succeeded."""
        assert self._split is not None
        return self._split

    @property
    def digest(self) -> str:
        """Of the tensors and their ranks; the same on all ranks."""
        return self._digest

    @property
    def base(self) -> BaseCheckpoint:
        """The checkpoint that readers start from. Raises ConfigError or IntegrityError when it cannot be read."""
        if self._base is None:
            self._base = BaseCheckpoint(self._base_directory)
        return self._base

    def capture(self, tensors: Iterable[NamedTensor]) -> bool:
        """Take in all tensors of this rank; the first time, whether they are those of the base, bit by bit.

        Tensors that only the base has are this rank's, too, if it is their turn; they never change.
        """
        is_first = self._split is None
        seen, differ = Split(self._size), set[str]()

        def copy(name: str, layout: Layout, contents: Bytes) -> None:
            if name not in self._bytes or self._bytes[name].size != contents.size:
                self._bytes[name] = np.empty(contents.size, dtype=np.uint8)
            self._bytes[name][:] = contents
            if is_first and not self.base.holds(name, layout, contents):
                differ.add(name)

        self._each(tensors, seen, copy, self._unreadable_base())
        if is_first:
            self._unsent = frozenset(self.base.layout.keys() - seen.layout.keys())
            for name in sorted(self._unsent):
                seen.add(name, self.base.layout[name])
            self._split, self._digest = seen, seen.digest()
        return is_first and not differ

    def changes(self, tensors: Iterable[NamedTensor]) -> Changes:
        """What changed of this rank's tensors, which are brought to what they are now."""
        payloads: dict[str, bytes] = {}
        checksums: dict[str, str] = {}

        def encode(name: str, layout: Layout, contents: Bytes) -> None:
            encoder = self._encoders.get()
            try:
                payload, checksum = encoder.encode(self._bytes[name], contents, WIDTHS[layout[0]])
            finally:
                self._encoders.put(encoder)
            checksums[name] = checksum
            if payload is not None:
                payloads[name] = payload

        self._each(tensors, Split(self._size), encode)
        checksums |= self._checksums_of_unsent()
        order = self.split.layout  # however the threads were scheduled
        return Changes(
            {name: payloads[name] for name in order if name in payloads},
            {name: checksums[name] for name in order if name in checksums},
        )

    def contents(self, name: str) -> Bytes:
        """The bytes of one of this rank's tensors."""
        return self.base.read(name) if name in self._unsent else self._bytes[name]

    def checksums(self, names: Iterable[str]) -> dict[str, str]:
        """Checksums of tensors of this rank."""
        found: dict[str, str] = {}

        def compute(name: str) -> None:
            found[name] = checksum_of(self.contents(name), self._checksum)

        names = list(names)
        try:
            for name in names:
                self._workers.make_room(0)
                self._workers.submit(0, partial(compute, name))
        finally:
            self._workers.finish()
        return {name: found[name] for name in names}

    def close(self) -> None:
        """End the threads; idempotent."""
        self._workers.close()

    def _checksums_of_unsent(self) -> Mapping[str, str]:
        if self._unsent_checksums is None:
            owners = self.split.owners
            self._unsent_checksums = self.checksums(name for name in self._unsent if owners[name] == self._rank)
        return self._unsent_checksums

    def _unreadable_base(self) -> Exception | None:
        try:
            _ = self.base
        except Exception as error:
            return error
        return None

    def _each(
        self,
        tensors: Iterable[NamedTensor],
        seen: Split,
        work: Callable[[str, Layout, Bytes], None],
        failure: Exception | None = None,
    ) -> None:
        """Let threads do `work` on this rank's tensors; raise the first failure when the source is at its end."""
        try:
            for name, tensor in tensors:
                if failure is None:
                    try:
                        self._start(name, tensor, seen, work)
                    except Exception as error:
                        failure = error
        finally:
            failure = self._ended(failure)
        if failure is not None:
            raise failure
        if self._split is not None and (missing := self._split.layout.keys() - self._unsent - seen.layout.keys()):
            raise WeightsChanged(f"weight {min(missing)} was sent before, and is not in this update; send all weights")

    def _start(self, name: str, tensor: torch.Tensor, seen: Split, work: Callable[[str, Layout, Bytes], None]) -> None:
        layout = layout_of(name, tensor)
        owner = seen.add(name, layout)
        if self._split is not None:
            before = self._split.layout.get(name) if name not in self._unsent else None
            if before != layout:
                raise WeightsChanged(
                    f"weight {name} is {_text(layout)}, it was {_text(before) if before else 'not sent'} before; "
                    "readers cannot follow: publish such a model elsewhere"
                )
            owner = self._split.owners[name]
        if owner == self._rank:
            nbytes = nbytes_of(layout)
            self._workers.make_room(nbytes)
            self._workers.submit(nbytes, partial(work, name, layout, host_bytes(tensor)))

    def _ended(self, failure: Exception | None) -> Exception | None:
        """Wait for the threads: they write what the next call reads."""
        try:
            self._workers.finish()
        except Exception as error:
            return failure or error
        return failure


def host_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor (uint8 [n]): where they are, if they lie in a row in a host's memory, else a copy."""
    contents: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return contents


def blocks(contents: Bytes, most_bytes: int) -> Iterator[memoryview]:
    """The bytes in pieces of at most `most_bytes`."""
    for start in range(0, contents.size, most_bytes):
        yield contents[start : start + most_bytes].data


def _text(layout: Layout) -> str:
    return f"{layout[0]} {list(layout[1])}"
