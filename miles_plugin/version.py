"""The policy version: the integer that says which weights made a sample, and the one authority that gives it out.

Engines and samples carry it as a decimal string ("7"); an engine reports "default" before its first update.
The rollout manager owns the authority, so that a number is never a trainer process's own counter and cannot step
back when a trainer, the manager or the whole job is replaced. docs/versions.md states the contract.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from miles_plugin.version_log import Entry, Record, VersionLog, VersionsUnavailable, newest_of_earlier_layout
from miles_plugin.version_owner import ENDING_SECONDS, SILENT_SECONDS, Heartbeat, Owner, read_beat
from mooncake_store.errors import ConfigError, StoreClosed, StoreError

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.25


class VersionFenced(StoreError):
    """A writer lost its claim: another job, another trainer or a later update has it now. Final for that writer."""


class WriterRefused(ConfigError):
    """Another writer has the versions and is alive; the message names it."""


def newest_version(directory: Path) -> int:
    """The highest number ever allocated in a directory of versions; -1 before the first. Only reads; asks nobody.

    Raises:
        ConfigError: a record is damaged.
        VersionsUnavailable: the directory cannot be read.
    """
    return max(VersionLog(directory).last().record.newest, newest_of_earlier_layout(directory))


class VersionAuthority:
    """Allocates, announces and commits policy versions; each is in a log on the disk before the call returns.

    Safe to call from several threads.

    Args:
        directory: of the log; made when it is not there. Numbers in it are continued upward.
        owner: this process. Whoever owned the log before is fenced from here on.
        takeover: do not ask whether the last owner still lives.

    Raises:
        WriterRefused: its last owner lives, and has not left. To know that of one on another host takes half a minute.
        ConfigError: the directory cannot be read or written, or a record is damaged.
    """

    def __init__(self, directory: Path, owner: Owner, takeover: bool = False) -> None:
        self._records, self._owner = VersionLog(directory), owner
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._last = self._open(takeover)
        except VersionsUnavailable as error:
            raise ConfigError(f"{error}; or save to a directory where files can be written and linked") from error
        self._heartbeat = Heartbeat(self._records.beat_path(owner))

    @property
    def newest(self) -> int:
        """The highest number allocated, announced or not; -1 before the first."""
        return self._last.record.newest

    @property
    def current(self) -> int | None:
        """The highest number announced, also when its update was abandoned afterwards; None before the first."""
        return self._last.record.current

    @property
    def committed(self) -> int | None:
        """The highest number whose update is complete; None before the first."""
        return self._last.record.committed

    def register_trainer(self, trainer: str, takeover: bool = False) -> None:
        """Make `trainer` the one that may update; idempotent. The claim of the one before it is lost.

        Args:
            takeover: also when another one is registered: it has died, or is to be fenced.

        Raises:
            WriterRefused: another trainer is registered, and was not taken over.
        """

        def decide(last: Record) -> Record | None:
            if last.trainer == trainer:
                return None
            if last.trainer is not None and not takeover:
                raise WriterRefused(
                    f"policy versions in {self._records.directory}: {trainer} would be a second trainer of run "
                    f"{self._owner.run_id}; {last.trainer} is registered and has not left: stop it, or take over with "
                    "--takeover, which fences it"
                )
            return msgspec.structs.replace(last, event=f"register {trainer}", trainer=trainer, claim=None)

        self._append(decide)

    def leave_trainer(self, trainer: str) -> None:
        """Let another trainer register; without effect when `trainer` is not the registered one."""
        self._append(
            lambda last: (
                msgspec.structs.replace(last, event=f"leave {trainer}", trainer=None, claim=None)
                if last.trainer == trainer
                else None
            )
        )

    def allocate(self, trainer: str) -> int:
        """A number above every earlier one; it stays a hole if its update is abandoned.

        Raises:
            VersionFenced: `trainer` is not the registered one, or another owner took over.
        """

        def decide(last: Record) -> Record:
            self._check_trainer(last, trainer, "allocate a version")
            number = last.newest + 1
            return msgspec.structs.replace(last, event=f"allocate {number}", newest=number, claim=number)

        return self._append(decide).newest

    def verify_claim(self, version: int, trainer: str) -> None:
        """Look at the disk whether `version` is still `trainer`'s, before engines are touched.

        Raises:
            VersionFenced: as `announce`.
        """
        with self._lock:
            self._check_open()
            self._last = self._reread()
            self._check_claim(self._last.record, version, trainer, "update engines to")

    def announce(self, version: int, trainer: str) -> None:
        """Declare that engines are about to serve `version`; idempotent. Comes before the first engine resumes with it.

        Raises:
            VersionFenced: as `allocate`; or `trainer` did not allocate `version`, or has allocated a higher one since.
        """

        def decide(last: Record) -> Record | None:
            self._check_claim(last, version, trainer, "announce")
            if last.current == version:
                return None
            return msgspec.structs.replace(last, event=f"announce {version}", current=version)

        self._append(decide)

    def commit(self, version: int, trainer: str) -> None:
        """Declare that every engine in rotation serves `version`; idempotent.

        Raises:
            VersionFenced: as `announce`.
            ValueError: `version` was not announced.
        """

        def decide(last: Record) -> Record | None:
            self._check_claim(last, version, trainer, "commit")
            if last.committed == version:
                return None
            if last.current != version:
                raise ValueError(f"version {version} cannot be committed before it is announced")
            return msgspec.structs.replace(last, event=f"commit {version}", committed=version)

        self._append(decide)

    def continue_above(self, version: int) -> None:
        """Never allocate `version` or less: another run that this one resumes used them."""
        self._append(
            lambda last: (
                msgspec.structs.replace(last, event=f"continue above {version}", newest=version, claim=None)
                if version > last.newest
                else None
            )
        )

    def verify_owned(self) -> None:
        """Look at the disk; called before anything else is made durable, as a checkpoint.

        Raises:
            VersionFenced: another owner took over.
        """
        with self._lock:
            self._check_open()
            self._last = self._reread()

    def close(self) -> None:
        """Leave, so that the next owner need not ask whether this one lives; idempotent, and never raises."""
        try:
            self._append(
                lambda last: msgspec.structs.replace(last, event="leave", owner=None, trainer=None, claim=None)
            )
        except (StoreError, OSError) as error:
            if not isinstance(error, StoreClosed):
                _log.warning("%s", error)
        self._closed = True
        self._heartbeat.stop()

    def _open(self, takeover: bool) -> Entry:
        self._records.make()
        while True:
            last = self._records.last()
            before = last.record.owner
            if before is not None and not takeover and not self._has_ended(before, last):
                continue
            newest = max(last.record.newest, newest_of_earlier_layout(self._records.directory))
            opened = msgspec.structs.replace(
                last.record, event=f"open by {self._owner}", owner=self._owner, since=newest, newest=newest,
                trainer=None, claim=None,
            )  # fmt: skip
            leftovers = self._records.leftovers()
            if self._records.append(last.index + 1, opened):
                for left in leftovers:
                    with suppress(OSError):
                        left.unlink(missing_ok=True)
                return Entry(last.index + 1, opened)

    def _has_ended(self, owner: Owner, last: Entry) -> bool:
        """Whether `owner`, whose record is the last one, is dead. False when the log has changed meanwhile.

        Raises:
            WriterRefused: it lives.
        """
        beat_path = self._records.beat_path(owner)
        beat, started = read_beat(beat_path), time.monotonic()
        is_here = owner.process.is_here()
        if not is_here and not owner.process.is_gone():
            _log.warning("the policy versions have an owner on another host: %s; watching its heartbeat", owner)
        while not owner.process.is_gone():
            if not is_here and read_beat(beat_path) != beat:
                self._refuse(last.record)
            if time.monotonic() - started >= (ENDING_SECONDS if is_here else SILENT_SECONDS):
                if is_here:
                    self._refuse(last.record)
                return True
            time.sleep(_LOOK_SECONDS)
            if self._records.last().index != last.index:
                return False
        return True

    def _refuse(self, last: Record) -> NoReturn:
        since = f"since version {last.since}" if last.since >= 0 else "since before the first version"
        raise WriterRefused(
            f"policy versions in {self._records.directory} belong to {last.owner}, alive, {since}; a "
            "second job would give its numbers twice: stop it, save to another directory, or take "
            "over with --takeover, which fences it"
        )

    def _append(self, decide: Callable[[Record], Record | None]) -> Record:
        """Append what `decide` makes of the last record, which it may be asked for again; None changes nothing."""
        with self._lock:
            self._check_open()
            while True:
                record = decide(self._last.record)
                if record is None:
                    return self._last.record
                if self._records.append(self._last.index + 1, record):
                    self._last = Entry(self._last.index + 1, record)
                    return record
                self._last = self._reread()

    def _reread(self) -> Entry:
        """The last record; a call that failed midway may have appended it, if it is of this owner."""
        last = self._records.last()
        if last.record.owner != self._owner:
            by = f"{last.record.owner} took over" if last.record.owner is not None else "another one took over and left"
            raise VersionFenced(
                f"policy versions in {self._records.directory} do not belong to {self._owner} any more: "
                f"{by if last.index >= 0 else 'the log was removed'}; this job cannot update, announce or save any more"
            )
        return last

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the policy versions were closed")

    def _check_trainer(self, last: Record, trainer: str, what: str) -> None:
        if last.trainer != trainer:
            raise VersionFenced(
                f"{trainer} may not {what} in {self._records.directory}: "
                f"{last.trainer or 'no trainer'} is registered; one that was replaced has to end"
            )

    def _check_claim(self, last: Record, version: int, trainer: str, what: str) -> None:
        self._check_trainer(last, trainer, f"{what} version {version}")
        if last.claim != version:
            raise VersionFenced(
                f"{trainer} may not {what} version {version} in {self._records.directory}: its claim is "
                f"{'none' if last.claim is None else last.claim}, the newest number allocated is {last.newest}; "
                f"an update that lost its number is abandoned, the next one allocates its own"
            )
