"""The tables: samples per second of each mode, and what the simulation says beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import markdown
from benchmarks.fully_async.prediction import STEP
from benchmarks.fully_async.settings import SYNCHRONOUS
from benchmarks.fully_async.turn import STALENESS
from benchmarks.measurements import Measurement
from benchmarks.statistics import Spread, gathered, spread_of
from benchmarks.targets import Result, section
from miles_plugin.simulation.result import Outcome, Run

AT_LEAST = 1.3  # times the samples per second of the synchronous job
TIMES = "x synchronous"


@dataclass(frozen=True)
class Quantity:
    """What is both measured and simulated. measured: of a turn's line, the one of operation `STEP`. percent: whether it
    is a share, whose error is said in points of it: of nearly nothing a relative one says nothing.
    """

    name: str
    measured: Callable[[Measurement], float]
    simulated: Callable[[Run], float]
    percent: bool = False


def came_to(item: Measurement) -> Mapping[str, float]:
    """What the steps of a turn came to."""
    assert item.loop is not None, "of every line of operation STEP"
    return item.loop


def step_seconds(item: Measurement) -> float:
    assert item.seconds is not None, "of every line of operation STEP"
    return item.seconds


def staleness(item: Measurement) -> dict[int, float]:
    """Groups that were trained on, by their staleness."""
    found = {name: groups for name, groups in came_to(item).items() if name.startswith(STALENESS)}
    return {int(name.removeprefix(STALENESS)): groups for name, groups in found.items()}


def _mean_staleness(item: Measurement) -> float:
    groups = staleness(item)
    return sum(value * number for value, number in groups.items()) / sum(groups.values())


def _unused(item: Measurement) -> float:
    unused = came_to(item)["unused"]
    return 100 * unused / (unused + sum(staleness(item).values()))


def _tokens_per_second(item: Measurement) -> float:
    return came_to(item)["tokens"] / step_seconds(item)


SPEED = Quantity(
    "samples/s", lambda item: came_to(item)["samples"] / step_seconds(item), lambda run: run.samples_per_second
)
_ALWAYS = (
    SPEED,
    Quantity("seconds of a step", step_seconds, lambda run: run.seconds_per_step),
    Quantity(
        "trainers wait, %",
        lambda item: 100 * came_to(item)["waited"] / step_seconds(item),
        lambda run: 100 * round(run.trainers_idle, 9),  # what is left of sums that cancel
        percent=True,
    ),
    Quantity(
        "engines busy, %",
        lambda item: 100 * came_to(item)["engines_busy"],
        lambda run: 100 * run.engines_busy,
        percent=True,
    ),
)
_ASYNCHRONOUS = (
    Quantity("staleness: mean", _mean_staleness, lambda run: run.staleness_mean),
    Quantity("staleness: most", lambda item: max(staleness(item)), lambda run: run.staleness_max),
    Quantity("groups beyond the bound, %", _unused, lambda run: 100 * run.unused, percent=True),
)


def turns(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """A line for each turn, by mode, the synchronous first."""
    lines = [item for item in measurements if item.operation == STEP]
    modes = sorted(gathered(lines, lambda item: item.peer), key=lambda mode: mode != SYNCHRONOUS)
    return {mode: [item for item in lines if item.peer == mode] for mode in modes}


def results(measurements: Sequence[Measurement]) -> list[Result]:
    """How many times the samples per second each asynchronous mode has, in the same rounds."""
    by_mode = turns(measurements)
    return [
        Result(mode, "", f"{TIMES}, {SPEED.name}", AT_LEAST, times(SPEED.measured, lines, by_mode[SYNCHRONOUS]))
        for mode, lines in by_mode.items()
        if mode != SYNCHRONOUS
    ]


def times(
    value: Callable[[Measurement], float], lines: Sequence[Measurement], synchronous: Sequence[Measurement]
) -> Spread:
    """How many times a value the turns of a mode have, over the synchronous one of the same round."""
    of_round = {item.round: value(item) for item in synchronous}
    return spread_of(value(item) / of_round[item.round] for item in lines)


def text(measurements: Sequence[Measurement], simulated: Mapping[str, Outcome], found: Sequence[Result]) -> str:
    """Everything, as Markdown."""
    by_mode = turns(measurements)
    parts = [_circumstances(measurements), _speed(by_mode), section(found)]
    parts += [_beside(mode, by_mode, simulated) for mode in by_mode]
    return "\n\n".join(parts)


def spread(values: Iterable[float]) -> str:
    """Median and quartiles; one number where there is one."""
    return said(spread_of(values))


def said(found: Spread) -> str:
    return markdown.digits(found.median) if found.low == found.high else markdown.ranged(found)


def _circumstances(measurements: Sequence[Measurement]) -> str:
    load = measurements[0].settings
    groups, size = load["rollout_batch_size"], load["n_samples_per_prompt"]
    what = (
        f"Stand-in engine, seconds of a sample {load['generation']}; a step trains for {load['step']} s, weights "
        f"travel for {load['update']} s; {groups} groups of {size} samples, "
        f"a buffer of {load['capacity_factor']:g} batches; {load['warmup_steps']} + {load['steps']} steps of a turn."
    )
    return markdown.circumstances(measurements, what)


def _speed(by_mode: Mapping[str, Sequence[Measurement]]) -> str:
    def compared(value: Callable[[Measurement], float], mode: str) -> list[str]:
        lines, synchronous = by_mode[mode], by_mode[SYNCHRONOUS]
        return [spread(map(value, lines)), "" if mode == SYNCHRONOUS else said(times(value, lines, synchronous))]

    rows = [
        [
            mode,
            *compared(SPEED.measured, mode),
            *compared(_tokens_per_second, mode),
            *(
                markdown.digits(spread_of(came_to(item)[part] for item in lines).median)
                for part in ("waited", "trained", "updated")
            ),
        ]
        for mode, lines in by_mode.items()
    ]
    header = ["", SPEED.name, TIMES, "tokens/s", TIMES, "of a step: waiting, s", "training, s", "updating, s"]
    return markdown.table(header, rows)


def _beside(mode: str, by_mode: Mapping[str, Sequence[Measurement]], simulated: Mapping[str, Outcome]) -> str:
    """Measured, simulated, and by how much the simulation is wrong."""
    is_async, lines = mode != SYNCHRONOUS, by_mode[mode]
    runs = simulated[mode].asynchronous if is_async else next(iter(simulated.values())).synchronous
    rows = [
        _row(each.name, spread_of(map(each.measured, lines)), spread_of(map(each.simulated, runs)), each.percent)
        for each in (*_ALWAYS, *(_ASYNCHRONOUS if is_async else ()))
    ]
    if is_async:
        faster = times(SPEED.measured, lines, by_mode[SYNCHRONOUS])
        rows.insert(1, _row(TIMES, faster, Spread(*simulated[mode].speed_up)))
    table = markdown.table(["", "measured", "simulated", "error"], rows)
    return f"**{mode}**, simulated from the synchronous turns\n\n{table}"


def _row(name: str, measured: Spread, simulated: Spread, percent: bool = False) -> list[str]:
    """With the error of the simulated median, against the measured one."""
    if percent:
        error = f"{simulated.median - measured.median:+.1f} points"
    else:
        error = f"{100 * (simulated.median / measured.median - 1):+.1f} %" if measured.median else ""
    return [name, said(measured), said(simulated), error]
