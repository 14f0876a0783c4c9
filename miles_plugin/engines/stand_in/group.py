"""The receiving side of a broadcast: every tensor-parallel rank of one engine as a member of a gloo group."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore
from torch.distributed.rendezvous import rendezvous


class WeightsGroup:
    """Ranks `rank_offset`, `rank_offset` + 1, ... of a group whose rank 0 sends. Blocks until all have joined.

    SGLang has a process per rank and a helper of torch that allows one group of a name per process. Here all ranks are
    in one process: members are made directly, under the store's keys that the helper would use.

    Raises:
        RuntimeError: the group did not form in time.
    """

    def __init__(
        self, address: str, port: int, rank_offset: int, ranks: int, world_size: int, name: str, timeout: timedelta
    ) -> None:
        def join(rank: int) -> ProcessGroupGloo:
            store, _, _ = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
            store.set_timeout(timeout)
            prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            return ProcessGroupGloo(prefixed, rank, world_size, timeout)

        with ThreadPoolExecutor(ranks, thread_name_prefix="join") as pool:
            self._members = list(pool.map(join, range(rank_offset, rank_offset + ranks)))

    def receive(self, tensor: torch.Tensor) -> None:
        """Receive the next broadcast. Every rank gets the same bytes, so they share one result.

        Raises:
            RuntimeError: the sender went away or sent another size.
        """
        copies: Sequence[torch.Tensor] = [tensor, *(torch.empty_like(tensor) for _ in self._members[1:])]
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        works = [
            member.broadcast([copy], options)  # type: ignore[attr-defined]  # of its base class, which stubs leave out
            for member, copy in zip(self._members, copies, strict=True)
        ]
        for work in works:
            work.wait()
