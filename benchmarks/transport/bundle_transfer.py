"""Mooncake's MooncakeBundleTransfer with miles's column specs, as miles sets it up, and with a writer that owns memory.

As in miles the writer that does not contribute mounts nothing but Mooncake's minimal default segment, and a process of
its own (in miles a trainer rank) lends the memory. The master's options differ from miles's in leases and eviction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import SpawnedProcess
from benchmarks.transport.mooncake import connected, missing
from benchmarks.transport.peers import Held, Loaded, Peer, Room
from mooncake_store import MasterProcess

# Codec and dtype by column, as miles passes them. "auto" columns become meta_info, all others non_tensor_batch.
_SPECS: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(
        ["tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts"],
        ("typed_ragged", None),
    ),
    **dict.fromkeys(
        ["partition", "response_lengths", "truncated", "sample_indices", "rollout_ids", "rollout_mask_sums"],
        ("ndarray", "int64"),
    ),
    "rewards": ("ndarray", "float32"),
    **dict.fromkeys(["prompt", "metadata", "weight_versions"], ("msgpack_ragged", None)),
    **dict.fromkeys(["raw_reward", "total_lengths", "dynamic_global_batch_size"], ("auto", None)),
}
_EXTRA = 256 << 20  # bytes of segments and buffers beyond what the batches take


@dataclass(frozen=True)
class _Service:
    master: str
    room: Room


class BundleWriter:
    """Implements `Writer`."""

    def __init__(self, service: _Service, segment: int | None) -> None:
        self._transfer = _transfer(service, segment)
        self._batch: dict[str, Any] = {}
        self._schemas: dict[str, Any] = {}

    def prepare(self, loaded: Loaded) -> None:
        from mooncake.structured_object_store import FieldSchema

        self._batch = loaded.batch
        self._schemas = {
            name: FieldSchema(
                codec=codec,
                nullable=False,
                metadata={
                    "section": "meta_info" if codec == "auto" else "non_tensor_batch",
                    **({"dtype": dtype} if dtype else {}),
                },
            )
            for name, (codec, dtype) in _SPECS.items()
            if name in loaded.batch
        }

    def put(self) -> Any:
        from mooncake.structured_object_store import export_ref

        ref = self._transfer.put(
            self._batch, type="dict", namespace="miles", stage="rollout", field_schemas=self._schemas
        )
        return export_ref(ref)

    def remove(self, ref: Any) -> None:
        from mooncake.structured_object_store import import_ref

        self._transfer.cleanup_dataproto(import_ref(ref))

    def close(self) -> None:
        self._transfer.store.close()


class BundleReader:
    """Implements `Reader`."""

    def __init__(self, service: _Service) -> None:
        self._transfer = _transfer(service, None)

    def get(self, ref: Any) -> Held:
        from mooncake.structured_object_store import import_ref

        batch = self._transfer.get(import_ref(ref), type="dict")
        return Held(batch, partial(self._transfer.release_result, dict(batch)))

    def close(self) -> None:
        self._transfer.store.close()


class SegmentOwner:
    """Lends memory, and does nothing else."""

    def __init__(self, master: str, segment: int) -> None:
        self._store = connected(master, segment)

    def segment_name(self) -> str:
        return str(self._store.get_hostname())

    def close(self) -> None:
        self._store.close()


@contextmanager
def serve_with_owner(room: Room, directory: Path) -> Iterator[_Service]:
    """A master, and a process that lends the memory."""
    with (
        MasterProcess(directory / "mooncake_master-bundle.log") as master,
        SpawnedProcess("bundle-owner", directory, SegmentOwner, master.address, _segment(room)),
    ):
        yield _Service(master.address, room)


@contextmanager
def serve_alone(room: Room, directory: Path) -> Iterator[_Service]:
    """A master; the writer lends the memory."""
    with MasterProcess(directory / "mooncake_master-bundle-own.log") as master:
        yield _Service(master.address, room)


def _segment(room: Room) -> int:
    # Objects are not pinned: nothing may be evicted, which begins at 90 %.
    return int(1.2 * room.stored) + _EXTRA


def _transfer(service: _Service, segment: int | None) -> Any:
    from mooncake.structured_object_store import MooncakeBundleTransfer

    store = connected(service.master, segment, int(1.2 * service.room.moved) + _EXTRA)
    return MooncakeBundleTransfer(store, key_prefix="miles-object-store")


def _writer(service: _Service) -> BundleWriter:
    return BundleWriter(service, None)


def _owning_writer(service: _Service) -> BundleWriter:
    return BundleWriter(service, _segment(service.room))


PEERS = (
    Peer(
        "bundle",
        "BundleTransfer, as in miles",
        _writer,
        BundleReader,
        2.3,
        "bundle",
        serve_with_owner,
        missing=missing,
    ),
    Peer(
        "bundle-own",
        "BundleTransfer, own segment",
        _owning_writer,
        BundleReader,
        2.3,
        "bundle-own",
        serve_alone,
        missing=missing,
    ),
)
