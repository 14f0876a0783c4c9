"""What becomes of a run: whether it can be written, and then its table, files, comparison and place in a document."""

from __future__ import annotations

import argparse
import errno
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import compare, markdown
from benchmarks.measurements import Measurement
from miles_plugin.bench_commands import BenchFailed
from mooncake_store.errors import ConfigError

LINES = "measurements.jsonl"
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        directory: where it is written. lines: the file of measurements, which lies there.
        mark: what the table and the pictures are called, there and in a document.
        ours: peers whose code may be another one in the run that this is compared with.
        text: the table. draw: writes the pictures, given their directory.
    """

    directory: Path
    lines: Path
    mark: str
    measurements: Sequence[Measurement]
    ours: Sequence[str]
    text: str
    draw: Callable[[Path], Sequence[Path]]


def prepare(
    arguments: argparse.Namespace, mark: str, logs: Path, loads: Mapping[str, Mapping[str, Any]]
) -> Sequence[Measurement]:
    """Make the directory of logs, in that of the run; return the measurements to compare with, or none.

    Args:
        arguments: the flags `--compare` and `--document`. mark: see `Outcome`. loads: what is measured, by variant.

    Raises:
        ConfigError: one of these cannot be used; better known before anything is measured.
    """
    old = compare.read_same_load(arguments.compare, loads)
    if arguments.document:
        markdown.check_document(arguments.document, mark)
    if (logs.parent / LINES).exists():
        raise ConfigError(f"--output {logs.parent} has the measurements of another run; name another directory")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {logs.parent}: {error.strerror}; name another directory") from error
    return old


def tell(arguments: argparse.Namespace, outcome: Outcome, old: Sequence[Measurement]) -> None:
    """Print and write what was measured, the table first.

    A document gets the table, and beside it the picture, if it names that.

    Args:
        arguments: the flags `--compare` and `--document`. old: measurements of the run to compare with, or none.
    """
    print(outcome.text)
    if old:
        changed = compare.changes(old, outcome.measurements, outcome.ours)
        print(f"\nCompared with {arguments.compare}:\n\n{compare.text(changed)}")
    page = outcome.directory / f"{outcome.mark}.md"
    page.write_text(outcome.text + "\n")
    written = [outcome.lines, page, *outcome.draw(outcome.directory)]
    if arguments.document:
        markdown.insert(arguments.document, outcome.mark, outcome.text)
        written.append(arguments.document)
        picture = f"{outcome.mark}.png"
        if f"({picture})" in arguments.document.read_text():
            written.append(Path(shutil.copy(outcome.directory / picture, arguments.document.parent)))
    print(f"\nwritten: {', '.join(map(str, written))}")


@contextmanager
def full_disk_told(output: Path) -> Iterator[None]:
    """Raise BenchFailed instead of an OSError that says the disk is full or broken."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise BenchFailed(f"--output {output}: {error.strerror}; what is there so far stays") from error
