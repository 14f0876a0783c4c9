"""The buffer by miles's contract, in a host of miles's shape: what a miles job names, puts, gets and logs."""

import asyncio
import importlib
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_plugin import hooks
from miles_plugin.in_miles import names
from miles_plugin.in_miles.numbering import Numbering
from mooncake_store.errors import ConfigError
from tests.unit.plugin.fully_async_groups import let_run, metric, run

HOST = Path(__file__).parents[2] / "miles_host"
BUFFER = "miles/rollout/fully_async_data_buffer.py"


class Status(Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"


@dataclass
class MilesSample:
    """What the buffer looks at of miles's own `Sample`."""

    group_index: int
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.COMPLETED


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A miles that can be imported, and changed before; nothing of it stays imported."""
    copied = Path(shutil.copytree(HOST, tmp_path / "host"))
    before = set(sys.modules)
    monkeypatch.syspath_prepend(copied)
    yield copied
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "miles" or name == "miles_plugin.in_miles.data_buffer":
            del sys.modules[name]


def arguments(**changes: Any) -> Namespace:
    """Those that miles has for its buffer, with miles's defaults."""
    given = {
        "rollout_batch_size": 4, "async_data_buffer_capacity_factor": 2.0, "max_weight_staleness": None,
        "async_unused_samples_handler": "drop", "dynamic_sampling_filter_path": None,
    }  # fmt: skip
    return Namespace(**{**given, **changes})


class Job:
    """What miles's rollout function does with the class that the flag names."""

    def __init__(self, **changes: Any) -> None:
        module, _, name = "miles_plugin.hooks.DataBuffer".rpartition(".")
        theirs = importlib.import_module("miles.rollout.fully_async_data_buffer")
        self.input, self.unused = theirs.DataBufferInput, []
        made = getattr(importlib.import_module(module), name)
        self.buffer = made(
            theirs.DataBufferConstructorInput(args=arguments(**changes), unused_handler_fn=self.unused.append)
        )
        assert isinstance(self.buffer, theirs.DataBuffer)

    async def put(self, number: int, *versions: str, status: Status = Status.COMPLETED) -> None:
        group = [MilesSample(number, list(versions), status) for _ in range(2)]
        await self.buffer.put(self.input(prompt_group=group, group=group))

    async def get(self, version: int | None = None) -> int:
        taken = await self.buffer.get(current_version=version, some_future_key=2)
        assert type(taken) is self.input
        number: int = taken.group[0].group_index
        return number

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = self.buffer.get_metrics()
        return metrics

    def given_up(self) -> list[int]:
        return [group[0].group_index for group in self.unused]


@pytest.mark.parametrize("handler", ["retry", "drop"])
def test_what_is_not_trained_on_goes_to_the_handler_that_miles_gives(host: Path, handler: str) -> None:
    async def body() -> None:
        job = Job(max_weight_staleness=2, async_unused_samples_handler=handler)
        await job.put(1, "5", status=Status.ABORTED)
        await job.put(2, "5")
        await job.put(3, "8", "9")
        assert await job.get(10) == 3
        assert job.given_up() == [1, 2]
        metrics = job.metrics()
        for name, value in (("aborted_groups_filtered", 1), ("stale_groups_filtered", 1), ("max_staleness", 5)):
            assert metric(metrics, name) == value
        assert metric(metrics, "recycled_groups" if handler == "retry" else "dropped_groups") == 2

    run(body)


def test_nothing_is_measured_before_the_first_push_and_what_has_no_version_is_not_trained_on_after_it(
    host: Path,
) -> None:
    async def body() -> None:
        job = Job(max_weight_staleness=0)
        await job.put(1, "5")
        await job.put(2)
        assert [await job.get(), await job.get()] == [1, 2]
        assert not [name for name in job.metrics() if name.endswith("avg_staleness")]
        for number, versions in ((3, ()), (4, ("default",)), (5, ("1", "default")), (6, ("1",))):
            await job.put(number, *versions)
        assert await job.get(1) == 6
        assert job.given_up() == [3, 4, 5]
        assert metric(job.metrics(), "unstamped_groups_filtered") == 3

    run(body)


def test_a_full_buffer_makes_the_worker_wait(host: Path) -> None:
    async def body() -> None:
        job = Job(rollout_batch_size=2, async_data_buffer_capacity_factor=1.5)
        for number in range(3):
            await job.put(number)
        blocked = asyncio.create_task(job.put(3))
        await let_run()
        assert not blocked.done()
        assert metric(job.metrics(), "queue_size") == 3
        assert await job.get() == 0
        await blocked

    run(body)


def odd_only(args: Namespace, group: list[MilesSample], **_: Any) -> Any:
    assert args.dynamic_sampling_filter_path.endswith("odd_only")
    assert group[0].status is Status.COMPLETED, "an aborted group is not asked about"
    return SimpleNamespace(keep=group[0].group_index % 2 == 1, reason="even")


def test_what_the_dynamic_filter_does_not_keep_is_dropped_and_counted_by_its_reason(host: Path) -> None:
    async def body() -> None:
        job = Job(dynamic_sampling_filter_path=f"{__name__}.odd_only", async_unused_samples_handler="retry")
        await job.put(0, status=Status.ABORTED)
        for number in range(1, 5):
            await job.put(number)
        assert [await job.get(), await job.get()] == [1, 3]
        assert job.given_up() == [0]
        assert job.metrics()["rollout/dynamic_filter/drop_even"] == 2
        assert "rollout/dynamic_filter/drop_even" not in job.metrics()

    run(body)


def test_a_trainer_that_takes_over_with_a_lower_count_stops_nothing_and_freshens_nothing(host: Path) -> None:
    """miles's own buffer measures what lies there as staler than 0 by a negative number, and hands it out."""

    async def body() -> None:
        job = Job(max_weight_staleness=1, async_unused_samples_handler="retry")
        for number, version in ((1, "9"), (2, "10"), (3, "10")):
            await job.put(number, version)
        assert await job.get(10) == 1
        assert await job.get(1) == 2, "the version after 10"
        await job.put(4, "1")
        await job.put(5, "10")  # of the old count, finished late: nobody knows how stale it is
        await job.put(6, "2")
        assert await job.get(2) == 4
        assert job.given_up() == [3]
        assert await job.get(2) == 6
        assert job.given_up() == [3, 5]
        metrics = job.metrics()
        assert metric(metrics, "version_steps_back") == 1
        assert metric(metrics, "consumed_max_staleness") == 1
        assert metric(job.metrics(), "version_steps_back") == 0

    run(body)


def test_numbers_never_fall() -> None:
    numbering = Numbering()
    assert [numbering.current(version) for version in (None, 3, 3, 4, 1, 2, 2, 0)] == [None, 3, 3, 4, 5, 6, 6, 7]
    assert [numbering.number_of(version) for version in ("0", "1", "default", None)] == [7, 8, None, None]
    assert [numbering.take_steps_back(), numbering.take_steps_back()] == [2, 0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"async_data_buffer_capacity_factor": 0.1}, "no place"),
        ({"max_weight_staleness": -1}, "max_weight_staleness = -1"),
        ({"async_unused_samples_handler": "keep"}, "'keep'"),
    ],
)
def test_flags_that_mean_nothing_are_refused(host: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Job(**changes)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "unused_handler_fn: Callable",
            "unused: Callable",
            r"DataBufferConstructorInput.__init__\(self, args, unused_",
        ),
        ("class DataBufferInput", "class Entry", r"DataBufferInput.__init__.* found nothing of that name"),
        ("put(self, input)", "put(self, group, prompt_group)", r"DataBuffer.put\(self, input\)"),
    ],
)
def test_a_miles_with_another_contract_is_refused_by_name(host: Path, old: str, new: str, expected: str) -> None:
    source = (host / BUFFER).read_text()
    assert old in source
    (host / BUFFER).write_text(source.replace(old, new))
    with pytest.raises(ConfigError, match=f"{expected}.*eff558e9b"):
        _ = hooks.DataBuffer


def test_a_miles_without_such_a_buffer_is_refused_where_it_is_named_and_nowhere_else(host: Path) -> None:
    (host / BUFFER).unlink()
    names.check()
    with pytest.raises(ConfigError, match=r"looked for miles\.rollout.fully_async_data_buffer"):
        _ = hooks.DataBuffer


def test_without_miles_it_is_said_what_to_do() -> None:
    if names.is_importable():
        pytest.skip("miles is installed")
    with pytest.raises(ConfigError, match=r"no miles here; .* without --custom-async-data-buffer-path"):
        _ = hooks.DataBuffer
    with pytest.raises(AttributeError, match="it has DataBuffer"):
        _ = hooks.Buffer
