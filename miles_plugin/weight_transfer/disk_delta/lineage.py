"""Which published versions lead to one that is wanted: from it back, delta by delta, to one that is known in full.

A version without an index does not exist: it is being written, or deleted. What cannot be read is read once more, since
on a network file system it may have been half visible; then it counts as a gap, and `notes` say so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from miles_plugin.weight_transfer.disk_delta.format import (
    INDEX,
    LATEST,
    Index,
    Layout,
    parse_version_text,
    read_index,
    version_name,
)
from miles_plugin.weight_transfer.disk_delta.slots import BASE, Checksum
from miles_plugin.weight_transfer.disk_delta.storage import Chunk, Storage
from miles_plugin.weight_transfer.disk_delta.tensor_file import Header, read_header
from mooncake_store.errors import ConfigError, IntegrityError, ObjectNotFound


class Source:
    """Published versions as one reader sees them; threads may share it.

    Args:
        pre_read: called with a version before something of it is read.

    Attributes:
        bytes_read: so far.
    """

    def __init__(self, storage: Storage, pre_read: Callable[[int], None] | None = None) -> None:
        self._storage = storage
        self.bytes_read = 0
        self._pre_read = pre_read
        self._refreshed: set[int] = set()
        self._lock = threading.Lock()

    def refresh(self, version: int, again: bool = False) -> None:
        """See to it that what is read of `version` from here on is not an older view of it; once, unless `again`."""
        if self._pre_read is not None and (again or version not in self._refreshed):
            self._pre_read(version)
            self._refreshed.add(version)

    def read(self, name: str) -> Chunk:
        """A whole object. Raises FileNotFoundError, PublicationUnavailable."""
        data = self._storage.read(name)
        with self._lock:
            self.bytes_read += len(data)
        return data

    def newest(self) -> int | None:
        """The newest version; None when none was published. Raises IntegrityError, PublicationUnavailable."""
        try:
            text = bytes(self.read(LATEST)).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        version = parse_version_text(text)
        if version is None:
            raise IntegrityError(f"{LATEST} says {text!r:.40}; allowed: a version as six digits; publish once more")
        return version

    def index(self, version: int) -> Index:
        """The index of a version. Raises FileNotFoundError, IntegrityError, PublicationUnavailable."""
        source = f"{version_name(version)}/{INDEX}"
        index = read_index(self.read(source), source)
        if index.version != version:
            raise IntegrityError(f"{source}: version={index.version}; allowed: that of its directory")
        return index


@dataclass(frozen=True)
class File:
    """A file of a version, in memory. data: [header, tensors]. name: with its version, for messages."""

    name: str
    header: Header
    data: Chunk

    def part(self, name: str) -> memoryview:
        """The bytes of a tensor in it."""
        place = self.header.tensors[name]
        return memoryview(self.data)[place.start : place.end]


@dataclass
class Step:
    """One version on the way. files: of a delta, once read; an error stands for one that could not be."""

    index: Index
    files: dict[str, File | IntegrityError] = field(default_factory=dict)
    reread: bool = False

    @property
    def version(self) -> int:
        return self.index.version

    @property
    def is_full(self) -> bool:
        return self.index.base is None

    def checksum(self, name: str) -> Checksum | None:
        """Of a tensor in this version; None for one that the trainer does not know of."""
        text = self.index.checksums.get(name)
        return None if text is None else Checksum(self.index.checksum, text)

    def payload(self, name: str) -> tuple[str, memoryview]:
        """Encoding and payload of a tensor that this delta changes. Raises IntegrityError when it cannot be read."""
        assert self.index.encoding is not None
        file = self.files[self.index.files[name]]
        if isinstance(file, IntegrityError):
            raise file
        return self.index.encoding, file.part(name)


@dataclass(frozen=True)
class Plan:
    """How to come to a version.

    Attributes:
        start: what must be there: a version, or BASE; None when the first step is a full version.
        steps: the oldest first; none when `start` is the target.
        target: where it leads: a version, or BASE.
    """

    start: int | None
    steps: tuple[Step, ...]

    @property
    def target(self) -> int:
        if self.steps:
            return self.steps[-1].version
        assert self.start is not None
        return self.start

    def payloads(self, name: str) -> list[tuple[str, memoryview]]:
        """Encoding and payload of each delta that changes a tensor, the oldest first. Raises IntegrityError when one
        cannot be read."""
        return [step.payload(name) for step in self.steps if not step.is_full and name in step.index.files]

    def checksum(self, name: str) -> Checksum | None:
        """Of a tensor where the steps lead; None when none of them says so."""
        return self.steps[-1].checksum(name) if self.steps else None


class Chain:
    """The versions from `target` back, read as far as was asked for.

    Args:
        layout: of the base checkpoint, which every version must share.
        threads: that read files at once.

    Attributes:
        notes: what was found amiss, for people.

    Raises:
        ObjectNotFound: the target is not published. IntegrityError: its index is unreadable.
        ConfigError: a version is of another model. Also by the methods.
    """

    def __init__(
        self, source: Source, target: int, layout: Mapping[str, Layout], notes: list[str], threads: int = 1
    ) -> None:
        self.target, self.notes, self._threads = target, notes, threads
        self._source, self._layout = source, layout
        self._steps: list[Step] = []
        self._next: int | None = target  # what comes before the steps so far; None after a full version
        self._lengths = {target: 0}  # steps from a version to the target
        self._gap: str | None = None
        self._is_missing = False  # and not unreadable
        if not self._extend():
            kind = ObjectNotFound if self._is_missing else IntegrityError
            raise kind(f"version {target} of the weights: {self._gap}; publish it, or ask for another")

    @property
    def kind(self) -> str | None:
        """Of the target's checksums; None when that is the base."""
        return self._steps[0].index.checksum if self._steps else None

    def plan(self, at: int) -> Plan | None:
        """The way from version `at` (or BASE); None if none leads there without a full version in between."""
        while at not in self._lengths:
            if self._next is None or self._next < at or not self._extend():
                return None
        return Plan(at, tuple(reversed(self._steps[: self._lengths[at]])))

    def plan_from_full(self) -> Plan | None:
        """The way from the newest full version; None if there is none, or a gap before it."""
        while self._next is not None:
            if not self._extend():
                return None
        return Plan(None, tuple(reversed(self._steps)))

    def load(self, plan: Plan) -> None:
        """Read the files of its deltas, as far as they were not."""
        for step in plan.steps:
            if not step.is_full and not step.files:
                self._load(step, sorted(set(step.index.files.values())))

    def reload(self, plan: Plan, names: Iterable[str]) -> bool:
        """Read once more the plan's files that hold one of these tensors, each version's once at most.

        Returns:
            whether there is anything new to try. (The files of a full version are read by whoever uses them.)
        """
        wanted, any_read = set(names), False
        for step in plan.steps:
            files = {file for name, file in step.index.files.items() if name in wanted}
            if files and not step.reread:
                step.reread = any_read = True
                self._source.refresh(step.version, again=True)
                if not step.is_full:
                    self._load(step, sorted(files))
        return any_read

    def forget(self, plan: Plan) -> None:
        """Give back the memory that its files take."""
        for step in plan.steps:
            step.files.clear()

    def why_not(self) -> str:
        """Why there is no further way, for a message."""
        return self._gap or "its versions start from the local base checkpoint"

    def _extend(self) -> bool:
        """Go one version back; False if there is none."""
        if self._next in (None, BASE) or self._gap is not None:
            return False
        index = self._index(self._next)
        if index is None and self._next == 0 and self._gap is None:
            self._next = BASE  # what readers start from, unless there is a version 0
            self._lengths[BASE] = len(self._steps)
            return True
        if index is None:
            return False
        check_layout(index, self._layout)
        self._steps.append(Step(index))
        self._next = index.base
        if index.base is not None:
            self._lengths[index.base] = len(self._steps)
        return True

    def _index(self, version: int) -> Index | None:
        name = version_name(version)
        for attempt in range(2):
            self._source.refresh(version, again=attempt > 0)
            try:
                return self._source.index(version)
            except FileNotFoundError:
                if version != 0:
                    self._is_missing = True
                    self._gap = f"there is no {name}/{INDEX}"
                return None
            except IntegrityError as error:
                if attempt:
                    self._gap = str(error)
                    self.notes.append(f"version {version} cannot be read: {error}")
        return None

    def _load(self, step: Step, files: Sequence[str]) -> None:
        def read(file: str) -> File | IntegrityError:
            try:
                return read_delta_file(self._source, step.index, file)
            except IntegrityError as error:
                return error

        with ThreadPoolExecutor(self._threads) as pool:
            step.files.update(zip(files, pool.map(read, files), strict=True))


def plan(source: Source, at: int, target: int, layout: Mapping[str, Layout]) -> tuple[Plan, list[str]]:
    """The way from version `at` to `target`: deltas, or from the newest full version where `at` is not on their way.

    Returns:
        the plan, and what was found amiss.

    Raises:
        IntegrityError: there is no way. ObjectNotFound, ConfigError: see Chain.
    """
    notes: list[str] = []
    chain = Chain(source, target, layout, notes)
    found = chain.plan(at) or chain.plan_from_full() or chain.plan(BASE)
    if found is None:
        raise no_way(chain, at)
    return found, notes


def no_way(chain: Chain, at: int, reasons: Iterable[str] = ()) -> IntegrityError:
    """That a version cannot be reached from what is here."""
    here = "the base checkpoint" if at == BASE else f"version {at}"
    told = "".join(f"; {reason}" for reason in reasons)
    return IntegrityError(
        f"version {chain.target} of the weights cannot be made from {here} that is here{told}; {chain.why_not()}, and "
        "there is no full version to start from: let the trainer publish a full one (an anchor), and ask for that, or "
        "give readers the checkpoint that it started from"
    )


def check_layout(index: Index, layout: Mapping[str, Layout]) -> None:
    """Raise ConfigError if a version has a tensor that the base has not, or of another dtype or shape.

    The base may have more: what the trainer does not train stays.
    """
    for name, (dtype, shape) in index.layout.items():
        if layout.get(name) != (dtype, shape):
            there = f"{layout[name][0]} {list(layout[name][1])}" if name in layout else "not there"
            raise ConfigError(
                f"version {index.version} of the weights: tensor {name} is {dtype} {list(shape)}, in the local base "
                f"checkpoint {there}; give readers the checkpoint that the trainer started from"
            )


def read_file(source: Source, index: Index, file: str) -> File:
    """A file of a version, its tensors those that the index says. Raises IntegrityError, PublicationUnavailable."""
    name = f"{version_name(index.version)}/{file}"
    try:
        data = source.read(name)
    except FileNotFoundError as error:
        raise IntegrityError(f"{name} is not there, its index names it; publish the version once more") from error
    header = read_header(memoryview(data), name)
    wanted = {tensor for tensor, holder in index.files.items() if holder == file}
    if odd := sorted(wanted ^ header.tensors.keys()):
        raise IntegrityError(f"{name}: {odd[0]} is in only one of the file and its index; publish the version anew")
    return File(name, header, data)


def read_delta_file(source: Source, index: Index, file: str) -> File:
    """A file of payloads, each for what the index says. Raises IntegrityError, PublicationUnavailable."""
    found = read_file(source, index, file)
    for tensor, place in found.header.tensors.items():
        if place.layout != ("U8", (place.end - place.start,)):
            raise IntegrityError(
                f"{found.name}: payload of {tensor} is {place.layout[0]} {list(place.layout[1])}; allowed: U8, 1-D"
            )
        if (said := found.header.metadata.get(tensor)) != index.checksums[tensor]:
            raise IntegrityError(
                f"{found.name}: checksum of {tensor} is {said!r}, by its index {index.checksums[tensor]!r}; publish "
                "the version anew"
            )
    return found
