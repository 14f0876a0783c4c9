"""What was put and not removed is published again after a restart of the master, once, and what cannot be is told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mooncake_store import StoreUnavailable, outstanding
from mooncake_store.frame import Frame
from mooncake_store.holder import Ask, Kept, ask_key
from mooncake_store.outstanding import Outstanding
from mooncake_store.placement import Copy, Part, Written, part_key
from mooncake_store.records import MAX_BYTES, Records
from tests.unit.store.store_master import Content, Held, Lent, Master, Transport, ref_of

PAYLOAD = bytes(range(250)) * 10


class Asked(Master):
    """A master with a holder beside it, which answers what it is asked as soon as somebody looks whether it did.

    Attributes:
        before: by epoch, memory of before a restart.
        refused: keys that it does not publish again.
        silent: whether the holder is too slow to answer yet.
        asks: what it was asked.
    """

    def __init__(self, *lent: Lent) -> None:
        super().__init__(*lent)
        self.before: dict[int, Lent] = {}
        self.refused: set[str] = set()
        self.silent = False
        self.asks: list[Ask] = []
        self._answered: set[str] = set()

    def restart_and_lend(self, after: Lent) -> None:
        """Every holder but this one ends."""
        self.before |= {lent.record.epoch: lent for lent in self.lent if lent.record.name == after.record.name}
        self.restart()
        self.lend(after)

    def exist(self, keys: Sequence[str]) -> list[bool]:
        for key in [key for key in self.objects if "/ask/" in key and key not in self._answered and not self.silent]:
            self._answered.add(key)
            self._answer(msgspec.msgpack.decode(self.records.read(key) or b"", type=Ask))
        return super().exist(keys)

    def _answer(self, ask: Ask) -> None:
        self.asks.append(ask)
        for wanted in ask.objects:
            nbytes = -(-(64 + wanted.part_bytes) // 64) * 64
            source = self.before[ask.epoch].bytes[wanted.offset :][:nbytes]
            wanted.frame.check(source)
            if wanted.key not in self.refused:
                offset = self._hole(self.lent[0], nbytes)
                assert offset is not None
                self.objects[wanted.key] = held = Held(self.lent[0], offset, nbytes, True)
                held.bytes[:] = source


class Process:
    """A process that puts: transport and what it remembers."""

    def __init__(self, master: Master, **rest: Any) -> None:
        client: Any = master
        self.transport = Transport(master, **rest)
        self.outstanding = Outstanding(client, Records(client), self.transport.owners)

    def put(self, payload: bytes = PAYLOAD) -> Written:
        written = self.transport.write(Content(payload))
        self.outstanding.add(written)
        return written

    def read(self, written: Written) -> bytes:
        return self.transport.get(ref_of(written)).bytes.tobytes()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outstanding, "ANSWER_SECONDS", 0.0)


def test_it_remembers_until_told() -> None:
    process = Process(Master(Lent("a")))
    first, second = process.put(), process.put()
    assert len(process.outstanding) == 2
    process.outstanding.discard(first.key)
    process.outstanding.discard(first.key)
    assert len(process.outstanding) == 1
    process.outstanding.discard(second.key)
    process.transport.master.calls.clear()
    process.outstanding.tick()
    assert not process.transport.master.calls  # nothing to look after


def test_a_tick_asks_one_thing_while_all_is_well() -> None:
    master = Asked(Lent("a"))
    process = Process(master)
    for _ in range(3):
        process.put()
    master.calls.clear()
    process.outstanding.tick()
    assert master.calls == [("exist", (master.lent[0].record.sentinel,))]


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 1000])
def test_what_a_restart_forgot_is_published_again_each_time(share_memory: bool, chunk_bytes: int | None) -> None:
    master = Asked(Lent("a"))
    process = Process(master, share_memory=share_memory, chunk_bytes=chunk_bytes)
    removed, first, second = process.put(), process.put(), process.put(PAYLOAD[::-1])
    process.transport.remove(ref_of(removed))
    process.outstanding.discard(removed.key)
    keys = {part.key for written in (first, second) for part in written.copies[0].parts}
    for epoch in (1, 2, 3):
        master.asks.clear()
        master.restart_and_lend(Lent("a", epoch=epoch))
        process.outstanding.tick()
        assert set(master.stored()) == keys
        assert (process.read(first), process.read(second)) == (PAYLOAD, PAYLOAD[::-1])
        assert [(ask.epoch, {wanted.key for wanted in ask.objects}) for ask in master.asks] == [(epoch - 1, keys)]
        process.outstanding.tick()
        assert len(master.asks) == 1
    assert len(process.outstanding) == 2


def test_what_is_removed_while_it_is_published_again_does_not_stay(caplog: pytest.LogCaptureFixture) -> None:
    master = Asked(Lent("a"))
    process = Process(master)
    kept, removed = process.put(), process.put()
    answer = master._answer

    def remove_meanwhile(ask: Ask) -> None:
        process.transport.remove(ref_of(removed))
        process.outstanding.discard(removed.key)
        answer(ask)

    master._answer = remove_meanwhile  # type: ignore[method-assign]
    master.restart_and_lend(Lent("a", epoch=1))
    process.outstanding.tick()
    assert set(master.stored()) == {part.key for part in kept.copies[0].parts}
    assert len(process.outstanding) == 1
    assert "is lost" not in caplog.text


@pytest.mark.parametrize("chunk_bytes", [None, 1000])
def test_what_is_removed_while_it_is_published_again_leaves_nothing(chunk_bytes: int | None) -> None:
    master = Asked(Lent("a"))
    process = Process(master, chunk_bytes=chunk_bytes)
    removed, kept = process.put(), process.put()
    master.restart_and_lend(Lent("a", epoch=1))

    def remove() -> None:  # between the request and the answer
        process.outstanding.discard(removed.key)
        process.transport.remove(ref_of(removed))

    master.meanwhile["write"] = remove
    process.outstanding.tick()
    assert process.read(kept) == PAYLOAD
    assert not master.stored(removed.key)


def test_a_master_restarted_once_more_before_the_holder_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outstanding, "ANSWER_SECONDS", 1.0)
    master = Asked(Lent("a"))
    process = Process(master)
    written = process.put()
    master.silent = True
    master.restart_and_lend(Lent("a", epoch=1))
    restarting = threading.Timer(0.2, master.restart_and_lend, [Lent("a", epoch=2)])
    restarting.start()
    process.outstanding.tick()
    restarting.join()
    master.silent = False
    for _ in range(2):
        process.outstanding.tick()
    assert "is lost" not in caplog.text
    assert len(process.outstanding) == 1
    assert process.read(written) == PAYLOAD


def test_it_is_behind_from_a_restart_until_all_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outstanding, "ANSWER_SECONDS", 60.0)
    master = Asked(Lent("a"))
    process = Process(master)
    process.put()
    assert not process.outstanding.is_behind()
    master.silent = True
    master.restart_and_lend(Lent("a", epoch=1))
    process.outstanding.tick()
    assert process.outstanding.is_behind()
    master.silent = False
    process.outstanding.tick()
    assert not process.outstanding.is_behind()


def test_what_the_holder_lost_is_told_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    master = Asked(Lent("a"))
    process = Process(master, chunk_bytes=1000)
    kept, lost = process.put(), process.put()
    master.refused = {part_key(lost.key, 0, 1)}  # one part of three
    master.restart_and_lend(Lent("a", epoch=1))
    process.outstanding.tick()
    assert f"batch {lost.key} is lost" in caplog.text
    assert kept.key not in caplog.text
    assert len(process.outstanding) == 1
    assert process.read(kept) == PAYLOAD


def test_a_holder_that_does_not_come_back_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    master = Asked(Lent("a"))
    process = Process(master)
    lost = process.put()
    master.restart()
    for _ in range(3):
        process.outstanding.tick()
    assert len(process.outstanding) == 1
    assert not caplog.records
    monkeypatch.setattr(outstanding, "KEEP_SECONDS", -1.0)
    process.outstanding.tick()
    assert f"batch {lost.key} is lost: the holder of its memory is gone" in caplog.text
    assert len(process.outstanding) == 0
    process.outstanding.tick()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("refused", [True, False])
def test_a_batch_is_not_lost_while_it_has_another_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    monkeypatch.setattr(outstanding, "KEEP_SECONDS", -1.0)
    first, second = Lent("a"), Lent("b")
    master = Asked(first, second)
    process = Process(master, replica_num=2)
    written = process.put()
    (other,) = written.copies[1].parts
    master.restart_and_lend(Lent("a", epoch=1))
    # The other holder was fast: its copy is back, in memory that is known.
    master.objects[second.record.sentinel] = Held(second, 0, 64, True)
    assert other.offset is not None
    master.objects[other.key] = Held(second, other.offset, 2624, True)
    master.refused = {part_key(written.key, 0, 0)} if refused else set()
    process.outstanding.tick()
    assert len(process.outstanding) == 1
    assert not caplog.records
    del master.objects[second.record.sentinel]
    process.outstanding.tick()
    process.outstanding.tick()
    assert len(process.outstanding) == (0 if refused else 1)
    assert ("is lost" in caplog.text) is refused


def test_what_others_removed_is_forgotten_and_what_was_forgotten_is_not() -> None:
    first, second = Lent("a"), Lent("b")
    master = Asked(first, second)
    process = Process(master)
    kept, removed = process.put(), process.put()
    master.remove(removed.copies[0].parts[0].key)
    process.outstanding.forget_removed()
    assert len(process.outstanding) == 1
    master.restart()
    process.outstanding.forget_removed()
    assert len(process.outstanding) == 1  # its memory may come back
    master.failures["exist"] = [StoreUnavailable("no answer")]
    with pytest.raises(StoreUnavailable):
        process.outstanding.forget_removed()
    assert len(process.outstanding) == 1
    process.outstanding.discard(kept.key)


def test_a_master_that_does_not_answer_changes_nothing() -> None:
    master = Asked(Lent("a"))
    process = Process(master)
    written = process.put()
    for operation in ("exist", "allocate", "locate"):
        if operation != "exist":
            master.restart_and_lend(Lent("a", epoch=master.lent[0].record.epoch + 1))
        master.failures[operation] = [StoreUnavailable("no answer")]
        with pytest.raises(StoreUnavailable):
            process.outstanding.tick()
        master.failures.clear()
        process.outstanding.tick()
        assert process.read(written) == PAYLOAD
    assert len(process.outstanding) == 1


def test_requests_are_numbered_behind_those_of_others() -> None:
    master = Asked(Lent("a"))
    process, other = Process(master), Process(master)
    mine, theirs = process.put(), other.put()
    after = Lent("a", epoch=1)
    master.restart_and_lend(after)
    process.outstanding.tick()
    other.outstanding.tick()
    assert [[wanted.key for wanted in ask.objects] for ask in master.asks] == [
        [part.key for part in written.copies[0].parts] for written in (mine, theirs)
    ]
    assert [key for key in master.objects if "/ask/" in key] == [
        ask_key(after.record.holder, 1, number) for number in (0, 1)
    ]


def test_many_objects_are_asked_for_in_several_requests() -> None:
    master = Asked(Lent("a"))
    process = Process(master)
    every = [process.put(bytes([n % 256])) for n in range(2 * outstanding._PER_ASK + 1)]
    master.restart_and_lend(Lent("a", epoch=1))
    process.outstanding.tick()
    assert [len(ask.objects) for ask in master.asks] == [outstanding._PER_ASK, outstanding._PER_ASK, 1]
    assert len(master.stored()) == len(process.outstanding) == len(every)


def test_the_largest_request_fits_a_record() -> None:
    """A run id of 128 characters and every number as long as it can be."""
    key = part_key(f"run/{'x' * 128}/b/{'0' * 32}", 63, 65535)
    largest = 2**63 - 1
    kept = Kept(key, largest, bytes(16), 65535, 65536, largest, largest, bytes(16))
    assert len(msgspec.msgpack.encode(Ask(2**32, [kept] * outstanding._PER_ASK))) + 24 <= MAX_BYTES


def test_a_part_whose_place_is_unknown_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    old = Lent("a")
    master = Asked(old)
    process = Process(master)
    part = Part("run/r/b/x/0.0", Frame(bytes(16), 0, 1, 8, 8), None)
    process.outstanding.add(Written("run/r/b/x", "", (Copy(old.record, (part,), ""),)))
    master.restart_and_lend(Lent("a", epoch=1))
    process.outstanding.tick()
    assert not any(ask.objects for ask in master.asks)
    assert "run/r/b/x is lost" in caplog.text
