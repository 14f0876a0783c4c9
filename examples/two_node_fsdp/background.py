"""Processes that go on after the command that started them, and are ended by another: by pid, and only those.

What was started is noted in a file, each with the time at which the kernel says it started. A pid that now belongs to
somebody else has another.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mooncake_store.errors import ConfigError
from mooncake_store.process import tail

STOP_SECONDS = 20.0


class NotReady(RuntimeError):
    """A process that was started did not come up; the message says which, and ends with its log."""


@dataclass(frozen=True)
class Started:
    """One process. created: seconds since 1970, by the kernel. log: gets what it prints, from byte `log_from` on."""

    name: str
    pid: int
    created: float
    log: str
    log_from: int

    def said(self) -> str:
        """What it has printed so far."""
        with Path(self.log).open("rb") as file:
            file.seek(self.log_from)
            return file.read().decode(errors="replace")

    def process(self) -> psutil.Process | None:
        """The process, if it is still the one that was started, and runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class Background:
    """The processes of one node.

    Args:
        directory: gets `processes.json` and the logs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = directory / "processes.json"

    def started(self) -> list[Started]:
        """All that were started and not stopped, in the order in which they were, dead or alive."""
        try:
            return [Started(**entry) for entry in json.loads(self._file.read_text())]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._file}: {error}; name another STATE_DIR, or remove the file after ending what it names by hand"
            ) from error

    def running(self, name: str) -> Started | None:
        """The process of this name, if it runs."""
        return next((each for each in self.started() if each.name == name and each.process()), None)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Started:
        """Start a process in a session of its own, and note it in place of one of this name that has ended."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"STATE_DIR: {error}; name a directory that can be written") from error
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            log_from = output.tell()
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                start_new_session=True,
            )
        started = Started(name, child.pid, psutil.Process(child.pid).create_time(), str(log), log_from)
        self._note([*(each for each in self.started() if each.name != name), started])
        return started

    def start_once(
        self, name: str, command: Sequence[str], env: Mapping[str, str], say: Callable[[str], None]
    ) -> Started:
        """The process of this name, started if it does not run."""
        running = self.running(name)
        if running is not None:
            say(f"{name} runs already, pid {running.pid}")
            return running
        started = self.start(name, command, env)
        say(f"{name} started, pid {started.pid}, log {started.log}")
        return started

    def stop(self, name: str) -> bool:
        """End a process and what it started, SIGTERM first; whether it was running."""
        started = next((each for each in self.started() if each.name == name), None)
        process = started.process() if started else None
        if process is not None:
            family = [process, *process.children(recursive=True)]
            process.send_signal(signal.SIGTERM)
            _, left = psutil.wait_procs(family, timeout=STOP_SECONDS)
            for each in left:
                _kill(each)
            psutil.wait_procs(left, timeout=STOP_SECONDS)
        self._note([each for each in self.started() if each.name != name])
        return process is not None

    def _note(self, entries: Sequence[Started]) -> None:
        partial = self._file.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps([asdict(entry) for entry in entries], indent=1))
        partial.replace(self._file)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def await_ready(started: Started, ready: Callable[[], bool], seconds: float) -> None:
    """Wait until `ready` says so.

    Raises:
        NotReady: the process ended, or was not ready in time; ends with its log's last lines.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if started.process() is None:
            raise NotReady(f"{started.name} ended; {_last_words(started)}")
        if time.monotonic() > deadline:
            raise NotReady(f"{started.name} is not ready after {seconds:.0f} s; {_last_words(started)}")
        time.sleep(0.2)


def _last_words(started: Started) -> str:
    return f"its log {started.log} ends:\n{tail(Path(started.log))}"
