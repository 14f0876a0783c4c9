"""This project's transport, in the three ways in which a reader may get a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.transport.peers import Held, Loaded, Peer, Room
from mooncake_store import BatchRef, MasterProcess, ObjectStore, open_store
from mooncake_store.config import resolve
from mooncake_store.holder import start_holder

_SLACK = 0.2  # batches that a segment has room for beyond those it keeps: the allocator's sizes are an eighth apart
_EXTRA = 64 << 20  # and for records and alignment
_BUFFERS = 1.5  # batches that fit into buffers: what is fetched, and what of it is widened


class OurWriter:
    """Implements `Writer`."""

    def __init__(self, init_kwargs: dict[str, Any]) -> None:
        self._store = _opened(init_kwargs)
        self._batch: dict[str, Any] = {}

    def prepare(self, loaded: Loaded) -> None:
        self._batch = loaded.batch

    def put(self) -> BatchRef:
        return self._store.put(self._batch)

    def remove(self, ref: BatchRef) -> None:
        self._store.remove(ref)

    def close(self) -> None:
        self._store.close()


class OurReader:
    """Implements `Reader`."""

    def __init__(self, init_kwargs: dict[str, Any]) -> None:
        self._store = _opened(init_kwargs)

    def get(self, ref: BatchRef) -> Held:
        result = self._store.get(ref)
        return Held(result.value, result.release)

    def close(self) -> None:
        self._store.close()


@contextmanager
def serve(room: Room, directory: Path) -> Iterator[dict[str, Any]]:
    """A master and the segment holder of this node; yields init_kwargs."""
    with MasterProcess(directory / "mooncake_master-ours.log") as master:
        init_kwargs = {
            "master_server_address": master.address,
            "protocol": "tcp",
            "local_hostname": "127.0.0.1",
            "global_segment_size": int(room.stored + _SLACK * room.moved) + _EXTRA,
            "local_buffer_size": int(_BUFFERS * room.moved) + _EXTRA,
        }
        holder = start_holder(resolve(init_kwargs, {}), directory / "segment-holder.log")
        try:
            yield init_kwargs
        finally:
            holder.stop()


def _opened(init_kwargs: dict[str, Any]) -> ObjectStore:
    return open_store("mooncake", init_kwargs, contribute_segment=False)


def _writer(more: dict[str, Any], init_kwargs: dict[str, Any]) -> OurWriter:
    return OurWriter({**init_kwargs, **more})


def _reader(more: dict[str, Any], init_kwargs: dict[str, Any]) -> OurReader:
    return OurReader({**init_kwargs, **more})


def _peer(name: str, label: str, footprint: float, **more: Any) -> Peer:
    return Peer(name, label, partial(_writer, more), partial(_reader, more), footprint, "ours", serve)


PEERS = (
    _peer("ours", "ours", 1.2),  # the segment, which the three share
    _peer("ours-verified", "ours, verify=always", 0.0, verify="always"),
    _peer("ours-network", "ours, network path", 2.4, share_memory=False),
)
