"""The writers and readers of the soak: what they do, and what they say to whoever conducts it."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import xxhash

from mooncake_store import BatchRef, IntegrityError, ObjectStore, StoreError, StoreFull, StoreUnavailable
from mooncake_store.bounded import attempts
from mooncake_store.client import Limits
from mooncake_store.ledger import Ledger
from mooncake_store.store import GetResult
from tests.integration.store.store_services import MIB, carrier_of, store_with

SMALLEST, LARGEST = 1 << 10, 6 * MIB  # bytes of a batch
CHUNK = 2 * MIB  # larger batches are split
OUTSTANDING = 40 * MIB  # of a writer, that nobody has read yet
HELD = 10  # results that a reader keeps or prefetches at a time; one takes up to 8 MiB of its buffers
HOLDS = [0.0] * 8 + [0.2] * 8 + [1.0] * 8 + [20.0]  # seconds, the longest of a kind of result
BUFFERS = "128mb"
OPEN_SECONDS = 60.0
GONE_SECONDS = 60.0  # to be told that memory is not held any more, which may take a call to a master that is away
TRIES = 5  # of a get whose error says that it may succeed later
RIGHT, WRONG = "right", "wrong"


@dataclass(frozen=True)
class Figures:
    """What a process takes while it has nothing to do: private bytes without buffers that have a bound of their own."""

    private: int
    fds: int
    threads: int


# What the conductor says to writers ...


@dataclass(frozen=True)
class Readers:
    names: list[str]


@dataclass(frozen=True)
class Acknowledge:
    key: str
    reader: str


@dataclass(frozen=True)
class Died:
    reader: str


# ... to readers ...


@dataclass(frozen=True)
class Read:
    ref: str
    digest: str


# ... and to both; a writer measures itself when all its batches were acknowledged.


@dataclass(frozen=True)
class Measure:
    pass


@dataclass(frozen=True)
class Resume:
    pass


@dataclass(frozen=True)
class End:
    pass


# What they say to it.


@dataclass(frozen=True)
class Put:
    """A put was acknowledged, for these readers."""

    ref: str
    digest: str
    readers: list[str]


@dataclass(frozen=True)
class Refused:
    """A put was refused, by an error of this type."""

    error: str


@dataclass(frozen=True)
class Outcome:
    """What a reader found: RIGHT, WRONG or the type of the error that it was told."""

    key: str
    found: str
    retries: int
    detail: str = ""


@dataclass(frozen=True)
class Gone:
    """A reader's last view of a batch is gone."""

    key: str


def batch_of(rng: random.Random) -> dict[str, Any]:
    """A batch of SMALLEST to LARGEST bytes, every size class as likely as the next."""
    values = int(SMALLEST * (LARGEST / SMALLEST) ** rng.random()) // 4
    numbers = np.random.default_rng(rng.getrandbits(64)).integers(0, 1 << 30, values, dtype=np.int32)
    rows = min(values, rng.randint(1, 8))
    return {
        "tokens": np.array_split(numbers, rows),
        "rewards": [rng.random() for _ in range(rows)],
        "texts": [f"{rng.getrandbits(64):x}" for _ in range(rows)],
    }


def digest_of(batch: dict[str, Any]) -> str:
    """Of the values, computed apart from the store's own digests."""
    digest = xxhash.xxh3_128()
    for name in sorted(batch):
        for value in batch[name]:
            digest.update(value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def figures_of(process: psutil.Process, buffers: int = 0) -> Figures:
    memory = process.memory_info()
    return Figures(memory.rss - memory.shared - buffers, process.num_fds(), process.num_threads())


def _open(address: str, run_id: str, **more: Any) -> ObjectStore:
    for attempt in attempts(OPEN_SECONDS):
        try:
            return store_with(address, run_id, limits=Limits(), **more)
        except StoreUnavailable:  # the master is being replaced
            if attempt.is_last():
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _figures(store: ObjectStore) -> Figures:
    gc.collect()
    pool = carrier_of(store)._pool
    return figures_of(psutil.Process(), sum(buffer.nbytes for buffer in pool._buffers))


def write(connection: Connection, address: str, run_id: str, seed: int) -> None:
    """Put batches under `run_id`, each for some of the readers, and free them by a ledger."""
    rng = random.Random(seed)
    with _open(address, run_id, chunk_bytes=CHUNK) as store:
        writer = _Writer(connection, Ledger(store))
        sizes: dict[str, int] = {}
        took_over = False  # by the first put, what a writer that was killed has left: before that nothing comes to rest
        while not writer.ended.is_set():
            if writer.asked.is_set() and took_over:
                if not writer.ledger.outstanding():
                    connection.send(_figures(store))
                    writer.asked.clear()
                    writer.resumed.wait()
                time.sleep(0.02)
            sizes = {key: sizes[key] for key in writer.ledger.outstanding()}
            is_at_work = not (writer.asked.is_set() and took_over)
            if writer.readers and is_at_work and sum(sizes.values()) < OUTSTANDING - LARGEST:
                readers = rng.sample(writer.readers, rng.randint(1, len(writer.readers)))
                put = _put(connection, store, writer.ledger, batch_of(rng), readers)
                took_over = took_over or bool(put)
                sizes |= put
            time.sleep(rng.expovariate(1 / 0.08))
            _settle(writer.ledger)


class _Writer:
    """What a writer is told, in a thread: acknowledgements make the room that a put waits for."""

    def __init__(self, connection: Connection, ledger: Ledger) -> None:
        self.ledger = ledger
        self.readers: list[str] = []
        self.asked, self.resumed, self.ended = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: Connection) -> None:
        while not self.ended.is_set():
            message = connection.recv()
            with suppress(StoreUnavailable):  # what cannot be freed stays in the ledger, to be settled
                self._take(message)

    def _take(self, message: object) -> None:
        match message:
            case Readers(names):
                self.readers = names
            case Acknowledge(key, reader):
                self.ledger.acknowledge(key, reader)
            case Died(reader):
                self.ledger.reader_died(reader)
            case Measure():
                self.resumed.clear()
                self.asked.set()
            case Resume():
                self.resumed.set()
            case End():
                self.ended.set()
                self.resumed.set()


def _put(
    connection: Connection, store: ObjectStore, ledger: Ledger, batch: dict[str, Any], readers: list[str]
) -> dict[str, int]:
    """Put a batch and say so; its key and size, or nothing when it was refused."""
    try:
        ref = store.put(batch)
    except (StoreFull, StoreUnavailable) as error:
        connection.send(Refused(type(error).__name__))
        return {}
    ledger.expect(ref, readers)
    connection.send(Put(ref.to_json(), digest_of(batch), readers))
    return {ref.key: ref.nbytes}


def _settle(ledger: Ledger) -> None:
    try:
        ledger.settle()
    except StoreUnavailable:
        time.sleep(0.1)


def read(connection: Connection, address: str, seed: int, share_memory: bool) -> None:
    """Get what is announced, keep it for a while, and look twice whether it is what was put."""
    import torch  # now: a reader's memory is compared later

    assert torch.is_tensor(torch.zeros(1))
    with _open(address, "readers", share_memory=share_memory, local_buffer_size=BUFFERS) as store:
        _Reader(connection, store, random.Random(seed)).run()


@dataclass
class _Held:
    key: str
    digest: str
    until: float
    result: GetResult | None
    gone: threading.Event
    tensors: list[Any] = field(default_factory=list)
    retries: int = 0
    told: str = ""


class _Reader:
    def __init__(self, connection: Connection, store: ObjectStore, rng: random.Random) -> None:
        self._connection, self._store, self._rng = connection, store, rng
        self._held: list[_Held] = []
        self._prefetched: deque[Read] = deque()
        self._lock = threading.Lock()
        self._told_late = _count_late_errors()
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def run(self) -> None:
        while True:
            self._release(time.monotonic())
            if not self._connection.poll(0.02):
                if self._prefetched:
                    self._take(self._prefetched.popleft())
                continue
            match self._connection.recv():
                case Read() as wanted if self._rng.random() < 0.25 and self._kept() < HELD:
                    self._store.prefetch(BatchRef.from_json(wanted.ref))
                    self._prefetched.append(wanted)
                case Read() as wanted:
                    self._take(wanted)
                case Measure():
                    self._release(float("inf"))
                    self._say(_figures(self._store))
                case End():
                    return

    def _take(self, wanted: Read) -> None:
        ref = BatchRef.from_json(wanted.ref)
        retries, gone = 0, threading.Event()
        while True:
            try:
                result = self._get(ref, gone)
                break
            except StoreError as error:
                if not error.retryable or retries == TRIES:
                    self._say(Outcome(ref.key, type(error).__name__, retries, str(error)))
                    self._say(Gone(ref.key))
                    return
                retries += 1
        until = time.monotonic() + self._rng.choice(HOLDS) * self._rng.random()
        held = _Held(ref.key, wanted.digest, until, result, gone, retries=retries)
        if digest_of(result.value) != wanted.digest:
            self._finish(held)
            return
        if self._rng.random() < 0.25:
            _as_tensors(held)
        self._held.append(held)

    def _get(self, ref: BatchRef, gone: threading.Event) -> GetResult:
        def on_release() -> None:
            gone.set()
            self._say(Gone(ref.key))

        if self._rng.random() < 0.25:
            return asyncio.run(self._store.aget(ref, on_release=on_release))
        return self._store.get(ref, on_release=on_release)

    def _release(self, now: float) -> None:
        while self._held:
            due = min(self._held, key=lambda held: held.until)
            if due.until > now and self._kept() < HELD:
                return
            self._held.remove(due)
            self._finish(due)

    def _kept(self) -> int:
        return len(self._held) + len(self._prefetched)

    def _finish(self, held: _Held) -> None:
        """Look again, let go, and say what was found. What changed must have been told by the store."""
        late = self._told_late[0]
        if held.result is None:
            right = digest_of({"tokens": [tensor.numpy() for tensor in held.tensors]}) == held.digest
            held.tensors.clear()
            if not held.gone.wait(GONE_SECONDS):
                raise AssertionError(f"the end of the last tensor of {held.key} was not told\n{_stacks()}")
        else:
            right = digest_of(held.result.value) == held.digest
            _let_go(held)
        told = held.told or ("told late" if self._told_late[0] > late else "")
        found = IntegrityError.__name__ if told else RIGHT if right else WRONG
        self._say(Outcome(held.key, found, held.retries, told))

    def _say(self, message: object) -> None:
        with self._lock:
            self._connection.send(message)


def _as_tensors(held: _Held) -> None:
    """Keep torch tensors only, which outlive the result."""
    import torch

    assert held.result is not None
    held.tensors = [torch.from_numpy(row) for row in held.result.value["tokens"]]
    held.digest = digest_of({"tokens": held.result.value["tokens"]})
    _let_go(held)


def _let_go(held: _Held) -> None:
    assert held.result is not None
    try:
        held.result.release()
    except IntegrityError as error:
        held.told = str(error)
    held.result = None


def _stacks() -> str:
    """Where every thread of this process is."""
    return "\n".join("".join(traceback.format_stack(frame)) for frame in sys._current_frames().values())


def _count_late_errors() -> list[int]:
    """Count what the store says of memory given away under arrays whose result was released."""
    count = [0]

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            count[0] += "memory was given away" in record.getMessage()

    logging.getLogger("mooncake_store").addHandler(Handler(logging.ERROR))
    return count
