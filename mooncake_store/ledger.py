"""Which readers still need which batch; a batch is freed when none does."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from mooncake_store.ref import BatchRef
from mooncake_store.store import ObjectStore


@dataclass
class _Entry:
    ref: BatchRef
    waiting: set[Hashable] = field(default_factory=set)
    freeing: bool = False


class Ledger:
    """Kept where batches are put, usually in the rollout manager. Safe to share between threads.

    Readers acknowledge from `ObjectStore.get(..., on_release=...)`, which is called when their last view is gone.
    Everything is a set, so an acknowledgement that is delivered twice, or after its reader was declared dead, does
    nothing.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def expect(self, ref: BatchRef, readers: Collection[Hashable]) -> None:
        """Keep a batch until each of `readers` has acknowledged it; before any of them gets its ref.

        Raises:
            ValueError: no reader, or the batch is expected already.
        """
        if not readers:
            raise ValueError(f"batch {ref.key!r} is expected by nobody; remove it instead")
        with self._lock:
            if ref.key in self._entries:
                raise ValueError(f"batch {ref.key!r} is in the ledger already")
            self._entries[ref.key] = _Entry(ref, set(readers))

    def acknowledge(self, key: str, reader: Hashable) -> bool:
        """A reader needs the batch no more; whether that freed it.

        Raises:
            StoreUnavailable: the batch could not be freed; it stays in the ledger, for `settle`.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            entry.waiting.discard(reader)
        return self._free_if_done(key)

    def reader_died(self, reader: Hashable) -> None:
        """A dead reader needs nothing any more."""
        with self._lock:
            concerned = [key for key, entry in self._entries.items() if reader in entry.waiting]
            for key in concerned:
                self._entries[key].waiting.discard(reader)
        for key in concerned:
            self._free_if_done(key)

    def settle(self) -> None:
        """Try again to free what could not be freed; StoreUnavailable when it still cannot."""
        with self._lock:
            done = [key for key, entry in self._entries.items() if not entry.waiting]
        for key in done:
            self._free_if_done(key)

    def outstanding(self) -> dict[str, set[Hashable]]:
        """Keys of the batches that are kept, and the readers each waits for."""
        with self._lock:
            return {key: set(entry.waiting) for key, entry in self._entries.items()}

    def _free_if_done(self, key: str) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.waiting or entry.freeing:
                return False
            entry.freeing = True  # by this thread alone: a remove may take a while, and would be made and counted twice
        try:
            self._store.remove(entry.ref)
        except BaseException:
            entry.freeing = False
            raise
        with self._lock:
            del self._entries[key]
        return True
