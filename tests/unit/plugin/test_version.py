"""The version authority: what becomes of a number, which trainer may ask for one, and which owner may give it out."""

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_plugin import version, version_owner
from miles_plugin.version import VersionAuthority, VersionFenced, WriterRefused, newest_version
from miles_plugin.version_log import VersionsUnavailable
from mooncake_store.errors import ConfigError, StoreClosed
from tests.unit.plugin.version_writers import TRAINER, dead, elsewhere, open_versions, records, update


def test_a_number_goes_from_allocated_over_announced_to_committed(versions: VersionAuthority, tmp_path: Path) -> None:
    assert (versions.newest, versions.current, versions.committed) == (-1, None, None)
    assert versions.allocate(TRAINER) == 0
    assert (versions.newest, versions.current, versions.committed) == (0, None, None)
    with pytest.raises(ValueError, match="version 0 cannot be committed before it is announced"):
        versions.commit(0, TRAINER)
    for _ in range(2):
        versions.announce(0, TRAINER)
        assert (versions.newest, versions.current, versions.committed) == (0, 0, None)
    for _ in range(2):
        versions.commit(0, TRAINER)
        assert (versions.newest, versions.current, versions.committed) == (0, 0, 0)
    events = [record["event"] for record in records(tmp_path / "versions")]
    assert events[1:] == [f"register {TRAINER}", "allocate 0", "announce 0", "commit 0"], "what is repeated is not new"
    versions.close()
    versions.close()
    assert records(tmp_path / "versions")[-1]["event"] == "leave"
    with pytest.raises(StoreClosed):
        versions.allocate(TRAINER)


def test_an_abandoned_number_stays_a_hole_and_is_current_if_it_was_announced(versions: VersionAuthority) -> None:
    update(versions)
    assert versions.allocate(TRAINER) == 1
    assert versions.allocate(TRAINER) == 2
    versions.announce(2, TRAINER)
    assert versions.allocate(TRAINER) == 3
    assert (versions.newest, versions.current, versions.committed) == (3, 2, 0)
    for number in (1, 2):
        for call in (versions.announce, versions.commit):
            with pytest.raises(VersionFenced, match=rf"may not \w+ version {number} .*its claim is 3.*newest .* is 3"):
                call(number, TRAINER)
    with pytest.raises(VersionFenced, match="version 4"):
        versions.announce(4, TRAINER)
    assert update(versions) == 4


def test_the_next_owner_goes_on_where_the_last_one_left(tmp_path: Path) -> None:
    for run in range(3):
        versions = open_versions(tmp_path / "versions", f"run-{run}")
        assert (versions.newest, versions.current) == (2 * run - 1, 2 * run - 2 if run else None)
        with pytest.raises(VersionFenced, match=r"no trainer is registered"):
            versions.allocate(TRAINER)
        versions.register_trainer(TRAINER)
        assert update(versions) == 2 * run
        assert versions.allocate(TRAINER) == 2 * run + 1
        versions.close()
        assert newest_version(tmp_path / "versions") == 2 * run + 1
    assert not [path for path in (tmp_path / "versions").iterdir() if path.suffix != ".json"]


def test_numbers_that_another_run_used_are_not_given_out(versions: VersionAuthority, tmp_path: Path) -> None:
    claim = versions.allocate(TRAINER)
    versions.continue_above(6)
    versions.continue_above(5)
    assert versions.newest == newest_version(tmp_path / "versions") == 6
    with pytest.raises(VersionFenced, match="claim is none"):
        versions.announce(claim, TRAINER)
    assert versions.current is None
    assert versions.allocate(TRAINER) == 7


def test_the_log_of_the_earlier_layout_counts(tmp_path: Path, impatient: None) -> None:
    directory, earlier = tmp_path / "versions", tmp_path / "versions.log"
    assert newest_version(directory) == -1
    earlier.write_text("allocate 0\nannounce 0\nallocate 1\nalloc")
    assert newest_version(directory) == 1
    with_one = open_versions(directory)
    with_one.register_trainer(TRAINER)
    assert with_one.allocate(TRAINER) == 2
    earlier.write_text("allocate 9\n")
    assert newest_version(directory) == 9, "an older release went on there"
    assert open_versions(directory, takeover=True).newest == 9
    for damage in ("allocate\n", "alloc 3\n", "allocate -1\n", "\n"):
        earlier.write_text(f"allocate 0\n{damage}allocate 1\n")
        for read in (newest_version, lambda directory: open_versions(directory, takeover=True)):
            with pytest.raises(ConfigError, match=r"versions\.log, line 2"):
                read(directory)


# Trainers


def test_a_second_trainer_is_refused_until_the_first_has_left_or_is_taken_over(versions: VersionAuthority) -> None:
    versions.register_trainer(TRAINER)
    with pytest.raises(WriterRefused, match=rf"second would be a second .*{TRAINER} is registered.*--takeover"):
        versions.register_trainer("second")
    versions.leave_trainer("second")
    with pytest.raises(WriterRefused):
        versions.register_trainer("second")
    versions.leave_trainer(TRAINER)
    versions.register_trainer("second")
    versions.register_trainer("third", takeover=True)
    assert update(versions, "third") == 0
    for gone in (TRAINER, "second"):
        with pytest.raises(VersionFenced, match="third is registered; one that was replaced has to end"):
            versions.allocate(gone)


@pytest.mark.parametrize("announced", [False, True])
def test_a_trainer_that_was_replaced_between_transfer_and_commit_commits_nothing(
    announced: bool, versions: VersionAuthority
) -> None:
    late = versions.allocate(TRAINER)
    if announced:
        versions.announce(late, TRAINER)
    versions.register_trainer("next", takeover=True)
    for call in (versions.announce, versions.commit):
        with pytest.raises(VersionFenced):
            call(late, TRAINER)
        with pytest.raises(VersionFenced, match="its claim is none"):
            call(late, "next")
    assert (versions.newest, versions.current, versions.committed) == (0, 0 if announced else None, None)
    assert update(versions, "next") == 1


# Owners


def test_whoever_lost_its_number_is_told_before_it_touches_an_engine(
    versions: VersionAuthority, tmp_path: Path
) -> None:
    number = versions.allocate(TRAINER)
    versions.verify_claim(number, TRAINER)
    versions.register_trainer("next", takeover=True)
    with pytest.raises(VersionFenced, match=f"{TRAINER} may not update engines to"):
        versions.verify_claim(number, TRAINER)
    newer = versions.allocate("next")
    versions.verify_claim(newer, "next")
    with pytest.raises(VersionFenced, match=f"may not update engines to version {number}"):
        versions.verify_claim(number, "next")
    open_versions(tmp_path / "versions", "another", takeover=True)
    with pytest.raises(VersionFenced, match="took over"):
        versions.verify_claim(newer, "next")


def test_a_living_owner_is_named_and_taken_over_only_when_asked(tmp_path: Path, impatient: None) -> None:
    first = open_versions(tmp_path / "versions", "first")
    first.register_trainer(TRAINER)
    claimed = [update(first), first.allocate(TRAINER)]
    expected = rf"belong to run first, process {os.getpid()} of .*, alive, since before the first .*--takeover"
    with pytest.raises(WriterRefused, match=expected):
        open_versions(tmp_path / "versions", "second")
    second = open_versions(tmp_path / "versions", "second", takeover=True)
    second.register_trainer("other")
    fenced = rf"do not belong to run first, .*run second, process {os.getpid()} of .* took over"
    calls: list[Callable[[], object]] = [
        lambda: first.allocate(TRAINER),
        lambda: first.announce(claimed[1], TRAINER),
        lambda: first.register_trainer("x", takeover=True),
        lambda: first.continue_above(100),
        first.verify_owned,
    ]
    for call in calls:
        with pytest.raises(VersionFenced, match=fenced):
            call()
    assert update(second, "other") == 2
    first.close()
    second.verify_owned()
    assert update(second, "other") == 3
    with pytest.raises(WriterRefused, match="since version 1;"):
        open_versions(tmp_path / "versions", "third")
    second.close()
    with pytest.raises(StoreClosed):
        second.verify_owned()
    third = open_versions(tmp_path / "versions", "third")
    third.close()
    assert newest_version(tmp_path / "versions") == 3


def test_whoever_was_taken_over_by_one_that_left_is_fenced_as_well(tmp_path: Path) -> None:
    first = open_versions(tmp_path / "versions", "first")
    open_versions(tmp_path / "versions", "second", takeover=True).close()
    with pytest.raises(VersionFenced, match="another one took over and left"):
        first.verify_owned()
    with pytest.raises(VersionFenced):
        first.register_trainer(TRAINER)


def test_an_owner_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    VersionAuthority(tmp_path / "versions", dead())
    versions = open_versions(tmp_path / "versions")
    versions.close()
    assert len(list((tmp_path / "versions").iterdir())) == 3, "its heartbeat is removed"


def test_an_owner_on_another_host_is_judged_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr(version, "SILENT_SECONDS", 60.0)
    monkeypatch.setattr(version_owner, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(version, "_LOOK_SECONDS", 0.01)
    first = VersionAuthority(tmp_path / "versions", elsewhere("first"))
    with pytest.raises(WriterRefused, match="belong to run first, process 17 of elsewhere, alive"):
        open_versions(tmp_path / "versions")
    first._heartbeat.stop()
    monkeypatch.setattr(version, "SILENT_SECONDS", 0.2)
    versions = open_versions(tmp_path / "versions", "second")
    with pytest.raises(VersionFenced, match="run second"):
        first.verify_owned()
    versions.close()


def test_an_owner_that_goes_on_writing_while_it_is_watched_is_watched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr(version, "SILENT_SECONDS", 0.05)
    first = VersionAuthority(tmp_path / "versions", elsewhere("first"))
    first._heartbeat.stop()
    looks = iter(range(5))

    def sleep(_seconds: float) -> None:
        if next(looks, None) is not None:
            first.register_trainer(f"trainer-{os.urandom(2).hex()}", takeover=True)

    monkeypatch.setattr(time, "sleep", sleep)
    versions = open_versions(tmp_path / "versions", "second")
    assert next(looks, None) is None
    assert sum(record["event"].startswith("register") for record in records(tmp_path / "versions")) == 5
    versions.verify_owned()


def test_an_owner_that_leaves_while_it_is_watched_lets_the_next_one_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr(version, "ENDING_SECONDS", 1.0)
    first = open_versions(tmp_path / "versions", "first")
    monkeypatch.setattr(time, "sleep", lambda _seconds: first.close())
    open_versions(tmp_path / "versions", "second").verify_owned()


def test_a_heartbeat_changes_until_it_is_stopped_or_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_owner, "BEAT_SECONDS", 0.001)
    path = tmp_path / "beat"
    heartbeat = version_owner.Heartbeat(path)
    seen = {version_owner.read_beat(path)}
    while len(seen) < 5:
        seen.add(version_owner.read_beat(path))
    heartbeat.stop()
    heartbeat.stop()
    assert version_owner.read_beat(path) is None
    (thread,) = start_beating(path)
    path.unlink()
    thread.join(30)
    assert not thread.is_alive()
    assert not path.exists(), "an owner that was taken over does not come back"


def start_beating(path: Path) -> list[Any]:
    before = set(threading.enumerate())
    start_beating.kept = version_owner.Heartbeat(path)  # type: ignore[attr-defined]
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.parametrize("error", [VersionFenced("x"), WriterRefused("x"), VersionsUnavailable("x")])
def test_errors_cross_ray_as_what_they_are(error: Any) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.retryable) == (type(error), "x", isinstance(error, VersionsUnavailable))
