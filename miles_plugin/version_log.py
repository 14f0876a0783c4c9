"""The version log on disk: one small file per record, made once, by whoever is first.

POSIX cannot compare and swap, but `link` fails when the name is taken. So a record is written under a name of its own,
synced, and linked to the number after the last record that its writer has seen: if another writer was there first, this
one has to read what was appended and decide again. Every record holds the whole state, so a reader needs only the last
one, and older ones are pruned.
"""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from miles_plugin import durable
from miles_plugin.version_owner import Owner
from mooncake_store.errors import ConfigError, StoreUnavailable

FORMAT = 1
# Records that stay. A writer that slept through more than so many appends finds its number free again, see `append`.
KEPT = 64
_NAME = re.compile(r"(\d{8,})\.json")
_EARLIER_LINE = re.compile(r"(?:allocate|announce) (\d+)")


class VersionsUnavailable(StoreUnavailable):
    """The version log cannot be read or written just now. What was asked for was not promised; a number that got into
    the log all the same stays a hole."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record: what happened, and the state after it.

    Attributes:
        event: for people, as "commit 7".
        owner: who may append; None when the last one has left.
        since: the newest number when it became the owner.
        trainer: the only one that may allocate, announce and commit; None before one registers.
        newest: the highest number allocated; -1 before the first.
        claim: the number that `trainer` may announce and commit; None when it has none.
        current: the highest number announced; None before the first.
        committed: the highest number committed; None before the first.
    """

    event: str = ""
    owner: Owner | None = None
    since: int = -1
    trainer: str | None = None
    newest: int = -1
    claim: int | None = None
    current: int | None = None
    committed: int | None = None
    format: int = FORMAT

    def contradiction(self) -> str | None:
        """What cannot be true of a state; None for a sound one."""
        committed, current, claim = (-1 if n is None else n for n in (self.committed, self.current, self.claim))
        if -1 <= committed <= current <= self.newest and -1 <= claim <= self.newest:
            return None
        return f"committed={self.committed}, current={self.current}, claim={self.claim}, newest={self.newest}"


@dataclass(frozen=True)
class Entry:
    """A record and its place in the log. index: -1 stands for an empty log."""

    index: int
    record: Record


class VersionLog:
    """The records of one directory. No method caches anything; every process may have a log of its own.

    Raises:
        VersionsUnavailable: by every method, when the file system fails.
        ConfigError: by `last`, when the last record is damaged or of another format.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def make(self) -> None:
        """Make the directory, if it is not there."""
        with self._reported():
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True, exist_ok=True)
                durable.sync_directory(self.directory.parent)

    def last(self) -> Entry:
        """The last record."""
        with self._reported():
            while True:
                index = max(self._indices(), default=-1)
                if index < 0:
                    return Entry(-1, Record())
                with suppress(FileNotFoundError):  # pruned, since others have appended meanwhile
                    return Entry(index, _decode(self._path(index), self._path(index).read_bytes()))

    def append(self, index: int, record: Record) -> bool:
        """Make `record` number `index`, durably; False, and nothing is changed, when another writer was there first."""
        with self._reported():
            if not self._link(index, record):
                return False
            durable.sync_directory(self.directory)
            there = sorted(self._indices())
            # Whoever slept while KEPT others appended has linked a number whose record was pruned: among the newest
            # ones, which nobody prunes, it is not found. (Its predecessor is asked for since the directory may have
            # been emptied.)
            if not {max(index - 1, 0), index} <= {*there[-KEPT:]}:
                self._path(index).unlink(missing_ok=True)
                return False
        with suppress(OSError):  # the next append tries again
            for pruned in there[:-KEPT]:
                self._path(pruned).unlink(missing_ok=True)
        return True

    def leftovers(self) -> list[Path]:
        """Half-made records and heartbeats: after an append of a new owner, all are of those before it."""
        return [*self.directory.glob("*.partial"), *self.directory.glob("*.beat")]

    def beat_path(self, owner: Owner) -> Path:
        """Where the heartbeat of `owner` is."""
        return self.directory / f"{owner.token}.beat"

    def _link(self, index: int, record: Record) -> bool:
        partial = self.directory / f"{index:08d}.{uuid.uuid4().hex}.partial"
        try:
            durable.write(partial, msgspec.json.encode(record).decode() + "\n")
            try:
                os.link(partial, self._path(index))
            except (FileExistsError, FileNotFoundError):
                # Taken, or the partial file was cleared away by a new owner. Or it was made: of a network file system
                # the first answer may have been lost, and the call repeated.
                with suppress(FileNotFoundError):
                    return partial.stat().st_nlink == 2
                return False
            return True
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _indices(self) -> list[int]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return [int(match[1]) for match in map(_NAME.fullmatch, names) if match]

    def _path(self, index: int) -> Path:
        return self.directory / f"{index:08d}.json"

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise VersionsUnavailable(
                f"policy versions in {self.directory}: {error.strerror or error}; nothing was promised; see to "
                "that file system and try again"
            ) from error


def newest_of_earlier_layout(directory: Path) -> int:
    """The highest number in the file `versions.log` beside `directory`, which held versions before; -1 without one.

    Raises:
        ConfigError: it holds something else.
    """
    path = directory.with_suffix(".log")
    written = path.read_text(errors="replace") if path.exists() else ""
    newest = -1
    # A last line without its end was cut off by a crash: its call never returned a number.
    for position, line in enumerate(written[: written.rfind("\n") + 1].splitlines(), start=1):
        match = _EARLIER_LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"{path}, line {position}: {line!r:.80} is not 'allocate N' or 'announce N'; the file is damaged: "
                "restore it, or save to another directory"
            )
        newest = max(newest, int(match[1]))
    return newest


def _decode(path: Path, content: bytes) -> Record:
    try:
        found = msgspec.json.decode(content, type=_Format).format
        if found != FORMAT:
            raise ConfigError(f"{path}: format {found}, this package reads format {FORMAT}; use the one that wrote it")
        record = msgspec.json.decode(content, type=Record)
        if contradiction := record.contradiction():
            raise msgspec.DecodeError(contradiction)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}): which policy versions were given out is not known; restore the file, or "
            "save to another directory"
        ) from error
    return record


class _Format(msgspec.Struct):
    format: int
