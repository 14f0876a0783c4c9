"""Run a function of a test in a process of its own, started by spawn, with a bound on how long it may take."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any


class Child:
    """A spawned process running `function(connection, *arguments)`; killed, by its own handle, at the latest on exit.

    The function talks through `connection`; what it raises is sent as the last message and raised by `receive`.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, daemon: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=_run, args=(function, remote, arguments), daemon=daemon)
        self.process.start()
        remote.close()

    def receive(self, timeout: float = 60.0) -> Any:
        if not self.connection.poll(timeout):
            raise TimeoutError(f"the child said nothing in {timeout} s")
        message = self.connection.recv()
        if isinstance(message, _Failure):
            raise message.error from RuntimeError(message.trace)
        return message

    def send(self, message: Any) -> None:
        self.connection.send(message)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.process.join(20)
        self.kill()
        self.connection.close()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.trace = traceback.format_exc()


def _run(function: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    try:
        function(connection, *arguments)
    except BaseException as error:
        connection.send(_Failure(error))
