"""Reading: in place or copied, from whichever copy is left; a ref is believed only as far as the store confirms it."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_store import (
    BatchRef,
    IntegrityError,
    ObjectLost,
    ObjectNotFound,
    ObjectStore,
    StoreError,
    StoreUnavailable,
    frame,
    reading,
)
from mooncake_store.client import Limits, Location
from mooncake_store.holder import slot_key
from mooncake_store.placement import Written
from tests.unit.store.store_master import Content, Held, Lent, Master, Transport, ref_of

PAYLOAD = bytes(range(250)) * 10
PATIENT = Limits(get=5.0)


def written(master: Master, **rest: Any) -> tuple[Transport, Written, BatchRef]:
    transport = Transport(master, **rest)
    done = transport.write(Content(PAYLOAD))
    return transport, done, ref_of(done)


def keys_of(done: Written, copy: int = 0) -> list[str]:
    return [part.key for part in done.copies[copy].parts]


@pytest.mark.parametrize("chunk_bytes", [None, 1000])
@pytest.mark.parametrize("writer_shares", [True, False])
@pytest.mark.parametrize("reader_shares", [True, False])
def test_whoever_wrote_it_anybody_reads_it(writer_shares: bool, reader_shares: bool, chunk_bytes: int | None) -> None:
    master = Master(Lent("a"))
    _, _, ref = written(master, share_memory=writer_shares, chunk_bytes=chunk_bytes)
    stored = Transport(master, reader_shares).get(ref)
    assert stored.bytes.tobytes() == PAYLOAD
    assert stored.shared is (reader_shares and chunk_bytes is None)
    assert (stored.loan is not None) is stored.shared


def test_what_is_seen_in_place_is_not_copied_and_cannot_be_written() -> None:
    segment = Lent("a")
    transport, done, ref = written(Master(segment))
    view = transport.get(ref).bytes
    offset = done.copies[0].parts[0].offset
    assert offset is not None
    segment.bytes[offset + frame.NBYTES] = 99
    assert view[0] == 99
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


# --- which failure is told, and what is waited for --------------------------------------------------------------------


def test_another_copy_is_read_when_one_is_gone() -> None:
    first, second = Lent("a"), Lent("b")
    master = Master(first, second)
    transport, done, ref = written(master, replica_num=2)
    del master.objects[keys_of(done)[0]], master.objects[first.record.sentinel]
    assert transport.get(ref).bytes.tobytes() == PAYLOAD
    second.bytes[done.copies[1].parts[0].offset] ^= 1  # type: ignore[index]
    with pytest.raises(IntegrityError):  # of lost and wrong, wrong is told
        transport.get(ref)


@pytest.mark.parametrize("chunk_bytes", [None, 1000])
def test_removed_and_lost_are_told_apart(chunk_bytes: int | None) -> None:
    segment = Lent("a")
    master = Master(segment)
    transport, done, ref = written(master, chunk_bytes=chunk_bytes)
    del master.objects[keys_of(done)[-1]]
    with pytest.raises(ObjectNotFound, match=r"the store has \d of \d parts .* removed"):
        transport.get(ref)
    del master.objects[segment.record.sentinel]
    with pytest.raises(ObjectLost, match="the master was restarted"):
        transport.get(ref)
    master.failures["exist"] = [StoreUnavailable("no answer")]
    with pytest.raises(StoreUnavailable, match="no answer"):
        transport.get(ref)


def test_a_removed_batch_is_not_waited_for() -> None:
    master = Master(Lent("a"))
    transport, _, ref = written(master, limits=Limits(get=3600))
    transport.remove(ref)
    transport.remove(ref)
    assert not master.stored()
    with pytest.raises(ObjectNotFound):
        transport.get(ref)


@pytest.mark.parametrize("operation", ["locate", "read"])
def test_a_master_that_does_not_answer_is_waited_for(operation: str) -> None:
    master = Master(Lent("a"))
    transport, _, ref = written(master, share_memory=False, limits=PATIENT)
    silence = StoreUnavailable("no answer")
    master.failures = {operation: [silence, silence], "exist": [silence]}
    stored = transport.get(ref)
    assert stored.bytes.tobytes() == PAYLOAD
    assert transport.pool.lent_bytes > 0
    del stored
    gc.collect()
    assert transport.pool.lent_bytes == 0


class Watched(Master):
    """Calls `look` before it says where `look_for` lies."""

    look_for = ""
    look: Callable[[], None]

    def locate(self, keys: Sequence[str]) -> list[Location | None]:
        if self.look_for in keys:
            self.look()
        return super().locate(keys)


def test_a_batch_that_is_published_again_is_waited_for() -> None:
    """As a holder does it: visible first, without a commit word, then filled."""
    before, after = Lent("a"), Lent("a", epoch=1)
    master = Watched(before)
    transport, done, ref = written(master, limits=PATIENT)
    (part,) = done.copies[0].parts
    held = master.objects[part.key]
    master.restart()
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            master.lend(after)
            master.objects[part.key] = Held(after, 128, held.nbytes, True)
        if looks == 4:
            after.bytes[128:][: held.nbytes] = held.bytes

    master.look_for, master.look = part.key, look
    assert transport.get(ref).bytes.tobytes() == PAYLOAD
    assert looks == 4


def test_what_never_gets_a_commit_word_is_no_batch() -> None:
    segment = Lent("a")
    for share_memory in (True, False):
        transport, done, ref = written(Master(segment), share_memory=share_memory)
        frame.clear(transport.master.objects[keys_of(done)[0]].bytes)
        with pytest.raises(IntegrityError, match="no commit word"):
            transport.get(ref)


# --- after a restart of the master ------------------------------------------------------------------------------------


def test_a_reader_that_saw_no_restart_finds_the_new_memory() -> None:
    before = Lent("a")  # kept by its holder, so what comes next lies elsewhere
    master = Master(before)
    idle, _, ref = written(master)
    idle.get(ref)
    master.restart()
    master.lend(Lent("a", epoch=1))
    _, _, new = written(master)
    stored = idle.get(new)
    assert stored.shared  # and not over the network for ever
    assert stored.bytes.tobytes() == PAYLOAD


def test_memory_that_was_lent_at_the_same_address_before_is_not_taken_for_it() -> None:
    current, old = Lent("a", epoch=1), Lent("a")
    master = Master()
    stale = msgspec.structs.replace(current.record, epoch=0, path=old.record.path, inode=old.record.inode)
    assert master.records.claim(slot_key(0), msgspec.json.encode(stale), "a")
    idle = Transport(master, limits=PATIENT)
    assert idle.owners.all() == [stale]
    master.restart()
    master.lend(current)
    _, done, ref = written(master)
    offset = done.copies[0].parts[0].offset
    assert offset is not None
    frame.commit(old.bytes[offset:], frame.Frame(bytes(16), 0, 1, 2500, 2500))  # what lay there is whole
    assert idle.get(ref).bytes.tobytes() == PAYLOAD


# --- held while it is taken away --------------------------------------------------------------------------------------


def test_a_batch_removed_under_its_reader_is_told() -> None:
    master = Master(Lent("a"))
    transport, done, ref = written(master)
    stored = transport.get(ref)
    loan = stored.loan
    assert loan is not None
    loan.check()
    assert loan.is_kept()
    transport.remove(ref)
    loan.check()  # nobody was given the memory yet
    assert not loan.is_kept()
    other = transport.write(Content(PAYLOAD[::-1]))
    assert other.copies[0].parts[0].offset == done.copies[0].parts[0].offset
    with pytest.raises(IntegrityError, match=r"removed while it was read.*given to batch") as caught:
        loan.check()
    assert not caught.value.retryable
    assert np.array_equal(loan.memory, stored.bytes)
    ended = weakref.ref(stored.root)
    del stored
    assert ended() is None, "the loan holds up the end of what was lent"


def test_a_store_that_cannot_be_asked_vouches_for_nothing() -> None:
    master = Master(Lent("a"))
    transport, _, ref = written(master)
    loan = transport.get(ref).loan
    assert loan is not None
    master.failures["exist"] = [StoreUnavailable("no answer")]
    assert not loan.is_kept()


def test_parts_taken_away_while_they_are_gathered_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Lent("a")
    transport, done, ref = written(Master(segment), chunk_bytes=1000)
    checked: list[int] = []
    check = frame.Frame.check

    def check_then_lose(said: frame.Frame, stored: np.ndarray) -> None:
        check(said, stored)
        checked.append(said.part)
        if checked == [0, 1, 2]:  # before the copies, and so before the second check of all
            segment.bytes[done.copies[0].parts[1].offset] = 0  # type: ignore[index]

    monkeypatch.setattr(frame.Frame, "check", check_then_lose)
    with pytest.raises(IntegrityError, match="part 1 of 3"):
        transport.get(ref)
    assert transport.pool.lent_bytes == 0


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 1000])
@pytest.mark.parametrize("kind", [StoreUnavailable, ObjectLost])
def test_what_failed_first_does_not_hold_what_came_then(
    share_memory: bool, chunk_bytes: int | None, kind: type[StoreError]
) -> None:
    """No frame that a caught exception keeps may look at the batch: its end would wait for a collection."""

    def fail() -> None:
        raise kind("for a moment")

    master = Master(Lent("a"))
    transport = Transport(master, share_memory, chunk_bytes, limits=PATIENT)
    told = threading.Event()
    gc.disable()
    try:
        with ObjectStore("mooncake", "r", transport) as store:
            ref = store.put({"tokens": [np.arange(500, dtype=np.int32)] * 3})
            master.meanwhile["locate"] = fail
            with store.get(ref, on_release=told.set) as batch:
                rows = batch["tokens"]
            del batch
            assert not told.is_set()
            rows.clear()
            assert told.wait(10)
            assert transport.pool.lent_bytes == 0
    finally:
        gc.enable()


# --- refs that no put made --------------------------------------------------------------------------------------------

BATCH = {"tokens": [list(range(n)) for n in range(40)], "text": ["é"] * 40}
numbers = st.one_of(
    st.integers(-2, 70), st.integers(0, 2**70), st.sampled_from([0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30])
)


def store_of(master: Master, **rest: Any) -> tuple[ObjectStore, Transport]:
    transport = Transport(master, **rest)
    return ObjectStore("mooncake", "r", transport), transport


@settings(max_examples=40)
@given(
    share_memory=st.booleans(),
    chunk_bytes=st.sampled_from([None, 300]),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "nbytes": numbers,
            "num_rows": numbers,
            "digest": st.sampled_from(["00" * 16, "ab", "", "zz" * 16]),
            "key": st.sampled_from(["", "/", "x", "run/r/b/zz", "run/r/b/" + "0" * 32, "run/r/b/" + "0" * 31, "é/\0"]),
        },
    ),
    part_bytes=st.none() | numbers,
    copies=st.integers(0, 3),
)
def test_a_hostile_ref_ends_typed_and_takes_nothing(
    share_memory: bool, chunk_bytes: int | None, changes: dict[str, Any], part_bytes: int | None, copies: int
) -> None:
    master = Master(Lent("a", nbytes=1 << 16))
    store, transport = store_of(master, share_memory=share_memory, chunk_bytes=chunk_bytes)
    with store, mock.patch.object(reading, "MAX_PARTS", 64):
        true = store.put(BATCH)
        objects, leased = dict(master.objects), []
        record = json.loads(true.to_json())
        (sentinel, true_part_bytes) = record["copies"][0]
        record |= changes
        record["copies"] = [[sentinel, true_part_bytes if part_bytes is None else part_bytes]] * copies
        master.calls.clear()
        acquire = transport.pool.acquire
        transport.pool.acquire = lambda nbytes: (leased.append(nbytes), acquire(nbytes))[1]  # type: ignore[method-assign]
        failure: StoreError | None = None
        try:
            ref = BatchRef.from_json(json.dumps(record))
            with store.get(ref, as_lists=True) as batch:
                assert batch == BATCH
        except (IntegrityError, ObjectNotFound) as error:
            failure = error
        if failure is None:
            assert (ref.key, ref.nbytes, ref.digest) == (true.key, true.nbytes, true.digest)
        if isinstance(failure, ObjectNotFound):  # it names parts that the store does not have
            parts = -(-record["nbytes"] // record["copies"][0][1])
            assert record["key"] != true.key or parts > -(-true.nbytes // true_part_bytes)
        assert all(nbytes <= true.nbytes + 64 * 64 for nbytes in leased)
        assert all(len(keys) <= 2 * 64 for _, keys in master.calls)
        assert master.objects == objects
    gc.collect()


@pytest.mark.parametrize("nbytes", [-5, 0, 10**30])
@pytest.mark.parametrize("part_bytes", [-1, 0, 1, 10**31])
def test_a_ref_that_came_by_pickle_is_believed_no_more(nbytes: int, part_bytes: int) -> None:
    master = Master(Lent("a"))
    transport, done, true = written(master)
    ref = dataclasses.replace(true, nbytes=nbytes, copies=(true.copies[0]._replace(part_bytes=part_bytes),))
    master.calls.clear()
    for use in (transport.get, transport.remove):
        with pytest.raises(IntegrityError, match="no put made the ref"):
            use(ref)
    assert not any("/b/" in key for _, keys in master.calls for key in keys)
    assert keys_of(done)[0] in master.objects


@pytest.mark.parametrize(("copies", "sentinels"), [(0, 0), (2, 1), (60, 1), (65, 65), (10_000, 10_000)])
def test_a_ref_of_copies_that_no_put_makes_sends_nobody_anywhere(copies: int, sentinels: int) -> None:
    master = Master(Lent("a"))
    transport, _, ref = written(master)
    named = [ref.copies[0]._replace(sentinel=f"holder/{number % sentinels}/epoch/0") for number in range(copies)]
    master.calls.clear()
    for use in (transport.get, transport.remove):
        with pytest.raises(IntegrityError, match=f"names {copies} copies with {sentinels} owners"):
            use(dataclasses.replace(ref, copies=tuple(named)))
    assert not master.calls


def test_a_larger_object_than_the_ref_says_is_refused_before_a_buffer_is_taken() -> None:
    transport, _, ref = written(Master(Lent("a")), share_memory=False)
    for nbytes in (ref.nbytes - 64, ref.nbytes + 64, 1 << 40):
        wrong = dataclasses.replace(ref, nbytes=nbytes, copies=(ref.copies[0]._replace(part_bytes=nbytes),))
        transport.leased.clear()
        with pytest.raises(IntegrityError, match=rf"bytes in the store, {frame.footprint(nbytes)} by its ref"):
            transport.get(wrong)
        assert not transport.leased
    with pytest.raises(StoreError):
        transport.get(dataclasses.replace(ref, nbytes=ref.nbytes - 1))
