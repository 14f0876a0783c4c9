"""Where versions are published: a directory, or an object store by `object_storage.py`.

Objects have names with slashes, as "weight_v000012/model.safetensors.index.json". What a reader finds is whole: an
object is made or replaced at once, and the files of a version are drafted where nobody looks, by all trainer ranks,
until rank 0 commits them.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from miles_plugin import durable
from miles_plugin.weight_transfer.disk_delta.format import INDEX, READERS, parse_version_name
from mooncake_store.errors import ConfigError, StoreUnavailable

Chunk = bytes | memoryview
_PARTIAL = ".partial"
# Of a version, when it is to be made once more.
PUBLISHED = "was published before, by another trainer: end one of them, or let each publish in a place of its own"


class PublicationUnavailable(StoreUnavailable):
    """Where versions are published cannot be read or written just now; the message names the place and the cause."""


class Draft(Protocol):
    """One version in the making. Every trainer rank opens one and writes files of its own; rank 0 ends it."""

    def write(self, file: str, chunks: Iterable[Chunk]) -> int:
        """Write a file, durably; one of that name is replaced. Returns its bytes. May raise FileExistsError when there
        is such a version."""

    def remove(self, file: str) -> None:
        """Take back a file; idempotent."""

    def commit(self, index: bytes) -> None:
        """Let readers see the version, durably; raises FileExistsError when there is one of its name."""

    def abandon(self) -> None:
        """Remove what was drafted; idempotent. A version that was committed stays."""


class Storage(Protocol):
    """All methods raise PublicationUnavailable when the file system or the service fails."""

    def read(self, name: str) -> Chunk:
        """A whole object; raises FileNotFoundError."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of all objects whose names begin so, the names sorted; those of a version without an index may be
        among them, and do not count."""

    def names(self, prefix: str = "") -> list[str]:
        """The names of `sizes`."""

    def create(self, name: str, data: Chunk) -> None:
        """Make an object, durably; raises FileExistsError when it is there."""

    def replace(self, name: str, data: Chunk) -> None:
        """Make an object, or another in its place, at once and durably."""

    def remove(self, name: str) -> None:
        """Remove an object; idempotent."""

    def draft(self, version: str) -> Draft:
        """The draft of a version, by the name of its directory; nothing is made before the first file."""

    def clean(self) -> None:
        """Remove drafts and half-removed versions, which publishers that were killed have left. Only while no other
        process publishes there."""

    def drop(self, version: str) -> None:
        """Remove a version: all of it at once, or its index first, without which it does not exist. Idempotent."""


def open_storage(place: str | Path, make: bool = True) -> Storage:
    """A directory, which is made if need be and if `make`, or an object store: s3://, gs://, az://, memory://.

    Raises:
        ConfigError: the directory is not there or cannot be made, the URL is of no known kind, or obstore is not
            installed.
        PublicationUnavailable: not `make`, and the object store does not answer, or has no such bucket.
    """
    kind, _, rest = str(place).partition("://")
    if not rest and kind != "memory" and "://" not in str(place):
        return DirectoryStorage(Path(place), make)
    if kind == "file":
        return DirectoryStorage(Path(rest), make)
    from miles_plugin.weight_transfer.disk_delta.object_storage import open_object_storage

    storage = open_object_storage(str(place))
    if not make:  # in a bucket that is not there `latest` is not there either, as before the first version
        storage.names(f"{READERS}/")
    return storage


def check_publishable(storage: Storage) -> None:
    """Make an object twice and remove it.

    Raises:
        ConfigError: the second took the first one's place: so would two trainers' versions.
        PublicationUnavailable: nothing can be written there.
    """
    name = f"probe-{uuid.uuid4().hex}"
    storage.create(name, b"")
    try:
        storage.create(name, b"")
    except FileExistsError:
        return
    finally:
        storage.remove(name)
    raise ConfigError(
        "conditional writes: the object store replaces what is there although it was asked not to (If-None-Match), so "
        "that two trainers' versions would mix; publish in a directory, or in a store that has them"
    )


def check_name(name: str) -> str:
    """`name`; raises ValueError unless it is one of an object: parts between slashes, none hidden, none leads away."""
    if not name.isprintable() or "\\" in name or any(not part or part.startswith(".") for part in name.split("/")):
        raise ValueError(f"{name!r} is no name of an object: allowed are parts with / between, none begins with a dot")
    return name


class DirectoryStorage:
    """A directory, on a file system that all hosts share.

    Whatever returned has reached the disk: files, and the directories with their names.

    Args:
        make: it, if it is not there.

    Raises:
        ConfigError: it is not there, or cannot be made.
    """

    def __init__(self, root: Path, make: bool = True) -> None:
        self.root = root
        if not make and not root.is_dir():
            raise ConfigError(
                f"{root}: no such directory; mount it, start the job that publishes there, or make it first"
            )
        try:
            _make(root)
        except OSError as error:
            raise ConfigError(
                f"{root}: no directory to publish in ({error.strerror}); name one that can be made and written"
            ) from error

    def read(self, name: str) -> bytes:
        with self.reported(name, FileNotFoundError):
            try:
                return self._path(name).read_bytes()
            except (IsADirectoryError, NotADirectoryError) as error:
                raise FileNotFoundError(error.errno, "no such object", name) from error

    def sizes(self, prefix: str = "") -> dict[str, int]:
        with self.reported(prefix):
            return dict(sorted(_sizes(self.root, "", prefix)))

    def names(self, prefix: str = "") -> list[str]:
        return list(self.sizes(prefix))

    def create(self, name: str, data: Chunk) -> None:
        with self.reported(name, FileExistsError), self._written(name, data) as partial:
            os.link(partial, self._path(name))

    def replace(self, name: str, data: Chunk) -> None:
        with self.reported(name), self._written(name, data) as partial:
            partial.rename(self._path(name))

    def remove(self, name: str) -> None:
        with self.reported(name), suppress(FileNotFoundError, NotADirectoryError):
            self._path(name).unlink()
            durable.sync_directory(self._path(name).parent)

    def draft(self, version: str) -> DirectoryDraft:
        return DirectoryDraft(self, version)

    def clean(self) -> None:
        with self.reported(""):
            for path in list(self.root.iterdir()):
                is_draft = path.name.startswith(".") and path.name.endswith(_PARTIAL)
                if is_draft or (parse_version_name(path.name) is not None and not (path / INDEX).exists()):
                    _remove_tree(path)

    def drop(self, version: str) -> None:
        gone = self.root / f".{check_name(version)}.gone{_PARTIAL}"
        with self.reported(version):
            _remove_tree(gone)
            # Not its index first: some forks take a directory without one for a full version.
            with suppress(FileNotFoundError):
                self._path(version).rename(gone)
                durable.sync_directory(self.root)
            _remove_tree(gone)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    @contextmanager
    def _written(self, name: str, data: Chunk) -> Iterator[Path]:
        """A file beside `name` with `data`, for the caller to give its name."""
        path = self._path(name)
        if not path.parent.is_dir():
            _make(path.parent)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PARTIAL}")
        try:
            _write(partial, (data,))
            yield partial
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        durable.sync_directory(path.parent)

    @contextmanager
    def reported(self, name: str, *expected: type[OSError]) -> Iterator[None]:
        """Raise PublicationUnavailable instead of an OSError that is not `expected`."""
        try:
            yield
        except expected:
            raise
        except OSError as error:
            raise PublicationUnavailable(
                f"{self.root / name}: {error.strerror or error}; see that there is room, and that this process may "
                "read and write there"
            ) from error


class DirectoryDraft:
    """A hidden directory beside the versions, renamed when it is whole."""

    def __init__(self, storage: DirectoryStorage, version: str) -> None:
        self._storage, self._version = storage, version
        self._final = storage.root / check_name(version)
        self._directory = storage.root / f".{version}{_PARTIAL}"

    def write(self, file: str, chunks: Iterable[Chunk]) -> int:
        with self._storage.reported(f"{self._version}/{file}"):
            self._directory.mkdir(exist_ok=True)
            return _write(self._directory / check_name(file), chunks)

    def remove(self, file: str) -> None:
        with self._storage.reported(f"{self._version}/{file}"), suppress(FileNotFoundError):
            (self._directory / check_name(file)).unlink()

    def commit(self, index: bytes) -> None:
        with self._storage.reported(self._version, FileExistsError):
            if self._final.exists():  # an empty directory would be replaced
                raise FileExistsError(f"{self._final} {PUBLISHED}")
            self.write(INDEX, (index,))
            durable.sync_directory(self._directory)
            self._directory.rename(self._final)
            durable.sync_directory(self._storage.root)

    def abandon(self) -> None:
        with self._storage.reported(self._version):
            _remove_tree(self._directory)


def _write(path: Path, chunks: Iterable[Chunk]) -> int:
    nbytes = 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            left = memoryview(chunk).cast("B")
            nbytes += left.nbytes
            while left.nbytes:
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return nbytes


def _make(directory: Path) -> None:
    """Make a directory and those that it is in, durably."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        durable.sync_directory(path.parent)


def _remove_tree(path: Path) -> None:
    while path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):  # someone else removes it, too
            shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _sizes(directory: Path, above: str, prefix: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:  # removed meanwhile
        return
    for entry in entries:
        name = above + entry.name
        if entry.name.startswith("."):
            continue
        with suppress(FileNotFoundError):
            if entry.is_dir():
                if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                    yield from _sizes(Path(entry.path), f"{name}/", prefix)
            elif name.startswith(prefix):
                yield name, entry.stat().st_size
