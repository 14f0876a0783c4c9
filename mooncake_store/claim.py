"""Who owns a run id: an exclusive claim with a heartbeat, and the sweep of what dead runs left.

A claim is alive while its heartbeat changes before the eyes of whoever asks. No clock is compared with another's, and
none that can be set: only the observer's own monotonic one counts.
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

import msgspec

from mooncake_store.client import MooncakeClient
from mooncake_store.errors import ConfigError, IntegrityError, StoreError, StoreUnavailable
from mooncake_store.records import Records

BEAT_SECONDS = 1.0
MISSED_BEATS = 5  # that make a run dead
PATIENCE_SECONDS = 60.0  # with a store that stalls while a run is watched


class Claimant(msgspec.Struct, frozen=True):
    """The process that owns a run."""

    token: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"


def claim_key(run_id: str) -> str:
    """Key of a run's claim."""
    return f"run/{run_id}/claim"


def beat_key(run_id: str) -> str:
    """Key of a run's heartbeat, a record that changes."""
    return f"run/{run_id}/beat"


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


def is_alive(records: Records, run_id: str, seconds: float = BEAT_SECONDS * MISSED_BEATS) -> bool:
    """Whether the run's heartbeat changes within `seconds`; returns as soon as it does.

    Raises:
        StoreUnavailable: the master does not answer.
    """
    return bool(living(records, [run_id], seconds))


def living(records: Records, run_ids: Iterable[str], seconds: float = BEAT_SECONDS * MISSED_BEATS) -> set[str]:
    """The runs whose heartbeat changes within `seconds`, watched together; returns as soon as all have.

    What holds up the one who asks, a master or a holder that stalls, may hold up the heartbeats, too: silence counts
    from the last answer that was late.

    Raises:
        StoreUnavailable: the master does not answer, or answers too late for too long.
    """
    first = {run_id: _beat_of(records, run_id) for run_id in run_ids}
    alive: set[str] = set()
    silent, given_up = 0.0, time.monotonic() + PATIENCE_SECONDS
    while len(alive) < len(first) and silent < seconds:
        time.sleep(BEAT_SECONDS / 4)
        silent += BEAT_SECONDS / 4
        for run_id in first.keys() - alive:
            asked = time.monotonic()
            beat = _beat_of(records, run_id)
            if beat is not None and beat != first[run_id]:
                alive.add(run_id)
            if time.monotonic() - asked >= BEAT_SECONDS:
                silent = 0.0
        if not silent and time.monotonic() > given_up:
            raise StoreUnavailable("the store answers too slowly to tell whether a run is alive; try again later")
    return alive


def sweep(client: MooncakeClient, records: Records, run_id: str) -> int:
    """Free everything a dead run left; return how many objects.

    Raises:
        ConfigError: the run is alive.
        StoreUnavailable: the master does not answer.
    """
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
    try:
        return records.read(beat_key(run_id))
    except IntegrityError:  # read while it was being replaced
        return None


class RunClaim:
    """This process's claim on a run id: taken before the first put, kept by `beat`.

    Args:
        run_id: to claim.
    """

    def __init__(self, client: MooncakeClient, records: Records, run_id: str) -> None:
        self._client, self._records, self._run_id = client, records, run_id
        self._mine = Claimant(uuid.uuid4().hex, socket.gethostname(), os.getpid())
        self._lock = threading.Lock()
        self._held = False
        self._lost: Claimant | None = None
        self._beats = 0

    def take(self, segment: str) -> None:
        """Claim the run, once; the records go to `segment`. What a dead owner of the same id left is swept.

        Raises:
            ConfigError: a living process owns the run, or took it away from this one.
            StoreFull, StoreUnavailable: the claim could not be written.
        """
        with self._lock:
            if self._lost is not None:
                raise self._in_use(self._lost)
            if not self._held:
                self._take(segment)
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

    def release(self) -> None:
        """Give the run id up; what the run put stays until it is removed or swept. Best effort."""
        with self._lock:
            if self._held:
                self._held = False
                with suppress(StoreError):
                    if owner_of(self._records, self._run_id) == self._mine:
                        self._client.remove(claim_key(self._run_id))
                        self._client.remove(beat_key(self._run_id))

    def _take(self, segment: str) -> None:
        mine = msgspec.json.encode(self._mine)
        other: Claimant | None = None
        for _ in range(2):
            if self._records.claim(claim_key(self._run_id), mine, segment):
                self._beat(segment)
                if other is None or self._kept():
                    return
            other = owner_of(self._records, self._run_id)
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
        """Beat in the first segment that takes it, else raise `failure`, or StoreUnavailable of the master."""
        for segment in segments:
            self._client.remove(beat_key(self._run_id))  # what lies with a holder that is gone cannot be written over
            with suppress(StoreError):
                self._beat(segment)
                return
        raise failure

    def _kept(self) -> bool:
        """Whether a run that was taken over stays ours: two that saw the same owner die may both have swept."""
        time.sleep(BEAT_SECONDS / 4)
        return owner_of(self._records, self._run_id) == self._mine

    def _beat(self, segment: str) -> None:
        self._beats += 1
        beat = f"{self._mine.token} {self._beats}".encode()
        self._records.replace(beat_key(self._run_id), beat, segment)

    def _in_use(self, owner: Claimant | None) -> ConfigError:
        return ConfigError(
            f"run_id = {self._run_id!r} is in use by {owner or 'another process'}; give this run another run_id (or "
            f"none, for a fresh one), or end that process"
        )
