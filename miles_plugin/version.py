"""The policy version: the integer that says which weights made a sample.

Engines and samples carry it as a decimal string ("7"); an engine reports "default" before its first update.
The rollout manager owns the authority, so that a number is never a trainer process's own counter and cannot step
back when a trainer is replaced. The log outlives the manager; claims across processes come with durable recovery.
"""

import os
from pathlib import Path

from mooncake_store.errors import ConfigError


class VersionAuthority:
    """Allocates and announces policy versions, and appends both to a log that is fsynced before it answers.

    Args:
        log: file of lines "allocate 7" and "announce 7"; read back when it exists, so numbers continue upward.

    Raises:
        ConfigError: the log holds something else.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._newest = -1
        self._current: int | None = None
        written = log.read_text() if log.exists() else ""
        # A last line without its end was cut off by a crash or a full disk: its call never returned a number.
        self._complete_bytes = written.rfind("\n") + 1
        for position, line in enumerate(written[: self._complete_bytes].splitlines(), start=1):
            event, _, number = line.partition(" ")
            if event not in ("allocate", "announce") or not number.isdecimal():
                raise ConfigError(
                    f"{log}, line {position}: {line!r:.80} is not 'allocate N' or 'announce N'; the file is damaged: "
                    "restore it, or save to another directory"
                )
            self._newest = max(self._newest, int(number))
            if event == "announce":
                self._current = max(self._current or 0, int(number))

    @property
    def current(self) -> int | None:
        """The highest announced version; None before the first."""
        return self._current

    def allocate(self) -> int:
        """A number above every earlier one; it stays a hole if its update is abandoned."""
        self._append("allocate", self._newest + 1)
        self._newest += 1
        return self._newest

    def continue_above(self, version: int) -> None:
        """Never allocate `version` or less: another run that this one resumes used them. Logged like an allocation."""
        if version > self._newest:
            self._append("allocate", version)
            self._newest = version

    @property
    def newest(self) -> int:
        """The highest number allocated, announced or not; -1 before the first."""
        return self._newest

    def announce(self, version: int) -> None:
        """Declare that engines are about to serve `version`.

        Raises:
            ValueError: the number was never allocated, or a higher one was announced.
        """
        if not 0 <= version <= self._newest or (self._current is not None and version < self._current):
            raise ValueError(
                f"version {version} cannot be announced: newest allocated is {self._newest}, current is {self._current}"
            )
        self._append("announce", version)
        self._current = version

    def _append(self, event: str, version: int) -> None:
        line = f"{event} {version}\n"
        with self._log.open("a") as log:
            log.truncate(self._complete_bytes)
            log.write(line)
            log.flush()
            os.fsync(log.fileno())
        self._complete_bytes += len(line)
