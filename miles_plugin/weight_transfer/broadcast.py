"""Broadcast: trainer rank 0 and all engine ranks form a process group (gloo or NCCL), weights go out in buckets.

While a bucket is on its way the next one is gathered. An engine that fails while weights are sent breaks the group for
all: whoever is left forms another and is sent everything again.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.sglang import EngineError
from miles_plugin.weight_transfer.group import Broken, EngineGroup
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
        self._group: EngineGroup | None = None

    def connect(self, engines: Sequence[EngineAddress]) -> Mapping[str, str]:
        """Form the process group, unless it is there, with just these engines in the same lives."""
        if self._group is not None and self._group.engines == tuple(engines):
            return {}
        self.close()
        failed: dict[str, str] = {}
        for is_last in (False, True):
            rest = [engine for engine in engines if engine.url not in failed]
            try:
                self._group = self._form(rest)
                break
            except EngineError as error:
                if is_last or len(rest) == 1:
                    return failed | {engine.url: str(error) for engine in rest}
                failed = self._alone(rest)
            if len(failed) == len(rest):
                break
        return failed

    def send(self, tensors: Iterable[NamedTensor]) -> Sent:
        """Broadcast all weights. After a failure the rest is taken, since other ranks gather it too, but not sent."""
        group = self._group
        assert group is not None, "connect() comes first"
        nbytes, failed, broken = 0, dict[str, str](), ""
        with ThreadPoolExecutor(1, thread_name_prefix="broadcast") as sender:
            sending: Future[Mapping[str, str]] | None = None
            # One more than there are: what comes last has to be waited for, too.
            for bucket in itertools.chain(buckets(tensors, self._bucket_bytes), [[]]):
                if sending is not None:
                    try:
                        failed.update(sending.result())
                    except Broken as error:
                        broken = str(error)
                if failed or broken or not bucket:
                    sending = None
                else:
                    nbytes += sum(tensor.nbytes for _, tensor in bucket)
                    sending = sender.submit(group.send, bucket)
        if failed or broken:
            self.close()
        return Sent(nbytes, failed, broken or ("an engine left the process group" if failed else ""))

    def close(self) -> None:
        """Dissolve the group, on the engines that still answer too; idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _alone(self, engines: Sequence[EngineAddress]) -> dict[str, str]:
        """Why which engines do not join; in a group of many only the first to refuse may show."""
        failed = {}
        for engine in engines:
            try:
                self._form([engine]).leave()
            except EngineError as error:
                failed[engine.url] = str(error)
        return failed

    def _form(self, engines: Sequence[EngineAddress]) -> EngineGroup:
        return EngineGroup(engines, self._address, f"{self._name}-{next(self._numbers)}", self._backend, self._bounds)


class Bystander:
    """The other trainer ranks in a broadcast: they take part in each gather, and send nothing."""

    def connect(self, engines: Sequence[EngineAddress]) -> Mapping[str, str]:  # noqa: ARG002
        return {}

    def send(self, tensors: Iterable[NamedTensor]) -> Sent:
        for _ in tensors:
            pass
        return Sent(0)

    def close(self) -> None: ...
