"""Broadcast: trainer rank 0 and all engine ranks form a process group (gloo or NCCL), weights go out in buckets.

While a bucket is on its way the next one is gathered, into the other of two pieces of memory, which stay: new memory
costs a CPU more than the copy. An engine that fails while weights are sent breaks the group for
all: whoever is left forms another and is sent everything again. So does one that does not join: `joiners.py` finds it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.weight_transfer.group import Broken, Bucket, EngineGroup
from miles_plugin.weight_transfer.joiners import Joiners, NotFormed
from miles_plugin.weight_transfer.sources import NamedTensor, buckets
from miles_plugin.weight_transfer.transfer import Bounds, Sent


class Broadcaster:
    """The sending side, on trainer rank 0.

    Args:
        address: of this process, reachable from the engines.
        name: what names of process groups begin with.
        backend: "gloo" or "nccl".
        bucket_bytes: of one bucket; a larger tensor is one by itself.
    """

    def __init__(self, address: str, name: str, backend: str, bucket_bytes: int, bounds: Bounds = Bounds()) -> None:  # noqa: B008  (frozen)
        self._address, self._name, self._backend = address, f"{name}-{secrets.token_hex(4)}", backend
        self._bucket_bytes, self._bounds = bucket_bytes, bounds
        self._numbers = itertools.count()
        self._known: set[EngineAddress] = set()  # who was in the last group
        self._group: EngineGroup | None = None
        self._memory: list[torch.Tensor] = []  # two, of which one is sent from while the other is filled

    def connect(self, engines: Sequence[EngineAddress]) -> Mapping[str, str]:
        """Form the process group, unless it is there, with these engines in the same lives, or as many as form one."""
        if self._is_with(engines):
            return {}
        joiners = Joiners(self._try, self._bounds.search)
        group = joiners.most(engines, self._known)
        if group and not self._is_with(group):  # another one was tried after it
            try:
                self._try(group)
            except NotFormed as error:
                return joiners.failed | {engine.url: str(error) for engine in group}
        self._known = set(group)
        return joiners.failed

    def _is_with(self, engines: Sequence[EngineAddress]) -> bool:
        return self._group is not None and set(self._group.engines) == set(engines)

    def _try(self, engines: Sequence[EngineAddress]) -> None:
        """Form a group of just these engines; raises NotFormed."""
        self.close()
        name = f"{self._name}-{next(self._numbers)}"
        # Alone nobody waits for others, and who hangs is found out sooner.
        alone = min(self._bounds.alone, self._bounds.join)
        bounds = self._bounds if len(engines) > 1 else replace(self._bounds, join=alone)
        self._group = EngineGroup(engines, self._address, name, self._backend, bounds)

    def send(self, tensors: Iterable[NamedTensor]) -> Sent:
        """Broadcast all weights. After a failure the rest is taken, since other ranks gather it too, but not sent."""
        group = self._group
        assert group is not None, "connect() comes first"
        nbytes, failed, broken = 0, dict[str, str](), ""
        with ThreadPoolExecutor(1, thread_name_prefix="broadcast") as sender:
            sending: Future[Mapping[str, str]] | None = None
            # One more than there are: what comes last has to be waited for, too.
            for bucket in itertools.chain(buckets(tensors, self._bucket_bytes), [[]]):
                if bucket and not (failed or broken):
                    flat = self._flat(bucket)
                if sending is not None:
                    try:
                        failed.update(sending.result())
                    except Broken as error:
                        broken = str(error)
                if failed or broken or not bucket:
                    sending = None
                else:
                    nbytes += flat.flat.nbytes
                    sending = sender.submit(group.send, flat)
        if self._memory and self._memory[0].is_cuda:
            self._memory = []  # which a GPU has other use for, and gives back at once
        if failed or broken:
            self.close()
        return Sent(nbytes, failed, broken or ("an engine left the process group" if failed else ""))

    def close(self) -> None:
        """Dissolve the group, on the engines that still answer too; idempotent."""
        group, self._group = self._group, None
        self._memory = []  # a broadcast that failed may still read it
        if group is not None:
            group.leave()

    def _flat(self, bucket: Sequence[NamedTensor]) -> Bucket:
        """In memory from which nothing is sent: that of the bucket before the last."""
        nbytes, device = sum(tensor.nbytes for _, tensor in bucket), bucket[0][1].device
        memory = self._memory.pop(0) if len(self._memory) == 2 else None
        if memory is None or memory.numel() < nbytes or memory.device != device:
            memory = torch.empty(max(nbytes, self._bucket_bytes), dtype=torch.uint8, device=device)
        self._memory.append(memory)
        return Bucket.of(bucket, memory)


class Bystander:
    """The other trainer ranks in a broadcast: they take part in each gather, and send nothing."""

    def connect(self, engines: Sequence[EngineAddress]) -> Mapping[str, str]:  # noqa: ARG002
        return {}

    def send(self, tensors: Iterable[NamedTensor]) -> Sent:
        for _ in tensors:
            pass
        return Sent(0)

    def close(self) -> None: ...
