"""Broadcast: trainer rank 0 and all engine ranks form a process group (gloo or NCCL), weights go out in buckets."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    ProcessGroup,
    _new_process_group_helper,
)
from torch.distributed.rendezvous import rendezvous

from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.weight_transfer.sources import NamedTensor
from mooncake_store.process import free_ports

GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class EngineRanks:
    """An engine and how many ranks of the group it brings (its tensor-parallel size)."""

    engine: SGLangEngine
    ranks: int


class Broadcaster:
    """The sending side, on trainer rank 0. Engines join when it is made; `close()` dissolves the group.

    Args:
        engines: every engine in rotation.
        address: of this process, reachable from the engines.
        group: name of the process group, unique among those of the engines.
        backend: "gloo" or "nccl".

    Raises:
        EngineError: an engine refused to join, or did not within `GROUP_TIMEOUT`.
    """

    def __init__(self, engines: Sequence[EngineRanks], address: str, group: str, backend: str) -> None:
        self._engines, self._group_name = engines, group
        self._pool = ThreadPoolExecutor(len(engines), thread_name_prefix="broadcast")
        world_size = 1 + sum(member.ranks for member in engines)
        (port,) = free_ports(1, address)
        offsets = [1 + sum(member.ranks for member in engines[:index]) for index in range(len(engines))]
        joining = [
            self._pool.submit(member.engine.init_weights_group, address, port, offset, world_size, group, backend)
            for member, offset in zip(engines, offsets, strict=True)
        ]
        try:
            self._group = _join_as_root(address, port, world_size, group, backend)
        except Exception as error:
            reasons = [str(job.exception(timeout=0)) for job in joining if job.done() and job.exception()]
            raise EngineError(f"weight group {group} of {world_size} ranks did not form: {reasons or error}") from error
        for job in joining:
            job.result()

    def on_engines(self, action: Callable[[SGLangEngine], None]) -> None:
        """Do one thing on every engine at once and wait; raises the first failure."""
        for job in [self._pool.submit(action, member.engine) for member in self._engines]:
            job.result()

    def send(self, bucket: Sequence[NamedTensor]) -> int:
        """Send one bucket and wait until every engine has loaded it. Returns its bytes."""
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
        loading = [
            self._pool.submit(member.engine.receive_bucket, names, dtypes, shapes, self._group_name)
            for member in self._engines
        ]
        self._group.broadcast(flat, 0).wait(GROUP_TIMEOUT)
        for job in loading:
            job.result()
        return flat.nbytes

    def close(self) -> None:
        """Dissolve the group on the engines that still answer, and close their clients."""
        for member in self._engines:
            try:
                member.engine.destroy_weights_group(self._group_name)
            except EngineError:
                continue
            finally:
                member.engine.close()
        self._pool.shutdown()


def _join_as_root(address: str, port: int, world_size: int, name: str, backend: str) -> ProcessGroup:
    """Rank 0 of a group beside the default one.

    SGLang builds its side with the same private helper of torch (both run the same torch version), which prefixes
    the store's keys; a public constructor of the group would not meet it.
    """
    store, _, _ = next(rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=GROUP_TIMEOUT))
    store.set_timeout(GROUP_TIMEOUT)
    group: ProcessGroup
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=GROUP_TIMEOUT
    )
    return group
