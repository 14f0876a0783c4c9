"""Placement: parts, the order that makes a copy safe, and what happens where a copy cannot be made."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store import ConfigError, StoreClosed, StoreFull, StoreUnavailable, frame, placement, sinks
from mooncake_store.client import Limits
from mooncake_store.placement import frames, part_key
from mooncake_store.rows import STEP_BYTES, Sink
from mooncake_store.segment import Mapping
from mooncake_store.sinks import WINDOW_BYTES
from mooncake_store.worker import Worker
from tests.unit.store.store_master import Content, Lent, Master, Transport, ref_of

PAYLOAD = bytes(range(250)) * 10
BEFORE = 0x55  # what is in memory before it is lent again


def lent(name: str = "a", **rest: Any) -> Lent:
    segment = Lent(name, **rest)
    segment.bytes[64:] = BEFORE
    return segment


def order(master: Master) -> list[str]:
    """The operations on batches and sentinels."""
    return [operation for operation, keys in master.calls if any("/b/" in key or "/epoch/" in key for key in keys)]


def untouched(segment: Lent) -> bool:
    return bool((segment.bytes[64:] == BEFORE).all())


# --- arithmetic -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_parts_make_up_the_object(nbytes: int, part_bytes: int) -> None:
    part_bytes = max(part_bytes, -(-nbytes // 1000))
    parts = frames(bytes(16), nbytes, part_bytes)
    assert [part.part for part in parts] == list(range(len(parts)))
    assert sum(part.part_bytes for part in parts) == nbytes
    assert all(part.part_bytes == part_bytes for part in parts[:-1])
    assert 0 < parts[-1].part_bytes <= part_bytes
    assert {(part.parts, part.object_bytes, part.id) for part in parts} == {(len(parts), nbytes, bytes(16))}


@pytest.mark.parametrize(
    ("nbytes", "chunk_bytes", "expected"),
    [
        (10, None, [10]), (10, 10, [10]), (10, 11, [10]), (10, 4, [4, 4, 2]), (8, 4, [4, 4]),
        (10, 1, [3, 3, 3, 1]),  # not more than MAX_PARTS
    ],
)  # fmt: skip
def test_an_object_is_split_by_chunk_bytes(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, chunk_bytes: int | None, expected: list[int]
) -> None:
    monkeypatch.setattr(placement, "MAX_PARTS", 4)
    transport = Transport(Master(lent()), chunk_bytes=chunk_bytes)
    (copy,) = transport.write(Content(PAYLOAD[:nbytes])).copies
    assert [part.frame.part_bytes for part in copy.parts] == expected


def test_keys_are_fresh_and_name_copy_and_part() -> None:
    transport = Transport(Master(lent("a"), lent("b")), chunk_bytes=1000, replica_num=2)
    first, second = transport.write(Content(PAYLOAD)), transport.write(Content(PAYLOAD))
    assert first.key != second.key
    stem, _, identity = first.key.rpartition("/")
    assert stem == "run/r/b"
    for number, copy in enumerate(first.copies):
        assert [part.key for part in copy.parts] == [part_key(first.key, number, n) for n in range(3)]
        assert {part.frame.id.hex() for part in copy.parts} == {identity}
    assert first.digest == PAYLOAD[:16].hex()


# --- the order that makes it safe -------------------------------------------------------------------------------------


class Looking(Master):
    """Looks at a segment whenever a sentinel is asked for."""

    seen: list[bool]
    watched: Lent

    def exist(self, keys: Any) -> list[bool]:
        self._look(keys)
        return super().exist(keys)

    def locate(self, keys: Any) -> list[Any]:
        self._look(keys)
        return super().locate(keys)

    def _look(self, keys: Any) -> None:
        if any("/epoch/" in key for key in keys):
            self.seen.append(untouched(self.watched))


@pytest.mark.parametrize("chunk_bytes", [None, 1000])
@pytest.mark.parametrize("share_memory", [True, False])
def test_nothing_is_written_before_the_sentinel_was_found(share_memory: bool, chunk_bytes: int | None) -> None:
    segment = lent()
    master = Looking(segment)
    master.seen, master.watched = [], segment
    transport = Transport(master, share_memory, chunk_bytes)
    (copy,) = transport.write(Content(PAYLOAD)).copies
    in_place, sent = ["allocate", "commit", "locate", "exist"], ["allocate", "exist", "write", "commit", "locate"]
    assert [operation for operation, _ in groupby(order(master))] == (in_place if share_memory else sent)
    assert len(copy.parts) == (3 if chunk_bytes else 1)
    assert master.seen == ([True] if share_memory else [True, False]), "before it is written; what is sent also behind"
    assert not untouched(segment)
    assert transport.get(ref_of(transport.write(Content(PAYLOAD)))).bytes.tobytes() == PAYLOAD


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_forgotten_sentinel_writes_nothing(share_memory: bool) -> None:
    segment = lent()
    master = Master(segment)
    transport = Transport(master, share_memory)
    transport.owners.all()
    del master.objects[segment.record.sentinel]
    with pytest.raises(StoreUnavailable, match="forgotten segment a"):
        transport.write(Content(PAYLOAD))
    assert untouched(segment)
    assert not master.stored()
    assert "revoke" in order(master)


def test_a_put_goes_on_when_a_holder_lends_again_after_a_restart() -> None:
    before = lent("a")
    master = Master(before)
    transport = Transport(master, limits=Limits(put=5.0))
    transport.owners.all()
    after = lent("a", epoch=1)
    master.restart()
    master.lend(after)
    (copy,) = transport.write(Content(PAYLOAD)).copies
    assert copy.owner == after.record
    assert untouched(before)


def test_a_put_outlives_a_master_that_does_not_answer_for_a_while() -> None:
    master = Master(lent())
    silent = [StoreUnavailable("no answer") for _ in range(3)]
    master.failures["exist"] = [*silent]  # the list of holders, and the looks between attempts
    transport = Transport(master, limits=Limits(put=5.0))
    assert transport.get(ref_of(transport.write(Content(PAYLOAD)))).bytes.tobytes() == PAYLOAD


def test_memory_that_is_used_again_is_unreadable_until_it_is_whole() -> None:
    """What lay there was a finished batch; its frame goes first."""
    segment = lent()
    master = Master(segment)
    transport = Transport(master)
    old = transport.write(Content(PAYLOAD))
    (part,) = old.copies[0].parts
    assert part.offset is not None
    memory = segment.bytes[part.offset :]
    part.frame.check(memory)
    master.remove(part.key)

    class Dying(Content):
        def fill(self, sink: Sink) -> None:
            sink.reserve(0, self.nbytes)[:] = BEFORE
            assert memory[: len(frame.COMMIT)].tobytes() == bytes(len(frame.COMMIT))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transport.write(Dying(PAYLOAD))
    assert not master.stored()
    with pytest.raises(Exception, match="no commit word"):
        part.frame.check(memory)


def test_a_holder_that_ended_meanwhile_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    master = Master(lent())
    monkeypatch.setattr(Mapping, "holder_lives", lambda _: False)
    with pytest.raises(StoreUnavailable, match="holder ended while"):
        Transport(master).write(Content(PAYLOAD))
    assert not master.stored()


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_writer_that_was_silent_for_too_long_stops_between_steps(share_memory: bool) -> None:
    master = Master(Lent("a", nbytes=1 << 22))
    transport = Transport(master, share_memory)
    steps = 0

    def check() -> float:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise StoreUnavailable("silent")
        return math.inf

    transport.check = check
    with pytest.raises(StoreUnavailable, match="silent"):
        transport.write(Content(bytes(range(256)) * (6 * STEP_BYTES // 256)))
    assert steps == 3
    assert not master.stored()
    assert transport.pool.lent_bytes == 0
    assert transport.write(Content(PAYLOAD)).copies


def test_what_was_freed_while_it_was_written_is_not_acknowledged() -> None:
    master = Master(lent())
    transport = Transport(master)

    class Swept(Content):
        def fill(self, sink: Sink) -> None:
            super().fill(sink)
            master.remove_matching("^run/")

    with pytest.raises(StoreUnavailable, match="was freed while it was written"):
        transport.write(Swept(PAYLOAD))
    assert not master.stored()


def test_a_restart_while_it_is_written_frees_nothing() -> None:
    """What was put then is published again, like all else."""
    master = Master(lent())
    transport = Transport(master)

    class Restarting(Content):
        def fill(self, sink: Sink) -> None:
            super().fill(sink)
            master.restart()

    assert transport.write(Restarting(PAYLOAD)).copies


def test_a_store_that_is_closed_while_it_sends_says_so() -> None:
    master = Master(Lent("a", nbytes=1 << 26))
    transport = Transport(master, share_memory=False)

    class Closed(Content):
        def fill(self, sink: Sink) -> None:
            transport.writer.close()
            super().fill(sink)

    with pytest.raises(StoreClosed, match="was closed meanwhile"):
        transport.write(Closed(bytes(3 * WINDOW_BYTES)))
    assert not master.stored()
    assert transport.pool.lent_bytes == 0


def test_the_run_is_claimed_before_anything_is_allocated() -> None:
    master = Master(lent("a"), lent("b"))
    transport = Transport(master)

    def refuse(segment: str) -> None:
        assert segment == "a"
        raise ConfigError("run_id is in use")

    with pytest.raises(ConfigError):
        transport.writer.put("run/r/b", Content(PAYLOAD), 1, refuse)
    assert not order(master)


# --- where a copy cannot be made --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_copy_that_lands_elsewhere_is_revoked(share_memory: bool) -> None:
    full, other = lent("a"), lent("b")
    full.largest = 0
    master = Master(full, other)
    transport = Transport(master, share_memory)
    written = transport.write(Content(PAYLOAD))
    assert [copy.owner.name for copy in written.copies] == ["b"]
    assert untouched(full)
    revoked = [keys for operation, keys in master.calls if operation == "revoke"]
    assert revoked == [(part_key(written.key, 0, 0),)]
    assert master.stored() == [part_key(written.key, 0, 0)]
    assert transport.get(ref_of(written)).bytes.tobytes() == PAYLOAD


@pytest.mark.parametrize("share_memory", [True, False])
def test_two_copies_have_two_owners_or_none_is_kept(share_memory: bool) -> None:
    first, second = lent("a"), lent("b")
    master = Master(first, second)
    transport = Transport(master, share_memory, replica_num=2)
    payload = Content(PAYLOAD)
    written = transport.write(payload)
    assert [copy.owner.name for copy in written.copies] == ["a", "b"]
    assert transport.pool.lent_bytes == 0
    for number, copy in enumerate(written.copies):
        held = master.objects[part_key(written.key, number, 0)]
        assert held.lent.record == copy.owner
        copy.parts[0].frame.check(held.bytes)
        assert held.bytes[64:][: len(PAYLOAD)].tobytes() == PAYLOAD

    second.largest = 0  # it would land in the first, beside the other copy
    before = master.stored()
    with pytest.raises(StoreFull, match="segment b has no room"):
        transport.write(Content(PAYLOAD))
    assert master.stored() == before
    assert transport.pool.lent_bytes == 0


def test_too_few_owners_are_told_with_both_numbers() -> None:
    master = Master(lent())
    transport = Transport(master, replica_num=2)
    with pytest.raises(StoreUnavailable, match="1 segment holders serve this master, 2 replicas need one each"):
        transport.write(Content(PAYLOAD))
    with pytest.raises(StoreFull, match="nobody lends memory to this master: run `miles-mooncake holder`"):
        Transport(Master()).write(Content(PAYLOAD))
    assert not order(master)
    assert not transport.claimed


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 1500])
def test_a_fragmented_store_is_offered_pieces(
    monkeypatch: pytest.MonkeyPatch, share_memory: bool, chunk_bytes: int | None
) -> None:
    monkeypatch.setattr(placement, "PIECE_BYTES", 1000)
    segment = lent()
    segment.largest = frame.footprint(1000)
    master = Master(segment)
    transport = Transport(master, share_memory, chunk_bytes)
    written = transport.write(Content(PAYLOAD))
    assert [part.frame.part_bytes for part in written.copies[0].parts] == [1000, 1000, 500]
    assert len(master.stored()) == 3
    assert transport.get(ref_of(written)).bytes.tobytes() == PAYLOAD


def test_a_buffer_too_small_for_two_windows_is_told() -> None:
    transport = Transport(Master(lent(nbytes=1 << 22)), share_memory=False, limits=Limits(put=5.0))
    transport.pool.max_bytes = 2 * STEP_BYTES
    with pytest.raises(StoreFull, match="raise local_buffer_size"):
        transport.write(Content(bytes(1 << 20)))


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 1 << 20, 300_001])
def test_what_exceeds_a_window_is_sent_in_several(share_memory: bool, chunk_bytes: int | None) -> None:
    content = np.random.default_rng(0).integers(0, 255, 3_000_001, dtype=np.uint8).tobytes()
    transport = Transport(Master(lent(nbytes=1 << 23)), share_memory, chunk_bytes)
    transport.pool.max_bytes = 1 << 21
    written = transport.write(Content(content))
    transport.pool.max_bytes = 1 << 24
    assert transport.get(ref_of(written)).bytes.tobytes() == content
    assert transport.pool.lent_bytes == 0


def test_the_first_windows_are_short() -> None:
    nbytes, sent = 5 * WINDOW_BYTES, list[int]()
    parts = frames(bytes(16), nbytes, nbytes)
    buffer = np.zeros(sinks.window_buffer(parts, 1 << 30), dtype=np.uint8)
    sender = Worker("test sender")
    try:
        windows = sinks.Windows(parts, lambda: None, buffer, lambda *what: sent.append(what[2].size), sender)
        Content(bytes(nbytes)).write(windows)
    finally:
        sender.close(60.0)
    assert sum(sent) >= nbytes
    assert sent[0] <= sinks.FIRST_BYTES < sent[1] <= sinks.GROWTH * sinks.FIRST_BYTES < sent[2] <= WINDOW_BYTES
    assert len(sent) <= 9, "and the others full"


def test_a_window_that_cannot_be_sent_ends_the_put() -> None:
    master = Master(lent(nbytes=1 << 23))
    transport = Transport(master, share_memory=False)
    transport.pool.max_bytes = 1 << 21
    master.failures["write"] = [None, StoreUnavailable("its owner does not answer")]
    with pytest.raises(StoreUnavailable, match="its owner"):
        transport.write(Content(bytes(3_000_000)))
    assert not master.stored()
    assert transport.pool.lent_bytes == 0
    assert transport.write(Content(PAYLOAD)).copies


def test_a_batch_that_changes_while_its_copies_are_made_is_no_batch() -> None:
    class Changing(Content):
        def write(self, sink: Sink) -> str:
            super().write(sink)
            return f"{self.written:032x}"

    master = Master(lent("a"), lent("b"))
    with pytest.raises(ValueError, match="changed while it was put"):
        Transport(master, replica_num=2).write(Changing(PAYLOAD))
    assert not master.stored()


def test_pieces_are_no_larger_than_what_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PIECE_BYTES", 1000)
    segment = lent()
    segment.largest = 64
    master = Master(segment)
    with pytest.raises(StoreFull):
        Transport(master, chunk_bytes=500).write(Content(PAYLOAD))
    assert [operation for operation in order(master) if operation == "allocate"] == ["allocate"]
    assert not master.stored()


def test_what_no_segment_can_ever_hold_is_not_waited_for() -> None:
    master = Master(lent("a", nbytes=1 << 16), lent("b"))
    transport = Transport(master, limits=Limits(put=60.0))
    with pytest.raises(
        StoreFull, match=r"exceeds the 1048576 bytes of the largest segment.*global_segment_size"
    ) as caught:
        transport.write(Content(bytes(1 << 20)))
    assert not caught.value.retryable
    assert not order(master)


def test_a_full_store_is_waited_for() -> None:
    master = Master(lent())
    master.failures["allocate"] = [StoreFull("full"), StoreFull("full")]
    with pytest.raises(StoreFull):
        Transport(master).write(Content(PAYLOAD))
    assert Transport(master, limits=Limits(put=5.0)).write(Content(PAYLOAD)).copies
    assert order(master).count("allocate") == 3


@pytest.mark.parametrize("operation", ["allocate", "write", "commit", "locate"])
def test_a_failure_at_any_step_leaves_nothing(operation: str) -> None:
    for share_memory in (True, False):
        if share_memory and operation == "write":
            continue  # in place
        segment = lent()
        master = Master(segment)
        transport = Transport(master, share_memory)
        transport.owners.all()
        master.failures[operation] = [StoreUnavailable("it went")]
        with pytest.raises(StoreUnavailable, match="it went"):
            transport.write(Content(PAYLOAD))
        assert not master.stored()
        assert transport.pool.lent_bytes == 0
        transport.write(Content(PAYLOAD))  # the next one works


def test_an_interrupted_allocation_is_given_back() -> None:
    """Ctrl-C during Mooncake's call is raised when that returns, with the memory allocated."""
    master = Master(lent())
    transport = Transport(master)
    allocate = master.allocate

    def interrupted(*arguments: Any) -> None:
        allocate(*arguments)
        raise KeyboardInterrupt

    master.allocate = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        transport.write(Content(PAYLOAD))
    assert not master.stored()


def test_a_copy_is_aligned() -> None:
    master = Master(lent())
    transport = Transport(master, chunk_bytes=777)
    for _ in range(3):
        for part in transport.write(Content(PAYLOAD)).copies[0].parts:
            assert part.offset is not None
            assert part.offset % 64 == 0
