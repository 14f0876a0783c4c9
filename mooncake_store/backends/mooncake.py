"""Carries batches through Mooncake Store: in the memory of segment holders, seen in place where a node shares it."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from mooncake_store.backends import BackendOptions, Payload, Placed, Result, Stored
from mooncake_store.claim import RunClaim, batch_prefix
from mooncake_store.client import Limits, MooncakeClient
from mooncake_store.config import MooncakeConfig, fit_to_host, resolve
from mooncake_store.errors import StoreError, StoreUnavailable
from mooncake_store.holder import RunningHolder, start_holder
from mooncake_store.outstanding import Outstanding
from mooncake_store.owners import Owners
from mooncake_store.placement import Writer
from mooncake_store.pool import BufferPool
from mooncake_store.reading import Reader
from mooncake_store.records import Records
from mooncake_store.ref import BatchRef, CopyOf

KEEPER_SECONDS = 1.0
_FORGET_EVERY = 30  # ticks
_log = logging.getLogger(__name__)


class MooncakeCarrier:
    """Implements `Carrier` over one MooncakeClient.

    Args:
        client: the connection; this carrier closes it.
        config: its settings.
        run_id: named in every key, and claimed before the first put.
        replica_num: holders that must have a copy of each object.
        limits: of waiting.
    """

    def __init__(
        self,
        client: MooncakeClient,
        config: MooncakeConfig,
        run_id: str,
        replica_num: int = 1,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self.verify_shared = config.verify == "always"
        self._compact, self._slow_network = config.compact, config.protocol == "tcp"
        self._client, self._run_id, self._replica_num = client, run_id, replica_num
        self._holder: RunningHolder | None = None
        self._pool = BufferPool(config.local_buffer_size, limits.put, client.register, client.unregister)
        self._records = records = Records(client, lambda segment: self._owners.is_known(segment, client))
        self._owners = Owners(client, records, config.share_memory)
        beside = client.beside()
        self._claim = RunClaim(beside, Records(beside, lambda segment: self._owners.is_known(segment, beside)), run_id)
        self._writer = Writer(client, self._owners, self._pool, limits, config.chunk_bytes, self._claim.check)
        self._reader = Reader(client, self._owners, self._pool, limits)
        self._outstanding = Outstanding(client, records, self._owners)
        self._ended = threading.Event()
        self._keepers: list[threading.Thread] = []
        self._lock = threading.RLock()

    def lend(self, config: MooncakeConfig, log: Path) -> None:
        """Start a segment holder that ends with this carrier, unless one lends memory of this node already.

        Raises what `start_holder` raises.
        """
        if not self._owners.here():
            self._holder = start_holder(config, log)

    def put(self, payload: Payload) -> Placed:
        written = self._writer.put(batch_prefix(self._run_id), payload, self._replica_num, self._claimed)
        self._outstanding.add(written)
        copies = tuple(CopyOf(copy.owner.sentinel, copy.parts[0].frame.part_bytes) for copy in written.copies)
        return Placed(written.key, written.digest, copies=copies)

    def get(self, ref: BatchRef, whole: bool, use: Callable[[Stored], Result]) -> Result:
        return self._reader.get(ref, whole, use)

    def narrows(self) -> bool:
        if self._compact != "auto":
            return self._compact == "always"
        return self._slow_network and not self._writer.is_in_place()

    def traffic(self) -> Mapping[str, int]:
        return self._client.traffic()

    def remove(self, ref: BatchRef) -> None:
        self._outstanding.discard(ref.key)  # first, so that it is not published again after it was removed
        self._reader.remove(ref)

    def close(self) -> None:
        self._ended.set()
        for keeper in self._keepers:
            if keeper is not threading.current_thread():
                keeper.join(2 * KEEPER_SECONDS)
        self._claim.release()
        self._writer.close()
        self._pool.close()
        self._client.close()
        if self._holder is not None:
            self._holder.stop()

    def _claimed(self, segment: str) -> None:
        """Own the run id, with its records in `segment`, and keep it from now on.

        Raises:
            ConfigError: another process owns it.
            StoreUnavailable: after a restart, what was put before it comes first, or there may be no room left for it.
        """
        if self._outstanding.is_behind():
            raise StoreUnavailable("the master was restarted; what this run had put is published again first")
        self._claim.take(segment, restarted=any(owner.epoch for owner in self._owners.all()))
        with self._lock:
            if not self._keepers:
                # Two, since publishing again after a restart takes longer than a run may be silent.
                for number, keep in enumerate((self._beat, self._tend)):
                    name = f"mooncake keeper {number}"
                    self._keepers.append(threading.Thread(target=self._keep, args=(keep,), name=name, daemon=True))
                    self._keepers[-1].start()

    def _keep(self, keep: Callable[[int], None]) -> None:
        ticks = 0
        while not self._ended.wait(KEEPER_SECONDS):
            ticks += 1
            try:
                keep(ticks)
            except StoreError as error:
                _log.info("run %s: %s", self._run_id, error)
            except Exception:  # the run's claim and its batches depend on the next tick
                _log.exception("run %s: tick %d failed", self._run_id, ticks)

    def _beat(self, _: int) -> None:
        owners = self._owners.all()
        if owners:
            try:
                self._claim.beat([owner.name for owner in owners])
            except StoreError:
                self._owners.changed()  # for the next beat
                raise

    def _tend(self, ticks: int) -> None:
        self._outstanding.tick()
        if ticks % _FORGET_EVERY == 0:
            self._outstanding.forget_removed()


def open_carrier(options: BackendOptions) -> MooncakeCarrier:
    """Connect as `options.init_kwargs` and the environment say; lend memory if this process contributes.

    Memory is lent by a segment holder: the one that serves this node already, else one that is started here and ends
    with this process.

    Raises what `resolve`, `fit_to_host`, `MooncakeClient.connect` and `start_holder` raise, in this order: what can be
    decided here comes before the network, and the network before memory and devices.
    """
    config = resolve(options.init_kwargs, os.environ, node_ip=_ray_node_ip)
    if options.contribute_segment and config.global_segment_size == 0:
        raise config.settings["global_segment_size"].complain(
            "contradicts contribute_segment = True, since it lends nothing; set a size, or leave contribute_segment out"
        )
    config = fit_to_host(config, options.contributes)
    carrier = MooncakeCarrier(MooncakeClient.connect(config), config, options.run_id, options.replica_num)
    if options.contributes and config.global_segment_size:
        try:
            carrier.lend(config, _log_file(options))
        except BaseException:
            carrier.close()
            raise
    return carrier


def _log_file(options: BackendOptions) -> Path:
    directory = options.log_dir or Path(tempfile.gettempdir())
    return directory / f"segment-holder-{uuid.uuid4().hex[:8]}.log"


def _ray_node_ip() -> str | None:
    """This node's address as Ray knows it, if this process uses Ray already."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.util.get_node_ip_address())
