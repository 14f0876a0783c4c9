"""What goes wrong, one after the other, against a real master and real holders: each ends typed, or recovers.

Every test ends with a put and a get that work.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import signal
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from mooncake_store import (
    BatchRef,
    ConfigError,
    GetResult,
    IntegrityError,
    MasterProcess,
    ObjectLost,
    ObjectNotFound,
    ObjectStore,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from mooncake_store.backends.mooncake import KEEPER_SECONDS
from mooncake_store.claim import beat_key, claim_key, sweep, sweep_dead
from mooncake_store.client import Limits, MooncakeClient
from mooncake_store.config import resolve
from mooncake_store.holder import RunningHolder, SegmentHolder, start_holder
from mooncake_store.ledger import Ledger
from mooncake_store.outstanding import Outstanding
from tests.integration.store.store_children import Child
from tests.integration.store.store_services import (
    HANG,
    MIB,
    PATIENT,
    batch_of,
    batches,
    carrier_of,
    holding,
    lies_at,
    metric,
    same,
    settings,
    store_with,
)

pytestmark = pytest.mark.integration
SIZE = 1 * MIB
MASTER_OPTIONS = {"client_ttl": "2"}


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    with MasterProcess(tmp_path / "master.log", options=MASTER_OPTIONS) as process:
        yield process


@pytest.fixture
def holder(master: MasterProcess, tmp_path: Path) -> Iterator[RunningHolder]:
    with holding(master.address, tmp_path) as running:
        yield running


@pytest.fixture
def uncollected() -> Iterator[Callable[[], list[BaseException]]]:
    """The exceptions that only a collection of cycles would free."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def find() -> list[BaseException]:
        gc.collect()
        found = [item for item in gc.garbage if isinstance(item, BaseException)]
        gc.garbage.clear()
        return found

    try:
        yield find
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def works(address: str, run_id: str = "afterwards") -> None:
    """A put and a get, seen in place and over the network."""
    with (
        store_with(address, run_id, PATIENT) as writer,
        store_with(address, limits=PATIENT, share_memory=False) as reader,
    ):
        ref = writer.put(batch_of(SIZE, 7))
        for store in (writer, reader):
            with store.get(ref) as got:
                assert same(got, SIZE, 7)
        writer.remove(ref)


def replaced(master: MasterProcess, tmp_path: Path) -> MasterProcess:
    """The master restarted: killed, and another started at its address."""
    master.stop()
    return MasterProcess(tmp_path / "master2.log", options=MASTER_OPTIONS, ports=master.ports)


# --- memory that runs out -------------------------------------------------------------------------------------------


def test_a_thousand_batches_through_a_segment_that_holds_twenty(master: MasterProcess, holder: RunningHolder) -> None:
    nbytes = 32 * MIB // 20 - 4096
    with store_with(master.address) as store, store_with(master.address) as reader:
        ledger = Ledger(store)
        for number in range(1000):
            ref = store.put(batch_of(nbytes, number % 5))
            ledger.expect(ref, {0})
            with reader.get(ref, on_release=lambda key=ref.key: ledger.acknowledge(key, 0)) as got:
                assert same(got, nbytes, number % 5)
            del got
    assert metric(master, "master_evicted_key_count") == 0
    assert not ledger.outstanding()
    assert not batches(master)


def test_a_full_store_waits_for_its_reader_then_says_what_is_wrong(
    master: MasterProcess, holder: RunningHolder
) -> None:
    with store_with(master.address, limits=PATIENT) as store:
        first = store.put(batch_of(20 * MIB, 1))
        threading.Timer(0.5, store.remove, [first]).start()
        second = store.put(batch_of(20 * MIB, 2))  # waits for the room
        with store.get(second) as got:
            assert same(got, 20 * MIB, 2)
        store.remove(second)
    with store_with(master.address) as store:
        refs = [store.put(batch_of(14 * MIB, seed)) for seed in range(2)]
        with pytest.raises(StoreFull, match="remove batches that were read") as caught:
            store.put(batch_of(14 * MIB, 3))
        assert caught.value.retryable
        for seed, ref in enumerate(refs):
            with store.get(ref) as got:
                assert same(got, 14 * MIB, seed)
            store.remove(ref)
    works(master.address)


def test_a_fragmented_store_takes_a_batch_in_pieces(master: MasterProcess, tmp_path: Path) -> None:
    with holding(master.address, tmp_path, "256mb"), store_with(master.address, local_buffer_size="300mb") as store:
        refs = [store.put(batch_of(20 * MIB, seed)) for seed in range(11)]
        for ref in refs[::2]:
            store.remove(ref)
        large = 80 * MIB  # every hole has about 20 MiB; pieces of PIECE_BYTES do not fit either
        with pytest.raises(StoreFull):
            store.put(batch_of(large))
        for ref in refs[1::4]:
            store.remove(ref)
        ref = store.put(batch_of(large, 5))
        assert len(batches(master, "run1")) > 3
        with (
            store.get(ref) as got,
            store_with(master.address, "other", share_memory=False, local_buffer_size="300mb") as other,
            other.get(ref) as sent,
        ):
            assert same(got, large, 5)
            assert same(sent, large, 5)
        store.remove(ref)


def until_full(store: ObjectStore, nbytes: int) -> Iterator[BatchRef]:
    """Puts `batch_of(nbytes, 0)`, 1, ..."""
    with suppress(StoreFull):
        for seed in itertools.count():
            yield store.put(batch_of(nbytes, seed))


def test_a_fragmented_store_takes_small_batches(master: MasterProcess, tmp_path: Path) -> None:
    """They are not packed together: the holes that larger ones leave take them one by one."""
    with (
        holding(master.address, tmp_path, "64mb"),
        store_with(master.address, limits=Limits(put=0.0)) as store,
    ):
        refs = list(until_full(store, MIB))
        for ref in refs[::2]:
            store.remove(ref)
        with pytest.raises(StoreFull):
            store.put(batch_of(3 * MIB))  # no hole is so large
        size = 60_000
        small = list(until_full(store, size))
        assert len(small) * size > 0.75 * MIB * len(refs[::2]), "of what was freed"
        for seed, ref in list(enumerate(small))[:: len(small) // 7]:
            with store.get(ref) as got:
                assert same(got, size, seed)
            del got


@pytest.mark.parametrize("share_memory", [True, False])
def test_chunks(master: MasterProcess, holder: RunningHolder, share_memory: bool) -> None:
    with store_with(master.address, share_memory=share_memory, chunk_bytes=300_001) as store:
        ref = store.put(batch_of(SIZE, 3))
        assert len(batches(master)) == 4
        with store.get(ref) as got:
            assert same(got, SIZE, 3)
        store.remove(ref)
        assert not batches(master)


def test_a_segment_larger_than_memory(master: MasterProcess, tmp_path: Path) -> None:
    config = resolve(settings(master.address, global_segment_size=1 << 50), {})
    with pytest.raises(StoreUnavailable, match="global_segment_size"):
        start_holder(config, tmp_path / "holder.log")


def _private(process: psutil.Process) -> int:
    """Bytes of memory without what is shared with the holder."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def test_what_was_let_go_of_before_it_was_removed_was_not_taken_away(
    master: MasterProcess, holder: RunningHolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the thread that looks after the end of arrays gets no time."""
    with store_with(master.address) as store:
        queue, get = store._releases._queue, store._releases._queue.get
        late = SimpleNamespace(put=queue.put, get=lambda: (time.sleep(0.02), get())[1])
        store._releases._queue = cast(Any, late)
        for number in range(30):
            ref = store.put({"reward": np.array([float(number)])})
            with store.get(ref) as got:
                assert got["reward"][0] == number
            del got
            store.remove(ref)
    assert not caplog.records


@pytest.mark.slow
def test_ten_thousand_small_batches_leave_nothing(master: MasterProcess, holder: RunningHolder) -> None:
    process = psutil.Process()
    with store_with(master.address, limits=PATIENT) as store:
        sizes = []
        for number in range(10_000):
            ref = store.put({"reward": np.array([float(number)])})
            with store.get(ref) as got:
                assert got["reward"][0] == number
            del got
            store.remove(ref)
            if number in (999, 9_999):
                gc.collect()
                sizes.append((process.num_fds(), process.num_threads(), _private(process)))
        assert len(carrier_of(store)._outstanding) == 0
    (fds, threads, private), (fds_after, threads_after, private_after) = sizes
    # Mooncake opens and ends a few of its own; of 9,000 batches none may leave one.
    assert fds_after - fds < 20
    assert threads_after - threads < 20
    assert private_after - private < 8 * MIB
    assert not batches(master)


# --- holders --------------------------------------------------------------------------------------------------------


def test_a_holder_that_is_killed(master: MasterProcess, holder: RunningHolder, tmp_path: Path) -> None:
    with store_with(master.address) as store, store_with(master.address, share_memory=False) as far:
        ref = store.put(batch_of(SIZE))
        held = store.get(ref)
        os.kill(holder.record.pid, signal.SIGKILL)
        holder.stop()
        with pytest.raises(ObjectLost):
            far.get(ref)
        with pytest.raises((StoreFull, StoreUnavailable)):
            store.put(batch_of(SIZE))
        assert same(held.value, SIZE), "what is mapped stays readable"
        held.release()
        with holding(master.address, tmp_path):
            works(master.address)
            store.remove(store.put(batch_of(SIZE)))


@pytest.mark.slow
def test_a_holder_that_is_stopped(master: MasterProcess, holder: RunningHolder) -> None:
    with store_with(master.address) as store, store_with(master.address, share_memory=False) as far:
        ref = store.put(batch_of(SIZE))
        os.kill(holder.record.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreError) as caught:
                far.get(ref)
            assert isinstance(caught.value, ObjectLost | StoreUnavailable)
        finally:
            os.kill(holder.record.pid, signal.SIGCONT)
        with far.get(ref) as got:  # published again, if the master gave the holder up
            assert same(got, SIZE)
        store.remove(ref)
    works(master.address)


@pytest.mark.slow
def test_replicas_survive_the_loss_of_an_owner(master: MasterProcess, tmp_path: Path) -> None:
    with holding(master.address, tmp_path) as first, holding(master.address, tmp_path) as second:
        with store_with(master.address, replica_num=2) as store, store_with(master.address, share_memory=False) as far:
            ref = store.put(batch_of(SIZE))
            owners = [copy.sentinel.split("/")[1] for copy in ref.copies]
            assert sorted(owners) == sorted([first.record.holder, second.record.holder])
            assert len(batches(master)) == 2
            lost = {first.record.holder: first, second.record.holder: second}[owners[0]]
            os.kill(lost.record.pid, signal.SIGKILL)
            with far.get(ref) as got:
                assert same(got, SIZE)
            with pytest.raises(StoreUnavailable, match="2 replicas"):
                store.put(batch_of(SIZE))
            store.remove(ref)
        works(master.address)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_stays_alive_without_the_holder_of_its_heartbeat(tmp_path: Path, how: signal.Signals) -> None:
    """Mooncake takes longer to give an owner up than a run may be silent, and a stopped one holds transfers up."""
    with (
        MasterProcess(tmp_path / "master.log") as master,
        holding(master.address, tmp_path),
        holding(master.address, tmp_path),
        store_with(master.address, replica_num=2, share_memory=False) as store,
        store_with(master.address, "observer") as observer,
    ):
        ref = store.put(batch_of(SIZE))
        writer, watcher = carrier_of(store), carrier_of(observer)
        (location,) = writer._client.locate([beat_key("run1")])
        assert location is not None
        holders = sorted(writer._owners.all(), key=lambda owner: not owner.holds(location))
        stopped = holders[how == signal.SIGSTOP]
        os.kill(stopped.pid, how)
        try:
            putting = threading.Thread(target=_try_to_put, args=(store,))
            if how == signal.SIGSTOP:
                putting.start()
            time.sleep(1)
            for _ in range(2):
                with pytest.raises(ConfigError, match="is alive"):
                    sweep(watcher._client, watcher._records, "run1")
            with observer.get(ref) as got:
                assert same(got, SIZE)
        finally:
            if how == signal.SIGSTOP:
                os.kill(stopped.pid, signal.SIGCONT)
                putting.join(HANG)
        assert not putting.is_alive()


def _try_to_put(store: ObjectStore) -> None:
    with suppress(StoreError):
        store.put(batch_of(SIZE))


# --- writers and readers that die -----------------------------------------------------------------------------------


def die_at(connection: Connection, address: str, moment: str, share_memory: bool) -> None:
    from mooncake_store.encode import Encoded
    from mooncake_store.rows import Sink

    store = store_with(address, "dead", share_memory=share_memory)
    if moment == "during":

        def cut(self: Encoded, sink: Sink) -> str:
            for position in range(self.head_bytes, self.nbytes // 2, 4096):
                sink.reserve(position, 4096)[:] = 1
            os.kill(os.getpid(), signal.SIGKILL)
            return ""

        Encoded.write = cut  # type: ignore[method-assign]
    if moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    ref = store.put(batch_of(SIZE))
    connection.send(ref.to_json())
    connection.recv()


@pytest.mark.parametrize(
    ("moment", "share_memory"),
    [
        ("during", True),
        *(
            pytest.param(moment, shared, marks=pytest.mark.slow)
            for moment, shared in (
                ("before", True),
                ("after", True),
                ("before", False),
                ("during", False),
                ("after", False),
            )
        ),
    ],
)
def test_a_writer_that_is_killed(master: MasterProcess, holder: RunningHolder, moment: str, share_memory: bool) -> None:
    with Child(die_at, master.address, moment, share_memory) as writer:
        ref = BatchRef.from_json(writer.receive(HANG)) if moment == "after" else None
        if ref is None:
            writer.process.join(HANG)
        else:
            writer.kill()
    with store_with(master.address) as store:
        if ref is not None:
            with store.get(ref) as got:
                assert same(got, SIZE)
        for key in batches(master, "dead"):
            if ref is None:  # what it left cannot be read, whatever a ref says
                stem = key.rpartition("/")[0]
                some = store.put(batch_of(SIZE))
                forged = BatchRef("mooncake", "dead", stem, 1, some.nbytes, some.digest, copies=some.copies)
                store.remove(some)
                with pytest.raises(IntegrityError, match="did not finish"):
                    store.get(forged)
        carrier = carrier_of(store)
        sweep(carrier._client, carrier._records, "dead")
        assert not batches(master, "dead")
    works(master.address, "dead")


def stop_at(connection: Connection, address: str, share_memory: bool) -> None:
    """Put a batch of 16 MiB, stopped in its midst."""
    from mooncake_store.encode import Encoded
    from mooncake_store.rows import STEP_BYTES

    store = store_with(address, "stopped", limits=PATIENT, share_memory=share_memory)
    write, reserved = Encoded.write, itertools.count()

    def stopping(self: Encoded, sink: Any) -> str:
        reserve = sink.reserve

        def step(position: int, nbytes: int) -> Any:
            if next(reserved) == self.nbytes // STEP_BYTES // 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            return reserve(position, nbytes)

        sink.reserve = step
        return write(self, sink)

    Encoded.write = stopping  # type: ignore[method-assign]
    ref = store.put(batch_of(16 * MIB))
    connection.send(ref.to_json())
    connection.recv()


@pytest.mark.parametrize("share_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_writer_that_is_stopped_keeps_its_memory(
    master: MasterProcess, holder: RunningHolder, share_memory: bool
) -> None:
    """What it writes when it continues must not be another's."""
    with Child(stop_at, master.address, share_memory) as writer, store_with(master.address, "other") as store:
        os.waitid(os.P_PID, writer.process.pid, os.WSTOPPED)
        carrier = carrier_of(store)
        with pytest.raises(ConfigError, match=f"alive .process {writer.process.pid} of"):
            sweep(carrier._client, carrier._records, "stopped")
        assert sweep_dead(carrier._client, carrier._records, ["stopped"]) == {}
        with store_with(master.address, "stopped") as successor, pytest.raises(ConfigError, match="is in use by"):
            successor.put(batch_of(SIZE))
        refs = [store.put(batch_of(SIZE, seed)) for seed in range(3)]
        os.kill(writer.process.pid, signal.SIGCONT)
        with store.get(BatchRef.from_json(writer.receive(HANG))) as got:
            assert same(got, 16 * MIB)
        for seed, ref in enumerate(refs):
            with store.get(ref) as got:
                assert same(got, SIZE, seed)
        writer.kill()
    works(master.address, "stopped")


def die_writing(connection: Connection, address: str, key: str) -> None:
    """Die between the two calls that write a record, as a process may that is killed."""
    client = carrier_of(store_with(address, "other"))._client
    client.allocate([key], [64], "")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_while_it_writes_a_record(master: MasterProcess, holder: RunningHolder) -> None:
    """Mooncake neither shows nor removes what it left, for minutes."""
    for key in (beat_key("beating"), claim_key("claiming")):
        with Child(die_writing, master.address, key) as writer:
            os.waitid(os.P_PID, writer.process.pid, os.WEXITED | os.WNOWAIT)
    works(master.address, "beating")
    with (
        store_with(master.address, "claiming") as store,
        pytest.raises(ConfigError, match="give this run another run_id"),
    ):
        store.put(batch_of(SIZE))
    works(master.address)


def hold(connection: Connection, address: str, text: str) -> None:
    store = store_with(address, "reader")
    result = store.get(BatchRef.from_json(text))
    connection.send(float(result.value["tokens"][0][0]))
    connection.recv()


def test_a_reader_that_is_killed_while_it_holds(master: MasterProcess, holder: RunningHolder) -> None:
    with store_with(master.address) as store:
        ledger = Ledger(store)
        ref = store.put(batch_of(SIZE))
        ledger.expect(ref, {"a", "b"})
        with Child(hold, master.address, ref.to_json()) as reader:
            reader.receive(HANG)
            ledger.acknowledge(ref.key, "a")
            reader.kill()
        assert batches(master), "the dead reader has not acknowledged"
        ledger.reader_died("b")
        assert not batches(master)
        ledger.reader_died("b")
        assert not ledger.acknowledge(ref.key, "b")
    works(master.address)


def manage(connection: Connection, address: str) -> None:
    store = store_with(address, "managed")
    connection.send(store.put(batch_of(SIZE)).to_json())
    connection.recv()


def test_a_manager_that_is_killed_is_replaced(master: MasterProcess, holder: RunningHolder) -> None:
    with Child(manage, master.address) as manager:
        ref = BatchRef.from_json(manager.receive(HANG))
        with store_with(master.address, "managed") as second:
            with pytest.raises(ConfigError, match=f"in use by process {manager.process.pid}"):
                second.put(batch_of(SIZE))  # refused while the first lives
            with second.get(ref) as got:
                assert same(got, SIZE), "and nothing was swept"
            manager.kill()
            mine = second.put(batch_of(SIZE, 2))  # the run is dead now: taken over, its remains swept
            assert batches(master) == [f"{mine.key}/0.0"]
            with pytest.raises(ObjectNotFound):
                second.get(ref)
            second.remove(mine)
    works(master.address)


# --- masters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_master_that_is_restarted_loses_nothing(
    master: MasterProcess, holder: RunningHolder, tmp_path: Path, share_memory: bool
) -> None:
    with (
        store_with(master.address, limits=PATIENT, share_memory=share_memory) as store,
        store_with(master.address, limits=PATIENT) as near,
    ):
        refs = [store.put(batch_of(SIZE, seed)) for seed in range(5)]
        held = near.get(refs[0])
        store.remove(refs.pop())
        with replaced(master, tmp_path) as second:
            for seed, ref in enumerate(refs):
                with store.get(ref) as got:
                    assert same(got, SIZE, seed)
            for _ in range(3):  # more than the segment holds: fresh memory is refilled, not that under the view
                for number in range(20):
                    store.remove(store.put(batch_of(SIZE, 100 + number)))
            assert same(held.value, SIZE, 0), "the view did not change"
            held.release()
            for ref in refs:
                store.remove(ref)
            assert not batches(second)
            with replaced(second, tmp_path):  # and once more
                works(master.address)
                again = store.put(batch_of(SIZE, 9))
                with near.get(again) as got:
                    assert same(got, SIZE, 9)


@pytest.mark.slow
def test_a_master_that_is_restarted_twice(master: MasterProcess, holder: RunningHolder, tmp_path: Path) -> None:
    with store_with(master.address, limits=PATIENT) as store:
        ref = store.put(batch_of(SIZE, 4))
        second = replaced(master, tmp_path)
        with store.get(ref) as got:
            assert same(got, SIZE, 4)
        with replaced(second, tmp_path):
            with store.get(ref) as got:
                assert same(got, SIZE, 4)
            store.remove(ref)
            works(master.address)


def test_a_batch_that_is_removed_while_it_is_published_again_stays_removed(
    master: MasterProcess, holder: RunningHolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    ask = Outstanding._ask
    with store_with(master.address, limits=PATIENT) as store:
        refs = [store.put(batch_of(SIZE, seed)) for seed in range(2)]

        def remove_first(*arguments: Any) -> None:
            store.remove(refs[0])  # the new master knows nothing of it
            ask(*arguments)
            asked.set()

        monkeypatch.setattr(Outstanding, "_ask", remove_first)
        with replaced(master, tmp_path) as second:
            assert asked.wait(HANG)
            deadline = time.monotonic() + HANG
            left = [f"{refs[1].key}/0.0"]
            while batches(second) != left and time.monotonic() < deadline:
                time.sleep(0.1)
            assert batches(second) == left
            with store.get(refs[1]) as got:
                assert same(got, SIZE, 1)
            store.remove(refs[1])
            works(master.address)


def test_a_put_after_a_restart_leaves_room_for_what_was_there(
    master: MasterProcess, holder: RunningHolder, tmp_path: Path
) -> None:
    with store_with(master.address, limits=PATIENT) as store:
        refs = [store.put(batch_of(4 * MIB - 4096, seed)) for seed in range(7)]
        with replaced(master, tmp_path):
            with ThreadPoolExecutor(1) as thread:
                putting = thread.submit(store.put, batch_of(4 * MIB - 4096, 9))  # fits when one of them is gone
                for seed, ref in enumerate(refs):
                    with store.get(ref) as got:
                        assert same(got, 4 * MIB - 4096, seed)
                    store.remove(ref)
                store.remove(putting.result(HANG))
            works(master.address)


def test_failures_leave_nothing_for_the_collector(
    master: MasterProcess, holder: RunningHolder, tmp_path: Path, uncollected: Callable[[], list[BaseException]]
) -> None:
    """An exception in a cycle keeps the frames of all its callers, and what they look at, until a collection."""
    limits = Limits(put=1.0, get=1.0, remove=1.0)
    with (
        store_with(master.address, limits=limits) as store,
        store_with(master.address, share_memory=False, limits=limits) as far,
    ):
        refs = [store.put(batch_of(SIZE, seed)) for seed in range(2)]
        store.remove(refs[0])
        for reader in (store, far):
            with suppress(ObjectNotFound):
                reader.get(refs[0])
        master.stop()
        for call in (lambda: store.get(refs[1]), lambda: far.get(refs[1]), lambda: store.remove(refs[1])):
            with suppress(StoreUnavailable):
                call()
        with suppress(StoreUnavailable):
            store.put(batch_of(SIZE))
        assert uncollected() == []
        with MasterProcess(tmp_path / "master2.log", options=MASTER_OPTIONS, ports=master.ports):
            works(master.address)
    assert uncollected() == []


@pytest.mark.parametrize(
    ("number", "nbytes"), [pytest.param(12_000, 256, marks=pytest.mark.slow), (452, 64 << 10)], ids=["many", "full"]
)
def test_whatever_was_outstanding_comes_back(
    number: int, nbytes: int, master: MasterProcess, holder: RunningHolder, tmp_path: Path
) -> None:
    with store_with(master.address, limits=PATIENT) as store:
        refs = []
        with suppress(StoreFull):
            refs += [store.put(batch_of(nbytes, seed % 7)) for seed in range(number)]
        for _ in range(2):
            with replaced(master, tmp_path) as after:
                store.put(batch_of(4, 1))  # waits for those before it
                for seed in range(0, len(refs), max(1, len(refs) // 500)):
                    with store.get(refs[seed]) as got:
                        assert same(got, nbytes, seed % 7)
                assert len(batches(after)) >= len(refs)


def test_a_living_run_keeps_its_id_through_a_restart(
    master: MasterProcess, holder: RunningHolder, tmp_path: Path
) -> None:
    with store_with(master.address, limits=PATIENT) as mine, store_with(master.address) as thief:
        mine.put(batch_of(SIZE))
        with pytest.raises(ConfigError, match="in use"):
            thief.put(batch_of(SIZE))
        with replaced(master, tmp_path):
            deadline = time.monotonic() + 10.0
            while time.monotonic() < deadline:
                try:
                    thief.put(batch_of(SIZE))
                except ConfigError:
                    break
                except StoreError:  # the holder lends nothing yet
                    continue
                pytest.fail("the run was taken from a living process")
            mine.put(batch_of(SIZE))


def test_a_close_waits_for_no_master(master: MasterProcess, holder: RunningHolder) -> None:
    store = store_with(master.address, limits=Limits(put=HANG, get=HANG, remove=3 * HANG))
    with ThreadPoolExecutor(1) as thread:
        store.put(batch_of(SIZE))
        master.stop()
        time.sleep(3 * KEEPER_SECONDS)  # its heartbeat has missed the master
        thread.submit(store.close).result(HANG)


def test_a_claim_that_the_end_of_a_master_interrupted_is_taken_later(
    master: MasterProcess, holder: RunningHolder, tmp_path: Path
) -> None:
    with store_with(master.address, limits=PATIENT) as store:
        client = carrier_of(store)._client
        client.allocate([claim_key("run1")], [100], holder.record.name)
        master.stop()
        client.revoke([claim_key("run1")])  # nobody hears it
        with MasterProcess(tmp_path / "master2.log", options=MASTER_OPTIONS, ports=master.ports):
            ref = store.put(batch_of(SIZE))
            with store.get(ref) as got:
                assert same(got, SIZE)
            store.remove(ref)


@pytest.mark.parametrize("shared", [True, False])
def test_a_holder_lends_again_after_a_mount_that_the_end_of_a_master_interrupted(
    shared: bool,
    master: MasterProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve(settings(master.address), {})
    client = MooncakeClient.connect(config, Limits())
    lent = SegmentHolder(client, config.global_segment_size, "tcp", uuid.uuid4().hex)
    if not shared:
        monkeypatch.setattr(lent, "_memory", lambda _: None)
    try:
        master.stop()
        monkeypatch.setattr(client, "_probe_again", lambda: None)  # it goes when it has been looked for
        with pytest.raises(StoreError, match="mount"):
            lent._lend(epoch=1)
        with MasterProcess(tmp_path / "master2.log", options=MASTER_OPTIONS, ports=master.ports):
            deadline, said = time.monotonic() + HANG, list[str]()
            while lent.record.epoch == 0:
                assert time.monotonic() < deadline
                try:
                    lent.tick()
                except StoreError as error:
                    said.append(str(error))
            # Of memory of its own Mooncake chooses the addresses by rules of its own, and it may take a few more.
            assert not shared or sum("mount" in text for text in said) <= 3, "its addresses were free, and refused"
            works(master.address)
    finally:
        lent.close()


@pytest.mark.slow
def test_until_a_holder_has_seen_a_restart_nothing_is_written_into_its_memory(
    master: MasterProcess, tmp_path: Path
) -> None:
    """Mooncake lends it to the new master by itself, as if it were free: to batches, and to records of runs."""
    config = resolve(settings(master.address), {})
    client = MooncakeClient.connect(config, Limits())
    lent = SegmentHolder(client, config.global_segment_size, "tcp", uuid.uuid4().hex)
    try:
        with store_with(master.address, limits=PATIENT) as store, store_with(master.address, "run2") as other:
            refs = [store.put(batch_of(SIZE, seed)) for seed in range(3)]
            other.remove(other.put(batch_of(SIZE)))  # a run without a batch, which beats, too
            held = store.get(refs[0])
            with replaced(master, tmp_path) as second:
                deadline = time.monotonic() + HANG
                before = lent._current.bytes.copy()
                while metric(second, "master_total_capacity_bytes") < lent.record.nbytes:
                    assert time.monotonic() < deadline, "Mooncake did not lend it again"
                    time.sleep(0.05)
                time.sleep(2 * KEEPER_SECONDS)
                carrier = carrier_of(other)
                for call in (
                    lambda: other.put(batch_of(SIZE, 9)),
                    lambda: carrier._claim.beat([lent.record.name]),
                    lambda: carrier._records.claim("record", b"", lent.record.name),
                ):
                    with pytest.raises(StoreError):
                        call()
                assert np.array_equal(lent._current.bytes, before)
                while lent.record.epoch == 0:
                    with suppress(StoreError):
                        lent.tick()
                ended = threading.Event()

                def tick() -> None:
                    while not ended.wait(0.1):
                        with suppress(StoreError):
                            lent.tick()

                ticking = threading.Thread(target=tick)
                ticking.start()
                try:
                    for seed, ref in enumerate(refs):
                        with store.get(ref) as got:
                            assert same(got, SIZE, seed)
                    assert same(held.value, SIZE)
                    held.release()
                    works(master.address)
                finally:
                    ended.set()
                    ticking.join()
    finally:
        lent.close()


@pytest.mark.slow
def test_a_batch_whose_writer_is_gone_is_lost_with_the_master(
    master: MasterProcess, holder: RunningHolder, tmp_path: Path
) -> None:
    with store_with(master.address) as writer:
        ref = writer.put(batch_of(SIZE))
    with store_with(master.address) as reader, replaced(master, tmp_path):
        with pytest.raises(ObjectLost, match="did not publish it again"):
            reader.get(ref)
        works(master.address)


def test_a_master_that_is_gone(master: MasterProcess, holder: RunningHolder) -> None:
    with store_with(master.address, limits=Limits(put=1.0, get=1.0, remove=1.0)) as store:
        ref = store.put(batch_of(SIZE))
        master.stop()
        for call in (lambda: store.put(batch_of(SIZE)), lambda: store.get(ref), lambda: store.remove(ref)):
            with pytest.raises(StoreUnavailable, match=master.address):
                call()


# --- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_connection_that_is_cut_midway(master: MasterProcess, tmp_path: Path) -> None:
    nbytes = 200 * MIB
    with (
        holding(master.address, tmp_path, "256mb") as holder,
        store_with(master.address, local_buffer_size="512mb") as store,
        store_with(master.address, local_buffer_size="512mb", share_memory=False) as far,
    ):
        ref = store.put(batch_of(nbytes))
        with far.get(ref) as got:
            assert same(got, nbytes)
        del got
        cut = threading.Thread(target=_kill_while_reading, args=(holder.record.pid, psutil.Process()))
        cut.start()
        with pytest.raises((ObjectLost, StoreUnavailable)):
            far.get(ref)
        cut.join()
    with holding(master.address, tmp_path):
        works(master.address)


def _kill_while_reading(pid: int, reader: psutil.Process) -> None:
    time.sleep(0.05)  # a quarter of what 200 MiB take at the speed of loopback
    os.kill(pid, signal.SIGKILL)


# --- runs and keys --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_runs_on_one_master(master: MasterProcess, holder: RunningHolder) -> None:
    with store_with(master.address, "one") as first, store_with(master.address, "two") as second:
        refs = [store.put(batch_of(SIZE, seed)) for seed, store in enumerate((first, second))]
        carrier = carrier_of(first)
        with pytest.raises(ConfigError, match="alive"):
            sweep(carrier._client, carrier._records, "two")
        second.close()
        assert sweep(carrier._client, carrier._records, "two") == 1
        with first.get(refs[0]) as got:
            assert same(got, SIZE, 0)
        with pytest.raises(ObjectNotFound):
            first.get(refs[1])
    works(master.address, "two")


def test_the_same_run_id_twice(master: MasterProcess, holder: RunningHolder) -> None:
    with store_with(master.address) as first, store_with(master.address) as second:
        ref = first.put(batch_of(SIZE))
        with pytest.raises(ConfigError, match="run_id = 'run1' is in use by process"):
            second.put(batch_of(SIZE))
        with second.get(ref) as got:
            assert same(got, SIZE)
        first.put(batch_of(SIZE))


def test_a_duplicate_key_keeps_what_is_there(
    master: MasterProcess, holder: RunningHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_with(master.address) as store:
        ref = store.put(batch_of(SIZE, 1))
        taken = uuid.UUID(ref.key.rpartition("/")[2])
        with monkeypatch.context() as patched:
            patched.setattr("mooncake_store.placement.uuid.uuid4", lambda: taken)
            with pytest.raises(StoreError, match="OBJECT_ALREADY_EXISTS"):
                store.put(batch_of(SIZE, 2))
        with store.get(ref) as got:
            assert same(got, SIZE, 1)
    works(master.address)


# --- views ----------------------------------------------------------------------------------------------------------


def test_a_remove_under_a_live_view_is_told_when_the_memory_was_given_away(
    master: MasterProcess, holder: RunningHolder
) -> None:
    with store_with(master.address) as store:
        ref = store.put(batch_of(SIZE))
        result = store.get(ref)
        store.remove(ref)
        assert same(result.value, SIZE)
        others = [store.put(batch_of(SIZE, 5)) for _ in range(20)]
        with pytest.raises(IntegrityError, match="given to"):
            result.release()
        for other in others:
            store.remove(other)
    works(master.address)


def test_a_batch_given_away_behind_its_frame_is_told(master: MasterProcess, holder: RunningHolder) -> None:
    def frame_is_whole(result: GetResult) -> bool:
        assert result._stored is not None
        assert result._stored.loan is not None
        try:
            result._stored.loan.check()
        except IntegrityError:
            return False
        return True

    with store_with(master.address) as store:
        client, owner = carrier_of(store)._client, holder.record
        results = [store.get(store.put(batch_of(SIZE))) for _ in range(2)]
        client.remove_matching("^run/run1/b/")
        # Who gets the start of the memory has written nothing yet when others write behind it.
        client.allocate(["first"], [64], owner.name)
        others = [store.put(batch_of(SIZE // 2, 5)) for _ in range(20)]
        assert any(map(frame_is_whole, results))
        for result in results:
            assert not same(result.value, SIZE)
            with pytest.raises(IntegrityError, match="removed while it was read"):
                result.release()
        client.revoke(["first"])
        for other in others:
            store.remove(other)
    works(master.address)


def test_a_close_under_a_live_view(master: MasterProcess, holder: RunningHolder) -> None:
    store = store_with(master.address)
    view = store.get(store.put(batch_of(SIZE))).value
    store.close()
    holder.stop()
    assert same(view, SIZE)


def test_memory_is_lent_until_the_last_tensor_is_gone(master: MasterProcess, holder: RunningHolder) -> None:
    torch = pytest.importorskip("torch")
    acknowledged = threading.Event()
    with store_with(master.address) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says once per process that the array is not writable
        ref = store.put(batch_of(SIZE))
        with store.get(ref, on_release=acknowledged.set) as got:
            tensor = torch.from_numpy(got["tokens"][0])[10:20]
        del got
        gc.collect()
        assert not acknowledged.wait(0.3)
        assert tensor.tolist() == batch_of(SIZE)["tokens"][0][10:20].tolist()
        del tensor
        assert acknowledged.wait(HANG)
    works(master.address)


# --- mappings that cannot be had --------------------------------------------------------------------------------------


def read_as(connection: Connection, address: str, text: str, how: str) -> None:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mooncake_store").addHandler(handler)
    store = store_with(address, "reader")
    if how == "another user":
        os.setuid(65534)
    for _ in range(3):
        with store.get(BatchRef.from_json(text)) as got:
            assert same(got, SIZE)
    connection.send(said)


def test_a_segment_that_another_user_may_not_map(master: MasterProcess, holder: RunningHolder) -> None:
    if os.getuid() != 0:
        pytest.skip("becoming another user takes root")
    with store_with(master.address) as store:
        ref = store.put(batch_of(SIZE))
        with Child(read_as, master.address, ref.to_json(), "another user") as reader:
            said = reader.receive(HANG)
        assert len(said) == 1, "the fallback is reported once"
        assert "is not mapped, its bytes travel over the network" in said[0]


def read_in_a_namespace(connection: Connection, address: str, text: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    new_pid_namespace = 0x20000000
    if libc.unshare(new_pid_namespace):
        connection.send(os.strerror(ctypes.get_errno()))
        return
    with Child(read_as, address, text, "another namespace") as reader:  # its child is the namespace's first process
        connection.send(reader.receive(HANG))


def test_a_segment_of_another_pid_namespace(master: MasterProcess, holder: RunningHolder) -> None:
    with store_with(master.address) as store:
        ref = store.put(batch_of(SIZE))
        with Child(read_in_a_namespace, master.address, ref.to_json(), daemon=False) as outer:
            said = outer.receive(HANG)
    if isinstance(said, str):
        pytest.skip(f"no PID namespaces here: {said}")
    assert len(said) <= 1


# --- bytes that change ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["frame", "payload"])
def test_a_flipped_bit(master: MasterProcess, holder: RunningHolder, where: str) -> None:
    with (
        store_with(master.address, verify="always") as store,
        store_with(master.address, share_memory=False) as far,
    ):
        ref = store.put(batch_of(SIZE))
        carrier = carrier_of(store)
        (record,) = carrier._owners.all()
        mapping = carrier._owners.mapping(record, writable=True)
        assert mapping is not None
        offset = lies_at(master, f"{ref.key}/0.0") - record.base
        mapping.bytes[offset + (20 if where == "frame" else ref.nbytes // 2)] ^= 1
        for reader in (store, far):
            with pytest.raises(IntegrityError):
                reader.get(ref)
        store.remove(ref)
    works(master.address)


def test_a_truncated_object(master: MasterProcess, holder: RunningHolder) -> None:
    with store_with(master.address) as store, store_with(master.address, share_memory=False) as far:
        ref = store.put(batch_of(SIZE))
        client = carrier_of(store)._client
        key = f"{ref.key}/0.0"
        client.remove(key)
        client.allocate([key], [4096], holder.record.name)
        client.commit([key])
        for reader in (store, far):
            with pytest.raises(IntegrityError):
                reader.get(ref)
    works(master.address)


def test_a_holder_without_shared_memory_is_reached_over_the_network(
    master: MasterProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("mooncake_store.segment.os.memfd_create", refuse)
    config = resolve(settings(master.address), {})
    lent = SegmentHolder(MooncakeClient.connect(config), config.global_segment_size, "tcp", uuid.uuid4().hex)
    try:
        lent.tick()
        with store_with(master.address) as store:
            for number in range(3):
                ref = store.put(batch_of(SIZE, number))
                with store.get(ref) as got:
                    assert same(got, SIZE, number)
                store.remove(ref)
    finally:
        lent.close()
    (said,) = [message for message in caplog.messages if "no shared memory here" in message]
    assert "Function not implemented" in said
