"""Engines that ask to join a job that runs: `engines-to-join` in the directory of its report, an address a line.

A file, since that directory is all that whoever starts an engine later has of the job.
"""

import fcntl
import json
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mooncake_store.addresses import endpoint
from mooncake_store.errors import ConfigError

ADD_ENGINE = "add-engine"  # the command, for messages
_FILE, _REPORT = "engines-to-join", "report.json"


class JoinRequests:
    """What the job has not read yet of the requests in `directory`, which is seen to have a job while this lives."""

    def __init__(self, directory: Path) -> None:
        self._path, self._read = directory / _FILE, 0
        lock = os.open(directory, os.O_RDONLY)
        weakref.finalize(self, os.close, lock)
        with suppress(OSError):  # a file system without locks; then a job that was killed looks as if it ran
            fcntl.flock(lock, fcntl.LOCK_SH)

    def new(self) -> list[str]:
        """Addresses (host:port) that were asked for since this was called last; a line that is not whole waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read += len(whole) + len(newline)
        return list(dict.fromkeys(line.strip() for line in whole.decode(errors="replace").splitlines() if line.strip()))


def ask_to_join(directory: Path, addresses: Sequence[str]) -> None:
    """Ask the job whose report is in `directory` to take in engines (host:port).

    Raises:
        ConfigError: an address is none, or no job runs there.
    """
    for address in addresses:
        endpoint(address)
    try:
        status = json.loads((directory / _REPORT).read_bytes())["status"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory}: {error}; name the directory of a job's report, runs/<run id> or what --report names"
        ) from error
    if status != "running":
        raise ConfigError(f"{directory}: its job has ended ({status}); name the directory of one that runs")
    if _is_free(directory):
        raise ConfigError(f"{directory}: its job was killed; name the directory of one that runs")
    with (directory / _FILE).open("a") as file:
        file.write("".join(f"{address}\n" for address in addresses))


def _is_free(directory: Path) -> bool:
    """Whether no job has this directory, dead or alive as its report may say; the kernel knows."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it has, or the file system cannot tell
        return False
    finally:
        os.close(lock)
    return True
