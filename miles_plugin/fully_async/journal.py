"""The journal: which groups were finished, taken and trained on, on the disk, so that a restart knows.

JSON lines, only appended to. A line is what one `flush` writes: a checksum, and the records noted since the one before.
So a crash leaves a batch of records whole or not at all, and one disk access is enough for many. When most of what is
there is history, the file is written anew, beside itself, and takes its own place in one step.

    {"sum":"<xxh3-64 of the records' bytes>","records":[{"event":"taken","group":7,"batch":2},{"event":"trained",…}]}

What is promised, after `flush` has returned and whatever ends then:
  * A group noted as trained, or as dropped, is never finished, taken or trained again.
  * A group that was taken and not trained comes back, and so does one that was finished and not taken: as samples where
    they lie in a store that still has them, otherwise as its prompt, to be generated again.
What is not: a record that was noted and not flushed may be missing. For all but "trained", "dropped" and "taken" that
costs work and no group: a group of which nothing is known is generated from its prompt. When `trained` is to be noted
is the caller's to say: if what a group taught can still be undone, by going back to a checkpoint from before it, note
it when the checkpoint after it is complete. Or have the checkpoint say what it has learned from, see `Learned`: then
that is what counts, and the journal adds where samples lie.

One process writes. Its owner is that of the policy versions beside it, see `VersionAuthority`: whoever opens the
journal writes the file anew, and what a process still writes that was taken over goes into a file without a name.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from miles_plugin import durable
from miles_plugin.fully_async.journal_records import Events, Learned, Progress, Returned, State, Trained
from mooncake_store.errors import ConfigError, IntegrityError, StoreClosed, StoreUnavailable

FORMAT = 1
# Records that may be history before the file is written anew; and how many for each group that is not settled.
KEPT, KEPT_PER_GROUP = 4096, 8
_SUM, _BODY, _END = b'{"sum":"', b'","records":', b"}"
_BODY_AT = len(_SUM) + 16 + len(_BODY)


class JournalUnavailable(StoreUnavailable):
    """The journal cannot be written just now. Nothing of what was noted is lost; call `flush` again."""


class _Header(msgspec.Struct, frozen=True):
    """First record of a file. lines: written before the file got its name. first: the number of the first group."""

    format: int
    lines: int
    first: int


class Journal:
    """The journal in one file. Safe to share between threads; `note` never waits for the disk.

    Args:
        path: of the file; made when it is not there. Its directory is there.
        first: the number of the run's first group; what the file says counts, when there is one.
        learned: of the checkpoint that the run goes on from; None: what the file says counts.

    Attributes:
        orphans: refs of samples of which nobody knows any more, since `learned` was given.

    Raises:
        IntegrityError: the file is damaged elsewhere than at its end, where a crash may have cut it off.
        ConfigError: it has another format, or cannot be read or written.
    """

    def __init__(self, path: Path, first: int = 0, learned: Learned | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()  # of what is noted, never held while the disk is waited for
        self._writing = threading.Lock()
        self._pending: list[Events] = []
        self._descriptor: int | None = None
        self._nbytes = self._count = 0
        self._names_are_safe = True
        try:
            self._state, self.orphans = self._read(first), list[str]()
            if learned is not None:
                self._state, self.orphans = self._state.as_of(learned)
            self._write_anew(list(self._state.records()))
            self._sync_names()
        except OSError as error:
            raise ConfigError(
                f"journal {path}: {error.strerror or error}; name a file in a directory that can be written"
            ) from error
        self._state.freed.clear()

    @property
    def state(self) -> State:
        """What was noted so far, flushed or not. To look at, in the thread that notes."""
        return self._state

    def note(self, *events: Events) -> None:
        """Note records, in order; `flush` makes them durable.

        Raises:
            StoreClosed: after `close`.
        """
        with self._lock:
            if self._descriptor is None:
                raise StoreClosed(f"journal {self._path} is closed; open it again")
            for event in events:
                self._state.apply(event)
            self._pending += events

    def has_pending(self) -> bool:
        """Whether something was noted that is not durable."""
        return bool(self._pending)

    def flush(self) -> list[int]:
        """Make what was noted durable. Returns the groups whose samples nobody needs from here on.

        Raises:
            JournalUnavailable: the file system failed; what was noted is kept for the next call.
        """
        with self._writing:
            events, freed = self._take_pending()
            try:
                if not self._names_are_safe:
                    self._sync_names()
                if events:
                    self._append(_line(events), len(events))
            except OSError as error:
                self._give_back(events, freed)
                raise JournalUnavailable(
                    f"journal {self._path}: {error.strerror or error}; what was noted waits; see to that file system "
                    "and try again"
                ) from error
            if self._count > KEPT + KEPT_PER_GROUP * len(self._state.live):
                self._compact()
            return freed

    def trained(self, groups: Iterable[int]) -> list[int]:
        """Note that groups have been trained on, and flush; idempotent. Returns and raises what `flush` does."""
        self.note(Trained(list(groups)))
        return self.flush()

    def trained_before(self, batch: int) -> list[int]:
        """The same of all groups taken for batches with lower numbers."""
        with self._lock:
            groups = self._state.taken_before(batch)
        return self.trained(groups)

    def give_back_taken(self) -> None:
        """Note that what was taken and not trained waits again: whoever had taken it is gone."""
        with self._lock:
            taken = [group for group, known in self._state.live.items() if known.progress is Progress.TAKEN]
        if taken:
            self.note(Returned(taken))

    def close(self) -> None:
        """Flush, as far as the file system lets it, and close; idempotent."""
        if self._descriptor is None:
            return
        with suppress(JournalUnavailable):
            self.flush()
        with self._writing, self._lock:
            os.close(self._descriptor)
            self._descriptor = None

    def _take_pending(self) -> tuple[list[Events], list[int]]:
        with self._lock:
            events, self._pending = self._pending, []
            freed, self._state.freed = self._state.freed, []
            return events, freed

    def _give_back(self, events: list[Events], freed: list[int]) -> None:
        with self._lock:
            self._pending[:0] = events
            self._state.freed[:0] = freed

    def _append(self, line: bytes, count: int) -> None:
        assert self._descriptor is not None, "open"
        try:
            _write_all(self._descriptor, line)
            os.fsync(self._descriptor)
        except OSError:
            # What is there of the line would run into the next one. It is written anew, too: after a failed fsync the
            # kernel may take pages for written that are not.
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._nbytes)
            raise
        self._nbytes += len(line)
        self._count += count

    def _compact(self) -> None:
        """Write the file anew; when that fails, it stays as it is, and is tried again after the next flush."""
        with self._lock:
            events, self._pending = self._pending, []  # of what was noted meanwhile the state knows
            records = list(self._state.records())
        try:
            self._write_anew(records)
        except OSError:
            self._give_back(events, [])
            return
        with suppress(OSError):  # then the next flush does it, before it promises anything
            self._sync_names()

    def _write_anew(self, records: Sequence[Events]) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        content = _line([_Header(FORMAT, 2, self._state.first)]) + _line(records)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            _write_all(descriptor, content)
            os.fsync(descriptor)
            os.replace(partial, self._path)
        except OSError:
            os.close(descriptor)
            raise
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._nbytes, self._count = descriptor, len(content), len(records)
        self._names_are_safe = False

    def _sync_names(self) -> None:
        """Until this has worked, a crash of the machine may bring back the file of before: nothing is promised."""
        durable.sync_directory(self._path.parent)
        self._names_are_safe = True

    def _read(self, first: int) -> State:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return State(first)
        *lines, _ = content.split(b"\n")  # what comes after the last end of a line was cut off
        header = self._header(lines)
        state = State(header.first)
        decoded = [_decode(line) for line in lines[1:]]
        while decoded and decoded[-1] is None:
            decoded.pop()
        if len(decoded) + 1 < header.lines or None in decoded:
            damaged = decoded.index(None) + 2 if None in decoded else len(decoded) + 2
            raise IntegrityError(
                f"journal {self._path}, line {damaged} is damaged or missing: which groups were trained on is not "
                "known; restore the file, or start anew with another one"
            )
        for event in (event for events in decoded for event in events or ()):
            state.apply(event)
        return state

    def _header(self, lines: list[bytes]) -> _Header:
        header = None
        with suppress(IndexError, msgspec.DecodeError, ValueError):
            (header,) = msgspec.json.decode(_checked(lines[0]), type=list[_Header])
        if header is None:
            raise IntegrityError(
                f"journal {self._path}, line 1 is no header of a journal; restore the file, or start anew with another"
            )
        if header.format != FORMAT:
            raise ConfigError(
                f"journal {self._path} has format {header.format}, this package reads format {FORMAT}; use the one "
                "that wrote it"
            )
        return header


def _line(records: Sequence[Events] | Sequence[_Header]) -> bytes:
    body = msgspec.json.encode(records)
    return _SUM + xxhash.xxh3_64_hexdigest(body).encode() + _BODY + body + _END + b"\n"


def _checked(line: bytes) -> bytes:
    """The records of a line; ValueError when it is not whole."""
    body = line[_BODY_AT : -len(_END)]
    if line != _SUM + xxhash.xxh3_64_hexdigest(body).encode() + _BODY + body + _END:
        raise ValueError("the checksum is another one")
    return body


def _decode(line: bytes) -> list[Events] | None:
    try:
        return msgspec.json.decode(_checked(line), type=list[Events])
    except (ValueError, msgspec.DecodeError):
        return None


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
