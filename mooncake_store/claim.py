"""Who owns a run id: an exclusive claim with a heartbeat, and the sweep of what dead runs left.

A claim is alive while its heartbeat changes before the eyes of whoever asks. No clock is compared with another's, and
none that can be set: only the observer's own monotonic one counts. Where the claimant can be seen, in the same PID
namespace, its absence is proof, and nobody has to wait; and so is its presence, however silent: a process that was
stopped in the midst of a put would write on, in memory that was freed and given to others.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from mooncake_store import codes
from mooncake_store.client import MooncakeClient
from mooncake_store.errors import ConfigError, IntegrityError, StoreClosed, StoreError, StoreUnavailable
from mooncake_store.records import Records
from mooncake_store.ref import check_run_id
from mooncake_store.segment import boot_id

BEAT_SECONDS = 1.0
# Silence that makes a claimed run dead. Beats wait for no transfer, but a process may be stopped or starved a while.
SILENT_SECONDS = 45.0
# The same for a run without a claim: one that was closed, or whose claim a restarted master lost a beat ago.
UNCLAIMED_SECONDS = 5.0
# A record whose writer is killed while it writes can be neither read nor removed for ten minutes (measured).
BEAT_SLOTS = 4
GIVE_UP_SECONDS = 60.0  # with a store that stalls while runs are watched


class Claimant(msgspec.Struct, frozen=True):
    """The process that owns something: a run's objects, or its policy versions.

    Attributes:
        token: 32 hex digits, of this claim alone.
        host, pid: for people.
        process: tells it from all other processes there ever were, see `_identity`; empty when that is not known.
    """

    token: str
    host: str
    pid: int
    process: str = ""

    @classmethod
    def here(cls) -> Claimant:
        """This process, with a new token."""
        pid = os.getpid()
        return cls(uuid.uuid4().hex, socket.gethostname(), pid, _identity(pid))

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"

    def is_gone(self) -> bool:
        """Whether it certainly runs no more. False also when it cannot be seen from here."""
        return self._can_be_seen() and _identity(self.pid) != self.process

    def is_here(self) -> bool:
        """Whether it certainly runs still, or was stopped: then it may go on writing where it was."""
        return self._can_be_seen() and _identity(self.pid) == self.process

    def _can_be_seen(self) -> bool:
        namespace, _, _ = self.process.rpartition("/")
        return bool(namespace) and namespace == _namespace()


def _namespace() -> str:
    """This boot of this host's kernel, and the PID namespace of this process in it."""
    return f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"


def _identity(pid: int) -> str:
    """The namespace and the moment since boot when a process began; empty when none with this pid runs."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{_namespace()}/{pid}-{fields[18]}"


def claim_key(run_id: str) -> str:
    """Key of a run's claim."""
    return f"run/{run_id}/claim"


def beat_key(run_id: str, slot: int = 0) -> str:
    """Key of a run's heartbeat, a record that changes.

    slot: below BEAT_SLOTS; the first unless a process was killed in the instant in which it wrote there.
    """
    return f"run/{run_id}/beat.{slot}" if slot else f"run/{run_id}/beat"


def batch_prefix(run_id: str) -> str:
    """Stem of the keys of a run's batches."""
    return f"run/{run_id}/b"


def run_pattern(run_id: str) -> str:
    """Regular expression of all keys of a run."""
    return f"^run/{re.escape(run_id)}/"


def owner_of(records: Records, run_id: str) -> Claimant | None:
    """Who claims the run; None when nobody does."""
    payload = records.read(claim_key(run_id))
    try:
        return None if payload is None else msgspec.json.decode(payload, type=Claimant)
    except msgspec.DecodeError:
        return None


def is_alive(records: Records, run_id: str, seconds: float | None = None) -> bool:
    """Whether the run's heartbeat changes, see `living`.

    Raises:
        StoreUnavailable: the master does not answer.
    """
    return bool(living(records, [run_id], seconds))


def living(records: Records, run_ids: Iterable[str], seconds: float | None = None) -> set[str]:
    """The runs whose heartbeat changes, watched together; returns as soon as every run is known to be alive or dead.

    Args:
        seconds: to watch each, instead of SILENT_SECONDS, UNCLAIMED_SECONDS, or not at all when its process is seen
            to be gone, or to be there.

    What holds up the one who asks, a master or a holder that stalls, may hold up the heartbeats, too: silence counts
    from the last answer that was late.

    Raises:
        StoreUnavailable: the master does not answer, or answers too late for too long.
    """
    first = {run_id: _beat_of(records, run_id) for run_id in run_ids}
    owners = {run_id: owner_of(records, run_id) for run_id in first}
    alive = {run_id for run_id, owner in owners.items() if owner is not None and owner.is_here()}
    silence = {run_id: _patience(owner, seconds) for run_id, owner in owners.items() if run_id not in alive}
    left = {run_id: patience for run_id, patience in silence.items() if patience > 0}
    given_up = time.monotonic() + max(silence.values(), default=0.0) + GIVE_UP_SECONDS
    while left:
        time.sleep(BEAT_SECONDS / 4)
        late = False
        for run_id in list(left):
            asked = time.monotonic()
            beat = _beat_of(records, run_id)
            late = late or time.monotonic() - asked >= BEAT_SECONDS
            if beat is not None and beat != first[run_id]:
                alive.add(run_id)
                del left[run_id]
        if late and time.monotonic() > given_up:
            raise StoreUnavailable("the store answers too slowly to tell whether a run is alive; try again later")
        passed = {run_id: silence[run_id] if late else more - BEAT_SECONDS / 4 for run_id, more in left.items()}
        left = {run_id: more for run_id, more in passed.items() if more > 0}
    return alive


def _patience(owner: Claimant | None, seconds: float | None) -> float:
    if seconds is not None:
        return seconds
    if owner is None:
        return UNCLAIMED_SECONDS
    return 0.0 if owner.is_gone() else SILENT_SECONDS


def sweep(client: MooncakeClient, records: Records, run_id: str) -> int:
    """Free everything a dead run left; return how many objects.

    Raises:
        ConfigError: the run is alive, or nothing that can name one.
        StoreUnavailable: the master does not answer.
    """
    check_run_id(run_id)
    if is_alive(records, run_id):
        owner = owner_of(records, run_id) or "who owns it cannot be read now"
        raise ConfigError(f"run {run_id!r} is alive ({owner}); end it first, then sweep")
    return client.remove_matching(run_pattern(run_id))


def sweep_dead(client: MooncakeClient, records: Records, run_ids: Collection[str]) -> dict[str, int]:
    """Free everything that those of the runs left which are dead; return how many objects of each.

    Raises:
        StoreUnavailable: the master does not answer.
    """
    watched = {run_id: _beat_of(records, run_id) for run_id in run_ids}
    freed = {}
    for run_id in watched.keys() - living(records, watched):
        # Freeing others takes a while, in which somebody may take this one over.
        if _beat_of(records, run_id) == watched[run_id]:
            freed[run_id] = client.remove_matching(run_pattern(run_id))
    return dict(sorted(freed.items()))


def _beat_of(records: Records, run_id: str) -> bytes | None:
    """What was beaten last, in whichever slots; None when there is nothing, or it is just being replaced."""
    beats = []
    for slot in range(BEAT_SLOTS):
        with suppress(IntegrityError):  # read while it was being replaced
            beats.append(records.read(beat_key(run_id, slot)))
    return b"|".join(beat for beat in beats if beat is not None) or None


class RunClaim:
    """This process's claim on a run id: taken before the first put, kept by `beat`.

    Args:
        run_id: to claim.
    """

    def __init__(self, client: MooncakeClient, records: Records, run_id: str) -> None:
        self._client, self._records, self._run_id = client, records, run_id
        self._mine = Claimant.here()
        self._lock = threading.RLock()  # a signal handler may close the store in the midst of `take`
        self._held = self._released = False
        self._lost: Claimant | None = None
        self._beats, self._beaten = 0, time.monotonic()
        self._slot = 0

    def take(self, segment: str, restarted: bool = False) -> None:
        """Claim the run, once; the records go to `segment`. What a dead owner of the same id left is swept.

        Args:
            restarted: the store lost its records once: a run without a claim may be alive, about to claim itself again.

        Raises:
            ConfigError: a living process owns the run, or took it away from this one.
            StoreFull, StoreUnavailable: the claim could not be written.
            StoreClosed: it was released.
        """
        with self._lock:
            if self._lost is not None:
                raise self._in_use(self._lost)
            if self._released:
                raise StoreClosed(f"the store of run {self._run_id!r} was closed while a batch was put")
            if not self._held:
                self._take(segment, restarted)
                self._held = True

    def beat(self, segments: Sequence[str]) -> None:
        """Show that the run is alive; claim again what a restart of the master or the end of a holder has lost.

        Args:
            segments: that may take the records, at least one. While the holder of one is gone and the master has not
                noticed, writes fail there for longer than a run may be silent.

        Raises:
            StoreFull, StoreUnavailable: it could not be written; the next beat may be.
        """
        with self._lock:
            if not self._held:
                return
            try:
                if self._taken_by_other(segments[0]):
                    return
                self._beat(segments[0])
            except StoreError as error:
                self._beat_anew(segments, error)

    def check(self) -> float:
        """Raise StoreUnavailable when this process was silent for so long that others may have freed its memory.

        Returns the time.monotonic() at which that would be so without another sign of life.
        """
        beaten = self._beaten
        silent = time.monotonic() - beaten
        if silent > SILENT_SECONDS:
            raise StoreUnavailable(
                f"this process showed no sign of life for {silent:.0f} s: its run may have been swept, and the memory "
                f"that it writes into given to others; put the batch again"
            )
        return beaten + SILENT_SECONDS

    def release(self) -> None:
        """Give the run id up for good; what the run put stays until it is removed or swept. Best effort."""
        with self._lock:
            self._released = True
            if self._held:
                self._held = False
                with suppress(StoreError):
                    if owner_of(self._records, self._run_id) == self._mine:
                        self._client.remove(claim_key(self._run_id), BEAT_SECONDS)
                        self._client.remove(beat_key(self._run_id, self._slot), BEAT_SECONDS)

    def _take(self, segment: str, restarted: bool) -> None:
        mine = msgspec.json.encode(self._mine)
        other: Claimant | None = None
        if restarted and owner_of(self._records, self._run_id) is None and is_alive(self._records, self._run_id):
            raise self._in_use(owner_of(self._records, self._run_id))
        for _ in range(2):
            if self._records.claim(claim_key(self._run_id), mine, segment):
                self._beat(segment)
                if other is None or self._kept():
                    return
            before, other = other, owner_of(self._records, self._run_id)
            if other == self._mine:  # written, but not seen at once by who wrote it
                self._beat(segment)
                if before is None or self._kept():
                    return
            if is_alive(self._records, self._run_id):
                break
            if owner_of(self._records, self._run_id) == other:  # nobody took it over meanwhile
                self._client.remove_matching(run_pattern(self._run_id))
        raise self._in_use(other)

    def _taken_by_other(self, segment: str) -> bool:
        if not self._records.claim(claim_key(self._run_id), msgspec.json.encode(self._mine), segment):
            other = owner_of(self._records, self._run_id)
            if other is not None and other != self._mine:
                self._held, self._lost = False, other
        return not self._held

    def _beat_anew(self, segments: Sequence[str], failure: StoreError) -> None:
        """Beat in the first segment that takes it, else raise what failed last. No segment helps without a master."""
        try:
            for segment in segments:
                if failure.code in codes.UNANSWERED:
                    break
                try:
                    self._beat(segment)
                    return
                except StoreError as error:
                    failure = error
            raise failure
        finally:
            del failure  # see `bounded`

    def _kept(self) -> bool:
        """Whether a run that was taken over stays ours: two that saw the same owner die may both have swept."""
        time.sleep(BEAT_SECONDS / 4)
        return owner_of(self._records, self._run_id) == self._mine

    def _beat(self, segment: str) -> None:
        self._beats += 1
        beat = f"{self._mine.token} {self._beats}".encode()
        began = time.monotonic()
        while True:
            try:
                self._records.replace(beat_key(self._run_id, self._slot), beat, segment)
                break
            except StoreUnavailable as error:
                if error.code != codes.NOT_READY or self._slot + 1 == BEAT_SLOTS:
                    raise
                self._slot += 1  # whoever owned the run before was killed while it beat
        self._beaten = began

    def _in_use(self, owner: Claimant | None) -> ConfigError:
        return ConfigError(
            f"run_id = {self._run_id!r} is in use by {owner or 'another process'}; give this run another run_id (or "
            f"none, for a fresh one), or end that process"
        )
