"""Which holders are known: what they say is believed where it can be read, and mapped where that works."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_store import StoreUnavailable
from mooncake_store.bounded import bounded
from mooncake_store.client import Location
from mooncake_store.holder import slot_key
from mooncake_store.owners import Owners
from mooncake_store.segment import CannotMap, Mapping
from tests.unit.store.store_master import Lent, Master


def owners_of(master: Any, share_memory: bool = True) -> Owners:
    return Owners(master, master.records, share_memory)


def test_holders_of_this_node_come_first() -> None:
    far, near = Lent("far"), Lent("near")
    far.record = msgspec.structs.replace(far.record, boot_id="another host")
    master = Master(far, near)
    owners = owners_of(master)
    assert [record.name for record in owners.all()] == ["near", "far"]
    master.calls.clear()
    owners.all()
    assert not master.calls  # known


def test_a_slot_that_holds_no_record_is_told_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    segment = Lent("a")
    master = Master(segment)
    for slot, payload in ((1, b"{"), (2, b'{"holder": 5}')):
        assert master.records.claim(slot_key(slot), payload, "a")
    assert owners_of(master).all() == [segment.record]
    assert [record.args[0] for record in caplog.records if record.args] == [slot_key(1), slot_key(2)]


def test_a_holder_that_says_so_twice_is_one() -> None:
    """Two copies of a batch must not come to lie in one memory."""
    segment = Lent("a")
    master = Master(segment)
    assert master.records.claim(slot_key(5), msgspec.json.encode(segment.record), "a")
    assert owners_of(master).all() == [segment.record]


@pytest.mark.parametrize("operation", ["exist", "locate", "read"])
def test_a_master_that_does_not_answer_makes_no_holder_unknown(operation: str) -> None:
    segment = Lent("a")
    master = Master(segment)
    owners = owners_of(master)
    owners.all()
    for look in (owners.refresh, owners.changed):
        master.failures[operation] = [StoreUnavailable("no answer")]
        if look == owners.refresh:
            with pytest.raises(StoreUnavailable):
                look()
        else:
            assert look() is False
        assert owners.all() == [segment.record]


def test_changed_tells_whether_other_memory_is_lent() -> None:
    first, second = Lent("a"), Lent("a", epoch=1)
    master = Master(first)
    owners = owners_of(master)
    assert owners.changed()  # nothing was known
    assert not owners.changed()
    master.restart()
    master.lend(second)
    assert owners.changed()
    assert owners.all() == [second.record]


def test_the_owner_of_a_place_is_who_lends_it_now() -> None:
    first, second = Lent("a"), Lent("a", epoch=1)
    master = Master(first)
    owners = owners_of(master)

    def at(segment: Lent, offset: int, nbytes: int = 64) -> Location:
        return Location(segment.record.endpoint, segment.record.base + offset, nbytes)

    assert owners.of(at(first, 0)) == first.record
    assert owners.of(at(first, first.record.nbytes - 64)) == first.record
    for outside in (at(first, -64), at(first, first.record.nbytes - 63), at(first, 0, first.record.nbytes + 1)):
        assert owners.of(outside) is None
    assert owners.of(Location("stranger", first.record.base, 64)) is None
    master.restart()
    master.lend(second)
    assert owners.of(at(second, 64)) == second.record  # same endpoint, other memory


def test_a_segment_is_mapped_once_and_let_go_when_it_is_lent_no_more() -> None:
    segment = Lent("a")
    master = Master(segment)
    owners = owners_of(master)
    record = owners.all()[0]
    mapping = owners.mapping(record, writable=False)
    assert mapping is not None
    assert owners.mapping(record, writable=False) is mapping
    assert owners.mapping(record, writable=True) is not mapping
    segment.bytes[100] = 7
    assert mapping.bytes[100] == 7
    assert not mapping.bytes.flags.writeable
    view = mapping.bytes[100:101]
    del mapping
    master.restart()
    master.lend(Lent("a", epoch=1))
    owners.refresh()
    assert not owners._mapped
    assert view[0] == 7  # a view outlives what it was made from


def resident(mapping: Mapping) -> int:
    """Bytes of a mapping that are in this process's page table."""
    address, inside = mapping.bytes.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            inside = start <= address < end
        elif inside and first == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError("it is not mapped")


def test_a_writer_has_all_pages_before_it_writes() -> None:
    segment = Lent("a", nbytes=200 << 20)
    mapping, reading = Mapping(segment.record, writable=True), Mapping(segment.record, writable=False)
    deadline = time.monotonic() + 60
    while resident(mapping) < segment.record.nbytes:
        assert time.monotonic() < deadline, f"{resident(mapping)} bytes of {segment.record.nbytes} are there"
        time.sleep(0.01)
    assert resident(reading) < 1 << 20
    assert not any(thread.name == "mooncake pages" and thread.join(60) for thread in threading.enumerate())
    view = weakref.ref(mapping.bytes)
    del mapping
    gc.collect()
    assert view() is None


@pytest.mark.parametrize("writable", [True, False])
def test_a_fifo_in_the_place_of_a_segment_holds_nobody(tmp_path: Path, writable: bool) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    record = msgspec.structs.replace(Lent("a").record, path=str(fifo))

    def map_it() -> str:
        with pytest.raises(CannotMap):
            Mapping(record, writable)
        return "refused"

    assert bounded(map_it, 5) == "refused"


@pytest.mark.parametrize("writable", [True, False])
def test_a_record_cannot_make_a_file_of_the_user_a_segment(tmp_path: Path, writable: bool) -> None:
    segment = Lent("a")
    file = tmp_path / "precious"
    file.write_bytes(segment.bytes.tobytes())  # the probe is in it
    path = file
    if not writable:
        path = tmp_path / "link"
        path.symlink_to(file)
    record = msgspec.structs.replace(segment.record, path=str(path), inode=file.stat().st_ino)
    with pytest.raises(CannotMap):
        Mapping(record, writable)


def test_without_shared_memory_nothing_is_mapped(caplog: pytest.LogCaptureFixture) -> None:
    master = Master(Lent("a"))
    owners = owners_of(master, share_memory=False)
    assert owners.mapping(owners.all()[0], writable=False) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"path": ""}, "could not make shared memory"),
        ({"path": "/proc/self/fd/999999"}, "No such file"),
        ({"path": "/proc/self/exe"}, "another file"),
        ({"path": "/proc/self\0/fd/3"}, "null"),
        ({"path": "/proc/self/fd/3", "nbytes": 2**70}, "."),
        ({"pid": 2**62}, "."),
        ({"inode": 1}, "another PID namespace"),
        ({"nbytes": 4096}, "another PID namespace"),
        ({"probe": "00" * 64}, "the probe is not where"),
        ({"probe_at": 64}, "the probe is not where"),
        ({"pid": 2**22 + 1}, "No such process|Invalid"),
        ({"boot_id": "another"}, "another host"),
    ],
)
def test_what_cannot_be_mapped_says_why_once(
    caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    caplog.set_level(logging.WARNING)
    segment = Lent("a")
    wrong = msgspec.structs.replace(segment.record, **change)
    with pytest.raises(CannotMap, match=reason):
        Mapping(wrong, writable=True)
    owners = owners_of(Master(segment))
    for epoch in (0, 1):
        assert owners.mapping(msgspec.structs.replace(wrong, epoch=epoch), writable=True) is None
    if "boot_id" not in change:  # another host's memory is no surprise
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "travel over the network" in caplog.text
    else:
        assert not caplog.records
