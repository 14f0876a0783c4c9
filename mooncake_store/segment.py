"""A segment: memory that a holder lends to the store, as a memfd that processes of the same node can map.

Mapping it takes the same boot of the same kernel, sight of the holder's /proc/<pid>/fd (same PID namespace, same user)
and an address arithmetic that the segment's probe bytes confirm. Where one of these fails the store uses the network.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np

from mooncake_store.arrays import Bytes
from mooncake_store.client import Location
from mooncake_store.memory import available_bytes

PROBE_BYTES = 64
_NAME = "mooncake_segment"  # of the memfd
_ANOTHER_FILE = "its path leads to another file here (another PID namespace)"
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # linux/mman.h, madvise; Linux 5.14
_POPULATE_BYTES = 64 << 20  # at a time: what a mapping that ends has to wait for


class SegmentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a holder tells everybody about the memory it lends now.

    Attributes:
        holder: id of the holder, 32 hex digits.
        epoch: counts the segments of this holder; a new one after every restart of the master.
        name: what Mooncake calls the segment, "host:port".
        endpoint: where its bytes are reached over the network, "host:port".
        nbytes: its size.
        base: address of its first byte in the holder, as the master names addresses.
        path, inode, boot_id, pid: of the memfd, to map it; path is empty, and base and probe mean nothing, where the
            holder's system has no shared memory.
        probe_at: offset in bytes of PROBE_BYTES bytes that a mapping must find there.
        probe: those bytes, hexadecimal.
    """

    holder: str
    epoch: int
    name: str
    endpoint: str
    nbytes: int
    base: int
    path: str
    inode: int
    boot_id: str
    pid: int
    probe_at: int
    probe: str

    @property
    def sentinel(self) -> str:
        """Key of the object whose absence says that the master has forgotten this segment."""
        return sentinel_key(self.holder, self.epoch)

    def holds(self, location: Location) -> bool:
        """Whether an object lies in this segment."""
        return location.endpoint == self.endpoint and (not self.path or self.offset_of(location) is not None)

    def offset_of(self, location: Location) -> int | None:
        """Offset of an object in this segment; None when it does not lie in it, or where it starts is not known."""
        offset = location.address - self.base
        inside = location.endpoint == self.endpoint and 0 <= offset <= self.nbytes - location.nbytes
        return offset if self.path and inside else None


def sentinel_key(holder: str, epoch: int) -> str:
    """Key of the sentinel of one segment of a holder."""
    return f"holder/{holder}/epoch/{epoch}"


class CannotMap(Exception):
    """Why a segment is not mapped here."""


class Mapping:
    """A holder's segment, mapped.

    Attributes:
        bytes: uint8 [nbytes]; read-only unless mapped for writing. Views of it keep the memory alive, also after the
            holder is gone.
    """

    def __init__(self, record: SegmentRecord, writable: bool) -> None:
        """Map the segment; CannotMap says why that is not possible."""
        if not record.path:
            raise CannotMap("its holder could not make shared memory")
        if record.boot_id != boot_id():
            raise CannotMap("it is on another host")
        try:
            self._holder = os.pidfd_open(record.pid)
            memory = _map(record, writable)
        except (OSError, ValueError, OverflowError) as error:  # the record may say anything
            raise CannotMap(f"{record.path!r}: {getattr(error, 'strerror', None) or error}") from error
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        found = self.bytes[record.probe_at : record.probe_at + PROBE_BYTES].tobytes().hex()
        if found != record.probe:
            raise CannotMap("the probe is not where it should be")
        if writable:
            # A put into pages that this process never touched takes twice as long (measured); a large segment has many.
            Thread(target=_enter_pages, args=(weakref.ref(self),), name="mooncake pages", daemon=True).start()

    def holder_lives(self) -> bool:
        """Whether the process that lends this memory still runs (stopped counts as running)."""
        poll = select.poll()
        poll.register(self._holder, select.POLLIN)
        return not poll.poll(0)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._holder)


def boot_id() -> str:
    """Identifies this boot of this host's kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SharedMemory:
    """A memfd of `nbytes` with every page allocated, and a mapping of it whose pages are all present.

    Attributes:
        descriptor: of the memfd.
        mapping: writable.
        address: where it is mapped.

    Raises:
        OSError: no memfd here; ENOMEM when there is not so much memory now. That is asked first: the kernel would
            hand out pages until it has to kill a process.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes > available_bytes():
            raise OSError(errno.ENOMEM, f"{available_bytes()} bytes of memory are available now")
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, nbytes)
            self.mapping = mmap.mmap(self.descriptor, nbytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.address = int(np.frombuffer(self.mapping, dtype=np.uint8).ctypes.data)
        populate(self.address, nbytes)

    @property
    def path_for_self(self) -> str:
        """Under which this process can open it."""
        return f"/proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        """Give it back; whoever has mapped it keeps its pages."""
        os.close(self.descriptor)


def populate(address: int, nbytes: int, writable: bool = True) -> None:
    """Enter pages into this process's page table, so that the first transfer does not fault on each of them.

    A hint: an older kernel refuses it and pages come one by one. Faults halve the speed of a first write (measured).
    """
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE if writable else _POPULATE_READ)


def _enter_pages(mapping: weakref.ref[Mapping]) -> None:
    """Populate a mapping as long as it is used."""
    start = 0
    while (held := mapping()) is not None and start < held.bytes.size:
        populate(held.bytes.ctypes.data + start, min(_POPULATE_BYTES, held.bytes.size - start))
        start += _POPULATE_BYTES
        del held


def mapped_at(descriptor: int, address: int) -> int | None:
    """Where this process maps offset 0 of a file, of the mappings that contain `address`; None when none does."""
    inode = str(os.fstat(descriptor).st_ino)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, number, *_ = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if number == inode and start <= address < end:
            return start - int(offset, 16)
    return None


def _map(record: SegmentRecord, writable: bool) -> mmap.mmap:
    # Whoever can write to the store can write a record: it must not make its readers write into their own files.
    if not os.readlink(record.path).startswith(f"/memfd:{_NAME}"):
        raise CannotMap(_ANOTHER_FILE)
    flags = os.O_RDWR if writable else os.O_RDONLY
    descriptor = os.open(record.path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO there would hold the caller
    try:
        status = os.fstat(descriptor)
        if status.st_ino != record.inode or status.st_size != record.nbytes:
            raise CannotMap(_ANOTHER_FILE)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(descriptor, record.nbytes, prot=protection)
    finally:
        os.close(descriptor)
