"""The version authority: whoever may write, whatever crashes, no number is given out twice and none steps back."""

import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_plugin import durable, version, version_owner
from miles_plugin.version import VersionAuthority, VersionFenced, WriterRefused, newest_version
from miles_plugin.version_log import KEPT, Record, VersionLog, VersionsUnavailable
from miles_plugin.version_owner import Owner
from mooncake_store.claim import Claimant
from mooncake_store.errors import ConfigError, StoreClosed

ROOT = Path(__file__).parents[3]
TRAINER = "run/trainer-0@here:1"


def elsewhere(run_id: str = "other", host: str = "elsewhere") -> Owner:
    """An owner that cannot be seen from here."""
    return Owner(run_id, Claimant(os.urandom(16).hex(), host, 17, f"another-boot/1/17-{random.random()}"))


def dead(run_id: str = "dead") -> Owner:
    """An owner on this host whose process is gone."""
    here = Claimant.here()
    return Owner(run_id, Claimant(here.token, here.host, here.pid, here.process + "0"))


def open_versions(directory: Path, run_id: str = "run", takeover: bool = False) -> VersionAuthority:
    return VersionAuthority(directory, Owner.here(run_id), takeover)


def update(versions: VersionAuthority, trainer: str = TRAINER) -> int:
    number = versions.allocate(trainer)
    versions.announce(number, trainer)
    versions.commit(number, trainer)
    return number


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "ENDING_SECONDS", 0.0)
    monkeypatch.setattr(version, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(version, "_LOOK_SECONDS", 0.0)


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[VersionAuthority]:
    opened = open_versions(tmp_path / "versions")
    opened.register_trainer(TRAINER)
    yield opened
    opened.close()


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


# The log


def test_the_newest_records_stay(versions: VersionAuthority, tmp_path: Path) -> None:
    for _ in range(KEPT):
        update(versions)
    names = sorted(path.name for path in (tmp_path / "versions").glob("*.json"))
    last = 2 + 3 * KEPT - 1
    assert names == [f"{index:08d}.json" for index in range(last - KEPT + 1, last + 1)]
    assert newest_version(tmp_path / "versions") == KEPT - 1


@pytest.mark.parametrize("appended", [1, KEPT - 1, KEPT, KEPT + 1, 3 * KEPT])
@pytest.mark.parametrize("asleep", ["before the link", "before the look"])
def test_a_writer_that_slept_while_others_wrote_is_fenced(
    asleep: str, appended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the link its number is taken, or, once pruned, free again; before the look its record counts."""
    sleeper = open_versions(tmp_path / "versions", "sleeper")
    sleeper.register_trainer(TRAINER)
    others: list[VersionAuthority] = []
    taken: list[int] = []

    def write_meanwhile() -> None:
        monkeypatch.undo()
        others.append(open_versions(tmp_path / "versions", "other", takeover=True))
        others[0].register_trainer("other")
        taken.extend(others[0].allocate("other") for _ in range(appended - 2))

    if asleep == "before the link":

        def link(*paths: Path) -> None:
            write_meanwhile()
            os.link(*paths)  # the real one again

        monkeypatch.setattr(os, "link", link)
    else:
        original = durable.sync_directory

        def sync(directory: Path) -> None:
            original(directory)
            write_meanwhile()

        monkeypatch.setattr(durable, "sync_directory", sync)
    try:
        number = sleeper.allocate(TRAINER)
    except VersionFenced:
        assert asleep == "before the link" or appended >= KEPT - 1
    else:
        assert asleep == "before the look"
        assert number not in taken
    with pytest.raises(VersionFenced):
        sleeper.allocate(TRAINER)
    assert update(others[0], "other") == max([*taken, others[0].newest - 1]) + 1
    others[0].verify_owned()
    assert len(list((tmp_path / "versions").glob("*.json"))) <= KEPT


def test_two_writers_that_slept_do_not_vouch_for_each_other(tmp_path: Path) -> None:
    """Both found their numbers, which follow each other, pruned: the second sees the record of the first before it."""
    log = VersionLog(tmp_path)
    for index in range(3 * KEPT):
        assert log.append(index, Record(newest=index))
    stale = VersionLog(tmp_path)
    for index in (7, 8):
        assert stale._link(index, Record(newest=index))
    assert not stale.append(9, Record(newest=9))
    assert log.last().record.newest == 3 * KEPT - 1
    assert log.append(3 * KEPT, Record(newest=3 * KEPT))
    assert len(list(tmp_path.iterdir())) == KEPT, "what they left is pruned"


def test_a_directory_that_was_emptied_or_removed_fences_its_owner(tmp_path: Path) -> None:
    for remove in (False, True):
        directory = tmp_path / str(remove)
        versions = open_versions(directory)
        versions.register_trainer(TRAINER)
        for path in directory.iterdir():
            path.unlink()
        if remove:
            directory.rmdir()
        with pytest.raises(VersionFenced, match="the log was removed"):
            versions.verify_owned()
        with pytest.raises(VersionsUnavailable if remove else VersionFenced):
            versions.allocate(TRAINER)
        assert not directory.exists() if remove else not list(directory.iterdir())


def test_a_first_answer_that_a_network_file_system_lost_is_no_refusal(
    versions: VersionAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def repeated(*paths: Path) -> None:
        link(*paths)
        link(*paths)

    monkeypatch.setattr(os, "link", repeated)
    assert [versions.allocate(TRAINER) for _ in range(3)] == [0, 1, 2]
    assert len(list((tmp_path / "versions").glob("*.json"))) == 5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b'{"format": 1, "newest": 3', "is damaged"),
        (b'{"format": 1, "newest": "3"}', "is damaged"),
        (b'{"format": 1, "newest": 3, "owner": {}}', "is damaged"),
        (b'{"format": 1, "newest": 3, "event": "\xff"}', "is damaged"),
        (b'{"newest": 3}', "is damaged"),
        (b'{"format": 1, "newest": 3, "current": 4}', r"is damaged \(.*current=4.*newest=3"),
        (b'{"format": 1, "newest": 3, "committed": 2}', "is damaged"),
        (b'{"format": 1, "newest": 3, "claim": 4}', "is damaged"),
        (b'{"format": 1, "newest": -2}', "is damaged"),
        (b"\x00" * 512, "is damaged"),
        (b'{"format": 2}', "format 2, this package reads format 1"),
    ],
)
def test_a_damaged_record_is_named_and_nothing_is_given_out(content: bytes, expected: str, tmp_path: Path) -> None:
    directory = tmp_path / "versions"
    versions = open_versions(directory)
    versions.register_trainer(TRAINER)
    update(versions)
    newest = sorted(directory.glob("*.json"))[-1]
    newest.write_bytes(content)
    before = sorted(directory.iterdir())
    for read in (newest_version, lambda directory: open_versions(directory, takeover=True)):
        with pytest.raises(ConfigError, match=rf"{newest}.*{expected}"):
            read(directory)
    with pytest.raises(ConfigError, match=str(newest)):
        versions.verify_owned()
    assert sorted(directory.iterdir()) == before


def test_what_is_no_record_is_not_looked_at(versions: VersionAuthority, tmp_path: Path) -> None:
    update(versions)
    for name in ("99999999.json.partial", "notes.txt", "1.json", "x99999999.json", ".nfs0001", "99999998.abc.partial"):
        (tmp_path / "versions" / name).write_text("{")
    assert newest_version(tmp_path / "versions") == 0
    assert update(versions) == 1


# Faults of the file system


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOSPC, errno.EOPNOTSUPP])
def test_a_directory_that_cannot_be_used_is_refused_at_the_start(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    for owner, name in ((Path, "mkdir"), (durable, "write"), (os, "link"), (durable, "sync_directory")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(ConfigError, match=rf"{tmp_path}/{name}: {os.strerror(code)}.*save to a directory"):
                open_versions(tmp_path / name)
        open_versions(tmp_path / name, takeover=True).close()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", Path("/proc/versions"), Path("/sys/versions")):
        with pytest.raises(ConfigError, match=str(path)):
            open_versions(path)


class Failing:
    """Lets the calls that reach the file system fail from the `survives`-th on, when armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for owner, name in ((Path, "open"), (os, "open"), (os, "fsync"), (os, "link"), (os, "listdir")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left -= self.left > 0
            return original(*arguments, **options)

        return call


@pytest.mark.parametrize("method", ["allocate", "announce", "commit", "verify"])
def test_a_full_disk_promises_nothing_and_the_next_call_goes_on(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call fails: what was told before stays, what was not told may be a hole, and the owner stays owner."""
    failing = Failing(monkeypatch)
    versions = open_versions(tmp_path / "versions")
    versions.register_trainer(TRAINER)
    said: list[str] = []
    for survives in range(100):
        update(versions)
        number = versions.allocate(TRAINER)
        calls: dict[str, Callable[[], object]] = {
            "allocate": lambda: versions.allocate(TRAINER),
            "announce": lambda number=number: versions.announce(number, TRAINER),  # type: ignore[misc]
            "commit": lambda number=number: versions.commit(number, TRAINER),  # type: ignore[misc]
            "verify": versions.verify_owned,
        }
        if method == "commit":
            versions.announce(number, TRAINER)
        before = (versions.newest, versions.current, versions.committed)
        failing.left = survives
        try:
            calls[method]()
            break
        except VersionsUnavailable as error:
            said.append(str(error))
        finally:
            failing.left = -1
        assert "No space left on device; nothing was promised" in said[-1]
        assert (versions.newest, versions.current, versions.committed) == before
        calls[method]()
        assert versions.newest >= number + (method == "allocate")
        if method in ("announce", "commit"):
            assert versions.current == number
        if method == "commit":
            assert versions.committed == number
        assert not list((tmp_path / "versions").glob("*.partial"))
    assert len(said) == (2 if method == "verify" else 6), "the calls that the test lets fail in turn"
    versions.close()


# Crashes and races of real processes


def run_processes(command: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.plugin.version_processes", command, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=250, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def directory_in_memory() -> Path:
    """Processes die and race there as on a disk, and a thousand times in seconds."""
    return Path(tempfile.mkdtemp(prefix="versions-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


@pytest.fixture
def memory() -> Iterator[Path]:
    directory = directory_in_memory()
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("moment", ["first", "later"])
def test_a_kill_between_any_two_lines_loses_nothing_that_was_told(moment: str, memory: Path) -> None:
    """SIGKILL at each line of the log's and the authority's code in turn, from opening to leaving."""
    points = int(run_processes("crash", moment, memory))
    assert points > 200


def test_processes_that_take_over_from_each_other_get_distinct_numbers(memory: Path) -> None:
    numbers = [int(line) for line in run_processes("storm", memory / "versions", 8, 200).split()]
    assert len(numbers) == 8 * 200
    assert len(set(numbers)) == len(numbers)
    assert newest_version(memory / "versions") >= max(numbers)
    assert not list((memory / "versions").glob("*.partial"))


def test_an_owner_that_was_stopped_is_alive_and_fenced_when_it_wakes(tmp_path: Path, impatient: None) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.plugin.version_processes", "hold", str(tmp_path / "versions")],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert owner.stdout is not None
        assert owner.stdin is not None
        assert owner.stdout.readline() == "0\n"
        os.kill(owner.pid, signal.SIGSTOP)
        with pytest.raises(WriterRefused, match=rf"run held, process {owner.pid} of"):
            open_versions(tmp_path / "versions")
        versions = open_versions(tmp_path / "versions", "next", takeover=True)
        versions.register_trainer(TRAINER)
        assert update(versions) == 1
        os.kill(owner.pid, signal.SIGCONT)
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert f"run next, process {os.getpid()}" in owner.stdout.readline()
        assert update(versions) == 2
        versions.close()
    finally:
        owner.kill()
        owner.wait()


# Any order of everything


class Owners(RuleBasedStateMachine):
    """Several owners share a directory; some die without a word, some are on other hosts, some wake up late."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = directory_in_memory() / "versions"
        self.opened: list[VersionAuthority] = []
        self.owner: VersionAuthority | None = None
        self.trainer: str | None = None
        self.allocated: list[int] = []
        self.announced: list[int] = []
        self.committed: list[int] = []
        self.appended = -1
        self.leaped = -1

    def teardown(self) -> None:
        for each in self.opened:
            each._heartbeat.stop()
        shutil.rmtree(self.directory.parent)

    which = st.integers(0, 3)
    trainers = st.sampled_from(["a", "b"])

    def pick(self, which: int) -> VersionAuthority:
        return self.opened[-1 - which % len(self.opened)]

    def log(self) -> tuple[int, Record]:
        last = VersionLog(self.directory).last()
        return last.index, last.record

    @rule(takeover=st.booleans(), kind=st.sampled_from(["here", "dead", "elsewhere"]))
    def open(self, takeover: bool, kind: str) -> None:
        owner = {"here": Owner.here, "dead": dead, "elsewhere": elsewhere}[kind]("run")
        here = self.owner is not None and self.owner._owner.process.is_here()
        try:
            opened = VersionAuthority(self.directory, owner, takeover)
        except WriterRefused:
            assert here
            assert not takeover
            return
        assert takeover or not here
        self.opened.append(opened)
        self.owner, self.trainer = opened, None

    @precondition(lambda self: self.opened)
    @rule(which=which, trainer=trainers, takeover=st.booleans())
    def register(self, which: int, trainer: str, takeover: bool) -> None:
        versions = self.pick(which)
        with fenced_unless(versions is self.owner):
            try:
                versions.register_trainer(trainer, takeover)
                if versions is self.owner:
                    assert takeover or self.trainer in (None, trainer)
                    self.trainer = trainer
            except WriterRefused:
                assert not takeover

    @precondition(lambda self: self.opened)
    @rule(which=which, trainer=trainers)
    def allocate(self, which: int, trainer: str) -> None:
        versions = self.pick(which)
        with fenced_unless(versions is self.owner and trainer == self.trainer):
            number = versions.allocate(trainer)
            assert number > max([*self.allocated, self.leaped], default=-1)
            assert versions is self.owner
            assert trainer == self.trainer
            self.allocated.append(number)

    @precondition(lambda self: self.opened)
    @rule(which=which, trainer=trainers, back=st.sampled_from([0, 0, 0, 1, 2]))
    def announce(self, which: int, trainer: str, back: int) -> None:
        versions = self.pick(which)
        number = (self.allocated or [0])[-1] - back
        with fenced_unless(False):
            versions.announce(number, trainer)
            assert number in self.allocated
            self.announced.append(number)

    @precondition(lambda self: self.opened)
    @rule(which=which, trainer=trainers, back=st.sampled_from([0, 0, 0, 1, 2]))
    def commit(self, which: int, trainer: str, back: int) -> None:
        versions = self.pick(which)
        number = (self.allocated or [0])[-1] - back
        with fenced_unless(False):
            try:
                versions.commit(number, trainer)
            except ValueError:
                assert number not in self.announced
                return
            assert number in self.announced
            assert number == max(self.allocated)
            self.committed.append(number)

    @precondition(lambda self: self.opened)
    @rule(which=which, by=st.integers(-3, 5))
    def leap(self, which: int, by: int) -> None:
        versions = self.pick(which)
        above = max([*self.allocated, self.leaped], default=-1) + by
        with fenced_unless(False):
            versions.continue_above(above)
            if versions is self.owner:
                self.leaped = max(self.leaped, above)

    @precondition(lambda self: self.opened)
    @rule(which=which)
    def verify(self, which: int) -> None:
        with fenced_unless(self.pick(which) is self.owner):
            self.pick(which).verify_owned()
            assert self.pick(which) is self.owner

    @precondition(lambda self: self.opened)
    @rule(which=which)
    def close(self, which: int) -> None:
        versions = self.pick(which)
        versions.close()
        self.opened.remove(versions)
        if versions is self.owner:
            self.owner = self.trainer = None

    @invariant()
    def nothing_steps_back_and_only_the_owner_writes(self) -> None:
        index, record = self.log()
        assert index >= self.appended
        self.appended = index
        assert record.newest == max([*self.allocated, self.leaped], default=-1)
        assert record.current == max(self.announced, default=None)
        assert record.committed == max(self.committed, default=None)
        assert set(self.committed) <= set(self.announced) <= set(self.allocated)
        assert record.owner == (self.owner._owner if self.owner else None)
        assert record.trainer == self.trainer


class fenced_unless:
    """Passes over VersionFenced, which must not be raised when `allowed`."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is VersionFenced:
            assert not self.allowed
            return True
        return False


@pytest.mark.usefixtures("impatient")
class TestOwners(Owners.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
