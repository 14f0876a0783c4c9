"""Two runs of one load side by side: what changed, and whether that is more than the machine's noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.measurements import Measurement, read
from benchmarks.statistics import Cell, Spread, seconds_of, spread_of
from mooncake_store.errors import ConfigError


@dataclass(frozen=True)
class Change:
    """A cell in both runs.

    Attributes:
        before, after: seconds.
        drift: by which factor the machine itself was slower in the second run, as far as that can be told.
    """

    cell: Cell
    before: Spread
    after: Spread
    drift: Spread

    @property
    def factor(self) -> float:
        """Time now over time then, the machine's drift taken out: below 1 is faster."""
        return self.after.median / (self.before.median * self.drift.median)

    @property
    def verdict(self) -> str:
        """Faster or slower only where the ranges between the quartiles are apart, whatever the drift was."""
        expected = Spread(*(then * drift for then, drift in zip(self.before, self.drift, strict=True)))
        if self.after.overlaps(expected):
            return "within noise"
        return "faster" if self.factor < 1 else "slower"


def changes(old: Sequence[Measurement], new: Sequence[Measurement], ours: Sequence[str]) -> list[Change]:
    """What changed in each cell that both runs have.

    The machine's drift is the change of the cells that are not `ours`, median and quartiles: their code is the same.

    Raises:
        ConfigError: the runs have no cell in common.
    """
    then = {cell: spread_of(rounds.values()) for cell, rounds in seconds_of(old).items()}
    now = {cell: spread_of(rounds.values()) for cell, rounds in seconds_of(new).items()}
    common = [cell for cell in now if cell in then]
    if not common:
        raise ConfigError("the two runs have no variant, peer and operation in common")
    others = [now[cell].median / then[cell].median for cell in common if cell.peer not in ours]
    drift = spread_of(others or [1.0])
    return [Change(cell, then[cell], now[cell], drift) for cell in common]


def text(found: Sequence[Change]) -> str:
    """As a Markdown table, with a line on the machine's drift."""
    drift = found[0].drift
    rows = [
        [
            " ".join(change.cell),
            _milliseconds(change.before),
            _milliseconds(change.after),
            f"{change.factor:.2f}",
            change.verdict,
        ]
        for change in found
    ]
    return (
        f"The machine itself took {drift.median:.2f} ({drift.low:.2f} to {drift.high:.2f}) times as long as then, by "
        "the peers whose code did not change; `factor` is what is left. `faster` and `slower` are said only where the "
        "ranges between the quartiles are apart.\n\n"
        + markdown.table(["variant, peer, operation", "then, ms", "now, ms", "factor", "change"], rows)
    )


def _milliseconds(spread: Spread) -> str:
    median, low, high = (1000 * value for value in spread)
    return f"{median:.3g} ({low:.3g} to {high:.3g})"


def check_same_load(old: Sequence[Measurement], loads: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError when a variant of `loads`, its settings by name, was another one in the old run."""
    then = {item.variant: item.settings for item in old}
    for variant, load in loads.items():
        if then.get(variant, load) != load:
            raise ConfigError(
                f"--compare: variant {variant!r} was {then[variant]} in the earlier run and is {dict(load)} in this "
                "one; ask for the same load"
            )
    if not then.keys() & loads.keys():
        raise ConfigError(f"--compare: the earlier run has none of the variants {', '.join(loads)}")


def read_same_load(path: Path | None, loads: Mapping[str, Mapping[str, Any]]) -> list[Measurement]:
    """The measurements of an earlier run; none without a path. Raises ConfigError where `check_same_load` does."""
    old = read(path) if path is not None else []
    if old:
        check_same_load(old, loads)
    return old
