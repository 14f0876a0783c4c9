"""The Mooncake backend against a real master: wrong masters, two processes, buffers, close and fork.

What goes wrong later is in `test_store_faults.py`.
"""

from __future__ import annotations

import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mooncake_store import (
    BatchRef,
    ConfigError,
    MasterProcess,
    ObjectNotFound,
    ObjectStore,
    StoreClosed,
    StoreFull,
    StoreUnavailable,
    open_store,
    probe_master,
)
from mooncake_store.client import Limits
from mooncake_store.config import rdma_devices
from mooncake_store.inventory import Metrics
from tests.integration.store.store_children import Child
from tests.integration.store.store_services import HANG, MIB, batch_of, batches, holding, settings, store_with

pytestmark = pytest.mark.integration

# --- connecting -----------------------------------------------------------------------------------------------------


def open_and_report(connection: Connection, address: str) -> None:
    open_store("mooncake", settings(address))
    connection.send("opened")


WRONG_MASTER = """
import sys
from mooncake_store import StoreUnavailable, open_store

try:
    open_store("mooncake", eval(sys.argv[1]))
except StoreUnavailable as error:
    print(error)
    sys.exit("mooncake was imported" if "mooncake" in sys.modules else 0)
sys.exit("opened")
"""


def test_a_wrong_master_ends_before_anything_is_imported() -> None:
    command = [sys.executable, "-c", WRONG_MASTER, repr(settings("127.0.0.1:1"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1:1" in done.stdout


def test_no_buffers_are_refused_at_open() -> None:
    with pytest.raises(ConfigError, match="local_buffer_size = 0"):
        open_store("mooncake", settings("127.0.0.1:1", local_buffer_size=0))


@pytest.fixture(params=["silent", "http", "closing"])
def impostor(request: pytest.FixtureRequest) -> Iterator[str]:
    """A listener that accepts connections and is not a master."""
    server = socket.create_server(("127.0.0.1", 0))
    held = []

    def serve() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            if request.param == "silent":
                held.append(peer)
                continue
            if request.param == "http":
                peer.recv(1)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            peer.close()

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.close()
    for peer in held:
        peer.close()


def test_a_listener_that_is_no_master(impostor: str) -> None:
    started = time.monotonic()
    with (
        Child(open_and_report, impostor) as child,
        pytest.raises(StoreUnavailable, match="does not serve as a Mooncake"),
    ):
        child.receive(HANG)
    assert time.monotonic() - started < HANG


def test_rdma_is_refused_where_there_is_none() -> None:
    if rdma_devices():
        pytest.skip("this host has an RDMA device")
    with pytest.raises(ConfigError, match="no RDMA device"):
        open_store("mooncake", settings("127.0.0.1:1", protocol="rdma"))


# --- two processes --------------------------------------------------------------------------------------------------


def own_segment_and_read(connection: Connection, address: str) -> None:
    with open_store("mooncake", settings(address), contribute_segment=True, run_id="run1") as store:
        connection.send("ready")
        ref = BatchRef.from_json(connection.recv())
        with store.get(ref) as batch:
            connection.send([row.tolist() for row in batch["tokens"]])
        store.remove(ref)
        connection.send("removed")
        connection.recv()


def put_without_segment(connection: Connection, address: str) -> None:
    with open_store("mooncake", settings(address), contribute_segment=False, run_id="run1") as store:
        ref = store.put({"tokens": [[1, 2, 3], [4]]})
        assert pickle.loads(pickle.dumps(ref)) == ref
        connection.send(ref.to_json())
        connection.recv()
        try:
            store.get(ref)
        except ObjectNotFound:
            connection.send("gone")


def test_put_in_one_process_get_in_another(master: MasterProcess) -> None:
    with Child(own_segment_and_read, master.address) as reader:
        assert reader.receive(HANG) == "ready"
        with Child(put_without_segment, master.address) as writer:
            ref = writer.receive(HANG)
            reader.send(ref)
            assert reader.receive(HANG) == [[1, 2, 3], [4]]
            assert reader.receive(HANG) == "removed"
            writer.send("check")
            assert writer.receive(HANG) == "gone"
        reader.send("end")


def put_where_nobody_owns_memory(_: Connection, address: str) -> None:
    store_with(address, limits=Limits(put=0.5)).put(batch_of(MIB))


def test_a_store_without_memory_is_full_not_silent(master: MasterProcess) -> None:
    refused = pytest.raises(StoreFull, match="miles-mooncake holder")
    with Child(put_where_nobody_owns_memory, master.address) as child, refused:
        child.receive(HANG)


def test_too_few_owners_for_the_replicas(master: MasterProcess, tmp_path: Path) -> None:
    with holding(master.address, tmp_path), store_with(master.address, replica_num=2) as store:
        with pytest.raises(StoreUnavailable, match="1 segment holders serve this master, 2 replicas"):
            store.put(batch_of(MIB))
        assert not batches(master)


# --- buffers --------------------------------------------------------------------------------------------------------


def hold_results(connection: Connection, address: str) -> None:
    with open_store("mooncake", settings(address), contribute_segment=True) as owner:
        limits = Limits(put=0.2)
        store = store_with(address, limits=limits, local_buffer_size="8mb", share_memory=False)
        ref = store.put(batch_of(3 * MIB))
        _hold(connection, store, ref)
        owner.close()


def _hold(connection: Connection, store: ObjectStore, ref: BatchRef) -> None:
    held = [store.get(ref), store.get(ref)]
    try:
        store.get(ref)
    except StoreFull as error:
        connection.send(str(error))
    arrays = [result.value["tokens"][0] for result in held]
    for result in held:
        result.release()
    try:
        store.get(ref)  # the arrays still look into the buffers
    except StoreFull:
        connection.send("still held")
    del arrays
    store.get(ref).release()
    store.remove(ref)
    store.close()
    connection.send("read again")


def test_held_results_bound_the_reader_and_never_hang_it(master: MasterProcess) -> None:
    with Child(hold_results, master.address) as child:
        assert "local_buffer_size" in child.receive(HANG)
        assert child.receive(HANG) == "still held"
        assert child.receive(HANG) == "read again"


# --- close and fork -------------------------------------------------------------------------------------------------


def use_after_close(connection: Connection, address: str) -> None:
    store = open_store("mooncake", settings(address), contribute_segment=True)
    ref = store.put({"tokens": [[1, 2]]})
    kept = store.get(ref).value["tokens"][0]
    store.close()
    store.close()
    for call in (lambda: store.put({}), lambda: store.get(ref), lambda: store.remove(ref)):
        try:
            call()
            connection.send("no error")
        except StoreClosed:
            connection.send("closed")
    connection.send(kept.tolist())


def test_use_after_close(master: MasterProcess) -> None:
    with Child(use_after_close, master.address) as child:
        assert [child.receive(HANG) for _ in range(4)] == ["closed"] * 3 + [[1, 2]]
        child.process.join(HANG)
        assert child.process.exitcode == 0


def end_without_close(connection: Connection, address: str) -> None:
    store = open_store("mooncake", settings(address), contribute_segment=True)
    store.put({"tokens": [[1]]})
    connection.send("put")


def test_a_process_that_ends_without_close_ends_cleanly(master: MasterProcess) -> None:
    with Child(end_without_close, master.address) as child:
        assert child.receive(HANG) == "put"
        child.process.join(HANG)
        assert child.process.exitcode == 0


END = """
import atexit, sys, time

atexit.register(time.sleep, 2)  # as what ends after the store: the threads of the store run on
from mooncake_store import open_store

store = open_store("mooncake", eval(sys.argv[1]), contribute_segment=True)
store.put({"tokens": [[5]]})
"""


def test_threads_of_a_store_survive_a_slow_end(master: MasterProcess) -> None:
    command = [sys.executable, "-c", END, repr(settings(master.address))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


FORK = """
import os, sys
from mooncake_store import StoreClosed, open_store

store = open_store("mooncake", eval(sys.argv[1]), contribute_segment=True)
ref = store.put({"tokens": [[5]]})
pid = os.fork()
if pid == 0:
    try:
        store.get(ref)
    except StoreClosed as error:
        print(error, flush=True)
    store.close()
    sys.exit(7)  # runs the interpreter's whole teardown, in which Mooncake crashed when this was measured
_, status = os.waitpid(pid, 0)
assert store.get(ref, as_lists=True).value["tokens"] == [[5]]  # the parent works on
store.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_process_is_refused_and_ends(master: MasterProcess) -> None:
    command = [sys.executable, "-c", FORK, repr(settings(master.address))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 7, done.stderr
    assert "'spawn'" in done.stdout


# --- the master's process -------------------------------------------------------------------------------------------


def test_a_proxy_for_the_world_outside_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with MasterProcess(tmp_path / "master.log", start_timeout=5) as master:
        assert Metrics(master.metrics_url).list_keys() == []


def test_master_starts_answers_and_stops(tmp_path: Path) -> None:
    with MasterProcess(tmp_path / "logs" / "master.log") as master:
        probe_master(master.address)
        with urllib.request.urlopen(f"{master.metrics_url}/health", timeout=5) as answer:
            assert answer.status == 200
    with pytest.raises(StoreUnavailable):
        probe_master(master.address, timeout=1)
    master.stop()


def test_a_master_that_dies_at_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no_such_option"):
        MasterProcess(tmp_path / "master.log", options={"no_such_option": "1"})


def test_a_master_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from mooncake_store import MasterProcess\n"
        "master = MasterProcess(Path(sys.argv[1])); print(master.address, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "master.log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    address = parent.stdout.readline().strip()
    probe_master(address)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        try:
            probe_master(address, timeout=1)
        except StoreUnavailable:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"the master at {address} outlived its parent")
