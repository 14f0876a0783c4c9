"""The transport's interface: open a store, put a batch, get it back, remove it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from mooncake_store.arrow import to_table
from mooncake_store.backends import BackendOptions, Carrier, Loan, Stored, find_backend
from mooncake_store.columns import ValueSpec
from mooncake_store.decode import Rows, Selection, as_lists, check, read
from mooncake_store.encode import encode
from mooncake_store.errors import ConfigError, IntegrityError, StoreClosed
from mooncake_store.ref import BatchRef, check_run_id, provenance
from mooncake_store.releases import Releases
from mooncake_store.stored_columns import Slicing
from mooncake_store.worker import Worker

CLOSE_SECONDS = 30.0  # for calls in flight
_log = logging.getLogger(__name__)


class _Watch:
    """Finds out whether memory that was lent stayed what it was.

    Attributes:
        ended: whether the last view is known to be gone, so that nothing is left to be told late.
    """

    def __init__(self, ref: BatchRef, loan: Loan) -> None:
        self._ref, self._loan = ref, loan
        self.ended = False

    def confirm(self) -> None:
        """Raise IntegrityError if the memory was given to another batch.

        A frame may outlive its payload: other batches may lie behind it, with nothing written over itself yet. So a
        batch that the store has no more is digested.
        """
        self._loan.check()
        if not self._loan.is_kept():
            try:
                check(self._loan.memory.data.toreadonly(), self._ref.digest)
            except IntegrityError as error:
                raise IntegrityError(f"{self._ref.key!r} was removed while it was read: {error}") from None

    def confirm_late(self) -> None:
        """Log what `confirm` raises, when nobody is there to be told."""
        if not self.ended:
            try:
                self.confirm()
            except IntegrityError as error:
                _log.error("arrays were still in use when their batch's memory was given away: %s", error)


class GetResult:
    """A batch that was read. Use it as a context manager, or call `release` when done.

    Its arrays look into memory that the backend lends. Releasing drops this result's own hold; the memory is lent again
    only when the last array that looks into it is gone, so an array kept longer stays valid.
    """

    def __init__(self, batch: dict[str, Any], num_rows: int, stored: Stored, watch: _Watch | None) -> None:
        self._batch: dict[str, Any] | None = batch
        self._num_rows = num_rows
        self._stored: Stored | None = stored
        self._watch = watch

    @property
    def value(self) -> dict[str, Any]:
        """The batch, a dict of the caller's own; StoreClosed after release."""
        if self._batch is None:
            raise StoreClosed("this result was released; keep what you need before release, or get the batch again")
        return self._batch

    def to_arrow(self) -> Any:
        """The per-sample columns as a pyarrow.Table with memory of its own; see `arrow.to_table` for what is raised."""
        return to_table(self.value, self._num_rows)

    def release(self) -> None:
        """Let go of the batch; idempotent.

        Raises:
            IntegrityError: the batch was removed while it was read, and its memory given to another. What was computed
                from it may be wrong.
        """
        stored, self._batch, self._stored = self._stored, None, None
        if stored is None or self._watch is None:
            return
        try:
            # While this still holds the memory: who is told of its end may give it to another batch at once.
            self._watch.confirm()
        finally:
            root = weakref.ref(stored.source.root)
            self._watch.ended = True
            del stored
            self._watch.ended = root() is None  # or an array is kept longer, and the end is yet to come

    def __enter__(self) -> dict[str, Any]:
        return self.value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.release()
        else:  # what went wrong first is what the caller should see
            self._batch = self._stored = None


class ObjectStore:
    """Puts and gets batches through one backend. Safe to share between threads; open one per process, never fork it."""

    def __init__(self, backend: str, run_id: str, carrier: Carrier) -> None:
        self.backend = backend
        self.run_id = run_id
        self._carrier = carrier
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may close the store while its thread holds it
        # One each: Mooncake's transfers hinder each other. But a put may wait for room that a get and a remove make,
        # and a prefetch for buffers, for which nobody who awaits a get should wait.
        self._reads = Worker("store reads")
        self._writes = Worker("store writes")
        self._ahead = Worker("store prefetches")
        self._prefetches: dict[str, tuple[Selection, Future[tuple[dict[str, Any], Stored]]]] = {}
        self._releases = Releases()
        self._stats = {"puts": 0, "gets": 0, "removes": 0, "bytes_put": 0, "bytes_got": 0}

    def put(
        self,
        batch: Mapping[str, Any],
        value_spec: Mapping[str, ValueSpec] | None = None,
        partitions: Sequence[Sequence[int]] | None = None,
    ) -> BatchRef:
        """Store a batch and return its ref; when this returns, any process with the ref can read it.

        Args:
            batch: columns and values by name; `columns` states what may be in it.
            value_spec: codec and dtype by column name, for columns whose values do not speak for themselves.
            partitions: for each reader the rows that it will get, e.g. for each data-parallel rank; together every row
                once. The rows of each lie together, what describes the whole batch is stored once for all.

        Raises:
            TypeError, OverflowError, ValueError: a value that cannot be stored, named by column and row. Nothing was
                stored.
            StoreFull: no room within the backend's bounded wait.
            StoreUnavailable: the backend cannot be reached.
            StoreClosed: the store was closed.
        """
        self._check_open()
        encoded = encode(batch, value_spec, partitions, self._carrier.narrows())
        origin = provenance(batch)
        placed = self._carrier.put(encoded)
        self._count(puts=1, bytes_put=encoded.nbytes)
        return BatchRef(
            backend=self.backend,
            run_id=self.run_id,
            key=placed.key,
            num_rows=encoded.num_rows,
            nbytes=encoded.nbytes,
            digest=placed.digest,
            head_bytes=encoded.head_bytes,
            partitions=encoded.partitions,
            copies=placed.copies,
            handle=placed.handle,
            **origin._asdict(),
        )

    def get(
        self,
        ref: BatchRef,
        fields: Sequence[str] | None = None,
        rows: Rows = None,
        as_lists: bool = False,
        on_release: Callable[[], None] | None = None,
        *,
        partition: int | None = None,
        slices: Mapping[str, Slicing] | None = None,
    ) -> GetResult:
        """Read a batch, or some of its columns, rows and slices: over the network only their bytes move.

        Every byte that moved is checked against the ref's digest. Bytes that did not move, in memory shared with the
        writer, are known by the object's frame; their digests are checked with the setting verify="always".

        Numbers come back as read-only numpy arrays, whichever types carried them in; bfloat16 and float8, which numpy
        lacks, as torch tensors, which are copies of the caller's own.

        Args:
            ref: what `put` returned, here or in another process.
            fields: columns to return, in this order; None for all.
            rows: a slice or row numbers; None for all. Values that describe the whole batch ignore it.
            as_lists: numeric columns as Python lists instead.
            on_release: called once, in a thread of the store's, when the result was released and the last array that
                looks into its memory is gone: the moment to acknowledge the batch to a `Ledger`.
            partition: the rows of this partition of those that the batch was put with, instead of `rows`.
            slices: for columns with a `ValueSpec.slice_axis`: what to take of each row along it, one slice for all
                rows, or a sequence of one for each row that is returned.

        Raises:
            ObjectNotFound, ObjectLost: the batch was removed, or died with its owner.
            IntegrityError: the bytes are not those that were put.
            StoreUnavailable, StoreFull: the backend cannot be reached, or this process holds too many results.
            StoreClosed: the store was closed.
            KeyError, IndexError, TypeError: a column, row, partition or slice axis that the batch does not have.
            MissingDependency: a column of bfloat16 or float8 where torch is not installed.
        """
        self._check_open()
        self._check_ref(ref)
        wanted = Selection(fields, rows, partition, slices or {})
        # By a call, so that no frame of this method, which a caught exception may keep, looks at the batch.
        return self._lend(
            ref, wanted, as_lists, on_release, *(self._prefetched(ref, wanted) or self._read(ref, wanted))
        )

    def prefetch(
        self,
        ref: BatchRef,
        fields: Sequence[str] | None = None,
        rows: Rows = None,
        *,
        partition: int | None = None,
        slices: Mapping[str, Slicing] | None = None,
    ) -> None:
        """Start a `get` in the background; the next one of the same here takes what was read, or its failure.

        What was read keeps its buffers until then, or until a `get` of something else of the batch, or its `remove`.

        Raises:
            StoreClosed, ConfigError: as `get`.
        """
        self._check_open()
        self._check_ref(ref)
        wanted = Selection(fields, rows, partition, slices or {})
        with self._lock:
            if ref.key not in self._prefetches:
                self._prefetches[ref.key] = wanted, self._ahead.submit(self._read, ref, wanted)

    async def aput(
        self,
        batch: Mapping[str, Any],
        value_spec: Mapping[str, ValueSpec] | None = None,
        partitions: Sequence[Sequence[int]] | None = None,
    ) -> BatchRef:
        """`put` in a thread of the store's, so that the event loop goes on. Cancelling does not undo what has begun."""
        self._check_open()
        return await asyncio.wrap_future(self._writes.submit(self.put, batch, value_spec, partitions))

    async def aget(self, ref: BatchRef, *arguments: Any, **more: Any) -> GetResult:
        """`get`, with the same arguments, in a thread of the store's, so that the event loop goes on."""
        self._check_open()
        return await asyncio.wrap_future(self._reads.submit(self.get, ref, *arguments, **more))

    def remove(self, ref: BatchRef) -> None:
        """Free a batch. Removing it again, or when it is already gone, does nothing.

        Raises:
            StoreUnavailable: the backend cannot be reached; the batch may still be there.
            StoreClosed: the store was closed.
        """
        self._check_open()
        self._check_ref(ref)
        self._give_up_prefetch(ref.key)
        # Arrays that are gone are looked after first: what this frees was not taken from under them.
        self._releases.settle()
        self._carrier.remove(ref)
        self._count(removes=1)

    def stats(self) -> dict[str, int]:
        """Return counters since open: puts, gets, removes, bytes_put and bytes_got (bytes of stored objects).

        Mooncake adds bytes_sent and bytes_received, which moved over the network, records of the store's own included.
        """
        with self._lock:
            return {**self._stats, **self._carrier.traffic()}

    def close(self) -> None:
        """Disconnect; idempotent. Every later call raises StoreClosed; arrays already read stay valid."""
        self._closed = True
        if os.getpid() == self._pid:
            with self._lock:
                prefetched = list(self._prefetches)
            for key in prefetched:
                self._give_up_prefetch(key)
            for worker in (self._reads, self._writes, self._ahead):  # calls that wait there find the store closed
                worker.close(CLOSE_SECONDS)
            self._releases.close()
            self._carrier.close()

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        # Before any lock is touched: a fork may have copied it in its locked state.
        if os.getpid() != self._pid:
            raise StoreClosed(
                f"this store was opened by process {self._pid} and forked into {os.getpid()}, where it cannot work; "
                f"start the process with 'spawn' and open a store in it"
            )
        if self._closed:
            raise StoreClosed(f"the {self.backend} store of run {self.run_id!r} is closed; open a new one")

    def _check_ref(self, ref: BatchRef) -> None:
        if not isinstance(ref, BatchRef):
            raise TypeError(f"a {type(ref).__name__} names no batch; pass the BatchRef that put returned")
        if ref.backend != self.backend:
            raise ConfigError(
                f"ref {ref.key!r} was put by backend {ref.backend!r}, this store is {self.backend!r}; "
                f"open the same backend in every process"
            )

    def _lend(
        self,
        ref: BatchRef,
        wanted: Selection,
        as_lists: bool,
        on_release: Callable[[], None] | None,
        batch: dict[str, Any],
        stored: Stored,
    ) -> GetResult:
        watch = None
        if stored.loan is not None:
            stored.loan.check()  # what was decoded was read from memory that was still this batch's
            watch = _Watch(ref, stored.loan)
        at_end = [] if watch is None else [watch.confirm_late]
        if on_release is not None:
            at_end.append(on_release)
        if at_end:
            self._releases.call_when_gone(stored.source.root, *at_end)
        self._count(gets=1, bytes_got=ref.nbytes)
        num_rows = wanted.count(ref.num_rows, ref.partitions)
        return GetResult(_as_lists(batch) if as_lists else batch, num_rows, stored, watch)

    def _read(self, ref: BatchRef, wanted: Selection) -> tuple[dict[str, Any], Stored]:
        def decoded(stored: Stored) -> tuple[dict[str, Any], Stored]:
            verify = self._carrier.verify_shared or not stored.shared
            return read(stored.source, wanted, digest=ref.digest, verify=verify), stored

        return self._carrier.get(ref, wanted.is_all, decoded)

    def _prefetched(self, ref: BatchRef, wanted: Selection) -> tuple[dict[str, Any], Stored] | None:
        with self._lock:
            asked, reading = self._prefetches.pop(ref.key, (None, None))
        # One that has not begun is given up: here it would wait behind others.
        if reading is None or reading.cancel() or asked != wanted:
            return None
        batch, stored = reading.result()
        # Nor is one taken whose batch was removed since.
        return (batch, stored) if stored.loan is None or stored.loan.is_kept() else None

    def _give_up_prefetch(self, key: str) -> None:
        with self._lock:
            _, reading = self._prefetches.pop(key, (None, None))
        if reading is not None:
            reading.cancel()

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._stats[name] += amount


_as_lists = as_lists  # `get` has a parameter of this name


def open_store(
    backend: str,
    init_kwargs: Mapping[str, Any] | None = None,
    replica_num: int = 1,
    contribute_segment: bool | None = None,
    run_id: str | None = None,
    log_dir: Path | None = None,
) -> ObjectStore:
    """Open the store of this process.

    Args:
        backend: "ray", "mooncake", or a name from the entry-point group mooncake_store.backends.
        init_kwargs: the backend's settings. For mooncake see `MooncakeConfig`, each falling back to the environment;
            ray has none.
        replica_num: number of owners that must hold each batch; a put that gets fewer fails. Ray takes 1 only.
        contribute_segment: whether this process lends memory to the store; None means that LOCAL_RANK is unset or 0,
            so that one process per node does.
        run_id: names the run whose keys this store writes; None makes a new one. The first put claims it for this
            process: one process puts under a run id, any number read.
        log_dir: directory of the log of a segment holder that is started here; None for the system's temporary one.

    Raises:
        ConfigError: an unknown backend or setting, or a value that cannot be used (also a ValueError).
        StoreUnavailable: the master does not answer; decided within about ten seconds.
    """
    if isinstance(replica_num, bool) or not isinstance(replica_num, int) or replica_num < 1:
        raise ConfigError(f"replica_num = {replica_num!r}: allowed is an integer of at least 1")
    if contribute_segment is not None and not isinstance(contribute_segment, bool):
        raise ConfigError(f"contribute_segment = {contribute_segment!r}: allowed are True, False and None")
    if run_id is None:
        run_id = uuid.uuid4().hex
    check_run_id(run_id)
    options = BackendOptions(run_id, _checked_kwargs(init_kwargs), replica_num, contribute_segment, log_dir)
    return ObjectStore(backend, run_id, find_backend(backend)(options))


def _checked_kwargs(init_kwargs: object) -> dict[str, Any]:
    if init_kwargs is None:
        return {}
    if not isinstance(init_kwargs, Mapping):
        raise ConfigError(
            f"init_kwargs = {init_kwargs!r:.200} is a {type(init_kwargs).__name__}; allowed: a mapping of names of "
            f"settings to their values (parse JSON text first)"
        )
    for name in init_kwargs:
        if not isinstance(name, str):
            raise ConfigError(f"init_kwargs has the key {name!r} of type {type(name).__name__}; allowed: strings")
    return dict(init_kwargs)
