"""miles's fully asynchronous rollouts with this project's buffer, named by its flag. Run by `test_miles.py`."""

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from miles.rollout import fully_async_rollout
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.fully_async_data_buffer import DataBuffer, DataBufferConstructorInput, DataBufferInput
from miles.utils.misc import load_function
from miles.utils.types import Sample

PATH = "miles_plugin.hooks.DataBuffer"
Group = list[Sample]


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 60)

    asyncio.run(bounded())


def group(number: int, *versions: str) -> Group:
    return [
        Sample(
            group_index=number,
            index=2 * number + at,
            prompt="question",
            response="yes",
            response_length=1,
            label="yes",
            reward=1,
            status=Sample.Status.COMPLETED,
            weight_versions=list(versions),
        )
        for at in range(2)
    ]


class Source:
    """First the groups that a test made, then those of a version, without end."""

    def __init__(self, *groups: Group, version: str) -> None:
        self._groups = self._all(groups, version)
        self.again: list[int] = []

    def _all(self, groups: tuple[Group, ...], version: str) -> Iterator[Group]:
        yield from groups
        number = 1000
        while True:
            yield group(number, version)
            number += 1

    def get_samples(self, count: int) -> list[Group]:
        return [next(self._groups) for _ in range(count)]

    def add_samples(self, groups: list[Group]) -> None:
        self.again += [each[0].group_index for each in groups]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """miles's rollout function, whose engines hand back what the source gives."""

    async def generate(state: Any, samples: Group, *_: Any, **__: Any) -> Group:
        await asyncio.sleep(0)
        return samples

    monkeypatch.setattr(fully_async_rollout, "GenerateState", lambda _: Namespace(sampling_params={}))
    monkeypatch.setattr(fully_async_rollout, "generate_and_rm_group", generate)

    def start(source: Source, **changes: Any) -> Any:
        return fully_async_rollout.FullyAsyncRolloutFn(
            RolloutFnConstructorInput(args=arguments(**changes), data_source=source)
        )

    return start


def arguments(**changes: Any) -> Namespace:
    given = {
        "rollout_global_dataset": True, "rollout_batch_size": 1, "n_samples_per_prompt": 2,
        "max_weight_staleness": 2, "async_max_concurrent_samples": None, "async_data_buffer_capacity_factor": 4.0,
        "async_unused_samples_handler": "retry", "custom_async_data_buffer_path": PATH,
        "rollout_submission_granularity": None, "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
    }  # fmt: skip
    return Namespace(**{**given, **changes})


async def numbers(rollouts: Any, version: int | None) -> tuple[list[int], dict[str, float]]:
    output = await rollouts(RolloutFnTrainInput(rollout_id=0, weight_version=version))
    prefix = "rollout/fully_async/"
    return [each[0].group_index for each in output.samples], {
        name.removeprefix(prefix): value for name, value in output.metrics.items()
    }


def test_the_flag_gives_a_job_our_buffer(start: Callable[..., Any]) -> None:
    async def body() -> None:
        rollouts = start(Source(version="1"), rollout_batch_size=3)
        got, metrics = await numbers(rollouts, 1)
        assert got == [1000, 1001, 1002]
        assert isinstance(rollouts._output, DataBuffer)
        assert type(rollouts._output).__module__ == "miles_plugin.in_miles.data_buffer"
        assert metrics["consumed_groups"] == 3

    run(body)


def test_what_is_stale_is_dropped_by_default(start: Callable[..., Any]) -> None:
    """miles's own test of this, with versions where it has none."""

    async def body() -> None:
        source = Source(group(1, "5"), version="10")
        got, metrics = await numbers(start(source, async_unused_samples_handler="drop"), 10)
        assert (got, source.again) == ([1000], [])
        assert metrics["stale_groups_filtered"] == 1

    run(body)


@pytest.mark.parametrize("versions", [(), ("default",), ("10", "default")])
def test_what_has_no_version_is_generated_again_once_one_was_pushed(
    start: Callable[..., Any], versions: tuple[str, ...]
) -> None:
    async def body() -> None:
        source = Source(group(1, *versions), version="10")
        got, metrics = await numbers(start(source), 10)
        assert (got, source.again) == ([1000], [1])
        assert metrics["unstamped_groups_filtered"] == 1
        before = Source(group(1, *versions), version="10")
        assert (await numbers(start(before), None))[0] == [1]
        unbounded = Source(group(1, *versions), version="10")
        assert (await numbers(start(unbounded, max_weight_staleness=None), 10))[0] == [1]

    run(body)


@pytest.mark.parametrize(("path", "second"), [(PATH, 3), (None, 2)], ids=["ours", "theirs"])
def test_a_lower_version_than_before_lets_nothing_stale_through(path: str | None, second: int) -> None:
    """By the bare numbers group 2 is eight versions ahead of 1; it is of the 9th, and this is the 11th."""

    async def body() -> None:
        kind = load_function(path) or fully_async_rollout.DefaultDataBuffer
        buffer = kind(DataBufferConstructorInput(args=arguments(max_weight_staleness=1), unused_handler_fn=id))
        for number in (1, 2):
            await buffer.put(DataBufferInput(prompt_group=group(number), group=group(number, "9")))
        assert (await buffer.get(current_version=10)).group[0].group_index == 1
        waiting = asyncio.create_task(buffer.get(current_version=1))
        await asyncio.sleep(0)
        await buffer.put(DataBufferInput(prompt_group=group(3), group=group(3, "1")))
        assert (await waiting).group[0].group_index == second

    run(body)
