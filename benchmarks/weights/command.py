"""`miles-mooncake bench weights`, given its parsed flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path

from benchmarks.measurements import Measurement
from benchmarks.outcome import LINES, Outcome, prepare, tell
from benchmarks.progress import Steps
from benchmarks.recorder import Recorder
from benchmarks.targets import check
from benchmarks.weights import delta_command, plot, report
from benchmarks.weights.settings import Case, Settings, resolve
from benchmarks.weights.trainer import MODES
from benchmarks.weights.turns import PROVEN, Stage, stage
from miles_plugin.interrupt import in_order, no_descendant_left

MARK = "weights"
OURS = (*MODES, *PROVEN.values())


def run(arguments: argparse.Namespace) -> None:
    """Measure, write, print.

    Raises:
        ConfigError: a value that cannot be used.
        BenchFailed: a process failed, an engine held other weights, or with --check a target was missed.
    """
    if arguments.deltas:
        delta_command.run(arguments)
        return
    settings = resolve(arguments)
    old = prepare(arguments, MARK, settings.logs, {case.name: settings.load(case) for case in settings.cases})
    recorder = Recorder(settings.run, settings.output / LINES)
    _measure(settings, recorder)
    _tell(arguments, settings, recorder, old)


def _measure(settings: Settings, recorder: Recorder) -> None:
    resource_tracker.ensure_running()  # Python's own process, which ends with this one: it is none of ours
    rounds = settings.warmup + settings.repeats
    with no_descendant_left(), in_order(), Steps(rounds * len(settings.cases)) as steps:
        for number, case in enumerate(settings.cases):
            steps.say(f"{case.name}: starting engines and trainers")
            with stage(settings, case, number) as running:
                for turn in range(-settings.warmup, settings.repeats):
                    which = "warming up" if turn < 0 else f"round {turn + 1} of {settings.repeats}"
                    steps.next(f"{case.name}, {which}")
                    _round(running, settings, case, turn, recorder)


def _round(running: Stage, settings: Settings, case: Case, number: int, recorder: Recorder) -> None:
    """Each takes its turn, and another one begins; warm-ups, whose numbers are negative, are not recorded."""
    names = list(running.turns)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        took = running.turns[name]()
        for operation, seconds in took.items() if number >= 0 else ():
            recorder.add(
                settings=settings.load(case),
                variant=case.name,
                peer=name,
                operation=operation,
                round=number,
                seconds=seconds,
                bytes=running.nbytes,
            )


def _tell(arguments: argparse.Namespace, settings: Settings, recorder: Recorder, old: Sequence[Measurement]) -> None:
    """Print and write what was measured, the table first."""
    found = report.results(recorder.measurements)
    text = report.text(recorder.measurements, found)

    def draw(directory: Path) -> Sequence[Path]:
        return plot.draw(recorder.measurements, directory)

    tell(arguments, Outcome(settings.output, recorder.path, MARK, recorder.measurements, OURS, text, draw), old)
    if arguments.check:
        check(found)
