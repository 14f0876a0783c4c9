"""Versions in an object store, by obstore: S3, Google Cloud Storage, Azure, or this process's memory for tests.

There is no rename: the files of a version are put where they stay, and its index last, by a put that fails when there
is one. An object is seen whole or not at all, and is durable when the service has acknowledged it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from miles_plugin.weight_transfer.disk_delta.format import INDEX, parse_version_name
from miles_plugin.weight_transfer.disk_delta.storage import PUBLISHED, Chunk, PublicationUnavailable, check_name
from mooncake_store.errors import ConfigError, MissingDependency

_CHUNK_BYTES = 8 << 20
_SCHEMES = ("s3", "gs", "az", "memory")


def open_object_storage(url: str) -> ObjectStorage:
    """The object store of a URL; credentials come from the environment, as each service's own tools read them.

    Raises:
        ConfigError: it is no URL of an object store, or obstore is not installed.
    """
    if url.partition("://")[0] not in _SCHEMES:
        raise ConfigError(f"{url}: no place to publish; allowed: a directory, {', '.join(f'{s}://' for s in _SCHEMES)}")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import MemoryStore, from_url
    except ImportError as error:
        raise MissingDependency(
            f"{url}: needs the package obstore; pip install 'miles-mooncake[object-store]', or publish in a directory"
        ) from error
    try:
        return ObjectStorage(MemoryStore() if url.startswith("memory:") else from_url(url), url)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url}: {_first_line(error)}") from error


class ObjectStorage:
    """An object store.

    Args:
        store: of obstore. label: for messages.
    """

    def __init__(self, store: Any, label: str) -> None:
        import obstore

        self._api, self._store, self.label = obstore, store, label

    def read(self, name: str) -> memoryview:
        with self.reported(name, FileNotFoundError):
            return memoryview(self._api.get(self._store, check_name(name)).bytes())

    def sizes(self, prefix: str = "") -> dict[str, int]:
        # The service knows whole parts of names only.
        above = prefix.rpartition("/")[0]
        with self.reported(prefix):
            found = [
                (each["path"], each["size"]) for page in self._api.list(self._store, above or None) for each in page
            ]
        return dict(sorted((path, size) for path, size in found if path.startswith(prefix)))

    def names(self, prefix: str = "") -> list[str]:
        return list(self.sizes(prefix))

    def create(self, name: str, data: Chunk) -> None:
        with self.reported(name):
            self._api.put(self._store, check_name(name), data, mode="create", use_multipart=False)

    def replace(self, name: str, data: Chunk) -> None:
        with self.reported(name):
            self._api.put(self._store, check_name(name), data, use_multipart=False)

    def remove(self, name: str) -> None:
        with self.reported(name, FileNotFoundError), suppress(FileNotFoundError):
            self._api.delete(self._store, check_name(name))

    def draft(self, version: str) -> ObjectDraft:
        return ObjectDraft(self, version)

    def clean(self) -> None:
        names = self.names("weight_v")
        versions = {version for name in names if parse_version_name(version := name.partition("/")[0]) is not None}
        for version in versions:
            if f"{version}/{INDEX}" not in names:
                self.drop(version)

    def drop(self, version: str) -> None:
        self.remove(f"{version}/{INDEX}")
        for name in self.names(f"{version}/"):
            self.remove(name)

    def put(self, name: str, chunks: Iterable[Chunk]) -> int:
        """Put an object in parts, which is seen when the last has arrived; return its bytes."""
        nbytes = 0

        def counted() -> Iterator[Chunk]:
            nonlocal nbytes
            for chunk in _cut(chunks):
                nbytes += len(chunk)
                yield chunk

        with self.reported(name):
            self._api.put(self._store, check_name(name), counted(), chunk_size=_CHUNK_BYTES)
        return nbytes

    @contextmanager
    def reported(self, name: str, *expected: type[OSError]) -> Iterator[None]:
        """Raise PublicationUnavailable, or FileExistsError, instead of what obstore raises and is not `expected`."""
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            yield
        except AlreadyExistsError as error:
            raise FileExistsError(f"{self.label}: {name} is there") from error
        except expected:
            raise
        except (BaseError, OSError) as error:  # also what is not found where something is written: the bucket
            raise PublicationUnavailable(
                f"{self.label}, {name}: {_first_line(error)}; see to that service and to this process's credentials"
            ) from error


class ObjectDraft:
    """Objects of a version whose index is not there yet."""

    def __init__(self, storage: ObjectStorage, version: str) -> None:
        self._storage, self._version = storage, check_name(version)
        self._index = f"{version}/{INDEX}"

    def write(self, file: str, chunks: Iterable[Chunk]) -> int:
        if self._storage.names(self._index):  # what readers see of it would change
            raise FileExistsError(f"{self._storage.label}: {self._version} {PUBLISHED}")
        return self._storage.put(f"{self._version}/{file}", chunks)

    def remove(self, file: str) -> None:
        self._storage.remove(f"{self._version}/{file}")

    def commit(self, index: bytes) -> None:
        try:
            self._storage.create(self._index, index)
        except FileExistsError as error:
            # It is ours when the service made it, failed to say so, and was asked again.
            if self._storage.read(self._index) != index:
                raise FileExistsError(f"{self._storage.label}: {self._version} {PUBLISHED}") from error

    def abandon(self) -> None:
        if not self._storage.names(self._index):
            self._storage.drop(self._version)


def _cut(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, view.nbytes, _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
