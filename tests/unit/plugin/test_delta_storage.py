"""Where versions are published: directories and object stores promise the same."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_plugin.weight_transfer.disk_delta import storage as storage_module
from miles_plugin.weight_transfer.disk_delta.storage import (
    DirectoryStorage,
    PublicationUnavailable,
    Storage,
    check_publishable,
    open_storage,
)
from mooncake_store.errors import ConfigError, MissingDependency

INDEX = "weight_v000001/model.safetensors.index.json"


class Killed(BaseException):
    """The process ends here."""


def directory(path: Path) -> Storage:
    return open_storage(path / "deep" / "source")


def memory(_path: Path) -> Storage:
    pytest.importorskip("obstore")
    return open_storage("memory://")


def local_objects(path: Path) -> Storage:
    pytest.importorskip("obstore")
    from obstore.store import LocalStore

    from miles_plugin.weight_transfer.disk_delta.object_storage import ObjectStorage

    (path / "objects").mkdir()
    return ObjectStorage(LocalStore(path / "objects"), "local objects")


@pytest.fixture(params=[directory, memory, local_objects, "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3"))
    make: Callable[[Path], Storage] = request.param
    return make(tmp_path)


def test_objects_are_made_replaced_and_removed(storage: Storage) -> None:
    storage.create("latest", b"1")
    with pytest.raises(FileExistsError):
        storage.create("latest", b"2")
    assert bytes(storage.read("latest")) == b"1"
    storage.replace("latest", b"3")
    storage.replace("readers/a.json", memoryview(b"four"))
    assert bytes(storage.read("latest")) == b"3"
    assert storage.sizes() == {"latest": 1, "readers/a.json": 4}
    for _ in range(2):
        storage.remove("latest")
    assert storage.names() == ["readers/a.json"]
    for missing in ("latest", "readers", "readers/b.json"):
        with pytest.raises(FileNotFoundError):
            storage.read(missing)


def test_below_a_file_there_is_nothing(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    storage.replace("latest", b"1")
    with pytest.raises(FileNotFoundError):
        storage.read("latest/deeper")
    storage.remove("latest/deeper")
    assert storage.names("latest/") == []


def test_names_are_found_by_any_beginning(storage: Storage) -> None:
    for name in ("readers/b.json", "weight_v000001/a", "weight_v000011/a", "weight_v000001/b"):
        storage.replace(name, b"")
    assert storage.names("weight_v000001/") == ["weight_v000001/a", "weight_v000001/b"]
    assert storage.names("weight_v00001") == ["weight_v000011/a"]
    assert storage.names("weight_v") == ["weight_v000001/a", "weight_v000001/b", "weight_v000011/a"]
    assert storage.names("readers/") == ["readers/b.json"]
    assert storage.names("nothing/") == []


@pytest.mark.parametrize("name", ["../a", "a/../b", "/a", "a//b", "", ".", ".hidden", "a/.b", "a\\b", "a\nb", "a/"])
def test_names_that_lead_away_are_refused(storage: Storage, name: str) -> None:
    for call in (storage.read, storage.remove, storage.draft):
        with pytest.raises(ValueError, match="is no name of an object"):
            call(name)
    with pytest.raises(ValueError, match="is no name of an object"):
        storage.replace(name, b"")
    with pytest.raises(ValueError, match="is no name of an object"):
        storage.draft("weight_v000001").write(name, (b"",))


def test_a_version_is_seen_when_it_is_committed(storage: Storage) -> None:
    ranks = [storage.draft("weight_v000001") for _ in range(2)]
    assert ranks[0].write("a", (b"12", memoryview(b"3"), b"")) == 3
    assert ranks[1].write("b", ()) == 0
    ranks[0].write("c", (b"x" * 20_000_000,))
    ranks[1].write("d", (b"d",))
    for _ in range(2):
        ranks[0].remove("d")
    assert INDEX not in storage.names()
    ranks[0].commit(b"{}")
    assert storage.sizes() == {
        "weight_v000001/a": 3, "weight_v000001/b": 0, "weight_v000001/c": 20_000_000, INDEX: 2
    }  # fmt: skip
    assert bytes(storage.read("weight_v000001/a")) == b"123"
    ranks[0].abandon()  # too late: it stays
    assert INDEX in storage.names()
    again = storage.draft("weight_v000001")
    with pytest.raises(FileExistsError, match="was published before, by another trainer: end one of them"):
        again.commit(b"[]")
    assert bytes(storage.read(INDEX)) == b"{}"


def test_a_version_that_was_published_is_not_written_to(storage: Storage) -> None:
    storage.draft("weight_v000001").write("a", (b"1",))
    storage.draft("weight_v000001").commit(b"{}")
    with contextlib.suppress(FileExistsError):  # where it can be told before the end
        storage.draft("weight_v000001").write("a", (b"2",))
    assert bytes(storage.read("weight_v000001/a")) == b"1"


@pytest.mark.parametrize("ours", [True, False])
def test_a_commit_whose_answer_was_lost_is_one(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service has made the index and fails to say so; asked again, it says that there is one."""
    obstore = pytest.importorskip("obstore")
    storage, put = memory(Path()), obstore.put

    def asked_twice(store: Any, name: str, data: bytes, **more: Any) -> Any:
        put(store, name, data if ours else b"[]", **more)
        return put(store, name, data, **more)

    monkeypatch.setattr(obstore, "put", asked_twice)
    commit = storage.draft("weight_v000001").commit
    if ours:
        commit(b"{}")
    else:
        with pytest.raises(FileExistsError, match="was published before, by another trainer"):
            commit(b"{}")
    assert storage.sizes() == {INDEX: 2}


def test_a_store_without_conditional_writes_is_refused(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    check_publishable(storage)
    assert storage.names() == []
    monkeypatch.setattr(storage, "create", storage.replace)
    with pytest.raises(ConfigError, match=r"conditional writes: .*publish in a directory"):
        check_publishable(storage)
    assert storage.names() == []


def test_a_draft_that_is_abandoned_or_left_is_removed(storage: Storage) -> None:
    storage.draft("weight_v000001").commit(b"{}")
    abandoned, left = storage.draft("weight_v000002"), storage.draft("weight_v000003")
    for draft in (abandoned, left):
        draft.write("a", (b"1",))
    for _ in range(2):
        abandoned.abandon()
    storage.replace("readers/a.json", b"")
    storage.clean()
    assert storage.names() == ["readers/a.json", INDEX]
    left.write("a", (b"2",))
    left.commit(b"{}")
    assert bytes(storage.read("weight_v000003/a")) == b"2"


def test_a_version_that_is_dropped_is_gone_when_a_kill_leaves_half_of_it(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory all at once; in an object store its index first."""
    draft = storage.draft("weight_v000001")
    draft.write("a", (b"1",))
    draft.commit(b"{}")
    original = storage.remove

    def kill(*_names: object, **_more: object) -> None:
        raise Killed

    def remove(name: str) -> None:
        original(name)
        kill()

    monkeypatch.setattr(storage, "remove", remove)
    monkeypatch.setattr(shutil, "rmtree", kill)
    with pytest.raises(Killed):
        storage.drop("weight_v000001")
    is_directory = isinstance(storage, DirectoryStorage)
    assert storage.names() == ([] if is_directory else ["weight_v000001/a"])
    if is_directory:
        assert not (storage.root / "weight_v000001").exists()
    monkeypatch.undo()
    again = storage.draft("weight_v000001")  # the name is free, whatever is left
    again.write("a", (b"2",))
    again.commit(b"{}")
    for _ in range(2):
        storage.drop("weight_v000001")
        assert storage.names() == []
    storage.clean()
    if is_directory:
        assert list(storage.root.iterdir()) == []


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is renamed or linked was synced, directories with their entries; and then the directory it is named in."""
    events: list[str] = []
    real_fsync, real_rename, real_link = os.fsync, os.rename, os.link

    def spied_fsync(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        real_fsync(descriptor)

    def spied(kind: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(old: Path, new: Path) -> None:
            events.append(f"{kind} {Path(new).relative_to(tmp_path)}")
            real(old, new)

        return call

    storage = DirectoryStorage(tmp_path / "s")
    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "rename", spied("rename", real_rename))
    monkeypatch.setattr(os, "link", spied("link", real_link))
    draft = storage.draft("weight_v000001")
    draft.write("a", (b"1",))
    draft.commit(b"{}")
    partial = "s/.weight_v000001.partial"
    assert events == [
        f"sync {partial}/a", f"sync {partial}/model.safetensors.index.json", f"sync {partial}",
        "rename s/weight_v000001", "sync s",
    ]  # fmt: skip
    events.clear()
    storage.replace("latest", b"1")
    storage.create("first", b"1")
    kinds = [event.split(".")[0] if "partial" in event else event for event in events]
    assert kinds == ["sync s/", "rename s/latest", "sync s", "sync s/", "link s/first", "sync s"]
    events.clear()
    storage.remove("first")
    assert events == ["sync s"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE])
def test_what_the_file_system_refuses_is_named_and_nothing_is_seen(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = DirectoryStorage(tmp_path)
    storage.replace("latest", b"old")
    draft = storage.draft("weight_v000001")
    draft.write("a", (b"1",))

    def refuse(*_args: object) -> None:
        raise OSError(code, os.strerror(code))

    for module, name in ((os, "fsync"), (storage_module, "_write")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, refuse)
            for call in (
                lambda: draft.write("b", (b"1",)),
                lambda: storage.replace("latest", b"new"),
                lambda: storage.create("other", b"new"),
                lambda: draft.commit(b"{}"),
            ):
                with pytest.raises(PublicationUnavailable, match=f"{tmp_path}.*{os.strerror(code)}"):
                    call()
        assert storage.read("latest") == b"old"
        assert storage.names() == ["latest"]
    assert not [path for path in tmp_path.iterdir() if path.is_file() and path.name.startswith(".")]


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "source", tmp_path / "file"):
        with pytest.raises(ConfigError, match="no directory to publish in"):
            open_storage(place)
    with pytest.raises(ConfigError, match=r"ftp://host/x: no place to publish; allowed: a directory, s3://"):
        open_storage("ftp://host/x")
    assert isinstance(open_storage(f"file://{tmp_path}/there"), DirectoryStorage)
    assert (tmp_path / "there").is_dir()


def test_an_object_store_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    monkeypatch.setitem(__import__("sys").modules, "obstore.exceptions", None)
    with pytest.raises(MissingDependency, match=r"s3://bucket/run: .*pip install 'miles-mooncake\[object-store\]'"):
        open_storage("s3://bucket/run")


def test_a_bucket_that_is_not_there_is_unavailable_and_not_empty(s3: str) -> None:
    url = "s3://no-such-bucket/run"
    with pytest.raises(PublicationUnavailable, match=f"{url}, "):
        open_storage(url, make=False)
    storage = open_storage(url)
    for call in (
        lambda: storage.names(),
        lambda: storage.replace("latest", b""),
        lambda: storage.create("latest", b""),
        lambda: storage.draft("weight_v000001").write("a", (b"1",)),
        lambda: storage.clean(),
        lambda: check_publishable(storage),
    ):
        with pytest.raises(PublicationUnavailable, match=f"{url}, "):
            call()


def test_an_object_store_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from obstore.store import S3Store

    from miles_plugin.weight_transfer.disk_delta.object_storage import ObjectStorage

    store = S3Store(
        "bucket", endpoint="http://127.0.0.1:9", access_key_id="a", secret_access_key="b", region="r",
        client_options={"allow_http": True}, retry_config={"max_retries": 0},
    )  # fmt: skip
    storage = ObjectStorage(store, "s3://bucket")
    for call in (
        lambda: storage.read("latest"),
        lambda: storage.names(),
        lambda: storage.replace("latest", b""),
        lambda: storage.create("latest", b""),
        lambda: storage.remove("latest"),
        lambda: storage.draft("weight_v000001").write("a", (b"1",)),
    ):
        with pytest.raises(PublicationUnavailable, match="s3://bucket, "):
            call()
