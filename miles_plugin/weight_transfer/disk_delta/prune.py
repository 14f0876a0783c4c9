"""Which versions may go.

Every reader can start at the newest full version, so what lies before it is there for readers that are close behind:
they need deltas only, and may be asked for a version that is not the newest. Versions go in whole spans, from one full
version to the next: a delta whose base is gone is of no use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from miles_plugin.weight_transfer.disk_delta.format import (
    INDEX,
    parse_version_name,
    read_index,
    version_name,
)
from miles_plugin.weight_transfer.disk_delta.storage import Storage
from mooncake_store.errors import ConfigError, IntegrityError


@dataclass(frozen=True)
class Pruned:
    """What `prune` did.

    Attributes:
        versions: that are gone. left_behind: readers that have to start at a full version the next time.
        nbytes: of the versions that are left; more than was asked for where no more could go.
    """

    versions: tuple[int, ...]
    left_behind: tuple[str, ...]
    nbytes: int


def newest_version(storage: Storage) -> int | None:
    """The newest version that is complete; None if there is none."""
    return max(published_versions(storage.names("weight_v")), default=None)


def published_versions(names: Iterable[str]) -> list[int]:
    """The versions that are complete, the oldest first, by the names of all objects."""
    split = (name.partition("/") for name in names)
    found = (parse_version_name(version) for version, _, file in split if file == INDEX)
    return sorted(version for version in found if version is not None)


def prune(
    storage: Storage,
    keep_versions: int,
    readers: Mapping[str, int],
    most_behind: int,
    most_bytes: int | None = None,
) -> Pruned:
    """Remove versions before the newest full one that is needed; never the newest full one, and what follows it.

    Args:
        keep_versions: how many of the newest versions stay, with what they are made from; at least 1.
        readers: version that each one has, as of `read_reports`.
        most_behind: how many versions a reader may be behind and still be waited for. One that is silent falls behind
            sooner or later; versions are counted, since clocks of hosts differ and a trainer may pause.
        most_bytes: of all versions; more are removed, the oldest first, whoever needs them.

    Raises:
        ConfigError: keep_versions is less than 1. PublicationUnavailable: the place cannot be read or written.
    """
    if keep_versions < 1:
        raise ConfigError(f"keep_versions={keep_versions}: at least 1, the version that engines are to have")
    nbytes = _sizes(storage)
    versions = sorted(nbytes)
    if not versions:
        return Pruned((), (), 0)
    waited_for = [has for has in readers.values() if sum(version > has for version in versions) <= most_behind]
    needed = min([versions[-keep_versions:][0], *(has + 1 for has in waited_for)])
    first = _first_that_stays(versions, _full_versions(storage, versions), needed, nbytes, most_bytes)
    gone = tuple(version for version in versions if version < first)
    for version in gone:
        storage.drop(version_name(version))
    behind = sorted(reader for reader, has in readers.items() if gone and has < gone[-1])
    return Pruned(gone, tuple(behind), sum(nbytes[version] for version in versions if version >= first))


def _first_that_stays(
    versions: list[int], full: list[int], needed: int, nbytes: Mapping[int, int], most_bytes: int | None
) -> int:
    first = max((version for version in full if version <= needed), default=versions[0])
    for version in full:
        if most_bytes is not None and sum(nbytes[each] for each in versions if each >= first) > most_bytes:
            first = max(first, version)
    return first


def _sizes(storage: Storage) -> dict[int, int]:
    """Bytes of every complete version."""
    sizes = storage.sizes("weight_v")
    nbytes = dict.fromkeys(published_versions(sizes), 0)
    for name, size in sizes.items():
        version = parse_version_name(name.partition("/")[0])
        if version in nbytes:
            nbytes[version] += size
    return nbytes


def _full_versions(storage: Storage, versions: list[int]) -> list[int]:
    full = []
    for version in versions:
        name = f"{version_name(version)}/{INDEX}"
        try:
            if read_index(storage.read(name), name).base is None:
                full.append(version)
        except (FileNotFoundError, IntegrityError):  # nobody can start there
            continue
    return full
