"""The claim on a run id: one living owner, told by its beats alone, and nothing of a living run is swept."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mooncake_store import ConfigError, StoreClosed, StoreFull, StoreUnavailable, claim, codes
from mooncake_store.claim import (
    Claimant,
    RunClaim,
    beat_key,
    claim_key,
    is_alive,
    owner_of,
    run_pattern,
    sweep,
    sweep_dead,
)
from tests.unit.store.store_master import Master

OTHER = Claimant("ab" * 16, "elsewhere", 17)


class Clock:
    """Time that passes only when somebody sleeps; `during` runs in each sleep."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.during: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(claim, "time", made)
    return made


@pytest.fixture
def master() -> Master:
    return Master()


def claim_of(master: Any, run_id: str = "r") -> RunClaim:
    return RunClaim(master, master.records, run_id)


def owned_by_other(master: Master) -> Callable[[], None]:
    """A run "r" of another process with two batches; returns what makes it beat."""
    assert master.records.claim(claim_key("r"), msgspec.json.encode(OTHER), "a")
    numbers = itertools.count()

    def beat() -> None:
        master.records.replace(beat_key("r"), f"{OTHER.token} {next(numbers)}".encode(), "a")

    beat()
    for key in ("run/r/batch/one", "run/r/batch/two", "run/r2/batch/three", "holder/x"):
        assert master.records.claim(key, b"batch", "a")
    return beat


def swept(master: Master) -> list[str]:
    return [keys[0] for operation, keys in master.calls if operation == "remove_matching"]


# --- taking -----------------------------------------------------------------------------------------------------------


def test_the_first_claimant_has_it_and_says_who_it_is(master: Master, clock: Clock) -> None:
    mine = claim_of(master)
    mine.take("a")
    mine.take("a")
    owner = owner_of(master.records, "r")
    assert owner is not None
    assert owner.pid > 0
    assert sum(operation == "allocate" and keys == (claim_key("r"),) for operation, keys in master.calls) == 1
    assert clock.now == 1000.0  # nobody was waited for
    assert not swept(master)
    claim_of(master, "r2").take("a")


def test_a_second_claimant_is_refused_while_beats_change(master: Master, clock: Clock) -> None:
    clock.during = owned_by_other(master)
    before = set(master.objects)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"run_id = 'r' is in use by process 17 of elsewhere; .* another run_id"):
            claim_of(master).take("a")
    assert set(master.objects) == before
    assert not swept(master)
    assert owner_of(master.records, "r") == OTHER


def test_a_slow_beat_is_a_beat(master: Master, clock: Clock) -> None:
    beat = owned_by_other(master)
    clock.during = lambda: beat() if clock.now > 1000 + 0.8 * claim.SILENT_SECONDS else None
    with pytest.raises(ConfigError, match="in use"):
        claim_of(master).take("a")


@pytest.mark.parametrize("beats", [True, False])
def test_a_dead_owner_is_taken_over_and_swept(master: Master, clock: Clock, beats: bool) -> None:
    owned_by_other(master)
    if not beats:
        master.remove(beat_key("r"))
    mine = claim_of(master)
    mine.take("a")
    assert swept(master) == [run_pattern("r")]
    assert set(master.objects) == {claim_key("r"), beat_key("r"), "run/r2/batch/three", "holder/x"}
    assert owner_of(master.records, "r") != OTHER
    assert clock.now >= 1000 + claim.SILENT_SECONDS


def test_an_owner_that_was_killed_while_it_beat_is_taken_over(master: Master, clock: Clock) -> None:
    """What it left can be neither read nor removed; whoever takes over beats beside it, and is seen to be alive."""
    owned_by_other(master)
    del master.objects[beat_key("r")]
    master.unready = {beat_key("r"), beat_key("r", 1)}
    mine = claim_of(master)
    mine.take("a")
    assert beat_key("r", 2) in master.objects
    clock.during = lambda: mine.beat(["a"])
    assert is_alive(master.records, "r")
    with pytest.raises(ConfigError, match="in use"):
        claim_of(master).take("a")
    mine.release()
    assert [key for key in master.objects if key.startswith("run/r/")] == []


def test_a_run_in_which_all_beats_were_cut_off_says_so(master: Master, clock: Clock) -> None:
    master.unready = {beat_key("r", slot) for slot in range(claim.BEAT_SLOTS)}
    with pytest.raises(StoreUnavailable, match="answered"):
        claim_of(master).take("a")


def test_only_one_takes_over(master: Master, clock: Clock) -> None:
    """Another took over while this one watched the dead owner: that one is alive, and nothing of it is swept."""
    owned_by_other(master)
    third = Claimant("cd" * 16, "third", 18)

    def take_over_late() -> None:
        if clock.now >= 1000 + claim.SILENT_SECONDS and owner_of(master.records, "r") == OTHER:
            master.remove_matching(run_pattern("r"))
            assert master.records.claim(claim_key("r"), msgspec.json.encode(third), "a")
            clock.during = lambda: master.records.replace(beat_key("r"), str(clock.now).encode(), "a")

    clock.during = take_over_late
    with pytest.raises(ConfigError, match="in use by process 18 of third"):
        claim_of(master).take("a")
    assert len(swept(master)) == 1  # the third's
    assert owner_of(master.records, "r") == third


def test_of_two_that_take_over_at_once_one_has_it(master: Master, clock: Clock) -> None:
    """The other looked at the dead claim before this one swept it, and sweeps only when this one has its own."""
    owned_by_other(master)
    third = Claimant("cd" * 16, "third", 18)

    def take_over() -> None:
        owner = owner_of(master.records, "r")
        if owner not in (OTHER, third):
            master.remove_matching(run_pattern("r"))
            assert master.records.claim(claim_key("r"), msgspec.json.encode(third), "a")
            clock.during = lambda: master.records.replace(beat_key("r"), str(clock.now).encode(), "a")

    clock.during = take_over
    with pytest.raises(ConfigError, match="in use by process 18 of third"):
        claim_of(master).take("a")
    assert owner_of(master.records, "r") == third


@pytest.mark.parametrize("record", [b"", b"{", b'{"token": 1}'])
def test_a_claim_that_cannot_be_read_is_somebodys_until_its_beats_stop(
    master: Master, clock: Clock, record: bytes
) -> None:
    assert master.records.claim(claim_key("r"), record, "a")
    numbers = itertools.count()
    clock.during = lambda: master.records.replace(beat_key("r"), str(next(numbers)).encode(), "a")
    with pytest.raises(ConfigError, match="in use by another process"):
        claim_of(master).take("a")
    clock.during = lambda: None
    claim_of(master).take("a")


@pytest.mark.parametrize("late", ["first", "any"])
def test_silence_while_the_store_stalls_is_no_sign_of_death(master: Master, clock: Clock, late: str) -> None:
    """What holds up who asks holds up the heartbeat, too."""
    beat = owned_by_other(master)
    read, reads = master.records.read, itertools.count()

    def stalled(key: str) -> bytes | None:
        if key == beat_key("r") and next(reads) == (0 if late == "first" else 18):
            clock.now += 2 * claim.SILENT_SECONDS
            clock.during = beat  # which is heard again from then on
        return read(key)

    master.records.read = stalled  # type: ignore[method-assign]
    assert is_alive(master.records, "r")


def test_a_store_that_answers_too_slowly_tells_nothing(master: Master, clock: Clock) -> None:
    owned_by_other(master)
    read = master.records.read

    def stalled(key: str) -> bytes | None:
        clock.now += 2 * claim.BEAT_SECONDS
        return read(key)

    master.records.read = stalled  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="too slowly"):
        is_alive(master.records, "r")
    assert clock.now < 1000 + 2 * (claim.SILENT_SECONDS + claim.GIVE_UP_SECONDS)


def test_a_jump_of_the_wall_clock_changes_nothing(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "BEAT_SECONDS", 0.02)
    jumps = itertools.cycle([0.0, 1e9, -1e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(jumps)))
    ended = threading.Event()
    beat = owned_by_other(master)

    def keep() -> None:
        while not ended.wait(0.005):
            beat()

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        for _ in range(3):
            assert is_alive(master.records, "r", seconds=10)
    finally:
        ended.set()
        keeper.join()
    assert not is_alive(master.records, "r", seconds=0.05)


def test_a_process_that_can_be_seen_to_be_gone_is_not_waited_for(master: Master, clock: Clock) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    there = Claimant("ab" * 16, "here", child.pid, claim._identity(child.pid))
    assert not there.is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert there.is_gone()
    child.wait()
    assert there.is_gone()
    assert master.records.claim(claim_key("r"), msgspec.json.encode(there), "a")
    claim_of(master).take("a")
    assert clock.now < 1000.0 + claim.BEAT_SECONDS


@pytest.mark.parametrize("process", ["", "another-boot/4026531836/17-9", "nonsense"])
def test_a_process_that_cannot_be_seen_may_be_alive(process: str) -> None:
    assert not Claimant("ab" * 16, "elsewhere", 17, process).is_gone()


def test_another_process_with_the_same_pid_is_another() -> None:
    pid = os.getpid()
    assert not Claimant("ab" * 16, "here", pid, claim._identity(pid)).is_gone()
    assert Claimant("ab" * 16, "here", pid, claim._identity(pid) + "0").is_gone()


def test_nobody_is_no_owner(master: Master, clock: Clock) -> None:
    assert owner_of(master.records, "r") is None
    assert not is_alive(master.records, "r")


@pytest.mark.parametrize("error", [StoreFull("full"), StoreUnavailable("no answer")])
def test_a_claim_that_could_not_be_written_can_be_tried_again(master: Master, clock: Clock, error: Exception) -> None:
    mine = claim_of(master)
    master.failures["allocate"] = [error]
    with pytest.raises(type(error)):
        mine.take("a")
    mine.take("a")
    assert owner_of(master.records, "r") is not None


# --- keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken_over", [False, True], ids=["free", "after a dead owner"])
@pytest.mark.parametrize("read_back", [None, b"", b"another"], ids=["not found", "being replaced", "stale"])
def test_a_claim_of_ours_that_could_not_be_read_back_is_ours(
    taken_over: bool, read_back: bytes | None, master: Master, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is busy may not show at once what was written: that made a process its own rival."""
    if taken_over:
        owned_by_other(master)
    written: list[str] = []
    stored_under = master.records._stored_under

    def read_too_soon(key: str) -> bytes | None:
        is_first = key == claim_key("r") and owner_bytes(stored_under(key)) and not written
        written.extend([key] if is_first else [])
        return read_back if is_first else stored_under(key)

    def owner_bytes(stored: bytes | None) -> bool:
        return stored is not None and OTHER.token.encode() not in stored

    monkeypatch.setattr(master.records, "_stored_under", read_too_soon)
    mine = claim_of(master)
    mine.take("a")
    assert written
    assert owner_of(master.records, "r") == mine._mine
    assert master.records.read(beat_key("r")) is not None
    with pytest.raises(ConfigError, match="in use"):
        claim_of(master).take("a")


def test_each_beat_changes_the_record(master: Master, clock: Clock) -> None:
    mine = claim_of(master)
    mine.beat(["a"])  # nothing is claimed yet
    assert not master.objects
    mine.take("a")
    seen = []
    for _ in range(12):
        seen.append(master.records.read(beat_key("r")))
        mine.beat(["a"])
    assert len(set(seen)) == 12


def test_what_a_restart_of_the_master_lost_is_claimed_again(master: Master, clock: Clock) -> None:
    mine = claim_of(master)
    mine.take("a")
    owner = owner_of(master.records, "r")
    master.restart()
    mine.beat(["a"])
    assert owner_of(master.records, "r") == owner
    assert master.records.read(beat_key("r")) is not None


@pytest.mark.parametrize("claims_again", [True, False])
def test_a_run_without_a_claim_may_be_alive_after_a_restart(claims_again: bool, master: Master, clock: Clock) -> None:
    first, second = claim_of(master), claim_of(master)
    first.take("s")
    master.restart()
    master.lent.clear()
    waits = itertools.count()
    clock.during = lambda: first.beat(["s"]) if claims_again and next(waits) > 2 else None
    if claims_again:
        with pytest.raises(ConfigError, match="in use"):
            second.take("s", restarted=True)
        first.take("s")
    else:
        second.take("s", restarted=True)
        assert clock.now - 1000.0 >= claim.UNCLAIMED_SECONDS


def test_a_store_that_is_closed_in_the_midst_of_a_claim_does_not_hang(master: Master, clock: Clock) -> None:
    """As a signal handler may do, in the same thread."""
    mine = claim_of(master)
    master.meanwhile["allocate"] = mine.release
    mine.take("s")


def test_who_lost_its_claim_takes_it_no_more(master: Master, clock: Clock) -> None:
    """Stopped for longer than a run may be silent, it was taken for dead."""
    mine = claim_of(master)
    mine.take("a")
    master.restart()
    owned_by_other(master)
    before = dict(master.objects)
    mine.beat(["a"])
    for _ in range(2):
        with pytest.raises(ConfigError, match="in use by process 17 of elsewhere"):
            mine.take("a")
        mine.beat(["a"])
        mine.release()
    assert master.objects == before


def test_a_beat_that_failed_is_made_up_for(master: Master, clock: Clock) -> None:
    mine = claim_of(master)
    mine.take("a")
    master.failures["allocate"] = [StoreUnavailable("no answer")] * 2
    with pytest.raises(StoreUnavailable):
        mine.beat(["a"])
    mine.beat(["a"])
    mine.take("a")


def test_a_beat_moves_away_from_a_holder_that_is_gone(master: Master, clock: Clock) -> None:
    """The master takes ten seconds to notice, and a run may be silent for five."""
    mine = claim_of(master)
    mine.take("a")
    before = master.records.read(beat_key("r"))
    allocate = master.allocate

    def refuse(keys: Any, nbytes: Any, segment: str) -> None:
        if segment == "a":
            raise StoreUnavailable("its owner does not answer")
        allocate(keys, nbytes, segment)

    master.allocate = refuse  # type: ignore[method-assign]
    mine.beat(["a", "b"])
    assert master.records.read(beat_key("r")) not in (None, before)


def test_a_beat_tries_no_other_segment_when_the_master_is_gone(master: Master, clock: Clock) -> None:
    """Each try takes a second, under the lock that a close waits for."""
    mine = claim_of(master)
    mine.take("a")
    tried: list[str] = []

    def refuse(keys: Any, nbytes: Any, segment: str) -> None:
        tried.append(segment)
        raise StoreUnavailable("the master does not answer", code=codes.RPC_FAILED)

    master.allocate = refuse  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="the master"):
        mine.beat(["a", "b", "c"])
    assert tried == ["a"]


# --- giving up --------------------------------------------------------------------------------------------------------


def test_release_gives_the_run_id_up_at_once(master: Master, clock: Clock) -> None:
    mine = claim_of(master)
    mine.take("a")
    mine.release()
    mine.release()
    assert not master.objects
    with pytest.raises(StoreClosed, match="closed while a batch was put"):
        mine.take("a")  # of a put that began before
    mine.beat(["a"])
    assert not master.objects
    claim_of(master).take("a")
    assert clock.now == 1000.0


def test_a_process_that_is_there_is_alive_however_silent(master: Master, clock: Clock) -> None:
    """Stopped in the midst of a put it would write on, in memory that was freed and given to others."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        there = Claimant("ab" * 16, "here", child.pid, claim._identity(child.pid))
        assert there.is_here()
        child.send_signal(signal.SIGSTOP)
        assert master.records.claim(claim_key("r"), msgspec.json.encode(there), "a")
        assert is_alive(master.records, "r")
        for refused in (lambda: claim_of(master).take("a"), lambda: sweep(master, master.records, "r")):
            with pytest.raises(ConfigError, match=f"process {child.pid} of here"):
                refused()
        assert sweep_dead(master, master.records, ["r"]) == {}
        assert not swept(master)
        assert clock.now == 1000.0
    finally:
        child.kill()
        child.wait()
    assert not there.is_here()
    claim_of(master).take("a")


def test_who_was_silent_for_too_long_writes_no_more(master: Master, clock: Clock) -> None:
    mine = claim_of(master)
    mine.take("a")
    for _ in range(3):
        clock.now += claim.SILENT_SECONDS
        assert mine.check() == clock.now, "how long it may write without another sign of life"
        mine.beat(["a"])
        assert mine.check() == clock.now + claim.SILENT_SECONDS
    clock.now += claim.SILENT_SECONDS + 1
    with pytest.raises(StoreUnavailable, match="no sign of life for 46 s"):
        mine.check()
    mine.beat(["a"])
    mine.check()
    master.failures["allocate"] = [StoreUnavailable("no answer")] * 2
    clock.now += claim.SILENT_SECONDS + 1
    with pytest.raises(StoreUnavailable, match="no answer"):
        mine.beat(["a"])
    with pytest.raises(StoreUnavailable, match="no sign of life"):
        mine.check()


def test_release_removes_only_its_own_claim(master: Master, clock: Clock) -> None:
    """It was taken over, and had no beat since in which to notice."""
    mine = claim_of(master)
    mine.take("a")
    master.restart()
    owned_by_other(master)
    before = dict(master.objects)
    mine.release()
    assert master.objects == before


@pytest.mark.parametrize("operation", ["locate", "read", "remove"])
def test_release_never_fails(master: Master, clock: Clock, operation: str) -> None:
    mine = claim_of(master)
    mine.take("a")
    master.failures[operation] = [StoreUnavailable("no answer")]
    mine.release()


# --- sweeping ---------------------------------------------------------------------------------------------------------


def test_only_dead_runs_are_swept(master: Master, clock: Clock) -> None:
    client: Any = master
    clock.during = owned_by_other(master)
    before = set(master.objects)
    with pytest.raises(ConfigError, match=r"run 'r' is alive \(process 17 of elsewhere\); end it first"):
        sweep(client, master.records, "r")
    assert set(master.objects) == before
    clock.during = lambda: None
    assert sweep(client, master.records, "r") == 4
    assert set(master.objects) == {"run/r2/batch/three", "holder/x"}
    assert sweep(client, master.records, "absent") == 0


def test_a_run_that_is_taken_over_while_others_are_swept_is_left_alone(master: Master, clock: Clock) -> None:
    client: Any = master
    owned_by_other(master)
    for run_id in ("q1", "q2"):
        assert master.records.claim(claim_key(run_id), b"", "a")

    def take_over() -> None:  # each while another is freed
        for run_id in ("q1", "q2", "r"):
            master.records.replace(beat_key(run_id), b"again", "a")

    master.meanwhile["remove_matching"] = take_over
    freed = sweep_dead(client, master.records, ["r", "q1", "q2"])
    assert len(freed) == 1
    assert sum(claim_key(run_id) in master.objects for run_id in ("r", "q1", "q2")) == 2


@pytest.mark.parametrize("run_id", ["", "a/b", "x y", "\x1b[31m", "-", "a" * 129])
def test_what_names_no_run_is_not_swept(run_id: str, master: Master) -> None:
    client: Any = master
    with pytest.raises(ConfigError, match=r"run_id = .*allowed are"):
        sweep(client, master.records, run_id)
    assert not master.calls


@pytest.mark.parametrize("run_id", ["r", "r.1", "a-b_c"])
def test_a_pattern_matches_keys_of_one_run(run_id: str, master: Master) -> None:
    keys = [f"run/{name}/claim" for name in ("r", "r.1", "rx1", "a-b_c", "rr")]
    for key in [*keys, f"x/run/{run_id}/claim"]:
        assert master.records.claim(key, b"", "a")
    assert master.remove_matching(run_pattern(run_id)) == 1
    assert claim_key(run_id) not in master.objects
