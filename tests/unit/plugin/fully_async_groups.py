"""Groups, stores and loops for the tests of the buffer."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np

from miles_plugin.fully_async.counts import PREFIX
from miles_plugin.fully_async.groups import DataBufferInput, iter_samples
from miles_plugin.rollout.sample import Sample
from mooncake_store import ObjectStore
from mooncake_store.backends import BackendOptions, Payload, Placed
from tests.unit.store.store_memory import Memory

Result = TypeVar("Result")


def finished(
    number: int, *versions: str, status: Sample.Status = Sample.Status.COMPLETED, run_id: str | None = None
) -> DataBufferInput:
    """A group of two samples, the first of which has `versions`, the second the last of them."""
    prompts = [Sample(2 * number + i, number, f"question {number}", str(number), {"n": number}) for i in (0, 1)]
    samples = [
        Sample(
            prompt.index,
            number,
            prompt.prompt,
            prompt.label,
            dict(prompt.metadata),
            tokens=[1, 2, number],
            response="yes",
            response_length=1,
            rollout_log_probs=[-0.1],
            weight_versions=list(versions[-i:]),
            status=status,
            reward=0.5,
        )
        for i, prompt in enumerate(prompts)
    ]
    return DataBufferInput(prompts, samples, run_id)


def number(group: DataBufferInput) -> int:
    """Of a group that came out, whose samples all have to be there."""
    samples = list(iter_samples(group.group))
    numbers = {sample.group_index for sample in [*samples, *group.prompt_group]}
    assert len(samples) == 2
    assert len(numbers) == 1
    return numbers.pop()


def metric(metrics: Mapping[str, float], name: str) -> float:
    return metrics[PREFIX + name]


def run(body: Callable[[], Awaitable[Result]]) -> Result:
    """Run a test in a loop of its own; what it waits for comes within the patience of the test runner, or never."""

    async def main() -> Result:
        return await body()

    return asyncio.run(main())


async def let_run(steps: int = 20) -> None:
    """Let all tasks go on until each waits for something else than the loop."""
    for _ in range(steps):
        await asyncio.sleep(0)


class Carrier(Memory):
    """Memory in which no key is used twice."""

    def __init__(self) -> None:
        super().__init__(BackendOptions("run1"))
        self.puts = 0

    def put(self, payload: Payload) -> Placed:
        out = np.empty(payload.nbytes, dtype=np.uint8)
        digest = payload.write_into(out)
        self.puts += 1
        key = f"run/run1/b/{self.puts}"
        self.objects[key] = out
        return Placed(key, digest)


class Store:
    """A real store over memory that may be told to fail or to wait; safe to use from several threads.

    failing: by method, what it raises. go_on: cleared, every call waits until it is set. calls: how many, by method.
    """

    def __init__(self) -> None:
        self.carrier = Carrier()
        self.inner = ObjectStore("memory", "run1", self.carrier)
        self.failing: dict[str, Exception] = {}
        self.go_on = threading.Event()
        self.go_on.set()
        self.calls = {"put": 0, "get": 0, "remove": 0}

    def put(self, batch: Mapping[str, Any], value_spec: Any = None, /) -> Any:
        self._call("put")
        return self.inner.put(batch, value_spec)

    def get(self, ref: Any, /) -> AbstractContextManager[Mapping[str, Any]]:
        self._call("get")
        return self.inner.get(ref)

    def remove(self, ref: Any, /) -> None:
        self._call("remove")
        self.inner.remove(ref)

    def _call(self, method: str) -> None:
        self.calls[method] += 1
        assert self.go_on.wait(60)
        if method in self.failing:
            raise self.failing[method]

    @property
    def objects(self) -> Sequence[str]:
        return list(self.carrier.objects)
