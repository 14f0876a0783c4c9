"""Writes that a crash of the machine does not undo: what returned is on the disk."""

import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a file and wait for the disk. Its name is safe only after `sync_directory`."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
