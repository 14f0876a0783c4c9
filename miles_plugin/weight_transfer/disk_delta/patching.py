"""Bringing the tensors of a slot to a version, by whatever way leads there; every one is checked, none is believed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from miles_plugin.weight_transfer.disk_delta.codec import Decoder, checksum_of
from miles_plugin.weight_transfer.disk_delta.lineage import Plan, Source, read_file
from miles_plugin.weight_transfer.disk_delta.local_checkpoint import Checkpoint
from miles_plugin.weight_transfer.disk_delta.slots import Checksum
from mooncake_store.arrays import Bytes
from mooncake_store.errors import IntegrityError

T = TypeVar("T")


# The bytes of a tensor by its name; None when they lie in the slot already.
Bytesource = Callable[[str], Bytes | None]


class Origin(Protocol):
    """Where the bytes of tensors come from before deltas are applied.

    Attributes:
        label: for messages.
    """

    label: str

    def groups(self, names: Sequence[str]) -> Iterator[tuple[Sequence[str], Bytesource | IntegrityError]]:
        """Tensors that are best done together, and where their bytes are; an error, when they cannot be read."""

    def checksum(self, name: str) -> Checksum | None:
        """Of those bytes; None when it is not known."""


class InPlace:
    """The slot itself. checksums: of its record."""

    def __init__(self, label: str, checksums: Mapping[str, Checksum]) -> None:
        self.label, self._checksums = label, checksums

    def groups(self, names: Sequence[str]) -> Iterator[tuple[Sequence[str], Bytesource | IntegrityError]]:
        yield names, lambda _: None

    def checksum(self, name: str) -> Checksum | None:
        return self._checksums[name]


class Local:
    """Another checkpoint of this host. checksums: of its record; none of the base."""

    def __init__(self, label: str, checkpoint: Checkpoint, checksums: Mapping[str, Checksum]) -> None:
        self.label, self._checkpoint, self._checksums = label, checkpoint, checksums

    def groups(self, names: Sequence[str]) -> Iterator[tuple[Sequence[str], Bytesource | IntegrityError]]:
        yield names, self._checkpoint.tensor

    def checksum(self, name: str) -> Checksum | None:
        return self._checksums.get(name)


class Full:
    """The first step of a plan, a full version: read file by file. What it does not hold is as in the base."""

    def __init__(self, source: Source, plan: Plan, base: Checkpoint) -> None:
        self._source, self._step, self._base = source, plan.steps[0], base
        self.label = f"full version {self._step.version}"

    def groups(self, names: Sequence[str]) -> Iterator[tuple[Sequence[str], Bytesource | IntegrityError]]:
        files = self._step.index.files
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(files.get(name, ""), []).append(name)
        for file, held in by_file.items():
            yield held, self._read(file) if file else self._base.tensor

    def checksum(self, name: str) -> Checksum | None:
        return self._step.checksum(name)

    def _read(self, file: str) -> Bytesource | IntegrityError:
        try:
            found = read_file(self._source, self._step.index, file)
            for name, place in found.header.tensors.items():
                if place.layout != self._step.index.layout[name]:
                    raise IntegrityError(f"{found.name}: {name} is {place.layout}, its index says otherwise")
        except IntegrityError as error:
            return error
        return lambda name: np.frombuffer(found.part(name), np.uint8)


@dataclass(frozen=True)
class _Job:
    """One tensor. origin: bytes to copy first. wanted: None when nothing is known to compare with."""

    name: str
    origin: Bytes | None
    payloads: Sequence[tuple[str, memoryview]]
    wanted: Checksum | None


class Patcher:
    """The tensors of one slot, while they are changed.

    Args:
        slot: mapped to be written.
        held: checksums of what the slot is known to hold; a tensor that is not in it may hold anything. It is kept up:
            a tensor leaves it before it is touched, and returns when it was checked.
        kind: of a checksum where nothing says which.
        threads: that work at once.
    """

    def __init__(self, slot: Checkpoint, held: dict[str, Checksum], kind: str, threads: int) -> None:
        self.held = held
        self._slot, self._kind, self._threads = slot, kind, threads
        self.touched: set[str] = set()

    def hash(self, kinds: Mapping[str, str]) -> None:
        """Find out what the slot holds. kinds: of checksum, by tensor."""
        self.held.clear()
        self.held.update(hash_all(self._slot, kinds, self._threads))

    def follow(self, plan: Plan, origin: Origin, names: Iterable[str]) -> dict[str, str]:
        """Bring tensors to the plan's end.

        Returns:
            those that did not get there, and why not: "" for one that the slot lost before, when `origin` is the slot.
        """
        failed: dict[str, str] = {}
        left: list[str] = []
        for name in names:
            wanted = self._wanted(plan, origin, name)
            if wanted is None or self.held.get(name) != wanted:
                left.append(name)
        for group, bytes_of in origin.groups(left):
            if isinstance(bytes_of, IntegrityError):
                failed.update(dict.fromkeys(group, str(bytes_of)))
                continue
            jobs: list[_Job] = []
            for name in group:
                try:
                    job = self._job(plan, origin, name, bytes_of)
                except IntegrityError as error:
                    failed[name] = str(error)
                    continue
                if job is None:
                    failed[name] = ""
                else:
                    jobs.append(job)
            failed.update(self._run(jobs, origin.label))
        return failed

    def flush(self, every: bool) -> None:
        """Wait until what was changed is on the disk. every: also what an earlier process changed."""
        files = self._slot.files if every else self._slot.files_of(self.touched)
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(self._slot.flush, files))

    def _wanted(self, plan: Plan, origin: Origin, name: str) -> Checksum | None:
        return plan.checksum(name) or origin.checksum(name)

    def _job(self, plan: Plan, origin: Origin, name: str, bytes_of: Bytesource) -> _Job | None:
        before = origin.checksum(name)
        payloads = plan.payloads(name)
        known = before is not None and self.held.get(name) == before
        data = None if known else bytes_of(name)
        if data is None and not known:
            return None
        return _Job(name, data, payloads, self._wanted(plan, origin, name))

    def _run(self, jobs: Iterable[_Job], label: str) -> dict[str, str]:
        ordered = sorted(jobs, key=lambda job: self._slot.tensor(job.name).size, reverse=True)
        for job in ordered:
            self.held.pop(job.name, None)
            self.touched.add(job.name)
        queue = deque(ordered)
        failed: dict[str, str] = {}

        def work() -> None:
            decoders: dict[str, Decoder] = {}  # one per thread: they are not to be shared
            for job in _taken(queue):
                kind = self._kind if job.wanted is None else job.wanted.kind
                if kind not in decoders:
                    decoders[kind] = Decoder(kind)
                try:
                    found = Checksum(kind, self._apply(job, decoders[kind], kind))
                    if job.wanted not in (None, found):
                        raise IntegrityError(f"its checksum is {found.hex}, not {job.wanted.hex if job.wanted else ''}")
                    self.held[job.name] = found
                except IntegrityError as error:
                    failed[job.name] = f"{job.name} from {label}: {error}"

        _in_threads(work, min(self._threads, len(ordered)))
        return failed

    def _apply(self, job: _Job, decoder: Decoder, kind: str) -> str:
        tensor = self._slot.tensor(job.name)
        if job.origin is not None:
            if job.origin.size != tensor.size:
                raise IntegrityError(f"{job.origin.size} bytes, where the slot has {tensor.size}")
            np.copyto(tensor, job.origin)
        if not job.payloads:
            return checksum_of(tensor, kind)
        return decoder.apply(job.payloads, tensor, self._slot.width(job.name))


def hash_all(checkpoint: Checkpoint, kinds: Mapping[str, str], threads: int) -> dict[str, Checksum]:
    """The checksums of a checkpoint's tensors. kinds: which to compute, by tensor."""
    queue = deque(sorted(kinds.items(), key=lambda item: checkpoint.tensor(item[0]).size, reverse=True))
    found: dict[str, Checksum] = {}

    def work() -> None:
        for name, kind in _taken(queue):
            found[name] = Checksum(kind, checksum_of(checkpoint.tensor(name), kind))

    _in_threads(work, min(threads, len(queue)))
    return found


def _in_threads(work: Callable[[], None], threads: int) -> None:
    if threads < 2:
        work()
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()


def _taken(queue: deque[T]) -> Iterator[T]:
    while queue:
        try:
            yield queue.popleft()
        except IndexError:  # another thread took the last one
            return
