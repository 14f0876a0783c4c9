"""Calls that may never return, given a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


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
