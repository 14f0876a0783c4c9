"""A loop in a thread of its own: what it returns, raises, and cancels."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from miles_plugin.rollout.event_loop import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("loop")
    yield thread
    thread.close()


async def name() -> str:
    return threading.current_thread().name


def test_everything_runs_in_one_thread(loop: LoopThread) -> None:
    assert [loop.run(name()), loop.start(name()).result(10), loop.run(name())] == ["loop"] * 3


def test_what_it_raises_is_raised(loop: LoopThread) -> None:
    async def fail() -> None:
        raise LookupError("no such prompt")

    with pytest.raises(LookupError, match="no such prompt"):
        loop.run(fail())


def test_closing_cancels_what_runs_and_lets_it_end(loop: LoopThread) -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    waiting = loop.start(wait())
    loop.run(name())  # it has begun
    loop.close()
    assert ended == ["ended"]
    assert waiting.cancelled()
    loop.close()
    with pytest.raises(RuntimeError, match="was closed"):
        loop.run(name())
