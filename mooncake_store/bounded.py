"""Calls that may never return, and calls that may heal when repeated, given a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds


class Attempt:
    """One attempt of `attempts`."""

    def __init__(self, deadline: float, pause: float) -> None:
        self._deadline, self._pause = deadline, pause
        self._last: bool | None = None

    def is_last(self) -> bool:
        """Whether the time was up when this was first asked: one that took long by itself is not followed by another.

        The answer stays, so that whoever was told that another attempt follows gets one.
        """
        if self._last is None:
            self._last = time.monotonic() + self._pause >= self._deadline
        return self._last


def attempts(seconds: float) -> Iterator[Attempt]:
    """Yield attempts, pausing twice as long between them each time, until one ends when the time is up."""
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE
    while True:
        attempt = Attempt(deadline, pause)
        yield attempt
        if attempt.is_last():
            return
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def bounded(call: Callable[[], Result], seconds: float, name: str = "bounded call") -> Result | None:
    """Run `call` in a thread called `name`; its result, or None when it takes longer. Its exceptions are raised here.

    What takes longer is left running: the thread is a daemon, which does not keep the process from ending.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        # Popped: an exception that one of its own frames holds is a cycle, and keeps the callers' frames, with whatever
        # they look at, until a collection.
        raise failure.pop()
    return outcome[0] if outcome else None
