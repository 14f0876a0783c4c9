"""A publisher that fails or is killed anywhere shows no half version, and the next one goes on."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_plugin.weight_transfer.disk_delta.prune import newest_version, prune
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage, PublicationUnavailable, Storage
from tests.delta_reader import Model, rebuild
from tests.unit.plugin.delta_trainers import Place, late_replica_arrives
from tests.unit.plugin.delta_training import Ranks, Weights, held, make_base, some_weights, step

LAST = 2
ANCHOR_EVERY = 2


def weights_of(version: int) -> Weights:
    """Of every version, the same in every process. The base is version 0."""
    weights = some_weights()
    for number in range(1, version + 1):
        step(weights, number)
    return weights


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "base", weights_of(0))


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return [held(weights_of(version)) for version in range(LAST + 3)]


def train(storages: list[Storage], base: Path, first: int = 0, last: int = LAST) -> None:
    """Publish the versions, deltas and full ones, and remove old ones."""
    ranks = Ranks(storages, base, anchor_every=ANCHOR_EVERY)
    try:
        for version in range(first, last + 1):
            ranks.publish(version, weights_of(version))
            prune(storages[0], 1, {}, 0)
    finally:
        ranks.close()


def check_what_is_there(storage: Storage, base: Path, models: list[Model]) -> int | None:
    """Every version that readers see is whole, or its base was removed before; the newest one is there."""

    def read(name: str) -> bytes:
        return bytes(storage.read(name))

    newest = newest_version(storage)
    seen = {name.partition("/")[0] for name in storage.names("weight_v") if name.endswith(".index.json")}
    for name in seen:
        version = int(name.removeprefix("weight_v"))
        try:
            assert rebuild(read, base, version) == models[version]
        except FileNotFoundError:
            assert version != newest
    with contextlib.suppress(FileNotFoundError):
        latest = int(read("latest"))
        assert newest is not None
        assert newest - 1 <= latest <= newest
        assert rebuild(read, base, latest) == models[latest]
    return newest


def check_next_publisher(storages: list[Storage], base: Path, models: list[Model]) -> None:
    newest = check_what_is_there(storages[0], base, models)
    first = 0 if newest is None else newest + 1
    train(storages, base, first, first + 1)
    assert check_what_is_there(storages[0], base, models) == first + 1
    indexed = {name.partition("/")[0] for name in storages[0].names() if name.endswith(".index.json")}
    assert {name.partition("/")[0] for name in storages[0].names()} == {"latest", *indexed}


def kill_at(number: int) -> None:
    """End this process, as kill -9 would, in its `number`-th change of the file system; a write is cut in half."""
    calls = itertools.count(1)

    def count(*_args: object) -> None:
        if next(calls) == number:
            os._exit(9)

    def hook(event: str, _args: object) -> None:
        if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link"):
            count()

    class Writer:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> "Writer":
            return self

        def __exit__(self, *_args: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: Any) -> int:
            if next(calls) == number:
                self._file.write(memoryview(data)[: len(data) // 2])
                os._exit(9)
            return int(self._file.write(data))

    real_open, real_fsync = Path.open, os.fsync

    def open_counted(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        opened = real_open(path, mode, *args, **more)
        if "w" not in mode:
            return opened
        count()
        return Writer(opened)

    def fsync(descriptor: int) -> None:
        count()
        real_fsync(descriptor)
        count()

    Path.open, os.fsync = open_counted, fsync  # type: ignore[assignment, method-assign]
    sys.addaudithook(hook)


def in_a_child(work: Callable[[], None]) -> int:
    """Do it in a fork of this process; how that ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_in_any_change_of_the_file_system(base: Path, models: list[Model], tmp_path: Path) -> None:
    for number in itertools.count(1):
        source = tmp_path / str(number)

        def work(number: int = number, source: Path = source) -> None:
            kill_at(number)
            train([DirectoryStorage(source)] * 2, base)

        ended = in_a_child(work)
        assert ended in (0, 9)
        if ended == 0:
            break
        check_next_publisher([DirectoryStorage(source)] * 2, base, models)
        assert not [path.name for path in source.iterdir() if path.name.startswith(".")]
    assert number > 40


@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_of_ranks_at_random_moments_show_no_half_version(kills: int, tmp_path: Path) -> None:
    """A reader follows meanwhile; one comes late."""
    place = Place(tmp_path)
    place.kill_trainers(kills, seed=kills)
    late_replica_arrives(place)
    print(f"{place.killed} ranks killed, {place.torn} times amid a version, {len(place.versions)} versions seen")
    assert place.killed >= kills
    assert kills < 200 or (place.torn > kills // 20 and len(place.versions) > kills // 4)


class Killed(BaseException):
    """The process ends here."""


class Faulty:
    """A storage, or a draft of it, whose `number`-th change fails, before or after it was done."""

    def __init__(self, real: Any, calls: "Iterator[int]", number: int, late: bool, error: type[BaseException]) -> None:
        self._real, self._rest = real, (calls, number, late, error)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name == "draft":
            return lambda version: Faulty(real(version), *self._rest)
        if name not in ("write", "commit", "remove", "abandon", "create", "replace", "drop", "clean"):
            return real
        calls, number, late, error = self._rest

        def call(*args: object) -> object:
            fails = next(calls) == number
            if fails and not late:
                raise error(name)
            result = real(*args)
            if fails:
                raise error(name)
            return result

        return call


def directory(path: Path) -> Storage:
    return DirectoryStorage(path)


def objects(_path: Path) -> Storage:
    pytest.importorskip("obstore")
    from obstore.store import MemoryStore

    from miles_plugin.weight_transfer.disk_delta.object_storage import ObjectStorage

    return ObjectStorage(MemoryStore(), "memory://")


@pytest.mark.parametrize("make", [directory, objects])
@pytest.mark.parametrize("late", [False, True])
def test_killed_in_any_call_of_the_storage(
    make: Callable[[Path], Storage], late: bool, base: Path, models: list[Model], tmp_path: Path
) -> None:
    for number in itertools.count(1):
        storage = make(tmp_path / str(number))
        faulty: Any = Faulty(storage, itertools.count(1), number, late, Killed)
        try:
            train([faulty] * 2, base)
        except Killed:
            check_next_publisher([storage] * 2, base, models)
        else:
            break
    assert number > 10


@pytest.mark.parametrize("make", [directory, objects])
@pytest.mark.parametrize("late", [False, True])
def test_a_publisher_goes_on_after_any_call_that_failed(
    make: Callable[[Path], Storage], late: bool, base: Path, models: list[Model], tmp_path: Path
) -> None:
    """The update that failed is abandoned, as the trainer does, and its number is not used again."""
    for number in itertools.count(2):  # the first call is made by the constructor
        storage = make(tmp_path / str(number))
        faulty: Any = Faulty(storage, itertools.count(1), number, late, PublicationUnavailable)
        ranks, failed = Ranks([faulty] * 2, base, anchor_every=ANCHOR_EVERY), 0
        try:
            for version in range(LAST + 1):
                try:
                    ranks.publish(version, weights_of(version))
                except PublicationUnavailable:
                    failed += 1
                    check_what_is_there(storage, base, models)
        finally:
            ranks.close()
        if not failed:
            break
        assert failed == 1
        assert check_what_is_there(storage, base, models) in (LAST - 1, LAST)
    assert number > 10


@pytest.mark.parametrize("make", [directory, objects])
def test_two_publishers_of_one_version_do_not_mix(
    make: Callable[[Path], Storage], base: Path, models: list[Model], tmp_path: Path
) -> None:
    """The second finds it there, and the first's stays."""
    storage = make(tmp_path)
    both = [Ranks([storage], base) for _ in range(2)]
    for ranks in both:
        ranks.publish(0, weights_of(0))
    both[0].publish(1, weights_of(1))
    with pytest.raises(FileExistsError, match="was published before, by another trainer"):
        both[1].publish(1, weights_of(2))
    assert check_what_is_there(storage, base, models) == 1
    for ranks in both:
        ranks.close()
