"""Warm buffers that are lent out and come back by themselves when the last view of them is gone.

A get into fresh pages costs about twice a get into touched ones, and a buffer must be registered with Mooncake before
a transfer (measured on mooncake 0.3.13.post1), so buffers are kept.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mooncake_store.arrays import Bytes
from mooncake_store.errors import StoreClosed, StoreFull

GRANULE = 2 << 20  # bytes; one huge page, so that nearby sizes share buffers
_POLL_SECONDS = 0.02
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # linux/mman.h; the second needs Linux 5.14


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    memory: mmap.mmap
    address: int
    nbytes: int


class Lease:
    """Part of a buffer, lent.

    Attributes:
        array: uint8 [nbytes], writable.
        address: its address in memory.
        nbytes: its size in bytes.
    """

    def __init__(self, buffer: _Buffer, nbytes: int, give_back: Callable[[_Buffer], None]) -> None:
        # numpy collapses chains of views onto the deepest ndarray. With a memoryview below it, that is this array:
        # every view of it keeps it alive, and its end is the end of them all.
        self.array: Bytes = np.frombuffer(memoryview(buffer.memory)[:nbytes], dtype=np.uint8)
        self.address = buffer.address
        self.nbytes = nbytes
        self._finalizer = weakref.finalize(self.array, give_back, buffer)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Give the buffer back now. Only for a lease of which no view was handed out."""
        self._finalizer()


class BufferPool:
    """Keeps at most `max_bytes` of buffers, lent or free.

    Args:
        max_bytes: bound on the memory of all buffers, in bytes.
        wait: seconds that `acquire` waits for a lent buffer to come back.
        register: called with (address, nbytes) of each new buffer, if given.
        unregister: called with the address of each buffer before it is dropped, if given.
    """

    def __init__(
        self,
        max_bytes: int,
        wait: float = 30.0,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.wait = wait
        self._register = register
        self._unregister = unregister
        self._lock = threading.RLock()  # a signal handler may close the pool while its thread holds it
        self._buffers: set[_Buffer] = set()
        self._free: list[_Buffer] = []
        # Finalizers may run at any allocation, also inside this class: SimpleQueue.put is reentrant, a lock is not.
        self._returned: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._closed = False

    def spare(self, nbytes: int) -> Bytes:
        """uint8 [nbytes] of a warm buffer where one can be had at once, else ordinary memory; writable.

        A buffer comes back by itself when the last view is gone.
        """
        if nbytes >= GRANULE:
            with suppress(StoreFull, StoreClosed):
                return self.acquire(nbytes, wait=0).array
        return np.empty(nbytes, dtype=np.uint8)

    def acquire(self, nbytes: int, wait: float | None = None) -> Lease:
        """Lend `nbytes` of a warm buffer.

        Args:
            wait: seconds, instead of the pool's.

        Raises:
            StoreFull: the pool cannot hold so much, or nothing came back within the bounded wait.
            StoreClosed: the pool was closed.
        """
        size = -(-nbytes // GRANULE) * GRANULE
        if nbytes > self.max_bytes:
            raise StoreFull(
                f"an object of {nbytes} bytes exceeds the {self.max_bytes} bytes of buffers this process may use; "
                f"raise local_buffer_size or put smaller batches",
                retryable=False,
            )
        wait = self.wait if wait is None else wait
        deadline = time.monotonic() + wait
        while True:
            with self._lock:
                buffer = self._take(nbytes, min(size, self.max_bytes))
            if buffer is not None:
                return Lease(buffer, nbytes, self._returned.put)
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreFull(
                    f"no buffer of {nbytes} bytes came back in {wait:g} s: {self.lent_bytes} of {self.max_bytes} "
                    f"bytes are held by results or arrays still in use, or by prefetched batches that nobody got; "
                    f"drop them, or raise local_buffer_size"
                )
            # In slices: another thread may collect what comes back, take one buffer of it and leave the rest free.
            with suppress(queue.Empty):
                buffer = self._returned.get(timeout=min(left, _POLL_SECONDS))
                with self._lock:
                    self._free.append(buffer)

    @property
    def lent_bytes(self) -> int:
        """Bytes of buffers that are lent now."""
        with self._lock:
            self._collect()
            return sum(buffer.nbytes for buffer in self._buffers) - sum(buffer.nbytes for buffer in self._free)

    def close(self) -> None:
        """Unregister every buffer and keep none; memory that is lent stays valid until its last view is gone."""
        with self._lock:
            self._closed = True
            for buffer in list(self._buffers):
                self._drop(buffer)
            self._free.clear()

    def _collect(self) -> None:
        while True:
            try:
                self._free.append(self._returned.get_nowait())
            except queue.Empty:
                return

    def _take(self, nbytes: int, size: int) -> _Buffer | None:
        """The smallest free buffer that fits, or a new one if the bound allows; None when the caller must wait."""
        if self._closed:
            raise StoreClosed("the buffers of this store were given back: the store is closed")
        self._collect()
        # A much larger one is not lent: its rest would be lost to everybody else for as long as that takes.
        fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 2 * size]
        if fitting:
            buffer = min(fitting, key=lambda candidate: candidate.nbytes)
            self._free.remove(buffer)
            return buffer
        lent = self._total() - sum(buffer.nbytes for buffer in self._free)
        if lent + size > self.max_bytes:  # and what is free stays warm
            return None
        while self._total() + size > self.max_bytes:
            self._drop(self._free.pop())
        buffer = _warm(size)
        if self._register is not None:
            self._register(buffer.address, buffer.nbytes)
        self._buffers.add(buffer)
        return buffer

    def _total(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def _drop(self, buffer: _Buffer) -> None:
        self._buffers.discard(buffer)
        if self._unregister is not None:
            self._unregister(buffer.address)


def _warm(nbytes: int) -> _Buffer:
    memory = mmap.mmap(-1, nbytes)
    for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with suppress(OSError):  # an older kernel: pages are touched on first use instead
            memory.madvise(advice)
    return _Buffer(memory, np.frombuffer(memory, dtype=np.uint8).ctypes.data, nbytes)
