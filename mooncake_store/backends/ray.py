"""Carries batches through Ray's object store: one put is one shared-memory object, read without a copy."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_store.backends import BackendOptions, Payload, Placed, Result, Stored
from mooncake_store.decode import AtHand
from mooncake_store.errors import (
    ConfigError,
    IntegrityError,
    MissingDependency,
    ObjectLost,
    ObjectNotFound,
    StoreClosed,
    StoreFull,
    StoreUnavailable,
)
from mooncake_store.pool import BufferPool
from mooncake_store.ref import BatchRef

GET_TIMEOUT = 30.0  # seconds; Ray's own default is to wait for ever
STAGING_BYTES = 1 << 40  # no bound of ours: Ray's object store refuses first


class RayHandle:
    """Carries Ray's object reference inside a BatchRef, so that Ray counts every holder of the ref.

    `drop` forgets the reference in this process. Ray frees the object when no process holds one; it has no call that
    frees an object under its readers (ray 2.60).
    """

    def __init__(self, object_ref: Any) -> None:
        self.object_ref = object_ref

    def drop(self) -> None:
        """Give up this process's reference; idempotent."""
        self.object_ref = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayHandle) and self.object_ref == other.object_ref

    def __hash__(self) -> int:
        return hash(self.object_ref)


class RayCarrier:
    """Implements `Carrier` over a Ray that the caller has initialised."""

    verify_shared = True

    def __init__(self, ray: Any, run_id: str, get_timeout: float = GET_TIMEOUT) -> None:
        self._ray = ray
        self._prefix = f"run/{run_id}/b"
        self._get_timeout = get_timeout
        self._staging = BufferPool(STAGING_BYTES)
        self._closed = False

    def put(self, payload: Payload) -> Placed:
        self.check_usable()
        lease = self._staging.acquire(payload.nbytes)
        try:
            digest = payload.write_into(lease.array)
            handle = RayHandle(self._ray.put(lease.array))  # copies, so the staging buffer is free again
        except self._ray.exceptions.ObjectStoreFullError as error:
            raise StoreFull(f"Ray's object store has no room for {payload.nbytes} bytes: {error}") from error
        except self._ray.exceptions.RaySystemError as error:
            raise StoreUnavailable(f"Ray could not store {payload.nbytes} bytes: {error}") from error
        finally:
            lease.release()
        return Placed(f"{self._prefix}/{uuid.uuid4().hex}", digest, handle)

    def get(self, ref: BatchRef, whole: bool, use: Callable[[Stored], Result]) -> Result:  # noqa: ARG002
        return use(self._stored(ref))

    def _stored(self, ref: BatchRef) -> Stored:
        self.check_usable()
        errors = self._ray.exceptions
        if self._handle(ref).object_ref is None:
            raise ObjectNotFound(f"batch {ref.key!r} was removed")
        try:
            data: npt.NDArray[np.uint8] = self._ray.get(ref.handle.object_ref, timeout=self._get_timeout)
        except errors.GetTimeoutError as error:
            raise StoreUnavailable(f"Ray did not deliver {ref.key!r} in {self._get_timeout:g} s") from error
        except errors.ObjectFreedError as error:
            raise ObjectNotFound(f"batch {ref.key!r} was freed") from error
        except errors.ObjectLostError as error:  # its owner died, its node died, or it could not be fetched
            raise ObjectLost(f"Ray lost batch {ref.key!r}: {error}") from error
        except errors.RaySystemError as error:
            raise StoreUnavailable(f"Ray could not read {ref.key!r}: {error}") from error
        return Stored(AtHand(data), shared=True)

    def remove(self, ref: BatchRef) -> None:
        self._handle(ref).drop()

    def narrows(self) -> bool:
        return False

    def traffic(self) -> Mapping[str, int]:
        return {}

    @staticmethod
    def _handle(ref: BatchRef) -> RayHandle:
        if not isinstance(ref.handle, RayHandle):
            raise IntegrityError(f"the ref of {ref.key!r} lost its handle; pass the BatchRef itself through Ray")
        return ref.handle

    def close(self) -> None:
        self._closed = True
        self._staging.close()

    def check_usable(self) -> None:
        """Raise StoreClosed or ConfigError when this carrier or Ray cannot be used."""
        if self._closed:
            raise StoreClosed("this store is closed; open a new one")
        if not self._ray.is_initialized():
            raise ConfigError("Ray is not running in this process: call ray.init() before using the ray backend")


def open_carrier(options: BackendOptions) -> RayCarrier:
    """Use the Ray of this process.

    Raises:
        MissingDependency: ray is not installed.
        ConfigError: ray.init was not called, or settings or replicas were asked for that Ray does not have.
    """
    if options.init_kwargs or options.replica_num != 1:
        raise ConfigError(
            f"backend 'ray' takes no init_kwargs and one replica, got {sorted(options.init_kwargs)} and replica_num "
            f"{options.replica_num}: these are settings of backend 'mooncake'"
        )
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependency(f"backend 'ray' needs ray: pip install miles-mooncake[train] ({error})") from error
    carrier = RayCarrier(ray, options.run_id)
    carrier.check_usable()
    return carrier
