"""A torch process group of trainer rank 0 and all ranks of some engines, beside the trainers' own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, ProcessGroup, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.weight_transfer.joiners import NotFormed
from miles_plugin.weight_transfer.sources import NamedTensor
from miles_plugin.weight_transfer.transfer import Bounds
from mooncake_store.bounded import bounded
from mooncake_store.process import free_ports

# Seconds between looks at who has failed while a bucket is on its way.
_LOOK_SECONDS = 0.002
# Seconds for an engine to leave a group, and for this process to.
_LEAVE_SECONDS = 10.0


class Broken(RuntimeError):
    """A broadcast failed, and which engine is to blame does not show."""


@dataclass(frozen=True)
class Bucket:
    """Weights one after the other in one tensor.

    names, dtypes, shapes: of each; dtypes as SGLang says them. flat: uint8, on the device that sends.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: torch.Tensor

    @classmethod
    def of(cls, tensors: Sequence[NamedTensor], memory: torch.Tensor) -> Bucket:
        """Copy tensors into the first bytes of `memory`."""
        flat = memory[: sum(tensor.nbytes for _, tensor in tensors)]
        torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors], out=flat)
        return cls(
            [name for name, _ in tensors],
            [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            [list(tensor.shape) for _, tensor in tensors],
            flat,
        )


class EngineGroup:
    """The group, as its rank 0. Engines join when it is made.

    Args:
        address: of this process, reachable from the engines.
        name: unique among the groups that these engines know.
        backend: "gloo" or "nccl".

    Raises:
        NotFormed: an engine refused to join, or did not within `bounds.join`.
    """

    def __init__(self, engines: Sequence[EngineAddress], address: str, name: str, backend: str, bounds: Bounds) -> None:
        self.engines = tuple(engines)
        self._name, self._bounds = name, bounds
        # Waits a little longer than the rendezvous, whose failure says more.
        self._clients = [SGLangEngine(engine.url, bounds.join + _LEAVE_SECONDS) for engine in engines]
        self._pool = ThreadPoolExecutor(len(engines), thread_name_prefix="weights group")
        self._group: ProcessGroup | None = None
        size = 1 + sum(engine.ranks for engine in engines)
        (port,) = free_ports(1, address)
        offsets = [1 + sum(engine.ranks for engine in engines[:index]) for index in range(len(engines))]
        joining = [
            self._pool.submit(client.init_weights_group, address, port, offset, size, name, backend)
            for client, offset in zip(self._clients, offsets, strict=True)
        ]
        order: list[str] = []  # in which engines said no
        for engine, job in zip(engines, joining, strict=True):
            job.add_done_callback(partial(_note_refusal, order, engine.url))
        try:
            self._group = _join_as_root(address, port, size, name, backend, timedelta(seconds=bounds.join))
            for job in joining:
                job.result()
        except Exception as error:
            refusals = {
                engine.url: str(failure)
                for engine, job in zip(engines, joining, strict=True)
                if job.done() and (failure := job.exception())
            }
            self.leave()
            raise NotFormed(
                f"process group {name} of {size} ranks did not form within {bounds.join:.0f} s: "
                f"{'; '.join(refusals.values()) or error}",
                order[0] if order else None,
            ) from error

    def send(self, bucket: Bucket) -> Mapping[str, str]:
        """Broadcast one bucket and wait until every engine has loaded it.

        Returns why not, by URL, of the engines that are to blame.

        Raises:
            Broken: the broadcast failed, and which engine is to blame does not show. The group is of no more use.
        """
        assert self._group is not None
        # Longer than the broadcast: who waits for bytes in vain says so when it is given up, and is not to blame.
        seconds = self._bounds.bucket + self._bounds.answer
        loading = [
            self._pool.submit(client.receive_bucket, bucket.names, bucket.dtypes, bucket.shapes, self._name, seconds)
            for client in self._clients
        ]
        broken = self._broadcast(bucket.flat, loading, self._bounds.bucket)
        refused = {engine.url for engine, job in zip(self.engines, loading, strict=True) if job.done()}
        if broken:
            self._drop()  # closes its connections, so that engines which still wait for bytes fail too
        failed: dict[str, EngineError] = {}
        for engine, job in zip(self.engines, loading, strict=True):
            try:
                job.result()
            except EngineError as error:
                failed[engine.url] = error
        if broken:
            # To blame is who does not answer, or else who said no while the others still waited; what those say who
            # lost their bytes for that comes later.
            silent = {url for url, error in failed.items() if error.status is None}
            failed = {url: error for url, error in failed.items() if url in (silent or refused)}
            if not failed:
                raise Broken(f"the broadcast of a bucket of {bucket.flat.nbytes} bytes failed: {broken}")
        return {url: str(error) for url, error in failed.items()}

    def _broadcast(self, flat: torch.Tensor, loading: Sequence[Future[None]], seconds: float) -> str:
        """Why the bytes did not get to all; empty when they did. An engine that says no ends the wait for others."""
        assert self._group is not None
        deadline = time.monotonic() + seconds
        group = self._group
        # With NCCL the first one connects, and returns when every engine has called it, too: that may be never.
        sending = _in_background(lambda: group.broadcast(flat, 0))
        try:
            while not (sending.done() and sending.result().is_completed()):
                done, _ = wait(loading, _LOOK_SECONDS, FIRST_EXCEPTION)
                if any(job.exception() for job in done):
                    return "an engine refused it"
                if time.monotonic() > deadline:
                    return f"it took more than {seconds:.0f} s"
            sending.result().wait()
        except RuntimeError as error:
            return str(error)
        return ""

    def leave(self) -> None:
        """Dissolve the group, on the engines that still answer too; idempotent."""
        self._drop()
        clients, self._clients = self._clients, []
        for client in clients:
            self._pool.submit(_leave, client, self._name)
        self._pool.shutdown()

    def _drop(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            _bounded(lambda: dist.destroy_process_group(group))


def _note_refusal(order: list[str], url: str, joined: Future[None]) -> None:
    if joined.exception():
        order.append(url)


def _leave(client: SGLangEngine, name: str) -> None:
    with suppress(EngineError):
        client.destroy_weights_group(name, _LEAVE_SECONDS)
    client.close()


def _in_background(call: Callable[[], dist.Work]) -> Future[dist.Work]:
    """Call it in a thread that does not keep the process from ending."""
    outcome: Future[dist.Work] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return outcome


def _bounded(call: Callable[[], None]) -> None:
    with suppress(RuntimeError, ValueError):
        bounded(call, _LEAVE_SECONDS, "leaving a process group")


def _join_as_root(
    address: str, port: int, world_size: int, name: str, backend: str, timeout: timedelta
) -> ProcessGroup:
    """Rank 0 of a group beside the default one.

    SGLang builds its side with the same private helper of torch (both run the same torch version), which prefixes
    the store's keys; a public constructor of the group would not meet it.
    """
    store, _, _ = next(rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group: ProcessGroup
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
