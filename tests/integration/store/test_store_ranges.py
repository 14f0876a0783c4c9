"""Over the network only what is asked for moves: by the store's counters and by the system's."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mooncake_store import BatchRef, MasterProcess, ObjectStore, ValueSpec
from tests.integration.store.store_children import Child
from tests.integration.store.store_services import HANG, MIB, holding, store_with

pytestmark = pytest.mark.integration

RANKS = 4
FRAMES = 4096  # bytes: frames, and what RPCs take
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


@pytest.fixture
def holder(master: MasterProcess, tmp_path: Path) -> Iterator[None]:
    with holding(master.address, tmp_path, "256mb"):
        yield


def rollout(samples: int = 64) -> dict[str, Any]:
    random = np.random.default_rng(0)
    lengths = random.integers(500, 4000, samples)
    return {
        "tokens": [random.integers(0, 1 << 17, n, dtype=np.int32) for n in lengths],
        "rollout_log_probs": [random.random(n, dtype=np.float32) for n in lengths],
        "rollout_routed_experts": [random.integers(0, 128, (n, 8, 4), dtype=np.int32) for n in lengths],
        "rewards": random.random(samples).tolist(),
        "prompt": [f"prompt {n // 8} " + "x" * 300 for n in range(samples)],
        "dynamic_global_batch_size": samples,
    }


def asked_for(batch: dict[str, Any], rows: list[int], fields: list[str]) -> int:
    """Bytes of the numbers that a reader gets."""
    return sum(batch[name][row].nbytes for name in fields for row in rows)


LARGE = ["tokens", "rollout_log_probs", "rollout_routed_experts"]
DEAL = [list(range(rank, 64, RANKS)) for rank in range(RANKS)]


def received(store: ObjectStore, call: Callable[[], object]) -> int:
    before = store.stats()["bytes_received"]
    call()
    return store.stats()["bytes_received"] - before


@pytest.mark.parametrize("chunk_bytes", [None, 100_000])
def test_each_rank_moves_its_own(master: MasterProcess, holder: object, chunk_bytes: int | None) -> None:
    batch = rollout()
    specs = {"rollout_routed_experts": ValueSpec(slice_axis=1)}
    far: dict[str, Any] = {"share_memory": False, "compact": "never"}
    with (
        store_with(master.address, chunk_bytes=chunk_bytes, **far) as writer,
        store_with(master.address, **far) as store,
    ):
        ref = writer.put(batch, specs, partitions=DEAL)
        assert ref.partitions == (16, 16, 16, 16)
        sent = writer.stats()["bytes_sent"]
        frames = 64 * len(range(0, ref.nbytes, chunk_bytes or ref.nbytes))
        assert ref.nbytes <= sent <= ref.nbytes + frames + FRAMES
        for rank, rows in enumerate(DEAL):
            result = store.get(ref, partition=rank)
            got = result.value
            assert [row.tolist() for row in got["tokens"]] == [batch["tokens"][row].tolist() for row in rows]
            assert got["prompt"] == [batch["prompt"][row] for row in rows]
            assert got["dynamic_global_batch_size"] == 64
            result.release()
            del got
            moved = received(store, lambda rank=rank: store.get(ref, partition=rank).release())  # type: ignore[misc]
            asked = asked_for(batch, rows, LARGE)
            assert asked <= moved <= 1.1 * asked + ref.head_bytes + FRAMES

        def stage() -> None:
            """What a rank of a pipeline takes: its layers, of its partition."""
            with store.get(
                ref, ["rollout_routed_experts"], partition=1, slices={"rollout_routed_experts": slice(2, 4)}
            ) as got:
                for row, part in zip(DEAL[1], got["rollout_routed_experts"], strict=True):
                    assert np.array_equal(part, batch["rollout_routed_experts"][row][:, 2:4])

        asked = asked_for(batch, DEAL[1], ["rollout_routed_experts"]) // 4
        assert asked <= received(store, stage) <= 1.1 * asked + ref.head_bytes + FRAMES
        asked = asked_for(batch, list(range(64)), ["tokens"])
        moved = received(store, lambda: store.get(ref, ["tokens"]).release())
        assert asked <= moved <= 1.1 * asked + ref.head_bytes + FRAMES
        whole = received(store, lambda: store.get(ref).release())
        assert ref.nbytes <= whole <= ref.nbytes + frames + FRAMES


def test_integers_travel_as_narrow_as_they_are(master: MasterProcess, holder: object) -> None:
    batch = rollout()
    with store_with(master.address, share_memory=False) as store, store_with(master.address, "near") as near:
        narrow, wide = store.put(batch), near.put(batch)
        assert narrow.nbytes < 0.5 * wide.nbytes
        for ref in (narrow, wide):
            for reader in (store, near):
                with reader.get(ref) as got:
                    assert got["rollout_routed_experts"][3].dtype == np.int32
                    for name in LARGE:
                        assert all(map(np.array_equal, got[name], batch[name]))
    with store_with(master.address, "always", compact="always") as store:
        assert store.put(batch).nbytes == narrow.nbytes
    with store_with(master.address, "never", share_memory=False, compact="never") as store:
        assert store.put(batch).nbytes == wide.nbytes


def test_reading_in_place_moves_nothing(master: MasterProcess, holder: object) -> None:
    with store_with(master.address) as store:
        ref = store.put(rollout(), partitions=DEAL)
        for wanted in ({}, {"partition": 2}, {"fields": ["tokens"], "rows": [5, 1]}):
            store.get(ref, **wanted).release()
            assert received(store, lambda wanted=wanted: store.get(ref, **wanted).release()) == 0  # type: ignore[misc]


# --- by the system's own counters -------------------------------------------------------------------------------------


def network_of_its_own() -> None:
    """Leave for a network namespace that has nothing but a loopback device; PermissionError where that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = b"lo".ljust(16, b"\0")
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, SIOCGIFFLAGS, name + bytes(2)))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, name + struct.pack("h", flags | IFF_UP))


def system_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


def count(connection: Connection, directory: Path) -> None:
    try:
        network_of_its_own()
    except PermissionError as error:
        connection.send(str(error))
        return
    batch = rollout()
    master = MasterProcess(directory / "master.log")
    try:
        with (
            holding(master.address, directory, "256mb"),
            store_with(master.address, share_memory=False, local_buffer_size="256mb") as store,
        ):
            ref = store.put(batch, partitions=DEAL)
            store.get(ref).release()
            idle = system_bytes()
            time.sleep(1.0)
            idle = system_bytes() - idle  # heartbeats
            for wanted in ({}, {"partition": 1}, {"fields": ["tokens"]}):
                began, before, own = time.monotonic(), system_bytes(), store.stats()["bytes_received"]
                for _ in range(5):
                    store.get(ref, **wanted).release()
                passed = time.monotonic() - began
                connection.send(
                    (store.stats()["bytes_received"] - own, system_bytes() - before, int(idle * (passed + 1.0)))
                )
        connection.send(None)
    finally:
        master.stop()


def test_the_system_counts_the_same_bytes(tmp_path: Path) -> None:
    with Child(count, tmp_path, daemon=False) as child:
        while (found := child.receive(HANG)) is not None:
            if isinstance(found, str):
                pytest.skip(f"no network namespace can be made here: {found}")
            own, system, idle = found
            assert own > MIB
            # TCP's own headers, and some requests to the master for each get.
            assert own <= system <= 1.05 * own + 5 * 32 * 1024 + idle


def test_a_ref_survives_with_its_partitions(master: MasterProcess, holder: object) -> None:
    with store_with(master.address) as store:
        ref = store.put(rollout(), partitions=DEAL)
        assert BatchRef.from_json(ref.to_json()) == ref
