"""A buffer of the user's in the job: what is refused before it starts, what it is asked, and what it may not do."""

import asyncio
import re
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from miles_plugin.fully_async.buffer import BufferClosed, BufferFailed
from miles_plugin.fully_async.custom_buffer import SETTING, CustomBuffer, load_buffer_class
from miles_plugin.rollout.custom import DataBuffer, DataBufferConstructorInput, DataBufferInput
from miles_plugin.rollout.functions import CustomFunctionError
from miles_plugin.rollout.sample import Sample
from mooncake_store.errors import ConfigError
from tests.unit.plugin.fully_async_groups import finished, let_run, number, run


class NewestFirst(DataBuffer):
    """Hands out what was finished last, holds eight groups, and gives up what was aborted."""

    def __init__(self, input: DataBufferConstructorInput) -> None:
        self.args, self.unused = input.args, input.unused_handler_fn
        self.groups: deque[DataBufferInput] = deque()
        self.changed = asyncio.Condition()
        self.asked: list[Any] = []

    async def put(self, input: DataBufferInput) -> None:
        if any(sample.status is Sample.Status.ABORTED for sample in input.group):
            self.unused(input.prompt_group)
            return
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.groups) < 8)
            self.groups.append(input)
            self.changed.notify_all()

    async def get(self, **context: Any) -> DataBufferInput:
        self.asked.append(context)
        async with self.changed:
            await self.changed.wait_for(lambda: self.groups)
            self.changed.notify_all()
            return self.groups.pop()

    def get_metrics(self) -> dict[str, float]:
        return {"mine/groups": len(self.groups)}


class Plain:
    """Inherits from nothing; miles passes the version by name."""

    def __init__(self, input: Any) -> None: ...
    async def put(self, input: Any) -> None: ...
    async def get(self, current_version: int | None = None, **_: Any) -> None: ...
    def get_metrics(self) -> dict[str, float]:
        return {}


def changed(**attributes: Any) -> type:
    return type("Changed", (Plain,), attributes)


async def without_version(self: Any) -> None: ...
async def one_too_many(self: Any, input: Any, more: Any) -> None: ...
def not_async(self: Any, current_version: int | None) -> None: ...
def of_two(self: Any, args: Any, handler: Any) -> None: ...


NO_CLASS = NewestFirst.put
NO_PUT = changed(put=None)
SYNC_GET = changed(get=not_async)
ASYNC_METRICS = changed(get_metrics=Plain.get)
NO_VERSION = changed(get=without_version)
TWO_GROUPS = changed(put=one_too_many)
OTHER_MAKING = changed(__init__=of_two)


class Unfinished(DataBuffer):
    """Has none of the methods of its own."""


def path_of(name: str) -> str:
    return f"{__name__}.{name}"


@pytest.mark.parametrize("name", ["NewestFirst", "Plain"])
def test_a_class_that_keeps_the_contract_is_loaded(name: str) -> None:
    assert load_buffer_class(path_of(name)) is globals()[name]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nowhere.Buffer", "there is no module 'nowhere'"),
        ("Buffer", r"write it as package\.module\.Class"),
        (path_of("Newest"), "has no 'Newest'; it has NewestFirst"),
        (path_of("NO_CLASS"), "function, not a class; it must have put, get and get_metrics"),
        (path_of("NO_PUT"), "it has no put"),
        (path_of("Unfinished"), "it has no put"),
        (path_of("SYNC_GET"), "get must be async"),
        (path_of("ASYNC_METRICS"), "get_metrics must be an ordinary method"),
        (path_of("NO_VERSION"), r"get: without_version\(self.*\(self, current_version=\.\.\.\)"),
        (path_of("TWO_GROUPS"), r"put: one_too_many\(.*cannot be called with \(self, input\)"),
        (path_of("OTHER_MAKING"), r"Changed\(args.* cannot be called with \(input\)"),
        ("miles_plugin.hooks.post_write", "does not have it yet"),
    ],
)
def test_a_class_that_does_not_is_refused_by_name(path: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{SETTING}={re.escape(path)}: .*{expected}"):
        load_buffer_class(path)


class Made:
    """A buffer of a class, and the prompts that were to be generated again, and not."""

    def __init__(self, name: str = "NewestFirst", unused: str = "retry") -> None:
        args = Namespace(
            async_data_buffer_capacity_factor=2.0, rollout_batch_size=2, max_weight_staleness=None,
            async_unused_samples_handler=unused, mine="read",
        )  # fmt: skip
        self.again: list[Any] = []
        self.dropped: list[Any] = []
        self.buffer = CustomBuffer(path_of(name), args, self.again.append, self.dropped.append)
        self.theirs: Any = self.buffer._theirs


def test_it_decides_what_comes_out() -> None:
    async def body() -> None:
        made = Made()
        for n in range(3):
            await made.buffer.put(finished(n, "1"))
        assert [number(await made.buffer.get()) for _ in range(2)] == [2, 1]
        assert made.buffer.get_metrics() == {"mine/groups": 1.0}
        assert made.theirs.args.mine == "read"

    run(body)


def test_it_is_told_the_highest_version_that_is_known() -> None:
    async def body() -> None:
        made = Made()
        for n in range(4):
            await made.buffer.put(finished(n, "1"))
        await made.buffer.get()
        made.buffer.announce(5)
        await made.buffer.get(4)
        await made.buffer.get(6)
        assert made.theirs.asked == [{"current_version": version} for version in (None, 5, 6)]

    run(body)


@pytest.mark.parametrize("unused", ["retry", "drop"])
def test_what_it_gives_up_goes_where_the_settings_say(unused: str) -> None:
    async def body() -> None:
        made = Made(unused=unused)
        given = finished(0, status=Sample.Status.ABORTED)
        await made.buffer.put(given)
        assert (made.again, made.dropped) == (
            ([given.prompt_group], []) if unused == "retry" else ([], [given.prompt_group])
        )
        await made.buffer.put(finished(0, "1"))
        assert number(await made.buffer.get()) == 0, "generated again, it may come again"

    run(body)


class Misbehaving(NewestFirst):
    """Does what a test wants with the group that it is asked for."""

    does: Callable[[NewestFirst, DataBufferInput], Any]

    async def get(self, **context: Any) -> Any:
        return Misbehaving.does(self, await super().get(**context))


def twice(buffer: NewestFirst, taken: DataBufferInput) -> DataBufferInput:
    buffer.groups.append(taken)
    return taken


def given_up_as_well(buffer: NewestFirst, taken: DataBufferInput) -> DataBufferInput:
    buffer.unused(taken.prompt_group)
    return taken


def given_up_twice(buffer: NewestFirst, taken: DataBufferInput) -> None:
    buffer.unused(taken.prompt_group)
    buffer.unused(taken.prompt_group)


def fails(buffer: NewestFirst, taken: DataBufferInput) -> None:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (twice, "get returned what is no group of its: group 0 is not there; it was never put, or was returned"),
        (given_up_as_well, "get returned what is no group of its: group 0 is not there"),
        (given_up_twice, "get: LookupError: group 0 is not there"),
        (lambda *_: finished(7), "get returned what is no group of its: group 7 is not there"),
        (lambda *_: None, "get returned what is no group of its: 'NoneType'"),
        (lambda _, taken: taken.group, "get returned what is no group of its: 'list' object has no attribute"),
        (
            lambda _, taken: DataBufferInput(taken.prompt_group, taken.group[:1]),
            "get returned group 0 with 1 samples, 2 were put",
        ),
        (
            lambda _, taken: DataBufferInput(taken.prompt_group, finished(0, status=Sample.Status.ABORTED).group),
            "get returned group 0, of which a sample was aborted",
        ),
        (fails, r"get: KeyError: 'mine' \(.*test_fully_async_custom\.py:\d+:"),
    ],
)
def test_what_it_may_not_do_is_named(does: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Misbehaving, "does", staticmethod(does), raising=False)

    async def body() -> None:
        made = Made("Misbehaving")
        await made.buffer.put(finished(0, "1"))
        if does is twice:
            await made.buffer.get()
        with pytest.raises(CustomFunctionError, match=f"^{SETTING}={path_of('Misbehaving')}: {expected}"):
            await made.buffer.get()

    run(body)


class CannotBeMade(Plain):
    def __init__(self, input: Any) -> None:
        input.args.no_such_setting  # noqa: B018


class OddMetrics(Plain):
    def get_metrics(self) -> dict[str, Any]:
        return {"mine": "many"}


def test_failures_of_making_it_and_of_its_metrics_are_named() -> None:
    async def body() -> None:
        with pytest.raises(CustomFunctionError, match=r"CannotBeMade: AttributeError: .*no_such_setting"):
            Made("CannotBeMade")
        with pytest.raises(CustomFunctionError, match=r"get_metrics returned \{'mine': 'many'\}"):
            Made("OddMetrics").buffer.get_metrics()

    run(body)


@pytest.mark.parametrize("ends", ["fail", "close"])
def test_who_waits_for_one_that_has_ended_is_told(ends: str) -> None:
    async def body() -> None:
        made = Made()
        waiting = asyncio.create_task(made.buffer.get())
        await let_run()
        assert not waiting.done()
        made.buffer.fail(RuntimeError("the engines are gone")) if ends == "fail" else made.buffer.close()
        with pytest.raises(BufferFailed if ends == "fail" else BufferClosed):
            await waiting
        for call in (made.buffer.put(finished(0)), made.buffer.get()):
            with pytest.raises(BufferClosed):
                await call
        made.buffer.close()

    run(body)
