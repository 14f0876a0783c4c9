"""Calls that may never return, and calls that may heal when repeated, given a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds


def attempts(seconds: float) -> Iterator[bool]:
    """Yield False before each attempt within `seconds`, pausing twice as long each time, and True before the last."""
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE
    while time.monotonic() + pause < deadline:
        yield False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    yield True


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
        raise failure[0]
    return outcome[0] if outcome else None
