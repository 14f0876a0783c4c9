"""The segment holder: a small process that lends memory to the store and outlives writers and readers.

`python -m mooncake_store.holder JSON` is what `start_holder` and `miles-mooncake holder` run. One per node is enough;
its record is found by everybody in one of SLOTS records of the store.

A restarted master believes that all memory is free, and Mooncake lends it the same memory again within a second,
although readers look into it. The sentinel object of each segment is gone then: writers look for it after they were
given memory and before they write. The holder lends fresh memory, keeps the old, and copies from it what writers ask
for: they know what is unacknowledged.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from mooncake_store import frame
from mooncake_store.arrays import Bytes
from mooncake_store.client import Limits, MooncakeClient
from mooncake_store.config import MooncakeConfig, resolve
from mooncake_store.decode import check
from mooncake_store.errors import IntegrityError, StoreError, StoreFull, StoreUnavailable
from mooncake_store.process import ManagedProcess
from mooncake_store.records import Records
from mooncake_store.segment import (
    PROBE_BYTES,
    SegmentRecord,
    SharedMemory,
    boot_id,
    mapped_at,
    populate,
    sentinel_key,
)

SLOTS = 64
TICK_SECONDS = 0.25
KEEP_SECONDS = 60.0  # how long memory of before a restart is kept for writers to ask for what was in it
ANSWER_SECONDS = 1.0  # of a tick for requests, of which there may be many
ASK_BYTES = 1 << 20  # that fresh memory has more, so that all that was in the old fits beside requests for it
ROOM_SECONDS = 5.0  # how long fresh memory is waited for beside the old one, before that is given up for it
_log = logging.getLogger(__name__)


def slot_key(slot: int) -> str:
    """Key of a record that a holder may claim."""
    return f"holder/slot/{slot}"


def ask_key(holder: str, epoch: int, number: int) -> str:
    """Key of the request `number` of those made to a holder in one epoch."""
    return f"holder/{holder}/epoch/{epoch}/ask/{number}"


_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_U63 = Annotated[int, msgspec.Meta(ge=0)]


def answered_key(ask: str) -> str:
    """Key of the record that stays of a request whose key is `ask`, so that no other takes its number."""
    return f"{ask}/answered"


class Kept(msgspec.Struct, frozen=True):
    """An object to copy out of the memory of before a restart: key, offset of its frame there, and what that says.

    `digest` is of the whole batch: of one in one part, which readers may see in place, it is asked for again.
    """

    key: str
    offset: _U63
    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    part: _U32
    parts: _U32
    part_bytes: _U63
    object_bytes: _U63
    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

    @property
    def frame(self) -> frame.Frame:
        return frame.Frame(self.id, self.part, self.parts, self.part_bytes, self.object_bytes)


class Ask(msgspec.Struct, frozen=True):
    """A writer's request after a restart: publish again what lay in the segment of `epoch`."""

    epoch: int
    objects: list[Kept]


@dataclass
class _Segment:
    """Memory lent now or before, and what Mooncake calls it."""

    record: SegmentRecord
    segment_id: str
    memory: SharedMemory | None
    kept_until: float = 0.0

    @property
    def bytes(self) -> Bytes:
        return np.frombuffer(self.memory.mapping if self.memory else b"", dtype=np.uint8)


class SegmentHolder:
    """Lends `nbytes` of memory through a client of its own until `close`.

    Raises:
        StoreUnavailable, StoreFull: the master does not answer, or all SLOTS are taken.
    """

    def __init__(self, client: MooncakeClient, nbytes: int, protocol: str, holder: str) -> None:
        self._client, self._nbytes, self._protocol, self._holder = client, nbytes, protocol, holder
        self._sentinel = ""  # of what is lent now, or will be
        self._records = Records(client, lambda _: client.exist([self._sentinel])[0])
        self._before: list[_Segment] = []
        self._asked = 0
        self._unwanted: list[str] = []  # segments that Mooncake would lend to the next master again
        self._blocked: list[mmap.mmap] = []  # addresses that Mooncake cannot use any more
        self._without_sharing = False
        self._current = self._lend(epoch=0)

    @property
    def record(self) -> SegmentRecord:
        """What is lent now."""
        return self._current.record

    def tick(self) -> None:
        """Look whether the master still knows the segment and whether somebody asks for something; act on it.

        Raises:
            StoreUnavailable: the master does not answer; the next tick may find it again.
        """
        self._unmount()
        record = self.record
        known, asked = self._client.exist([record.sentinel, ask_key(self._holder, record.epoch, self._asked)])
        if not known:
            _log.warning("the master has forgotten segment %d of %s: it was restarted", record.epoch, record.name)
            self._fence()
        until = time.monotonic() + ANSWER_SECONDS
        while known and asked:
            self._answer(ask_key(self._holder, record.epoch, self._asked))
            self._asked += 1
            if time.monotonic() > until:  # what is left comes with the next tick
                break
            known, asked = self._client.exist([record.sentinel, ask_key(self._holder, record.epoch, self._asked)])
        now = time.monotonic()
        for segment in [old for old in self._before if old.kept_until < now]:
            self._before.remove(segment)
            if segment.memory is not None:
                segment.memory.close()

    def close(self) -> None:
        """Take the memory back; what was in it is gone for the store."""
        self._client.close()

    def _fence(self) -> None:
        """Lend fresh memory instead of what the new master believes to be free."""
        old = self._current
        self._unmount(old.segment_id)
        if self._unwanted:  # what is lent beside the fresh memory would be given to others under the same name
            raise StoreUnavailable("memory of before the restart could not be taken back yet")
        now = time.monotonic()
        old.kept_until = old.kept_until or now + KEEP_SECONDS
        try:
            self._current = self._lend(old.record.epoch + 1)
        except StoreFull:
            if old.memory is not None and now > old.kept_until - KEEP_SECONDS + ROOM_SECONDS:
                _log.error(
                    "there is no room for fresh memory beside the old: what is in segment %s is lost", old.record.name
                )
                old.memory.close()
                old.memory = None
            raise
        self._before.append(old)
        self._asked = 0

    def _lend(self, epoch: int) -> _Segment:
        nbytes = self._nbytes + (ASK_BYTES if epoch else 0)
        memory = self._memory(nbytes)
        try:
            segment_id = self._mount(memory, nbytes)
            try:
                record = self._probe(memory, nbytes, epoch)
                self._sentinel = record.sentinel
                if record.path:
                    populate(record.base, nbytes)  # Mooncake's own mapping of the same pages
                self._claim_slot(record)
            except BaseException:
                self._unmount(segment_id)
                raise
        except BaseException:
            if memory is not None:
                memory.close()  # it would keep the memory, and the next tick takes as much again
            raise
        return _Segment(record, segment_id, memory)

    def _unmount(self, *segment_ids: str) -> None:
        """Stop lending those, and what could not be taken back before, as far as the master answers."""
        self._unwanted += [unwanted for unwanted in segment_ids if unwanted not in self._unwanted]
        with suppress(StoreError):
            while self._unwanted:
                self._client.unmount(self._unwanted[0])
                del self._unwanted[0]

    def _mount(self, memory: SharedMemory | None, nbytes: int) -> str:
        try:
            if memory is None:
                return self._client.mount_private(nbytes, self._protocol)
            return self._client.mount(memory.path_for_self, nbytes, self._protocol)
        except StoreError:
            # A mount that the master does not answer leaves the memory registered at the address where Mooncake had
            # mapped it, and that is free again: the next mapping would land there and be refused as overlapping, for
            # ever (measured on 0.3.13.post1). So something else is put there, which takes addresses and no memory.
            self._blocked.append(mmap.mmap(-1, nbytes, prot=0))
            raise

    def _memory(self, nbytes: int) -> SharedMemory | None:
        """Memory that others can map, None where the system has no such thing."""
        try:
            return SharedMemory(nbytes)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise StoreFull(
                    f"global_segment_size = {self._nbytes} bytes cannot be lent: {error.strerror}; lower it"
                ) from error
            if not self._without_sharing:
                self._without_sharing = True
                _log.warning("no shared memory here (%s): all bytes will travel over the network", error.strerror)
            return None

    def _probe(self, memory: SharedMemory | None, nbytes: int, epoch: int) -> SegmentRecord:
        """Put the sentinel, find where it lies, and so where the memory starts."""
        key, probe = sentinel_key(self._holder, epoch), secrets.token_bytes(PROBE_BYTES)
        name = self._client.segment_name
        self._client.allocate([key], [PROBE_BYTES], name)
        self._client.commit([key])
        location = self._client.locate([key])[0]
        base: int | None = 0
        if memory is not None and location is not None:
            base = mapped_at(memory.descriptor, location.address)
        if location is None or base is None:
            self._client.revoke([key])
            raise StoreUnavailable(f"the sentinel of {name} did not land in its own segment; try again")
        if memory is not None:
            # Not through Mooncake, which would write wherever it landed. The raw bytes and not a record: a mapping is
            # tested by finding them.
            place = np.frombuffer(memory.mapping, dtype=np.uint8)[location.address - base :][:PROBE_BYTES]
            place[:] = np.frombuffer(probe, dtype=np.uint8)
        return SegmentRecord(
            holder=self._holder,
            epoch=epoch,
            name=name,
            endpoint=location.endpoint,
            nbytes=nbytes,
            base=base,
            path=f"/proc/{os.getpid()}/fd/{memory.descriptor}" if memory else "",
            inode=os.fstat(memory.descriptor).st_ino if memory else 0,
            boot_id=boot_id(),
            pid=os.getpid(),
            probe_at=location.address - base if memory else 0,
            probe=probe.hex(),
        )

    def _claim_slot(self, record: SegmentRecord) -> None:
        payload = msgspec.json.encode(record)
        keys = [slot_key(slot) for slot in range(SLOTS)]
        for key, taken in zip(keys, self._client.exist(keys), strict=True):
            if not taken and self._records.claim(key, payload, record.name):
                return
        raise StoreUnavailable(f"{SLOTS} segment holders serve this master already; end some")

    def _answer(self, key: str) -> None:
        """Copy what was asked for out of old memory; what cannot be copied stays away, which is the answer."""
        try:
            ask = msgspec.msgpack.decode(self._records.read(key) or b"", type=Ask)
        except (IntegrityError, msgspec.DecodeError) as error:
            _log.warning("request %s cannot be read: %s", key, error)
            return
        with suppress(StoreError):  # that it was made is kept; what it said takes room that is needed
            if self._records.claim(answered_key(key), b"", self.record.name):
                self._client.remove(key)
        kept = 0
        for old in (segment for segment in self._before if segment.record.epoch == ask.epoch):
            for wanted in ask.objects:
                try:
                    self._copy(old, wanted)
                    kept += 1
                except StoreError as error:
                    _log.warning("%s is lost: %s", wanted.key, error)
        _log.warning("published %d of %d objects again after a restart of the master", kept, len(ask.objects))

    def _copy(self, old: _Segment, wanted: Kept) -> None:
        nbytes = frame.NBYTES + wanted.part_bytes
        if not 0 <= wanted.offset <= old.record.nbytes - nbytes:
            raise IntegrityError(f"{nbytes} bytes at {wanted.offset} exceed {old.record.nbytes} bytes")
        source = old.bytes[wanted.offset : wanted.offset + nbytes]
        wanted.frame.check(source)
        if wanted.parts == 1:  # a frame may outlive its payload, where the batch was removed before the restart
            check(source[frame.NBYTES :], wanted.digest.hex())
        self._client.allocate([wanted.key], [frame.footprint(wanted.part_bytes)], self.record.name)
        self._client.commit([wanted.key])
        location = self._client.locate([wanted.key])[0]
        offset = self.record.offset_of(location) if location else None
        if offset is None or not self._client.exist([self.record.sentinel])[0]:
            self._client.revoke([wanted.key])
            raise StoreUnavailable("it did not land in this holder's segment")
        target = self._current.bytes[offset : offset + nbytes]
        frame.clear(target)
        target[frame.NBYTES :] = source[frame.NBYTES :]
        frame.commit(target, wanted.frame)


def serve(config: MooncakeConfig, holder: str, lent_now: Callable[[SegmentRecord], None]) -> signal.Signals:
    """Lend `config.global_segment_size` until SIGTERM or SIGINT; return which of them it was.

    Args:
        config: whose master, and how to reach this process.
        holder: id of this holder, 32 hex digits.
        lent_now: called once, when memory is lent.

    Raises:
        ConfigError, StoreUnavailable, MissingDependency: as `MooncakeClient.connect`.
    """
    ended = threading.Event()
    received = [signal.SIGTERM]

    def end(number: int, _frame: object) -> None:
        received[0] = signal.Signals(number)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    client = MooncakeClient.connect(config, Limits())
    try:
        lent = SegmentHolder(client, config.global_segment_size, config.protocol, holder)
        lent_now(lent.record)
        while not ended.wait(TICK_SECONDS):
            try:
                lent.tick()
            except StoreError as error:
                _log.warning("%s", error)
    finally:
        client.close()
    return received[0]


class RunningHolder:
    """A segment holder started by this process, which ends with it at the latest."""

    def __init__(self, process: ManagedProcess, record: SegmentRecord) -> None:
        self._process, self.record = process, record

    def check(self) -> None:
        """Raise StoreUnavailable, with the log's last lines, if the holder has ended."""
        status = self._process.exit_status()
        if status is not None:
            raise StoreUnavailable(
                f"segment holder ended with status {status}; last lines of {self._process.log}:\n"
                f"{self._process.log_tail()}"
            )

    def end(self) -> None:
        """Begin to end it, which takes Mooncake seconds; `stop` waits for that."""
        self._process.end()

    def stop(self) -> None:
        """End it and give its memory back; idempotent."""
        self._process.stop()


def start_holder(config: MooncakeConfig, log: Path, timeout: float = 120.0) -> RunningHolder:
    """Start a holder of `config.global_segment_size` bytes and wait until it lends them.

    Args:
        config: as resolved for this process; the holder uses the same.
        log: file that gets what the holder prints.
        timeout: seconds; touching a GiB takes about half a second.

    Raises:
        StoreUnavailable: it ended or did not get ready; the error ends with the log's last lines.
    """
    holder = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="mooncake-holder-") as directory:
        ready = Path(directory, "ready")
        arguments = json.dumps({"config": config.as_kwargs(), "holder": holder, "ready": str(ready)})
        process = ManagedProcess("segment holder", [sys.executable, "-m", "mooncake_store.holder", arguments], log)
        deadline = time.monotonic() + timeout
        try:
            while not ready.exists():
                status = process.exit_status()
                if status is not None or time.monotonic() > deadline:
                    what = f"is not ready after {timeout:g} s" if status is None else f"ended with status {status}"
                    raise StoreUnavailable(f"the segment holder {what}; last lines of {log}:\n{process.log_tail()}")
                time.sleep(0.02)
        except BaseException:
            process.stop()
            raise
        return RunningHolder(process, msgspec.json.decode(ready.read_bytes(), type=SegmentRecord))


def main(argument: str) -> None:
    """Run a holder as `start_holder` asks."""
    asked = json.loads(argument)
    ready = Path(asked["ready"])

    def write(record: SegmentRecord) -> None:
        partial = ready.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(record))
        partial.rename(ready)

    serve(resolve(asked["config"], os.environ), asked["holder"], write)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    main(sys.argv[1])
