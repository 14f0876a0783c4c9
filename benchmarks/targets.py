"""Targets beside what was found, of any benchmark: the table, and what `--check` makes of a miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import markdown
from benchmarks.statistics import Spread
from miles_plugin.bench_commands import BenchFailed


@dataclass(frozen=True)
class Result:
    """A target beside what was found.

    Attributes:
        variant, operation: of the load; operation "memory" is bytes and not time.
        what: is compared with what.
        wanted: the bound.
        found: the ratio, with its spread over the rounds.
        at_most: the bound is an upper one.
    """

    variant: str
    operation: str
    what: str
    wanted: float
    found: Spread
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.found.median <= self.wanted if self.at_most else self.found.median >= self.wanted


def section(found: Sequence[Result]) -> str:
    """How many were met, and each of them in a row."""
    rows = [
        [
            f"{result.variant} {result.operation}",
            result.what,
            f"{'<=' if result.at_most else '>='} {result.wanted:g}",
            _found(result.found),
            "yes" if result.met else "no",
        ]
        for result in found
    ]
    met = sum(result.met for result in found)
    table = markdown.table(["", "compared with", "target", "found", "met"], rows)
    return f"**Targets**: {met} of {len(found)} met\n\n{table}"


def check(found: Sequence[Result]) -> None:
    """Raise BenchFailed when one was missed, naming all that were."""
    missed = [f"{result.variant} {result.operation} {result.what}" for result in found if not result.met]
    if missed:
        raise BenchFailed(f"{len(missed)} of {len(found)} targets were missed: {'; '.join(missed)}")


def _found(spread: Spread) -> str:
    return markdown.digits(spread.median) if spread.low == spread.high else markdown.ranged(spread)
