"""The holders this process knows, and which of them it has mapped."""

from __future__ import annotations

import logging
import threading

import msgspec

from mooncake_store.client import Location, MooncakeClient
from mooncake_store.errors import IntegrityError, StoreUnavailable
from mooncake_store.holder import SLOTS, slot_key
from mooncake_store.records import Records
from mooncake_store.segment import CannotMap, Mapping, SegmentRecord, boot_id

_log = logging.getLogger(__name__)


class Owners:
    """Finds holders by what the store says of them, and maps those of this node.

    Args:
        share_memory: False leaves every segment unmapped, so that all bytes travel over the network.
    """

    def __init__(self, client: MooncakeClient, records: Records, share_memory: bool = True) -> None:
        self._client, self._records, self._share_memory = client, records, share_memory
        self._lock = threading.RLock()
        self._known: list[SegmentRecord] = []
        self._mapped: dict[tuple[str, bool], Mapping | None] = {}
        self._said: set[str] = set()

    def all(self) -> list[SegmentRecord]:
        """What is lent as far as is known here, this node's first."""
        with self._lock:
            known = list(self._known)
        return known or self.refresh()

    def refresh(self) -> list[SegmentRecord]:
        """Look again.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        slots = [slot_key(slot) for slot in range(SLOTS)]
        taken = [slot for slot, exists in zip(slots, self._client.exist(slots), strict=True) if exists]
        read = [record for record in map(self._read, taken) if record is not None]
        found = list({record.sentinel: record for record in read}.values())  # each once: copies go to distinct owners
        here = boot_id()
        found.sort(key=lambda record: record.boot_id != here)
        with self._lock:
            self._known = found
            lent = {record.sentinel for record in found}
            self._mapped = {key: mapping for key, mapping in self._mapped.items() if key[0] in lent}
        return found

    def changed(self) -> bool:
        """Look again; whether other memory is lent than was known. A master that does not answer changed nothing."""
        with self._lock:
            known = self._known
        try:
            return self.refresh() != known
        except StoreUnavailable:
            return False

    def here(self) -> list[SegmentRecord]:
        """Look again for what is lent on this node; StoreUnavailable when the master does not answer."""
        return [record for record in self.refresh() if record.boot_id == boot_id()]

    def of(self, location: Location) -> SegmentRecord | None:
        """Who lends the memory at `location`; None for memory that no holder lends."""
        for look in (self.all, self.refresh):
            for record in look():
                if record.holds(location):
                    return record
        return None

    def mapping(self, record: SegmentRecord, writable: bool) -> Mapping | None:
        """The segment mapped here, None where that is impossible; why is logged once."""
        if not self._share_memory:
            return None
        key = (record.sentinel, writable)
        with self._lock:
            if key not in self._mapped:
                self._mapped[key] = self._map(record, writable)
            return self._mapped[key]

    def forgotten(self, record: SegmentRecord) -> bool:
        """Whether the master no longer knows this segment, because it was restarted or its holder is gone."""
        return not self._client.exist([record.sentinel])[0]

    def is_known(self, segment: str, client: MooncakeClient) -> bool:
        """Whether the master knows the memory that, as far as is known here, is lent under this name.

        Args:
            client: that asks.
        """
        with self._lock:
            sentinels = [record.sentinel for record in self._known if record.name == segment]
        return bool(sentinels) and all(client.exist(sentinels))

    def any_forgotten(self) -> bool:
        """The same of any segment: allocated memory may lie in another than was preferred."""
        return not all(self._client.exist([record.sentinel for record in self.all()]))

    def _read(self, slot: str) -> SegmentRecord | None:
        try:
            payload = self._records.read(slot)
            return None if payload is None else msgspec.json.decode(payload, type=SegmentRecord)
        except (IntegrityError, msgspec.DecodeError) as error:
            _log.warning("the record %s of a segment holder is ignored: %s", slot, error)
            return None

    def _map(self, record: SegmentRecord, writable: bool) -> Mapping | None:
        try:
            return Mapping(record, writable)
        except CannotMap as error:
            reason = str(error)
            # Another host's memory is no surprise; what should have worked is said once.
            if record.boot_id == boot_id() and reason not in self._said:
                self._said.add(reason)
                _log.warning("segment %s is not mapped, its bytes travel over the network: %s", record.name, reason)
            return None
