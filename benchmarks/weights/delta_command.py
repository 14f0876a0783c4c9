"""`miles-mooncake bench weights --deltas`, given its parsed flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path

from benchmarks.outcome import LINES, Outcome, full_disk_told, prepare, tell
from benchmarks.progress import Steps
from benchmarks.recorder import Recorder
from benchmarks.targets import check
from benchmarks.weights import delta_plot, delta_report, delta_targets
from benchmarks.weights.delta_settings import CASES, DELTAS, DeltaSettings, resolve
from benchmarks.weights.delta_sides import Codec
from benchmarks.weights.delta_turns import CODECS, measure, steps_of
from miles_plugin.interrupt import in_order, no_descendant_left
from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS


def run(arguments: argparse.Namespace, codecs: Mapping[str, Callable[[], Codec]] = CODECS) -> None:
    """Measure, write, print.

    Raises:
        ConfigError: a value that cannot be used.
        BenchFailed: a process failed, something was made that is not what it should be, or with --check a target was
            missed.
    """
    settings = resolve(arguments)
    old = prepare(arguments, DELTAS, settings.logs, {case.name: settings.load(case) for case in CASES})
    recorder = Recorder(settings.run, settings.output / LINES)
    with full_disk_told(settings.output):
        _measure(settings, recorder, codecs)
        found = delta_targets.results(recorder.measurements)
        text = delta_report.text(recorder.measurements, found)

        def draw(directory: Path) -> Sequence[Path]:
            return delta_plot.draw(recorder.measurements, directory)

        outcome = Outcome(settings.output, recorder.path, DELTAS, recorder.measurements, ENCODINGS, text, draw)
        tell(arguments, outcome, old)
    if arguments.check:
        check(found)


def _measure(settings: DeltaSettings, recorder: Recorder, codecs: Mapping[str, Callable[[], Codec]]) -> None:
    resource_tracker.ensure_running()  # Python's own process, which ends with this one: it is none of ours
    with no_descendant_left(), in_order(), Steps(steps_of(settings, codecs)) as steps:
        measure(settings, recorder, steps, codecs)
