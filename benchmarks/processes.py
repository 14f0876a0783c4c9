"""Objects that live in processes of their own, spawned or as Ray actors, and are called from here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from miles_plugin.bench_commands import BenchFailed

CALL_SECONDS = 300.0
_CLOSE_SECONDS = 10.0


class Process(Protocol):
    """A process that holds one object.

    Attributes:
        pid: of the process.
    """

    pid: int

    def wait(self) -> None:
        """Until the object was made: several processes begin side by side."""

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Call a method of the object; the result of what this returns is the method's, when it has ended.

        What the method raises is raised here as BenchFailed, as is an end of the process.
        """

    def call(self, method: str, *arguments: Any) -> Any:
        """The same, and wait."""

    def stop(self) -> None:
        """Close the object and end the process."""

    def kill(self) -> None:
        """End it at once."""


class SpawnedProcess:
    """Implements `Process`. It ends with this process at the latest; what it prints goes to `directory`/`name`.log.

    Raises:
        BenchFailed: the object could not be made.
    """

    def __init__(self, name: str, directory: Path, make: Callable[..., Any], *arguments: Any) -> None:
        self._name, self._log = name, directory / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(remote, self._log, make, arguments), name=name, daemon=True
        )
        self._process.start()
        remote.close()
        self.pid = self._process.pid or 0
        self._made = False

    def wait(self) -> None:
        if not self._made:
            self._made = True
            self._receive()

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        self.wait()
        self._connection.send((method, arguments))
        return self._receive

    def call(self, method: str, *arguments: Any) -> Any:
        return self.start(method, *arguments)()

    def stop(self) -> None:
        with suppress(OSError):
            self._connection.send(None)
            self._process.join(_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def __enter__(self) -> SpawnedProcess:
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:  # in the midst of something, perhaps for ever
            self.kill()

    def _receive(self) -> Any:
        try:
            if not self._connection.poll(CALL_SECONDS):
                raise BenchFailed(f"{self._name} does not answer after {CALL_SECONDS:g} s; its log is {self._log}")
            raised, result = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_CLOSE_SECONDS)
            status = self._process.exitcode
            raise BenchFailed(f"{self._name} ended with status {status}; its log is {self._log}") from None
        if raised:
            raise BenchFailed(f"{self._name}: {result}")
        return result


class ActorProcess:
    """Implements `Process` by an actor of the Ray that this process is connected to."""

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        import ray

        self._ray, self._name = ray, name
        self._actor = ray.remote(_Actor).options(num_cpus=0).remote(make, arguments)
        self._pid = self._actor.call.remote("pid")
        self.pid = 0

    def wait(self) -> None:
        self.pid = self.pid or self._result(self._pid)

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        self.wait()
        pending = self._actor.call.remote(method, *arguments)
        return lambda: self._result(pending)

    def call(self, method: str, *arguments: Any) -> Any:
        return self.start(method, *arguments)()

    def stop(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.call.remote("close"), timeout=_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def _result(self, pending: Any) -> Any:
        try:
            return self._ray.get(pending, timeout=CALL_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise BenchFailed(f"{self._name}: {error}") from None


class _Actor:
    """What an ActorProcess is, in its process."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._object = make(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        return os.getpid() if method == "pid" else getattr(self._object, method)(*arguments)


def _serve(connection: Connection, log: Path, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Make the object and call its methods until told to end, or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal reaches all; the parent ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    served: list[Any] = []

    def answer(method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            reply = False, method(*arguments)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            reply = True, f"{type(error).__name__}: {error}; its log is {log}"
        connection.send(reply)

    answer(lambda *given: served.append(make(*given)), arguments)
    while served and (asked := connection.recv()) is not None:
        method, arguments = asked
        answer(getattr(served[0], method), arguments)
    if served:
        served[0].close()


def _end_with_parent() -> None:
    """However the parent ends, and whatever this process is doing then."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
