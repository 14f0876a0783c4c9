"""The segment holder over a master in memory: fresh memory after a restart, and nothing kept of what failed."""

from __future__ import annotations

import gc
import mmap
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_store import StoreError, StoreFull, StoreUnavailable, records, segment
from mooncake_store import holder as module
from mooncake_store.client import Limits
from mooncake_store.encode import encode
from mooncake_store.frame import NBYTES
from mooncake_store.holder import Ask, Kept, SegmentHolder, ask_key, slot_key
from mooncake_store.outstanding import Outstanding
from mooncake_store.placement import Copy
from mooncake_store.records import Records
from mooncake_store.segment import Mapping, SegmentRecord
from tests.unit.store.store_master import Content, Held, Lent, Master, Transport, ref_of


def batch(number: int) -> bytes:
    encoded = encode({"x": [number] * 300, "y": ["text"] * 300})
    out = bytearray(encoded.nbytes)
    encoded.write_into(out)
    return bytes(out)


PAYLOAD, OTHER = batch(1), batch(2)
HOLDER = "ab" * 16
NODE = "node:1"


class Mounted(Lent):
    """A segment as Mooncake maps it: the holder's file once more, at another address."""

    def __init__(self, path: str, nbytes: int) -> None:
        self._file = os.open(path, os.O_RDWR)
        self.bytes = np.frombuffer(mmap.mmap(self._file, nbytes), dtype=np.uint8)
        self.largest = None
        base = int(self.bytes.ctypes.data)
        self.record = SegmentRecord(HOLDER, 0, NODE, "node:2", nbytes, base, path, 0, "", 0, 0, "")

    def __del__(self) -> None:
        os.close(self._file)


class Mounting(Master):
    """A master to which memory is lent by `mount`."""

    segment_name = NODE

    def mount(self, path: str, nbytes: int, protocol: str) -> str:
        self._note("mount", path)
        self.lent.append(Mounted(path, nbytes))
        return str(len(self.lent) - 1)

    def unmount(self, segment_id: str) -> None:
        self._note("unmount", segment_id)
        self.lent.clear()


class Forgetful(Mounting):
    """Does what was measured of Mooncake: a mount that the master does not answer leaves its addresses taken.

    Attributes:
        unanswered: how many of the next mounts are not answered.
    """

    unanswered = 0
    taken: tuple[int, ...] = ()

    def mount(self, path: str, nbytes: int, protocol: str) -> str:
        base = Mounted(path, nbytes).record.base  # and it is mapped no more
        if base in self.taken:
            raise StoreError("Mooncake mount answered -1: overlapped memory region", code=-1)
        if self.unanswered:
            self.unanswered -= 1
            self.taken += (base,)
            raise StoreUnavailable("Mooncake mount answered -900", code=-900)
        return super().mount(path, nbytes, protocol)


def holder_of(master: Any, nbytes: int = 1 << 20) -> SegmentHolder:
    return SegmentHolder(master, nbytes, "tcp", HOLDER)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_what_a_holder_says_of_its_memory_holds() -> None:
    master = Mounting()
    holder = holder_of(master)
    record = msgspec.json.decode(master.records.read(slot_key(0)) or b"", type=SegmentRecord)
    assert record == holder.record
    assert (record.name, record.nbytes, record.epoch) == (NODE, 1 << 20, 0)
    mapping = Mapping(record, writable=False)  # finds the probe
    transport = Transport(master)
    written = transport.write(Content(PAYLOAD))
    offset = written.copies[0].parts[0].offset
    assert offset is not None
    assert mapping.bytes[offset + NBYTES :][: len(PAYLOAD)].tobytes() == PAYLOAD
    assert transport.get(ref_of(written)).shared


@pytest.mark.parametrize("operation", ["mount", "allocate", "write", "commit", "locate"])
def test_a_segment_that_could_not_be_lent_keeps_no_memory(operation: str) -> None:
    master = Mounting()
    before = descriptors()
    for _ in range(3):
        master.failures[operation] = [StoreUnavailable("no answer")]
        with pytest.raises(StoreUnavailable, match="no answer"):
            holder_of(master)
        master.lent.clear()
        master.objects.clear()
    assert descriptors() == before


def test_a_fence_that_failed_is_tried_again_and_keeps_no_memory() -> None:
    master = Mounting()
    holder = holder_of(master)
    master.restart()
    before = descriptors()
    for _ in range(3):
        master.failures["mount"] = [StoreUnavailable("no answer")]
        with pytest.raises(StoreUnavailable):
            holder.tick()
    assert descriptors() == before
    holder.tick()
    assert holder.record.epoch == 1


def test_a_holder_without_room_for_two_segments_gives_the_old_one_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody could put anything again after a restart of the master."""
    master = Mounting()
    holder = holder_of(master)
    inode = holder.record.inode
    master.restart()
    monkeypatch.setattr(module, "ROOM_SECONDS", 0.05)
    monkeypatch.setattr(segment, "available_bytes", lambda: 0 if _mapped(inode) else 1 << 30)
    with pytest.raises(StoreFull, match="cannot be lent"):
        holder.tick()
    assert _mapped(inode), "there may be room in a moment"
    time.sleep(0.1)
    with pytest.raises(StoreFull):
        holder.tick()
    holder.tick()
    assert holder.record.epoch == 1
    ask = Ask(0, [Kept("run/r/b/x/0.0", 64, bytes(16), 0, 1, 8, 8, bytes(16))])
    key = ask_key(HOLDER, 1, 0)
    assert master.records.claim(key, msgspec.msgpack.encode(ask), NODE)
    holder.tick()  # cannot be answered, and stops nothing
    assert not master.stored()


def _mapped(inode: int) -> bool:
    """Whether this process maps a file."""
    gc.collect()
    return any(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def test_after_a_restart_memory_is_fresh_and_what_is_asked_for_is_published_again() -> None:
    master = Mounting()
    client: Any = master
    holder = holder_of(master)
    transport = Transport(master, limits=Limits(put=5.0, get=5.0))
    outstanding = Outstanding(client, Records(client), transport.owners)
    written = transport.write(Content(PAYLOAD))
    outstanding.add(written)
    held = transport.get(ref_of(written))
    old = holder.record
    master.restart()
    holder.tick()
    assert holder.record.epoch == old.epoch + 1
    assert holder.record.inode != old.inode
    for _ in range(3):  # new batches take the memory that a restarted master believes to be free
        transport.write(Content(OTHER))
    assert held.bytes.tobytes() == PAYLOAD
    assert held.loan is not None
    held.loan.check()

    class Ticking(Mounting):
        def exist(self, keys: Any) -> list[bool]:
            answers = super().exist(keys)
            if written.copies[0].parts[0].key in keys:
                holder.tick()
            return answers

    master.__class__ = Ticking
    outstanding.tick()
    assert transport.get(ref_of(written)).bytes.tobytes() == PAYLOAD


def test_memory_given_away_behind_its_frame_is_not_published_again(caplog: pytest.LogCaptureFixture) -> None:
    """The batch was removed before the restart, by another process than its writer, who asks for it."""
    master = Mounting()
    holder = holder_of(master)
    (copy,) = Transport(master).write(Content(PAYLOAD)).copies
    (part,) = copy.parts
    master.objects[part.key].bytes[-100] ^= 1
    master.restart()
    holder.tick()
    assert master.records.claim(ask_key(HOLDER, 1, 0), msgspec.msgpack.encode(Ask(0, [kept(copy)])), NODE)
    holder.tick()
    assert not master.stored()
    assert f"{part.key} is lost" in caplog.text


def test_a_request_that_makes_no_sense_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    master = Mounting()
    holder = holder_of(master)
    transport = Transport(master)
    (copy,) = transport.write(Content(PAYLOAD)).copies
    (part,) = copy.parts
    master.restart()
    holder.tick()
    monkeypatch.setattr(records, "REPLACED_SECONDS", 0.0)
    record = holder.record
    right = kept(copy)
    sizes = (-200, -64, 0, 1, 1 << 20, 2**62, 2**63, 2**64 - 1)
    wrong: dict[str, tuple[Any, ...]] = {
        "offset": sizes,
        "part_bytes": sizes,
        "object_bytes": sizes,
        "part": (-1, 1, 2**40),
        "parts": (-1, 0, 2**40),
        "id": (b"", bytes(16), bytes(40)),
        "digest": (b"", bytes(16), bytes(40)),
    }
    requests: list[bytes | None] = [
        None,  # bytes that are no record
        b"\xc1",
        msgspec.msgpack.encode({"epoch": "x"}),
        msgspec.msgpack.encode(Ask(99, [right])),
        *(
            msgspec.msgpack.encode(Ask(0, [msgspec.structs.replace(right, **{field: value})]))
            for field, values in wrong.items()
            for value in values
        ),
        msgspec.msgpack.encode(Ask(0, [right])),
    ]
    for number, request in enumerate(requests):
        key = ask_key(HOLDER, record.epoch, number)
        if request is None:
            master.objects[key] = Held(master._for_records, 1 << 17, 256, True)
        else:
            assert master.records.claim(key, request, NODE)
        assert not master.stored()
        holder.tick()
    assert master.objects[part.key].bytes[:16].tobytes() == part.frame.pack()[:16]
    assert "cannot be read" in caplog.text


def kept(copy: Copy) -> Kept:
    (part,) = copy.parts
    said = part.frame
    assert part.offset is not None
    numbers = said.part, said.parts, said.part_bytes, said.object_bytes
    return Kept(part.key, part.offset, said.id, *numbers, bytes.fromhex(copy.digest))


@pytest.mark.parametrize("unanswered", [1, 3])
def test_a_mount_that_was_not_answered_does_not_stand_in_the_way_of_the_next(unanswered: int) -> None:
    master = Forgetful()
    holder = holder_of(master)
    master.restart()
    master.unanswered = unanswered
    refused = 0
    while holder.record.epoch == 0:
        try:
            holder.tick()
        except StoreError:
            refused += 1
            assert refused <= unanswered + 2
    assert refused >= unanswered


def test_a_segment_that_could_not_be_taken_back_is_taken_back_later() -> None:
    """Mooncake would lend it to the next master again, beside the one that is meant."""
    master = Mounting()
    holder = holder_of(master)
    master.restart()
    master.failures["unmount"] = [StoreUnavailable("the master is away")] * 3
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="could not be taken back yet"):
            holder.tick()  # nor is anything lent beside it
    assert holder.record.epoch == 0
    for _ in range(3):
        holder.tick()
    assert holder.record.epoch == 1
    assert [keys for operation, keys in master.calls if operation == "unmount"] == [("0",)] * 5
