"""What becomes of acknowledged batches in a segment that fills up: Mooncake's own bundle transfer, and ours.

    python -m tests.soak.peer_bundle_transfer [--segment-mib 256] [--object-kib 4032]

Both get the same load: batches that nobody has read yet, first up to 97 % of a segment, in which they all fit, then up
to 125 %. Afterwards another process reads every batch whose put was acknowledged. Each side has a segment that is lent
by a process other than its writer. MooncakeBundleTransfer is set up as miles does it: no ReplicateConfig, hence no
pins, and a writer that mounts nothing but Mooncake's minimal default segment. It runs against a master with Mooncake's
own defaults, and against one with the options of `MasterProcess`.

Then both put a few batches, the master is restarted at its address, and they are read. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mooncake_store import BatchRef, MasterProcess, StoreError
from mooncake_store.client import Limits
from mooncake_store.master import find_master, probe_master
from mooncake_store.process import ManagedProcess, free_ports
from tests.integration.store.store_children import Child
from tests.integration.store.store_services import HANG, MIB, batch_of, holding, same, store_with

FILLS = (0.97, 1.25)  # of the segment, by the bytes of the batches
AFTER_RESTART = 10  # batches
REMOUNT_SECONDS = 5.0  # that a segment's owner may take to be known to the new master; about one, measured
READ_TIMEOUT = 600.0


@dataclass(frozen=True)
class Load:
    """So many batches of so many bytes each; their numbers are the seeds of their contents."""

    objects: int
    nbytes: int


@dataclass
class Found:
    """What became of a load; refused and unreadable by the type of the error."""

    acknowledged: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    right: int = 0
    wrong: int = 0
    unreadable: Counter[str] = field(default_factory=Counter)


# --- MooncakeBundleTransfer ------------------------------------------------------------------------------------------


def _transfer(address: str, segment: int | None) -> Any:
    from mooncake.store import MooncakeDistributedStore
    from mooncake.structured_object_store import MooncakeBundleTransfer

    settings: dict[str, Any] = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "local_buffer_size": 256 * MIB,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": address,
    }
    store = MooncakeDistributedStore()
    code = store.setup(settings if segment is None else {**settings, "global_segment_size": segment})
    assert code == 0, code
    return MooncakeBundleTransfer(store, key_prefix="miles-object-store")


def lend_and_read(connection: Connection, address: str, segment: int) -> None:
    from mooncake.structured_object_store import MooncakeBundleTransfer, import_ref

    transfer = _transfer(address, segment)
    connection.send("lent")
    refs, nbytes = connection.recv()
    found = Found(len(refs))
    for seed, ref in refs:
        try:
            value = transfer.get(import_ref(ref), type="dict")
        except Exception as error:
            found.unreadable[type(error).__name__] += 1
            continue
        if same(value, nbytes, seed):
            found.right += 1
        else:
            found.wrong += 1
        MooncakeBundleTransfer.release_result(value)
    connection.send(found)


def write_bundles(connection: Connection, address: str, load: Load) -> None:
    from mooncake.structured_object_store import FieldSchema, export_ref

    transfer = _transfer(address, None)
    schema = FieldSchema(
        codec="typed_ragged", nullable=False, metadata={"section": "non_tensor_batch", "dtype": "int32"}
    )
    refs: list[tuple[int, Any]] = []
    refused: Counter[str] = Counter()
    for seed in range(load.objects):
        try:
            ref = transfer.put(
                batch_of(load.nbytes, seed),
                type="dict",
                namespace="miles",
                stage="rollout",
                field_schemas={"tokens": schema},
            )
            refs.append((seed, export_ref(ref)))
        except Exception as error:
            refused[type(error).__name__] += 1
    connection.send((refs, refused))
    connection.recv()  # a writer outlives what it put


def of_bundles(address: str, segment: int, load: Load, between: Callable[[], None] = lambda: None) -> Found:
    with Child(lend_and_read, address, segment) as owner:
        owner.receive(HANG)
        with Child(write_bundles, address, load) as writer:
            refs, refused = writer.receive(READ_TIMEOUT)
            between()
            owner.send((refs, load.nbytes))
            found: Found = owner.receive(READ_TIMEOUT)
            writer.send("done")
    found.refused = refused
    return found


# --- ours ------------------------------------------------------------------------------------------------------------


def read_ours(connection: Connection, address: str) -> None:
    refs, nbytes = connection.recv()
    found = Found(len(refs))
    with store_with(address) as store:
        for seed, text in refs:
            try:
                with store.get(BatchRef.from_json(text)) as batch:
                    if same(batch, nbytes, seed):
                        found.right += 1
                    else:
                        found.wrong += 1
            except StoreError as error:
                found.unreadable[type(error).__name__] += 1
    connection.send(found)


def write_ours(connection: Connection, address: str, load: Load) -> None:
    refs: list[tuple[int, str]] = []
    refused: Counter[str] = Counter()
    with store_with(address, limits=Limits(put=0.5)) as store:
        for seed in range(load.objects):
            try:
                refs.append((seed, store.put(batch_of(load.nbytes, seed)).to_json()))
            except StoreError as error:
                refused[type(error).__name__] += 1
        connection.send((refs, refused))
        connection.recv()


def of_ours(
    address: str, segment: int, load: Load, directory: Path, between: Callable[[], None] = lambda: None
) -> Found:
    with (
        holding(address, directory, str(segment)),
        Child(write_ours, address, load) as writer,
        Child(read_ours, address) as reader,
    ):
        refs, refused = writer.receive(READ_TIMEOUT)
        between()
        reader.send((refs, load.nbytes))
        found: Found = reader.receive(READ_TIMEOUT)
        writer.send("done")
    found.refused = refused
    return found


# --- both ------------------------------------------------------------------------------------------------------------


@contextmanager
def default_master(log: Path) -> Iterator[str]:
    """A mooncake_master with nothing set but its ports."""
    rpc, metrics = free_ports(2)
    process = ManagedProcess(
        "mooncake_master", [str(find_master()), f"--rpc_port={rpc}", f"--metrics_port={metrics}"], log
    )
    try:
        for _ in range(100):
            try:
                probe_master(f"127.0.0.1:{rpc}", timeout=1.0)
                break
            except StoreError:
                continue
        yield f"127.0.0.1:{rpc}"
    finally:
        process.stop()


@contextmanager
def restartable(log: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a master, and a function that replaces it."""
    running = [MasterProcess(log)]

    def restart() -> None:
        running[0].stop()
        running[0] = MasterProcess(log, ports=running[0].ports)
        time.sleep(REMOUNT_SECONDS)

    try:
        yield running[0].address, restart
    finally:
        running[0].stop()


def after_a_restart(segment: int, nbytes: int) -> dict[str, Any]:
    load = Load(AFTER_RESTART, nbytes)
    with tempfile.TemporaryDirectory() as name:
        log = Path(name, "log")
        with restartable(log) as (address, restart):
            bundles = of_bundles(address, segment, load, restart)
        with restartable(log) as (address, restart):
            ours = of_ours(address, segment, load, Path(name), restart)
    return {"objects": load.objects, "bundle_transfer": vars(bundles), "ours": vars(ours)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segment-mib", type=int, default=256)
    parser.add_argument("--object-kib", type=int, default=4032)  # the allocator takes 4 MiB for either side's
    asked = parser.parse_args()
    segment, nbytes = asked.segment_mib * MIB, asked.object_kib * 1024
    results = []
    for fill in FILLS:
        load = Load(int(fill * segment / nbytes), nbytes)
        with tempfile.TemporaryDirectory() as name:
            log = Path(name, "log")
            with default_master(log) as address:
                bundles = of_bundles(address, segment, load)
            with MasterProcess(log) as master:
                with_options = of_bundles(master.address, segment, load)
            with MasterProcess(log) as master:
                ours = of_ours(master.address, segment, load, Path(name))
        results.append(
            {
                "fill": fill,
                "objects": load.objects,
                "bundle_transfer": vars(bundles),
                "bundle_transfer_with_our_master_options": vars(with_options),
                "ours": vars(ours),
            }
        )
    restart = after_a_restart(segment, nbytes)
    sizes = {"segment_mib": asked.segment_mib, "object_kib": asked.object_kib}
    print(json.dumps({**sizes, "loads": results, "after_a_restart": restart}))


if __name__ == "__main__":
    main()
