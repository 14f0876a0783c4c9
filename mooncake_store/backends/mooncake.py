"""Carries batches through Mooncake Store, by way of warm registered buffers on both sides."""

from __future__ import annotations

import os
import sys

import numpy as np
import numpy.typing as npt

from mooncake_store.backends import BackendOptions, Payload, Placed
from mooncake_store.client import Limits, MooncakeClient
from mooncake_store.config import fit_to_host, resolve
from mooncake_store.pool import BufferPool
from mooncake_store.ref import BatchRef


class MooncakeCarrier:
    """Implements `Carrier` over one MooncakeClient.

    Args:
        client: the connection; this carrier closes it.
        run_id: first part of every key.
        replica_num: owners that must hold each object.
        buffer_bytes: bound on the warm buffers, in bytes.
        wait: seconds to wait for a buffer that results still hold.
    """

    def __init__(
        self, client: MooncakeClient, run_id: str, replica_num: int, buffer_bytes: int, wait: float = 30.0
    ) -> None:
        self._client = client
        self._prefix = f"run/{run_id}/b"
        self._replica_num = replica_num
        self._pool = BufferPool(buffer_bytes, wait, client.register, client.unregister)

    def put(self, payload: Payload) -> Placed:
        lease = self._pool.acquire(payload.nbytes)
        try:
            digest = payload.write_into(lease.array)
            key = self._client.put(self._prefix, lease.address, lease.nbytes, self._replica_num)
        finally:
            lease.release()
        return Placed(key, digest)

    def get(self, ref: BatchRef) -> npt.NDArray[np.uint8]:
        lease = self._pool.acquire(ref.nbytes)
        try:
            self._client.get_into(ref.key, lease.address, ref.nbytes)
        except BaseException:
            lease.release()
            raise
        return lease.array

    def remove(self, ref: BatchRef) -> None:
        self._client.remove(ref.key)

    def close(self) -> None:
        self._pool.close()
        self._client.close()


def open_carrier(options: BackendOptions) -> MooncakeCarrier:
    """Connect as `options.init_kwargs` and the environment say.

    Raises what `resolve`, `fit_to_host` and `MooncakeClient.connect` raise, in this order: what can be decided here
    comes before the network, and the network before memory and devices.
    """
    config = resolve(options.init_kwargs, os.environ, node_ip=_ray_node_ip)
    if options.contribute_segment and config.global_segment_size == 0:
        raise config.settings["global_segment_size"].complain(
            "contradicts contribute_segment = True, since it lends nothing; set a size, or leave contribute_segment out"
        )
    config = fit_to_host(config, options.contributes)
    segment_bytes = config.global_segment_size if options.contributes else 0
    client = MooncakeClient.connect(config, segment_bytes, Limits())
    return MooncakeCarrier(client, options.run_id, options.replica_num, config.local_buffer_size)


def _ray_node_ip() -> str | None:
    """This node's address as Ray knows it, if this process uses Ray already."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.util.get_node_ip_address())
