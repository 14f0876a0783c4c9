"""What this process put and nobody removed yet, so that it can be published again when a master was restarted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import msgspec

from mooncake_store.client import MooncakeClient
from mooncake_store.holder import KEEP_SECONDS, Ask, Kept, answered_key, ask_key
from mooncake_store.owners import Owners
from mooncake_store.placement import Copy, Part, Written
from mooncake_store.records import Records
from mooncake_store.segment import SegmentRecord

ANSWER_SECONDS = 20.0  # without one more part
_PER_ASK = 128  # objects in one request, well within a record
Item = TypeVar("Item")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A holder was asked to publish copies again, in the segment `new`; what stays away when nothing comes is lost.

    Attributes:
        came: how many parts have come so far.
        until: when that has not grown for too long.
    """

    new: SegmentRecord
    copies: dict[str, Copy]
    came: int
    until: float


@dataclass(frozen=True, slots=True)
class _Lying:
    """What lies in one segment: a copy by batch."""

    owner: SegmentRecord
    copies: dict[str, Copy]


class Outstanding:
    """Remembers acknowledged objects until they are removed. Safe to share between threads; one of them ticks."""

    def __init__(self, client: MooncakeClient, records: Records, owners: Owners) -> None:
        self._client, self._records, self._owners = client, records, owners
        self._lock = threading.RLock()
        self._copies: dict[str, list[Copy]] = {}
        self._lying: dict[str, _Lying] = {}  # the same by the segment's sentinel: each put asks which there are
        self._missing_since: dict[str, float] = {}
        self._asked: dict[str, _Asked] = {}  # by the sentinel of the segment that was forgotten
        # By batch: the keys of the parts that a holder was asked for, and until when it may publish them.
        self._may_come: dict[str, tuple[list[str], float]] = {}

    def add(self, written: Written) -> None:
        """Remember an object."""
        with self._lock:
            self._set(written.key, list(written.copies))

    def discard(self, key: str) -> None:
        """Forget an object: it was removed."""
        with self._lock:
            self._set(key, [])

    def is_behind(self) -> bool:
        """Whether objects have yet to be published again in the memory that a holder lends since a restart."""
        return any(_follows(record, old) for old in self._segments() for record in self._owners.all())

    def __len__(self) -> int:
        with self._lock:
            return len(self._copies)

    def tick(self) -> None:
        """Ask holders whose segment the master has forgotten to publish again what lay in it; see what they did.

        Waits for none of them: the caller has a heartbeat to keep.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        self._remove_again()
        for sentinel in list(self._asked):
            self._settle(sentinel)
        owners = {owner.sentinel: owner for owner in self._segments() if owner.sentinel not in self._asked}
        if not owners:
            return
        known = self._client.exist(list(owners))
        for (sentinel, old), exists in zip(owners.items(), known, strict=True):
            if exists:
                self._missing_since.pop(sentinel, None)
                continue
            since = self._missing_since.setdefault(sentinel, time.monotonic())
            new = next((record for record in self._owners.refresh() if _follows(record, old)), None)
            if new is not None:
                self._publish_again(old, new)
            elif time.monotonic() - since > KEEP_SECONDS:
                self._give_up(old)

    def forget_removed(self) -> None:
        """Forget what other processes removed; StoreUnavailable when the master does not answer."""
        with self._lock:
            first = {key: copies[0].parts[0].key for key, copies in self._copies.items() if copies}
        for some in _batches(list(first.items()), 1000):
            exists = self._client.exist([part for _, part in some])
            missing = [key for (key, _), found in zip(some, exists, strict=True) if not found]
            for key in missing:
                with self._lock:
                    copies = self._copies.get(key, [])
                # Of a forgotten segment everything is missing; that is not a removal.
                if copies and not self._owners.forgotten(copies[0].owner):
                    self.discard(key)

    def _publish_again(self, old: SegmentRecord, new: SegmentRecord) -> None:
        with self._lock:
            lying = self._lying.get(old.sentinel)
            lost = dict(lying.copies) if lying else {}
            until = time.monotonic() + KEEP_SECONDS  # then the holder has nothing left to publish
            for key, copy in lost.items():
                self._may_come[key] = [part.key for part in copy.parts], until
        wanted = [_kept(copy, part) for copy in lost.values() for part in copy.parts if part.offset is not None]
        for some in _batches(wanted, _PER_ASK):
            self._ask(new, Ask(old.epoch, list(some)))
        self._asked[old.sentinel] = _Asked(new, lost, 0, time.monotonic() + ANSWER_SECONDS)
        self._settle(old.sentinel)

    def _settle(self, sentinel: str) -> None:
        """Take note of what a holder that was asked has published, once that is all that is wanted or time is up."""
        asked = self._asked[sentinel]
        if self._owners.forgotten(asked.new):  # the master was restarted once more: another segment will be asked
            del self._asked[sentinel]
            return
        with self._lock:
            wanted = {key: copy for key, copy in asked.copies.items() if key in self._copies}
        keys = [part.key for copy in wanted.values() for part in copy.parts]
        came = sum(self._client.exist(keys)) if keys else 0
        if came > asked.came:
            self._asked[sentinel] = replace(asked, came=came, until=time.monotonic() + ANSWER_SECONDS)
        if came < len(keys) and time.monotonic() < asked.until:
            return
        found = self._found(keys)
        for key, copy in wanted.items():
            offsets = [found.get(part.key) for part in copy.parts]
            with self._lock:
                if key not in self._copies:
                    continue
                copies = [other for other in self._copies[key] if other != copy]
                if None not in offsets:
                    moved = tuple(
                        Part(part.key, part.frame, offset) for part, offset in zip(copy.parts, offsets, strict=True)
                    )
                    copies.append(Copy(asked.new, moved, copy.digest))
                self._set(key, copies)
                if copies:
                    continue
            _log.error("batch %s is lost: the master was restarted and its memory could not be kept", key)
        del self._asked[sentinel]
        self._remove_again()

    def _ask(self, holder: SegmentRecord, ask: Ask) -> None:
        payload = msgspec.msgpack.encode(ask)
        for number in count():
            key = ask_key(holder.holder, holder.epoch, number)
            if self._records.claim(key, payload, holder.name):
                if not self._client.exist([answered_key(key)])[0]:
                    return
                self._client.remove(key)  # it was another's, and was answered

    def _found(self, keys: Sequence[str]) -> dict[str, int]:
        """Where those parts lie that are there."""
        found = {}
        for key, location in zip(keys, self._client.locate(keys) if keys else (), strict=True):
            owner = self._owners.of(location) if location is not None else None
            if owner is not None and location is not None:
                offset = owner.offset_of(location)
                if offset is not None:
                    found[key] = offset
        return found

    def _remove_again(self) -> None:
        """Free what was removed while a holder was asked to publish it again: that remove found nothing to free."""
        now = time.monotonic()
        with self._lock:
            self._may_come = {key: asked for key, asked in self._may_come.items() if asked[1] > now}
            keys = [part for key, (parts, _) in self._may_come.items() if key not in self._copies for part in parts]
        if keys:
            for key, exists in zip(keys, self._client.exist(keys), strict=True):
                if exists:
                    self._client.remove(key)

    def _give_up(self, old: SegmentRecord) -> None:
        with self._lock:
            lying = self._lying.get(old.sentinel)
            for key in list(lying.copies) if lying else ():
                left = [copy for copy in self._copies[key] if copy.owner.sentinel != old.sentinel]
                self._set(key, left)
                if not left:
                    _log.error("batch %s is lost: the holder of its memory is gone", key)

    def _segments(self) -> list[SegmentRecord]:
        with self._lock:
            return [lying.owner for lying in self._lying.values()]

    def _set(self, key: str, copies: list[Copy]) -> None:
        """Remember these copies of a batch and no others; the caller holds the lock."""
        for copy in self._copies.pop(key, ()):
            lying = self._lying[copy.owner.sentinel]
            del lying.copies[key]
            if not lying.copies:
                del self._lying[copy.owner.sentinel]
        for copy in copies:
            self._lying.setdefault(copy.owner.sentinel, _Lying(copy.owner, {})).copies[key] = copy
        if copies:
            self._copies[key] = copies


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _follows(record: SegmentRecord, old: SegmentRecord) -> bool:
    return record.holder == old.holder and record.epoch > old.epoch


def _kept(copy: Copy, part: Part) -> Kept:
    said = part.frame
    numbers = said.part, said.parts, said.part_bytes, said.object_bytes
    return Kept(part.key, part.offset or 0, said.id, *numbers, bytes.fromhex(copy.digest))
