"""The ledger: a batch is freed once, when every reader has acknowledged it or died, and not before."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mooncake_store import BatchRef, StoreUnavailable
from mooncake_store.ledger import Ledger


class Removing:
    """Stands in for the store: counts removals, and fails those it is told to."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.failing = 0
        self.lock = threading.Lock()

    def remove(self, ref: BatchRef) -> None:
        with self.lock:
            if self.failing:
                self.failing -= 1
                raise StoreUnavailable("the master does not answer")
            self.removed.append(ref.key)


@pytest.fixture
def store() -> Removing:
    return Removing()


@pytest.fixture
def ledger(store: Any) -> Ledger:
    return Ledger(store)


def ref(key: str = "a") -> BatchRef:
    return BatchRef("mooncake", "r", key, 1, 64, "00" * 16)


def test_the_last_acknowledgement_frees(store: Removing, ledger: Ledger) -> None:
    ledger.expect(ref(), [0, 1, "late"])
    assert not ledger.acknowledge("a", 0)
    assert not ledger.acknowledge("a", "late")
    assert ledger.outstanding() == {"a": {1}}
    assert not store.removed
    assert ledger.acknowledge("a", 1)
    assert store.removed == ["a"]
    assert not ledger.outstanding()


def test_acknowledgements_are_a_set(store: Removing, ledger: Ledger) -> None:
    ledger.expect(ref(), [0, 1, 1])
    for _ in range(3):
        assert not ledger.acknowledge("a", 0)
    assert not ledger.acknowledge("a", "a stranger")
    assert not store.removed
    assert ledger.acknowledge("a", 1)
    for reader in (0, 1):  # delivered again, after it was freed
        assert not ledger.acknowledge("a", reader)
    assert store.removed == ["a"]
    assert not ledger.acknowledge("never expected", 0)


def test_a_batch_is_expected_once_and_by_somebody(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match=r"'a'.*nobody; remove it"):
        ledger.expect(ref(), [])
    ledger.expect(ref(), [0])
    with pytest.raises(ValueError, match=r"'a' is in the ledger already"):
        ledger.expect(ref(), [1])
    assert ledger.outstanding() == {"a": {0}}


def test_a_dead_reader_counts(store: Removing, ledger: Ledger) -> None:
    ledger.expect(ref("a"), [0])
    ledger.expect(ref("b"), [0, 1])
    ledger.expect(ref("c"), [1])
    ledger.reader_died(0)
    ledger.reader_died(0)
    assert store.removed == ["a"]
    assert ledger.outstanding() == {"b": {1}, "c": {1}}
    assert not ledger.acknowledge("b", 0)  # it was only slow
    assert ledger.acknowledge("b", 1)


@pytest.mark.parametrize("end", ["acknowledge", "reader_died"])
def test_a_failed_remove_stays_and_settles(store: Removing, ledger: Ledger, end: str) -> None:
    ledger.expect(ref(), [0])
    store.failing = 2
    with pytest.raises(StoreUnavailable):
        ledger.acknowledge("a", 0) if end == "acknowledge" else ledger.reader_died(0)
    assert ledger.outstanding() == {"a": set()}
    with pytest.raises(StoreUnavailable):
        ledger.settle()
    assert ledger.outstanding() == {"a": set()}
    ledger.settle()
    ledger.settle()
    assert store.removed == ["a"]
    assert not ledger.outstanding()


def test_settle_leaves_what_is_needed(store: Removing, ledger: Ledger) -> None:
    ledger.expect(ref(), [0])
    ledger.settle()
    assert not store.removed


def test_threads_free_each_batch_once(ledger: Ledger, store: Removing) -> None:
    keys, readers = [f"k{n}" for n in range(50)], range(8)
    for key in keys:
        ledger.expect(ref(key), readers)
    freed: list[str] = []
    barrier = threading.Barrier(len(readers))

    def read(reader: int) -> None:
        barrier.wait(10)
        for key in keys:
            if ledger.acknowledge(key, reader):
                freed.append(key)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(freed) == sorted(keys)
    assert set(store.removed) == set(keys)
    assert not ledger.outstanding()
