"""Outcomes as text for a terminal: one setting in full, or a row for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from miles_plugin.simulation.result import Outcome, Run, Spread
from miles_plugin.simulation.sweep import SWEPT, Point

_BAR = 40


def value(number: Any) -> str:
    """Of a setting."""
    return "none" if number is None else f"{number:g}"


def sweep(points: Sequence[Point], outcomes: Sequence[Outcome]) -> str:
    """A row for each point that has an outcome; medians, with quartiles of the samples per second."""
    names = list(points[0].values)
    header = [*(SWEPT[name] for name in names), *(name for name, _ in _COLUMNS)]
    rows = [
        [*(value(point.values[name]) for name in names), *(cell(outcome) for _, cell in _COLUMNS)]
        for point, outcome in zip(points, outcomes, strict=False)
    ]
    return _table(header, rows)


def single(outcome: Outcome) -> str:
    """Both ways side by side, and the staleness of what was trained on."""
    rows = [[name, *(_ranged(spread(of)) for spread in (outcome.spread, outcome.synchronous_spread))]
            for name, of in _ROWS]  # fmt: skip
    rows.insert(1, ["speed-up", _ranged(outcome.speed_up), ""])
    histogram = outcome.histogram()
    most = max(histogram.values())
    bars = [
        f"{staleness:>9}  {'█' * round(_BAR * share / most) or '▏'} {_percent(share)}"
        for staleness, share in histogram.items()
    ]
    return "\n".join([_table(["", "asynchronous", "synchronous"], rows), "", "staleness  of the groups", *bars])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers to the right under what may be two lines of header."""
    heads = [name.split("\n") for name in header]
    depth = max(map(len, heads))
    lines = [[head[line - depth + len(head)] if line >= depth - len(head) else "" for head in heads]
             for line in range(depth)]  # fmt: skip
    lines += [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = widths
    return "\n".join("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines)


def _digits(number: float) -> str:
    """Three, without an exponent."""
    return f"{number:.0f}" if abs(number) >= 99.95 else f"{round(number, 6):.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.9995 else f"{100 * share:.0f} %"


def _ranged(spread: Spread) -> str:
    median, low, high = map(_digits, spread)
    return median if low == high else f"{median} ({low} to {high})"


def _median(of: Callable[[Run], float]) -> Callable[[Outcome], str]:
    return lambda outcome: _digits(outcome.spread(of).median)


_COLUMNS: Sequence[tuple[str, Callable[[Outcome], str]]] = (
    ("samples/s", lambda outcome: _ranged(outcome.spread(lambda run: run.samples_per_second))),
    ("synch-\nronous", lambda outcome: _digits(outcome.synchronous_spread(lambda run: run.samples_per_second).median)),
    ("speed-\nup", lambda outcome: _digits(outcome.speed_up.median)),
    ("engines\nbusy, %", _median(lambda run: 100 * run.engines_busy)),
    ("idle,\ns/step", _median(lambda run: run.engines_idle_seconds)),
    ("trainers\nbusy, %", _median(lambda run: 100 * run.trainers_busy)),
    ("idle,\ns/step", _median(lambda run: run.trainers_idle_seconds)),
    ("staleness\nmean", _median(lambda run: run.staleness_mean)),
    ("\nmax", _median(lambda run: run.staleness_max)),
    ("groups\nunused, %", _median(lambda run: 100 * run.unused)),
)
_ROWS: Sequence[tuple[str, Callable[[Run], float]]] = (
    ("samples/s", lambda run: run.samples_per_second),
    ("seconds of a step", lambda run: run.seconds_per_step),
    ("engines: busy, %", lambda run: 100 * run.engines_busy),
    ("  idle, seconds of a step", lambda run: run.engines_idle_seconds),
    ("  paused, seconds of a step", lambda run: run.engines_paused * run.seconds_per_step),
    ("trainers: busy, %", lambda run: 100 * run.trainers_busy),
    ("  idle, seconds of a step", lambda run: run.trainers_idle_seconds),
    ("staleness: mean", lambda run: run.staleness_mean),
    ("  max", lambda run: run.staleness_max),
    ("samples of several versions, %", lambda run: 100 * run.mixed),
    ("groups beyond the bound, %", lambda run: 100 * run.unused),
    ("generation in vain, %", lambda run: 100 * run.wasted),
    ("samples running", lambda run: run.running),
    ("groups buffered", lambda run: run.buffered),
    ("seconds of a sample", lambda run: run.sample_seconds),
    ("  of one that is trained on", lambda run: run.trained_sample_seconds),
)
