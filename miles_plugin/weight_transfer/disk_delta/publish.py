"""The publishing side. There is a `Publisher` on every trainer rank, and rank 0 says which step comes:

    shares = encode on all ranks
    if needs_full(shares): shares = full on all ranks
    finish(shares) on rank 0, or abandon if a step failed

Every rank keeps what it last published of its share of the tensors, and encodes what changed since. It says against
which version; rank 0, who alone knows what was published, asks for a full version when that is another one, when a rank
lost track, or when it is time for an anchor. So nothing has to be told to the ranks of updates that failed.

A full version takes the place of a delta, it does not come beside one: one directory is one version, whichever way a
reader came, and all readers of this format know both. Nobody needs the delta: a late reader starts at the full version,
and one that is just behind reads all of it, in the one update of `anchor_every` in which the trainer writes all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from miles_plugin.weight_transfer.disk_delta.codec import CHECKSUMS, ENCODINGS
from miles_plugin.weight_transfer.disk_delta.format import (
    LATEST,
    Index,
    nbytes_of,
    pack_index,
    parse_version_text,
    version_name,
    version_text,
)
from miles_plugin.weight_transfer.disk_delta.prune import Pruned, newest_version, prune
from miles_plugin.weight_transfer.disk_delta.snapshot import Changes, Snapshot, blocks
from miles_plugin.weight_transfer.disk_delta.split import WeightsChanged
from miles_plugin.weight_transfer.disk_delta.storage import Chunk, Draft, Storage
from miles_plugin.weight_transfer.disk_delta.tensor_file import pack_header
from miles_plugin.weight_transfer.sources import NamedTensor
from mooncake_store.errors import ConfigError, StoreError

# Of tensors that wait to be encoded; of a file of a full version, which readers may hold whole.
WAITING_BYTES = 64 << 20
FILE_BYTES = 512 << 20
_BLOCK = 8 << 20


class Superseded(StoreError):
    """Another trainer has published a later version meanwhile: this one was taken over."""


class State(StrEnum):
    """What a rank has done with a version: found it to be the base, written a delta, taken it in to write nothing yet,
    written all of it."""

    SAME = "same"
    DELTA = "delta"
    CAPTURED = "captured"
    FULL = "full"


@dataclass(frozen=True)
class Share:
    """What one rank tells rank 0; picklable.

    Attributes:
        base: the version that a delta is against; 0 for SAME; else None.
        digest: of all tensors and their ranks, the same on all ranks.
        files: that this rank wrote, by the tensors in them. nbytes: of those files.
        checksums: of all its tensors, by name; none where it wrote nothing.
    """

    version: int
    state: State
    base: int | None
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0


@dataclass(frozen=True)
class Published:
    """What became of a version.

    Attributes:
        is_published: False when all weights are those of the checkpoint that readers start from, and nothing was
            published before: there is no such version then, and readers that have it need nothing.
        base: the version that it is a delta against; None for a full one.
        changed: tensors that it holds, of `tensors`. nbytes: of its files, without the index. model_bytes: of all
            tensors.
    """

    version: int
    is_published: bool
    base: int | None
    changed: int
    tensors: int
    nbytes: int
    model_bytes: int


class Publisher:
    """One trainer rank's side. Rank 0's is made first: it removes what killed publishers left.

    Args:
        rank, size: of the trainer ranks.
        encoding, checksum: of `codec.ENCODINGS` and `codec.CHECKSUMS`.
        base: the Hugging Face checkpoint that readers start from (safetensors files).
        anchor_every: every so many versions a full one; 0: none but those that are needed.
        threads: that encode.
        waiting_bytes: of tensors that wait for them at a time; a larger tensor waits alone.
        file_bytes: of tensors in a file of a full version, unless one is larger.

    Raises:
        ConfigError: a setting is wrong, or by `encode`: the base cannot be read, or the place holds later versions.
        PublicationUnavailable: by all methods, when the place cannot be read or written.
    """

    def __init__(
        self,
        storage: Storage,
        rank: int,
        size: int,
        encoding: str,
        checksum: str,
        base: Path,
        anchor_every: int,
        threads: int = 2,
        waiting_bytes: int = WAITING_BYTES,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        _check("encoding", encoding, ENCODINGS)
        _check("checksum", checksum, CHECKSUMS)
        if anchor_every < 0 or threads < 1:
            raise ConfigError(f"anchor_every={anchor_every}, threads={threads}: at least 0, and at least 1")
        self._storage, self._rank, self._size = storage, rank, size
        self._encoding, self._checksum = encoding, checksum
        self._anchor_every, self._file_bytes = anchor_every, file_bytes
        self._snapshot = Snapshot(rank, size, encoding, checksum, base, threads, waiting_bytes)
        # The version whose bytes the snapshot holds; the one that a delta may be against; deltas since the last anchor.
        self._held: int | None = None
        self._base: int | None = None
        self._deltas = 0
        # Of rank 0: the newest version that there is, and the one that readers of this run are at.
        self._newest: int | None = None
        self._published: int | None = None
        if rank == 0:
            storage.clean()
            self._newest = newest_version(storage)
            self._published = 0 if self._newest is None else None

    def encode(self, version: int, tensors: Iterable[NamedTensor]) -> Share:
        """Take `tensors` to its end, and write what changed of this rank's share.

        If this raises, the next version is a full one.

        Raises:
            WeightsChanged: they are not the tensors that came the first time, or cannot be published.
        """
        base, self._base, self._held = self._base, None, None
        if base is None or 0 < self._anchor_every <= self._deltas + 1:
            is_base = self._snapshot.capture(tensors)
            self._check_newer(version)
            share = Share(
                version, State.SAME if is_base else State.CAPTURED, 0 if is_base else None, self._snapshot.digest
            )
            self._base = share.base
        else:
            changes = self._snapshot.changes(tensors)
            self._check_newer(version)
            share = self._write_delta(version, base, changes)
            self._base = version
            self._deltas += 1
        self._held = version
        return share

    def needs_full(self, shares: Sequence[Share]) -> bool:
        """On rank 0: whether every rank has to take `full` before `finish`.

        Args:
            shares: what `encode` or `full` returned on each rank.
        """
        states = {share.state for share in shares}
        if states == {State.FULL}:
            return False
        if states == {State.SAME}:
            return self._newest is not None  # of an earlier run, whose readers have other weights
        return states != {State.DELTA} or any(share.base != self._published for share in shares)

    def full(self, version: int) -> Share:
        """Write all of this rank's share of the version that `encode` was given last, instead of what changed."""
        if self._held != version:
            raise ValueError(f"full({version}): this rank holds version {self._held}; encode it first")
        self._base = None
        draft = self._draft(version)
        planned = self._snapshot.split.files(self._file_bytes)
        files: dict[str, str] = {}
        nbytes = 0
        for number, (rank, names) in enumerate(planned, 1):
            if rank == self._rank:
                file = _file(number, len(planned))
                nbytes += draft.write(file, self._full_file(names))
                files.update(dict.fromkeys(names, file))
        checksums = self._snapshot.checksums(files)
        self._base, self._deltas = version, 0
        return Share(version, State.FULL, None, self._snapshot.digest, files, checksums, nbytes)

    def finish(self, version: int, shares: Sequence[Share]) -> Published:
        """On rank 0: let readers see the version, whole and durable.

        Raises:
            WeightsChanged: the ranks did not send the same tensors.
            Superseded: another trainer has published since.
            FileExistsError: there is such a version.
        """
        self._check_shares(version, shares)
        self._check_latest(version)
        layout = self._snapshot.split.layout
        model_bytes = sum(map(nbytes_of, layout.values()))
        states = {share.state for share in shares}
        if states == {State.SAME}:
            return Published(version, False, 0, 0, len(layout), 0, model_bytes)
        is_full = states == {State.FULL}
        files = _merged(share.files for share in shares)
        index = Index(
            version,
            None if is_full else self._published,
            None if is_full else self._encoding,
            self._checksum,
            files,
            layout,
            _merged(share.checksums for share in shares),
        )
        draft = self._draft(version)
        nbytes = sum(share.nbytes for share in shares) + (self._complete_full(draft, files) if is_full else 0)
        draft.commit(pack_index(index))
        self._newest = self._published = version
        self._storage.replace(LATEST, f"{version_text(version)}\n".encode())
        return Published(version, True, index.base, len(files), len(layout), nbytes, model_bytes)

    def abandon(self, version: int) -> None:
        """On rank 0: remove what was written of a version that was not finished, when no rank is in a step any more.

        The next version is full then. A version that was finished stays, and is a base like any other.
        """
        self._draft(version).abandon()

    def prune(
        self, keep_versions: int, readers: Mapping[str, int], most_behind: int, most_bytes: int | None = None
    ) -> Pruned:
        """On rank 0: remove versions that nobody needs any more; see `prune.prune`."""
        return prune(self._storage, keep_versions, readers, most_behind, most_bytes)

    def close(self) -> None:
        """End the threads; idempotent."""
        self._snapshot.close()

    def _write_delta(self, version: int, base: int, changes: Changes) -> Share:
        payloads, checksums, nbytes = changes.payloads, changes.checksums, 0
        file = _file(self._rank + 1, self._size)
        if payloads:
            layout = [(name, ("U8", (len(payload),))) for name, payload in payloads.items()]
            header = pack_header(layout, {name: checksums[name] for name in payloads})
            nbytes = self._draft(version).write(file, (header, *payloads.values()))
        files = dict.fromkeys(payloads, file)
        return Share(version, State.DELTA, base, self._snapshot.digest, files, checksums, nbytes)

    def _full_file(self, names: Sequence[str]) -> Iterator[Chunk]:
        layout = self._snapshot.split.layout
        yield pack_header([(name, layout[name]) for name in names], {"format": "pt"})
        for name in names:
            yield from blocks(self._snapshot.contents(name), _BLOCK)

    def _complete_full(self, draft: Draft, files: Mapping[str, str]) -> int:
        """Remove what is left of a delta, when no rank writes any more, and copy what is no weights; its bytes."""
        for rank in range(self._size):
            if (file := _file(rank + 1, self._size)) not in files.values():
                draft.remove(file)
        return sum(draft.write(path.name, _file_blocks(path)) for path in self._snapshot.base.companions())

    def _check_newer(self, version: int) -> None:
        if self._newest is not None and version <= self._newest:
            raise ConfigError(
                f"version {version} cannot be published where there is version {self._newest} of an earlier run; "
                "publish in an empty place, or resume that run"
            )

    def _check_latest(self, version: int) -> None:
        """A trainer that hung, and wakes when another has taken its place, must not lead readers back."""
        try:
            latest = parse_version_text(bytes(self._storage.read(LATEST)).decode(errors="replace").strip())
        except FileNotFoundError:
            return
        if latest is not None and latest > version:
            raise Superseded(
                f"version {version} cannot be published: version {latest} is there, which another trainer has "
                "published; end this one, or let each publish in a place of its own"
            )

    def _check_shares(self, version: int, shares: Sequence[Share]) -> None:
        if len(shares) != self._size or any(share.version != version for share in shares) or self.needs_full(shares):
            told = ", ".join(f"{share.state} of {share.version} on {share.base}" for share in shares)
            raise ValueError(
                f"finish({version}) of {self._size} ranks with shares {told}: take the missing steps first"
            )
        if odd := [rank for rank, share in enumerate(shares) if share.digest != self._snapshot.digest]:
            raise WeightsChanged(f"trainer rank {odd[0]} sends other weights than rank 0; all have to send the same")

    def _draft(self, version: int) -> Draft:
        return self._storage.draft(version_name(version))


def _check(setting: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{setting}={value!r}; allowed: {', '.join(allowed)}")


def _file(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _file_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _merged(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for part in parts for name, value in part.items()}
