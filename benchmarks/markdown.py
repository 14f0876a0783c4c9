"""Tables as Markdown, and their place in a document."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, Spread, spread_of
from mooncake_store.errors import ConfigError


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that can be read as text, too: the first column to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    return "\n".join(map(line, [lines[0], rule, *lines[1:]]))


def milliseconds(seconds: Seconds, cell: Cell) -> str:
    """The median and its quartiles, of seconds; nothing where there are none."""
    return ranged(spread_of(1000 * value for value in seconds[cell].values())) if cell in seconds else ""


def rate(seconds: Seconds, cell: Cell, nbytes: int) -> str:
    """GB/s at the median; nothing where there is none."""
    return f"{nbytes / spread_of(seconds[cell].values()).median / 1e9:.2f}" if cell in seconds else ""


def ranged(spread: Spread) -> str:
    """A median with its quartiles in brackets."""
    return f"{digits(spread.median)} ({digits(spread.low)} to {digits(spread.high)})"


def digits(value: float) -> str:
    """Three of them, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: made by the command above -->", f"<!-- {name}: end -->"


def check_document(path: Path, name: str) -> None:
    """Raise ConfigError when a document has no place for what is called `name`."""
    _around(path, name)


def insert(path: Path, name: str, text: str) -> None:
    """Replace what lies between the marks of `name` in a document.

    Raises:
        ConfigError: it cannot be read, or does not have the two marks, once each.
    """
    before, after = _around(path, name)
    begin, end = _marks(name)
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def _around(path: Path, name: str) -> tuple[str, str]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    begin, end = _marks(name)
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found or text.count(begin) != 1 or text.count(end) != 1:
        raise ConfigError(f"{path} has no place for this table: it needs the lines {begin!r} and {end!r}, once each")
    return before, after


def circumstances(measurements: Sequence[Measurement], load: str = "") -> str:
    """Which run, where, with what, how often, when. load: sentences on what was measured."""
    item = measurements[0]
    rounds = len({measurement.round for measurement in measurements})
    versions = ", ".join(f"{part} {version}" for part, version in item.versions.items())
    parts = [
        f"Run {item.run} on {item.machine}; {versions}.",
        load,
        f"Rounds in which all take turns: {rounds}; median, quartiles in brackets. Written "
        f"{time.strftime('%Y-%m-%d')}.",
    ]
    return " ".join(filter(None, parts))
