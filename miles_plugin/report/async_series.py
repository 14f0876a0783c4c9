"""What the pictures of a fully asynchronous run show beside those of any run: how stale the groups were, who waited for
whom, and what became of all of them. The numbers are the buffer's metrics, see docs/async.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from miles_plugin.fully_async.buffer import capacity_of
from miles_plugin.fully_async.counts import PREFIX
from miles_plugin.report.panel import Line, Panel, counting, last_of, median, x_of
from miles_plugin.report.record import Arm, Report, Step
from miles_plugin.report.theme import arm_label, phase_colour

_CONSUMED, _BUFFERED, _BOUND, _HELD_BACK = "#0072B2", "#E69F00", "#6E6E6E", "#D55E00"
# What is said of all groups, in this order; the others only where there were any.
_TOTALS = {
    "consumed": "consumed_groups",
    "recycled": "recycled_groups",
    "dropped": "dropped_groups",
    "aborted": "aborted_groups_filtered",
    "stale": "stale_groups_filtered",
    "steps back": "version_steps_back",
}
_RARE = {
    "unstamped": "unstamped_groups_filtered",
    "foreign": "foreign_groups_filtered",
    "lost": "lost_groups",
    "duplicate": "duplicate_groups_filtered",
}


def panels(report: Report, arm: Arm | None) -> list[Panel]:
    """staleness and utilisation of an arm; none of a run that generates between its steps."""
    return [_staleness(report, arm), _utilisation(report, arm)] if _is_async(report) else []


def totals(report: Report) -> str:
    """What became of the groups of all arms; empty for a run that generates between its steps."""
    if not _is_async(report):
        return ""
    steps = [step for arm in report.arms.values() for step in arm.steps]

    def total(name: str) -> float:
        return sum(value for step in steps if math.isfinite(value := _metric(step, name)))

    said = {word: total(name) for word, name in _TOTALS.items()}
    said |= {word: number for word, name in _RARE.items() if (number := total(name))}
    return ", ".join(f"{number:.0f} {word}" for word, number in said.items())


def _is_async(report: Report) -> bool:
    return bool(report.config.get("fully_async"))


def _staleness(report: Report, arm: Arm | None) -> Panel:
    steps = arm.steps if arm else []

    def line(label: str, name: str, colour: str, width: float, dashed: bool) -> Line:
        return Line(label, x_of(arm), [_metric(step, name) for step in steps], colour, width, dashed)

    lines = [
        line("consumed max", "consumed_max_staleness", _CONSUMED, 2.5, False),
        line("consumed avg", "consumed_avg_staleness", _CONSUMED, 1.5, False),
        line("buffered max", "buffer_max_staleness", _BUFFERED, 2.5, True),
        line("buffered avg", "buffer_avg_staleness", _BUFFERED, 1.5, True),
    ]
    bound = report.config.get("max_weight_staleness")
    if bound is not None:
        lines.append(Line(f"bound {bound}", [0.0, last_of(arm) + 0.5], [bound, bound], _BOUND, 1.5, dashed=True))
    subtitle = f"{arm_label(arm.reward)}, versions behind, {'no bound' if bound is None else 'by group'}" if arm else ""
    panel = Panel("staleness", "Staleness", subtitle, "", lines, legend=True, last_x=last_of(arm))
    return counting(panel)


def _utilisation(report: Report, arm: Arm | None) -> Panel:
    """Percent of a step for trainers; of the capacity for the buffer, after a rollout was taken; of the groups that may
    be in flight for those that were finished and waited for room."""
    config, steps = report.config, arm.steps if arm else []
    capacity = capacity_of(config["async_data_buffer_capacity_factor"], config["rollout_batch_size"])
    in_flight = _groups_in_flight(config)
    values = {
        "training": [_part(step.seconds.get("train"), _total(step)) for step in steps],
        "waiting": [_part(_metric(step, "get_wait_seconds"), _total(step)) for step in steps],
        "buffer filled": [_part(_metric(step, "queue_size"), capacity) for step in steps],
        "held back": [
            _part(_metric(step, "put_wait_seconds"), in_flight * _since_last_rollout(steps, index))
            for index, step in enumerate(steps)
        ],
    }
    colours = phase_colour("train"), phase_colour("generate"), _BUFFERED, _HELD_BACK
    lines = [
        Line(
            f"{name} {_percent(median(shares))}",
            x_of(arm),
            shares,
            colour,
            dashed=name in ("buffer filled", "held back"),
        )
        for (name, shares), colour in zip(values.items(), colours, strict=True)
    ]
    return Panel(
        "utilisation",
        "Utilisation",
        f"{arm_label(arm.reward)}, percent, with medians" if arm and steps else "",
        "",
        lines,
        legend=True,
        y_range=(-4.0, max([100.0, *(value for line in lines for value in line.y if math.isfinite(value))])),
        y_ticks=[(float(percent), str(percent)) for percent in (0, 25, 50, 75, 100)],
        last_x=last_of(arm),
    )


def _metric(step: Step, name: str) -> float:
    return step.buffer.get(PREFIX + name, math.nan)


def _total(step: Step) -> float:
    return sum(step.seconds.values())


def _since_last_rollout(steps: Sequence[Step], index: int) -> float:
    """Seconds over which the buffer counted what it says in a step: from the end of the rollout before to that of its
    own."""
    generate = steps[index].seconds.get("generate", 0.0)
    before = steps[index - 1] if index else None
    return generate + (_total(before) - before.seconds.get("generate", 0.0) if before else 0.0)


def _groups_in_flight(config: dict[str, Any]) -> int:
    samples = config["n_samples_per_prompt"]
    return int((config["async_max_concurrent_samples"] or config["rollout_batch_size"] * samples) // samples)


def _part(amount: float | None, whole: float) -> float:
    """In percent; NaN where nothing is known."""
    return 100 * amount / whole if amount is not None and whole else math.nan


def _percent(value: float) -> str:
    return f"{value:.0f} %" if math.isfinite(value) else "?"
