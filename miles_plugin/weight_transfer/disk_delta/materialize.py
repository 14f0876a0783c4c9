"""The receiving side: a checkpoint on this host, brought to any published version.

Deltas are applied to the slot that no engine reads; every tensor is checked; then engines are pointed to it. A failure,
or a kill, at any moment leaves what engines read as it was.

What does not get to the version from what the slot holds is tried anew: from the files as they are when read once more,
from a copy of the complete slot, from the newest full version, from the base checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from miles_plugin.weight_transfer.disk_delta import codec
from miles_plugin.weight_transfer.disk_delta.format import Index
from miles_plugin.weight_transfer.disk_delta.lineage import Chain, Plan, Source, no_way
from miles_plugin.weight_transfer.disk_delta.local_checkpoint import Checkpoint
from miles_plugin.weight_transfer.disk_delta.patching import Full, InPlace, Local, Origin, Patcher, hash_all
from miles_plugin.weight_transfer.disk_delta.readers import ReaderReport, check_reader_id, write_report
from miles_plugin.weight_transfer.disk_delta.slots import BASE, NAMES, Checksum, Record, Slot, Slots, locked, reported
from miles_plugin.weight_transfer.disk_delta.storage import Storage
from mooncake_store.errors import ConfigError, IntegrityError, StoreUnavailable

# Two updates of a large model, or its first copy from a slow disk.
WAIT_SECONDS = 600.0
# Deltas that are in memory at once, of a reader that is far behind; the decoder takes no more in one pass either.
FOLD = codec.FOLD
_NAMED = 3  # tensors in a message


class WentBack(StoreUnavailable):
    """What is published now is older than what engines see: who took it would serve an older policy than before."""


@dataclass(frozen=True)
class Materialized:
    """A version that engines can load.

    Attributes:
        path: a Hugging Face checkpoint. Its bytes stay as they are until the second next version is brought here: load
            it before asking for that one.
        seconds: by phase: find, copy, hash, read, apply, flush, expose.
        bytes_read: from where the versions are published.
        notes: what was found amiss and got around, for people.
    """

    version: int
    path: Path
    seconds: dict[str, float]
    bytes_read: int
    notes: list[str]


class Materializer:
    """Brings the checkpoint in one local directory to published versions.

    Extra memory: FOLD deltas, or one file of a full version, and a few MB. (All deltas that lead from the base or the
    other slot, where a tensor must be made anew from there.)

    Args:
        storage: where versions are published.
        local: a directory of this host, for two copies of the checkpoint.
        base: the Hugging Face checkpoint, with safetensors, that the trainer started from; it is only read.
        threads: that hash and apply.
        pre_read: called with a version before anything of it is read, for file systems that must be refreshed.
        wait_seconds: for another process that is changing `local`.

    Raises:
        ConfigError: by every method: `local` is in use by another run, or `base` is no such checkpoint.
        LocalUnavailable, PublicationUnavailable: by every method: a disk is full, a permission is missing, and so on.
        LocalBusy: by every method: another process is changing `local`.
    """

    def __init__(
        self,
        storage: Storage,
        local: Path,
        base: Path,
        threads: int = 2,
        pre_read: Callable[[int], None] | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        if threads < 1:
            raise ConfigError(f"threads={threads}: at least 1")
        if base.resolve() in (local.resolve(), *local.resolve().parents):
            raise ConfigError(f"local={local} is the base checkpoint {base}, or in it; name a directory elsewhere")
        # Engines, whose working directories are others, are told where it is.
        self.local, self.base = local.absolute(), base
        self._storage, self._threads, self._pre_read, self._wait_seconds = storage, threads, pre_read, wait_seconds
        self._opened: tuple[Checkpoint, Slots] | None = None
        self._confirmed: set[tuple[str, int]] = set()

    def bring_to(self, version: int | None = None, forward: bool = False) -> Materialized:
        """Make engines see this version; None: the newest, or the base checkpoint, as version 0, if there is none yet.

        Args:
            forward: refuse a newest version that is older than what engines see.

        Raises:
            ObjectNotFound: it is not published.
            IntegrityError: it cannot be made from what is published and what is here.
            WentBack: `forward` forbids it.
        """
        if version is not None and version < 0:
            raise ConfigError(f"version={version}: versions are counted from 0")
        with reported(self.local):
            base, slots = self._open()
        with reported(self.local), locked(self.local, self._wait_seconds):
            source = Source(self._storage, self._pre_read)
            return _Update(base, slots, source, self._threads, self._confirmed).bring_to(version, forward)

    def exposed(self) -> tuple[int, Path] | None:
        """The version that engines see, and where; None before the first."""
        slot = self._seen()
        return None if slot is None else (max(slot.record.version, 0), slot.path)

    def verify(self) -> list[str]:
        """Names of the tensors that engines see and that are not as they were written: a disk has lost bits.

        When there are any, the next `bring_to` makes the version anew, also the same one.
        """
        with reported(self.local), locked(self.local, self._wait_seconds):
            _, slots = self._open()
            slot = slots.exposed()
            if slot is None:
                return []
            written, found = slot.record.checksums, dict[str, Checksum]()
            with suppress(ConfigError, IntegrityError, FileNotFoundError):  # no checkpoint any more: all are damaged
                found = hash_all(
                    Checkpoint(slot.path), {name: each.kind for name, each in written.items()}, self._threads
                )
            damaged = sorted(name for name, each in written.items() if found.get(name) != each)
            if damaged:
                slots.begin(slot.name, slot.record.version, slot.record.version, slot.record.checksums)
            return damaged

    def newest(self) -> int | None:
        """The newest version that is published; None if there is none yet."""
        return Source(self._storage).newest()

    def report(self, reader_id: str, engines: Sequence[str] = (), problem: str = "") -> None:
        """Tell the publisher how far this reader is, so that what it still needs is kept, and engines are not told to
        load what is not there.

        Args:
            reader_id: its own name among all readers; letters, digits, dots, dashes and underscores.
            engines: host:port of those that load what is here. problem: why it is not further.
        """
        check_reader_id(reader_id)
        slot = self._seen()
        if slot is None:
            raise ConfigError(f"reader {reader_id} has no version in {self.local} yet; call bring_to first")
        version, is_base = max(slot.record.version, 0), slot.record.version == BASE
        report = ReaderReport(version, str(slot.path), tuple(engines), problem, is_base, slot.record.base)
        write_report(self._storage, reader_id, report)

    def fingerprint(self) -> str:
        """Of the base checkpoint; see `Checkpoint.fingerprint`."""
        with reported(self.local):
            _, slots = self._open()
        return slots.fingerprint

    def _seen(self) -> Slot | None:
        """The slot that engines see."""
        with reported(self.local):
            _, slots = self._open()
            return slots.exposed()

    def _open(self) -> tuple[Checkpoint, Slots]:
        if self._opened is None:
            base = Checkpoint(self.base)
            self._opened = base, Slots(self.local, base, base.fingerprint())
        return self._opened


class _Update:
    """One call of `bring_to`. confirmed: slots and versions that are known to be of this run."""

    def __init__(
        self, base: Checkpoint, slots: Slots, source: Source, threads: int, confirmed: set[tuple[str, int]]
    ) -> None:
        self._base, self._slots, self._source, self._threads = base, slots, source, threads
        self._confirmed = confirmed
        self._notes: list[str] = []
        self._seconds: dict[str, float] = {}
        name = slots.current()
        self._name = NAMES[1] if name == NAMES[0] else NAMES[0]  # of the slot to be changed
        self._complete = slots.find(name) if name else None
        if name and (self._complete is None or self._complete.record.applying is not None):
            self._notes.append(f"slot {name}, which engines read, is in doubt; nothing is taken from it")
            self._complete = None
        self._slot = slots.find(self._name)

    def bring_to(self, version: int | None, forward: bool) -> Materialized:
        with self._timed("find"):
            target = self._newest(forward) if version is None else version
            self._complete, self._slot = self._sound(self._complete), self._sound(self._slot)
            for slot in (self._complete, self._slot):
                if slot is not None and slot.record.applying is None and slot.record.version == target:
                    return self._expose(slot.name, target)
            chain = Chain(self._source, target, self._base.layout, self._notes, self._threads)
            if self._complete and (plan := chain.plan(self._complete.record.version)) and not plan.steps:
                return self._expose(self._complete.name, self._complete.record.version)
        return self._apply(chain)

    def _newest(self, forward: bool) -> int:
        newest, exposed = self._source.newest(), self._slots.exposed()
        seen = BASE if exposed is None else exposed.record.version
        if forward and seen > (BASE if newest is None else newest):
            there = "nothing is" if newest is None else f"version {newest} is the newest that is"
            raise WentBack(
                f"{self._slots.local} has version {seen}, {there} published: the place is not mounted, or another run "
                f"publishes there; see to that, ask for a version by its number, or remove {self._slots.local}"
            )
        return newest or 0

    def _apply(self, chain: Chain) -> Materialized:
        kind = chain.kind or codec.CHECKSUMS[0]
        complete = self._mapped(self._complete, writable=False)
        slot = self._mapped(self._slot, writable=True)
        if slot is None or self._slot is None:
            record, slot, held = self._make(complete, kind)
            in_doubt = False
        else:
            record = self._slot.record
            held = dict(record.checksums)
            in_doubt = record.applying is not None
        patcher = Patcher(slot, held, kind, self._threads)
        if in_doubt:
            self._notes.append(f"slot {self._name} was left on its way to version {record.applying}")
            # All tensors: the call that was interrupted may have touched others than this one will.
            with self._timed("hash"):
                patcher.hash({name: checksum.kind for name, checksum in record.checksums.items()})
        self._slots.check_changeable(sum(slot.tensor(name).size for name in slot.layout))
        record = self._approach(chain, patcher, record)
        self._slots.begin(self._name, record.version, chain.target, record.checksums)
        plan = self._follow(chain, patcher, record, complete)
        with self._timed("flush"):
            patcher.flush(every=in_doubt)
        self._slots.complete(self._name, plan.target, patcher.held)
        self._confirmed.add((self._name, plan.target))
        return self._expose(self._name, plan.target)

    def _approach(self, chain: Chain, patcher: Patcher, record: Record) -> Record:
        """Come nearer to a version that is far ahead, FOLD deltas at a time, since all of them may be more than fits
        into memory. Returns where the slot is then: no further, when that failed."""
        while (plan := chain.plan(record.version)) and len(plan.steps) > FOLD:
            part = Plan(plan.start, plan.steps[:FOLD])
            version = part.steps[-1].version
            self._slots.begin(self._name, record.version, version, record.checksums)
            origin = InPlace(f"slot {self._name}", record.checksums)
            failed, _ = self._try(chain, patcher, part, origin, list(self._base.layout))
            chain.forget(part)
            if failed:
                break
            record = Record(version=version, applying=None, base=record.base, checksums=dict(patcher.held))
        return record

    def _follow(self, chain: Chain, patcher: Patcher, record: Record, complete: Checkpoint | None) -> Plan:
        """The way on which the last tensors came to the target; raises IntegrityError when there is none."""
        left: Sequence[str] = list(self._base.layout)
        reasons: list[str] = []
        for plan, origin in self._ways(chain, record, complete):
            left, told = self._try(chain, patcher, plan, origin, left)
            if not left:
                return plan
            reasons = told or reasons
        raise no_way(chain, record.version, reasons)

    def _try(
        self, chain: Chain, patcher: Patcher, plan: Plan, origin: Origin, names: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Go one way, and once more if what is published can be read anew. Returns the tensors that did not get there,
        and some reasons."""
        reasons: list[str] = []
        left = list(names)
        again = True
        while left and again:
            with self._timed("read"):
                chain.load(plan)
            with self._timed("apply"):
                failed = patcher.follow(plan, origin, left)
            left = list(failed)
            if told := [reason for reason in failed.values() if reason]:
                reasons = told[:_NAMED]
                self._notes.append(f"{len(told)} tensors did not come to version {plan.target}: {told[0]}")
            with self._timed("read"):
                again = chain.reload(plan, left)
        return left, reasons

    def _ways(self, chain: Chain, record: Record, complete: Checkpoint | None) -> Iterator[tuple[Plan, Origin]]:
        """Those that there are, the cheapest first."""
        if plan := chain.plan(record.version):
            yield plan, InPlace(f"slot {self._name}", record.checksums)
        if self._complete and complete and (plan := chain.plan(self._complete.record.version)):
            yield plan, Local(f"slot {self._complete.name}", complete, self._complete.record.checksums)
        if plan := chain.plan_from_full():
            yield plan, Full(self._source, plan, self._base)
        if plan := chain.plan(BASE):
            yield plan, Local("the base checkpoint", self._base, {})

    def _make(self, complete: Checkpoint | None, kind: str) -> tuple[Record, Checkpoint, dict[str, Checksum]]:
        """Fill the slot from the complete one, or from the base: what it should hold, and does."""
        known = self._complete.record if self._complete and complete else None
        with self._timed("copy"):
            self._slots.make(self._name, complete if known and complete else self._base)
        slot = Checkpoint(self._slots.local / self._name, writable=True)
        with self._timed("hash"):
            kinds = {name: known.checksums[name].kind if known else kind for name in slot.layout}
            held = hash_all(slot, kinds, self._threads)
            wanted = known.checksums if known else hash_all(self._base, kinds, self._threads)
        record = known or Record(version=BASE, applying=None, base="", checksums=wanted)
        return record, slot, held

    def _mapped(self, slot: Slot | None, writable: bool) -> Checkpoint | None:
        """A slot's tensors; None where files are missing or damaged so that it cannot be said where they lie."""
        if slot is None:
            return None
        try:
            found = Checkpoint(slot.path, writable)
        except (ConfigError, IntegrityError, FileNotFoundError) as error:
            self._notes.append(f"slot {slot.name} is no checkpoint any more: {error}")
            return None
        if found.layout != self._base.layout:
            self._notes.append(f"slot {slot.name} has other tensors than the base checkpoint")
            return None
        return found

    def _sound(self, slot: Slot | None) -> Slot | None:
        """The slot, unless it is no checkpoint any more; looked at once, when a reader starts.

        Raises:
            ConfigError: its version, as published, is another: then another run publishes there.
        """
        if slot is None or (slot.name, slot.record.version) in self._confirmed:
            return slot
        if self._mapped(slot, writable=False) is None:
            return None
        version = slot.record.version
        with suppress(FileNotFoundError, IntegrityError):  # deleted, or unreadable: then what is applied will tell
            if version != BASE:
                self._source.refresh(version)
                self._check_run(slot, self._source.index(version))
        self._confirmed.add((slot.name, version))
        return slot

    def _check_run(self, slot: Slot, published: Index) -> None:
        for name, text in published.checksums.items():
            held = slot.record.checksums.get(name)
            if held is not None and held.kind == published.checksum and held.hex != text:
                raise ConfigError(
                    f"{slot.path} holds version {published.version} of another run: its {name} is {held.hex}, the "
                    f"published one {text}; remove {self._slots.local}, or name another local directory"
                )

    def _expose(self, name: str, version: int) -> Materialized:
        with self._timed("expose"):
            self._slots.expose(name, version)
        path = self._slots.local / name
        return Materialized(max(version, 0), path, self._seconds, self._source.bytes_read, self._notes)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
