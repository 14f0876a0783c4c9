"""The version log: what a record on the disk promises when writers sleep, records are damaged and disks are full."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_plugin import durable
from miles_plugin.version import VersionAuthority, VersionFenced, newest_version
from miles_plugin.version_log import KEPT, Record, VersionLog, VersionsUnavailable
from mooncake_store.errors import ConfigError
from tests.unit.plugin.version_writers import (
    TRAINER,
    open_versions,
    update,
)


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
