"""Records: a claim is a put that is read back; what is read is whole, bounded, and checked."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mooncake_store import IntegrityError, ObjectLost, ObjectNotFound, StoreError, StoreFull, StoreUnavailable
from mooncake_store import records as module
from mooncake_store.records import MAX_BYTES, Records
from tests.unit.store.store_master import Master

LARGEST = MAX_BYTES - 24  # digest and token come with it


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Master:
    monkeypatch.setattr(module, "REPLACED_SECONDS", 0.05)
    return Master()


def records_of(master: Any) -> Records:
    return Records(master)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(LARGEST)])
def test_what_was_claimed_or_replaced_is_read(master: Master, payload: bytes) -> None:
    records = records_of(master)
    assert records.read("k") is None
    assert records.claim("k", payload, "a")
    assert records_of(master).read("k") == payload
    records.replace("k", payload[1:] + b"!", "a")
    assert records.read("k") == payload[1:] + b"!"


def test_a_claim_is_won_once(master: Master) -> None:
    one, other = records_of(master), records_of(master)
    assert one.claim("k", b"same", "a")
    assert not other.claim("k", b"same", "a")  # equal bytes are no claim of one's own
    assert not one.claim("k", b"same", "a")
    assert one.read("k") == b"same"
    assert sum(operation == "allocate" for operation, _ in master.calls) == 1


@pytest.mark.parametrize("seen", [None, b""], ids=["not found", "being replaced"])
def test_a_claim_that_is_not_seen_at_once_is_ours(
    seen: bytes | None, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = records_of(master)
    later, early = records._stored_under, [seen]
    monkeypatch.setattr(records, "_stored_under", lambda key: early.pop() if early else later(key))
    assert records.claim("k", b"mine", "a")
    assert not early
    monkeypatch.setattr(records, "_stored_under", lambda _: seen)
    assert not records.claim("other", b"mine", "a"), "never seen"


def test_a_claim_that_was_lost_between_two_questions_is_told_and_undoes_nothing(master: Master) -> None:
    """Both saw no record; the other was faster."""
    one, other = records_of(master), records_of(master)
    master.meanwhile["allocate"] = lambda: other.claim("k", b"theirs", "a")
    assert not one.claim("k", b"mine", "a")
    assert one.read("k") == b"theirs"
    assert not any(operation in ("revoke", "remove") for operation, _ in master.calls)


@pytest.mark.parametrize("error", [StoreUnavailable("no answer", code=-900), StoreFull("full", code=-200)])
def test_a_claim_that_failed_undoes_nothing_of_another(master: Master, error: StoreError) -> None:
    """The other's record appeared after the first question; an allocation that failed owns nothing under the key."""
    one, other = records_of(master), records_of(master)
    master.meanwhile["allocate"] = lambda: other.claim("k", b"theirs", "a")
    master.failures["allocate"] = [None, error]
    with pytest.raises(type(error)):
        one.claim("k", b"mine", "a")
    assert one.read("k") == b"theirs"


@pytest.mark.parametrize("operation", ["write", "commit"])
def test_a_claim_that_broke_off_leaves_the_key_free(master: Master, operation: str) -> None:
    records = records_of(master)
    master.failures[operation] = [StoreUnavailable("no answer")]
    with pytest.raises(StoreUnavailable):
        records.claim("k", b"mine", "a")
    assert not master.objects
    assert records.claim("k", b"mine", "a")


def test_a_claim_that_was_acknowledged_but_not_stored_is_not_ours() -> None:
    """Mooncake answers success to both of two that put one key, and keeps the first."""

    class Keeping(Master):
        def write(self, *_: Any) -> None: ...

    assert not records_of(Keeping()).claim("k", b"mine", "a")


@pytest.mark.parametrize("nbytes", [LARGEST + 1, 10 * MAX_BYTES])
def test_a_record_has_a_largest_size(master: Master, nbytes: int) -> None:
    records = records_of(master)
    for write in (records.claim, records.replace):
        with pytest.raises(ValueError, match=f"{nbytes} bytes exceeds {MAX_BYTES}"):
            write("k", bytes(nbytes), "a")
    assert not master.calls


def test_a_larger_object_is_no_record_and_is_not_read(master: Master) -> None:
    records = records_of(master)
    master.allocate(["k"], [MAX_BYTES + 64], "a")
    master.commit(["k"])
    assert records.read("k") is None
    assert not any(operation == "read" for operation, _ in master.calls)


@pytest.mark.parametrize("at", [0, 7, 8, 23, 24, -1])
def test_any_changed_byte_is_found(master: Master, at: int) -> None:
    records = records_of(master)
    records.claim("k", b"payload", "a")
    master.objects["k"].bytes[at] ^= 1
    with pytest.raises(IntegrityError, match="'k' does not match its checksum"):
        records.read("k")


@pytest.mark.parametrize("nbytes", [1, 8, 23])
def test_an_object_too_short_for_a_record_is_found(master: Master, nbytes: int) -> None:
    master.allocate(["k"], [nbytes], "a")
    master.commit(["k"])
    with pytest.raises(IntegrityError):
        records_of(master).read("k")


@pytest.mark.parametrize("second", [b"", b"other", b"a longer one"])
def test_a_record_that_is_replaced_while_it_is_read_is_read_whole(master: Master, second: bytes) -> None:
    """Its length was asked for before, its bytes come after."""
    records, other = records_of(master), records_of(master)
    records.claim("k", b"first", "a")
    master.meanwhile["read"] = lambda: other.replace("k", second, "a")
    assert records.read("k") == second


@pytest.mark.parametrize("error", [ObjectNotFound("it went"), ObjectLost("its owner died")])
def test_a_record_whose_memory_is_gone_is_none(master: Master, error: StoreError) -> None:
    records = records_of(master)
    records.claim("k", b"payload", "a")
    master.failures["read"] = [error]
    assert records.read("k") is None


@pytest.mark.parametrize("operation", ["locate", "read"])
def test_a_master_that_does_not_answer_is_no_absent_record(master: Master, operation: str) -> None:
    records = records_of(master)
    records.claim("k", b"payload", "a")
    master.failures[operation] = [StoreUnavailable("no answer")]
    with pytest.raises(StoreUnavailable):
        records.read("k")


def test_threads_share_one_scratch(master: Master) -> None:
    records = records_of(master)
    wrong: list[str] = []

    def use(name: str) -> None:
        for number in range(20):
            key, payload = f"{name}/{number}", name.encode() * 100
            if not records.claim(key, payload, "a") or records.read(key) != payload:
                wrong.append(key)

    threads = [threading.Thread(target=use, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("code", [-703, -714])
def test_a_record_that_is_being_replaced_is_waited_for(code: int) -> None:
    master = Master()
    master.records.replace("run/r/beat", b"one", "a")
    master.failures["read"] = [StoreUnavailable("not ready", code=code), StoreUnavailable("not ready", code=code)]
    assert master.records.read("run/r/beat") == b"one"
    master.failures["read"] = [StoreUnavailable("no answer", code=-900)]
    with pytest.raises(StoreUnavailable, match="no answer"):
        master.records.read("run/r/beat")


def test_memory_that_a_restarted_master_believes_to_be_free_is_not_written(master: Master) -> None:
    """Somebody may be looking at it: what is not known is given back unwritten."""
    known = True
    records = Records(master, lambda segment: known and segment == "a")  # type: ignore[arg-type]
    for write in (records.claim, records.replace):
        for known in (False, True):
            segment = "b" if known else "a"
            with pytest.raises(StoreUnavailable, match=f"forgotten segment {segment}: it was restarted"):
                write("k", b"payload", segment)
            assert not master.objects
    assert master.order("write") == []
    assert records.claim("k", b"payload", "a")
    assert master.order("allocate", "write")[-2:] == ["allocate", "write"]
    records.replace("k", b"other", "a")
    assert records.read("k") == b"other"


def test_two_that_replace_a_record_at_once_are_told_apart(master: Master) -> None:
    one, other = records_of(master), records_of(master)
    assert one.claim("k", b"first", "a")
    master.meanwhile["allocate"] = lambda: other.replace("k", b"theirs", "a")
    with pytest.raises(StoreUnavailable, match="another process writes it"):
        one.replace("k", b"mine", "a")
    assert one.read("k") == b"theirs"
