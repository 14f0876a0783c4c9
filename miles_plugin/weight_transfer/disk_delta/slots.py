"""Two copies of a checkpoint on this host, of which one is complete at every moment.

    LOCAL/a/, LOCAL/b/      Hugging Face checkpoints, changed in place: never the one that `current` names
    LOCAL/a.json, b.json    what each holds
    LOCAL/current           a link to the slot that engines read
    LOCAL/state.json        {"version": "000012", "slot": "a"}, for people and other programs
    LOCAL/lock              held by whoever changes a slot

The record of a slot says `applying` on the disk before the first byte of the slot is changed, and the version that it
came to only after the last one is on the disk. After any crash a slot is as its record says, or known to be in doubt.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from miles_plugin import durable
from miles_plugin.weight_transfer.disk_delta.format import version_text
from miles_plugin.weight_transfer.disk_delta.local_checkpoint import Checkpoint
from mooncake_store.errors import ConfigError, StoreUnavailable

FORMAT = 1
NAMES = ("a", "b")
CURRENT = "current"
STATE = "state.json"
# The version of a copy of the base. Not 0, which may have been published, too, later than that copy was made.
BASE = -1
_COPY_BYTES = 4 << 20
_POLL_SECONDS = 0.05
_WRITING_ELSEWHERE = {"btrfs", "zfs", "bcachefs"}
# Weights in other formats: an engine might load them instead, and they would be old.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"}


class LocalUnavailable(StoreUnavailable):
    """The local directory cannot be read or written just now: the disk is full, a permission is missing. What engines
    see is as before; the same call goes on where this one stopped."""


class LocalBusy(StoreUnavailable):
    """Another process is changing the local directory; the message names it."""


class Checksum(NamedTuple):
    """Of the whole tensor's bytes. kind: one of `codec.CHECKSUMS`; hex: its text.

    Every tensor has its own kind, since a trainer that was restarted with another one changes not all of them at once.
    """

    kind: str
    hex: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a slot holds.

    Attributes:
        version: of all tensors, unless `applying`.
        applying: the version that the slot was being brought to; None when it is complete.
        base: fingerprint of the checkpoint that it started from.
        checksums: of every tensor, at `version`.
    """

    version: int
    applying: int | None
    base: str
    checksums: dict[str, Checksum]
    format: int = FORMAT


@dataclass(frozen=True)
class Slot:
    """One of the two. name: "a" or "b"."""

    name: str
    path: Path
    record: Record


class Slots:
    """The slots of one local directory. Nothing is cached: another process may have changed them.

    Args:
        local: the directory; made on first use.
        base: the checkpoint that slots start from.
        fingerprint: of it.
    """

    def __init__(self, local: Path, base: Checkpoint, fingerprint: str) -> None:
        self.local, self.fingerprint = local, fingerprint
        self._base = base

    def find(self, name: str) -> Slot | None:
        """What the slot holds; None if it is not there, or no checkpoint of the base's shape.

        Raises:
            ConfigError: it started from another base, or another version of this package made it.
        """
        path = self.local / name
        try:
            record = msgspec.json.decode(self._record_path(name).read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        remedy = f"remove {self.local}, or name another local directory"
        if record.format != FORMAT:
            raise ConfigError(f"{path}: format {record.format}, this package reads format {FORMAT}; {remedy}")
        if record.base != self.fingerprint:
            raise ConfigError(
                f"{path} was made from a checkpoint with the fingerprint {record.base}, {self._base.path} has "
                f"{self.fingerprint}: it belongs to another run; {remedy}"
            )
        if record.checksums.keys() != self._base.layout.keys() or not path.is_dir():
            return None
        return Slot(name, path, record)

    def current(self) -> str | None:
        """Name of the slot that engines read."""
        with suppress(FileNotFoundError):
            name = os.readlink(self.local / CURRENT)
            return name if name in NAMES else None
        return None

    def exposed(self) -> Slot | None:
        """The slot that engines read."""
        name = self.current()
        return self.find(name) if name else None

    def make(self, name: str, origin: Checkpoint) -> None:
        """Fill a slot with a copy of `origin`, without a record. Durable on return.

        By reading and writing, and not by sharing blocks with the origin where the file system could: a shared block
        is allocated when it is first changed, and when a mapping does so on a full disk, the process dies (SIGBUS).

        Raises:
            LocalUnavailable: there is no room.
        """
        self._record_path(name).unlink(missing_ok=True)  # without one the slot is not there, however full it is
        durable.sync_directory(self.local)
        slot = self.local / name
        shutil.rmtree(slot, ignore_errors=True)
        sources = list(_files(origin))
        self._check_room(sum(path.stat().st_size for path in sources))
        try:
            slot.mkdir()
            for source in sources:
                target = slot / source.relative_to(origin.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                _copy(source, target)
        except OSError:
            shutil.rmtree(slot, ignore_errors=True)  # whoever needs the room shall have it
            raise
        for directory in (slot, *(path for path in slot.rglob("*") if path.is_dir())):
            durable.sync_directory(directory)
        durable.sync_directory(self.local)

    def check_changeable(self, nbytes: int) -> None:
        """Raise LocalUnavailable where changing so many bytes in place may take room that is not there.

        Most file systems overwrite what is allocated. Some write elsewhere instead, and when a mapping needs a block
        that they have not, the process dies.
        """
        found = os.statvfs(self.local)
        kind = _file_system(self.local)
        if kind in _WRITING_ELSEWHERE and (free := found.f_bavail * found.f_frsize) < nbytes:
            raise LocalUnavailable(
                f"{self.local}: changing {nbytes} bytes on {kind}, which writes them elsewhere first, needs as many "
                f"free bytes, {free} are; make room there, or name a local directory on ext4, xfs or tmpfs"
            )

    def begin(self, name: str, version: int, applying: int, checksums: Mapping[str, Checksum]) -> None:
        """Say durably that the slot, which holds `version`, is about to be changed."""
        self._write(name, version, applying, checksums)

    def complete(self, name: str, version: int, checksums: Mapping[str, Checksum]) -> None:
        """Say durably that the slot holds `version`; every byte of it must be on the disk."""
        self._write(name, version, None, checksums)

    def expose(self, name: str, version: int) -> None:
        """Let engines read this slot, durably; it must be complete."""
        if self.current() != name:
            link = self.local / f"{CURRENT}.partial"
            link.unlink(missing_ok=True)
            link.symlink_to(name)
            link.replace(self.local / CURRENT)
            durable.sync_directory(self.local)
        state = msgspec.json.encode({"version": version_text(max(version, 0)), "slot": name}).decode() + "\n"
        path = self.local / STATE
        if not path.is_file() or path.read_text(errors="replace") != state:
            self._replace(path, state)
        durable.sync_directory(self.local)

    def _write(self, name: str, version: int, applying: int | None, checksums: Mapping[str, Checksum]) -> None:
        record = Record(version=version, applying=applying, base=self.fingerprint, checksums=dict(checksums))
        self._replace(self._record_path(name), msgspec.json.encode(record).decode() + "\n")
        durable.sync_directory(self.local)

    def _replace(self, path: Path, text: str) -> None:
        partial = path.with_name(f"{path.name}.partial")
        durable.write(partial, text)
        partial.replace(path)

    def _record_path(self, name: str) -> Path:
        return self.local / f"{name}.json"

    def _check_room(self, needed: int) -> None:
        found = os.statvfs(self.local)
        if (free := found.f_bavail * found.f_frsize) < needed:
            raise LocalUnavailable(
                f"{self.local}: a copy of the checkpoint takes {needed} bytes, {free} are free; two copies must fit: "
                "make room there, or name another local directory"
            )


@contextmanager
def locked(local: Path, wait_seconds: float) -> Iterator[None]:
    """Be the only one that changes the slots of a directory, which is made if it is not there.

    Raises:
        LocalBusy: another process did so for the whole of `wait_seconds`.
    """
    local.mkdir(parents=True, exist_ok=True)
    path = local / "lock"
    deadline = time.monotonic() + wait_seconds
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                holder = path.read_text(errors="replace").strip() or "a process that has not said which"
                raise LocalBusy(
                    f"{local} is being changed by {holder}, for longer than {wait_seconds:g} seconds; wait for it, "
                    "stop it, or give every engine host a local directory of its own"
                )
            time.sleep(_POLL_SECONDS)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


@contextmanager
def reported(local: Path) -> Iterator[None]:
    """Turn what the file system says into LocalUnavailable, with the path and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room there" if full else "see to that file system and its permissions"
        raise LocalUnavailable(
            f"{error.filename or local}: {error.strerror or error}; the weights in {local} are as before; {remedy} and "
            "try again, or name another local directory"
        ) from error


def _files(origin: Checkpoint) -> Iterator[Path]:
    """What a copy needs: the weights, and what is not weights (configuration, tokenizer, code)."""
    yield from origin.files
    for path in sorted(origin.path.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(origin.path).parts)
        if not hidden and path.is_file() and path.suffix not in _OTHER_WEIGHTS:
            yield path


def _file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of file system that a path is on, by the kernel's name; "" when that cannot be told."""
    depth, kind = 0, ""
    with suppress(OSError):
        real = path.resolve()
        for line in mounts.read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4]))
            if real.is_relative_to(point) and len(point.parts) >= depth:  # of several at one point the last counts
                depth, kind = len(point.parts), after.split()[0]
    return kind


def _copy(source: Path, target: Path) -> None:
    block = memoryview(bytearray(_COPY_BYTES))
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while size := reader.readinto(block):
            written = 0
            while written < size:
                written += writer.write(block[written:size])
        os.fsync(writer.fileno())
