"""`miles-mooncake bench transport`, given its parsed flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path

from benchmarks import compare, markdown
from benchmarks.measurements import Measurement
from benchmarks.outcome import Outcome, full_disk_told, tell
from benchmarks.progress import Steps
from benchmarks.targets import check
from benchmarks.transport import plot, report, rounds, scaling, stage, targets
from benchmarks.transport.peers import Peer
from benchmarks.transport.recorder import Recorder
from benchmarks.transport.settings import PEERS, Settings, resolve
from miles_plugin.interrupt import in_order, no_descendant_left
from mooncake_store.errors import ConfigError

OURS = tuple(name for name in PEERS if name.startswith("ours"))


def run(arguments: argparse.Namespace, peers: Mapping[str, Peer] = PEERS) -> None:
    """Measure, write, print.

    Args:
        arguments: as `miles_plugin.bench_commands` parses them.
        peers: the peers there are, by name.

    Raises:
        ConfigError: a value that cannot be used.
        BenchFailed: a peer failed, a payload was wrong, or with --check a target was missed.
    """
    settings = resolve(arguments, peers)
    mark = "scaling" if settings.scaling else "fresh" if settings.fresh else "transport"
    if settings.scaling and (arguments.compare or arguments.check):
        raise ConfigError("--scaling has no targets and nothing to compare; leave out --check and --compare")
    old = compare.read_same_load(
        arguments.compare, {workload.variant: settings.load(workload) for workload in settings.workloads}
    )
    if arguments.document:
        markdown.check_document(arguments.document, mark)
    with full_disk_told(settings.output):
        recorder = _measure(settings)
        _tell(arguments, settings, mark, recorder, old)


def _tell(
    arguments: argparse.Namespace, settings: Settings, mark: str, recorder: Recorder, old: Sequence[Measurement]
) -> None:
    """Print and write what was measured, the table first."""
    found = targets.results(recorder.measurements)
    if settings.scaling:
        text = scaling.text(recorder.measurements, settings.peers)
    else:
        text = report.text(recorder.measurements, settings.peers, found, settings.skipped)

    def draw(directory: Path) -> Sequence[Path]:
        if settings.scaling:
            return scaling.draw(recorder.measurements, settings.peers, directory)
        return plot.draw(recorder.measurements, settings.peers, directory, mark)

    tell(arguments, Outcome(settings.output, recorder.path, mark, recorder.measurements, OURS, text, draw), old)
    if arguments.check:
        check(found)


def _measure(settings: Settings) -> Recorder:
    recorder = Recorder(settings)
    if recorder.path.exists():
        raise ConfigError(f"--output {settings.output} has the measurements of another run; name another directory")
    work = scaling if settings.scaling else rounds
    parts = [(part, work.capacity(part)) for part in rounds.parts(settings)]
    try:
        settings.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {settings.output}: {error.strerror}") from error
    steps = Steps(work.turns(settings))
    for reason in settings.skipped:
        steps.say(f"not measured: {reason}")
    resource_tracker.ensure_running()  # Python's own process, which ends with this one: it is none of ours
    for part, capacity in parts:
        steps.say(f"run {part.run}: starting what {', '.join(peer.name for peer in part.peers)} need")
        with (
            no_descendant_left(),
            stage.services(part.peers, capacity, rounds.kept(part), part.logs) as running,
            in_order(),  # not before: an exception in the midst of Ray's start may end this process by a signal
            steps,
        ):
            work.measure(part, running, recorder, steps)
    return recorder
