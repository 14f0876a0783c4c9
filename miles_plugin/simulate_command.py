"""`miles-mooncake simulate async`: what asynchronous training would gain and cost, before a cluster is rented."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from miles_plugin import interrupt
from miles_plugin.report.console import write_line
from mooncake_store.errors import ConfigError

if TYPE_CHECKING:
    from miles_plugin.simulation.result import Outcome, Run
    from miles_plugin.simulation.settings import Settings
    from miles_plugin.simulation.sweep import Plan, Point

_PROG = "miles-mooncake simulate"
_GROWTH = 0.1  # of what is trained on
_FORMS = "SECONDS, exponential:MEAN, lognormal:MEDIAN,SIGMA[,LONGEST], pareto:LOW,ALPHA[,HIGH], uniform:LOW,HIGH"


def simulate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Predict what a cluster would do. Nothing is started.",
        epilog=f"`{_PROG} NAME --help` lists its flags and their defaults.",
    )
    names = parser.add_subparsers(dest="simulation", required=True, metavar="NAME", help="what to simulate")
    _add_async(names)
    return parser


def run_simulate(argv: Sequence[str]) -> None:
    """Simulate what the arguments say.

    Raises:
        ConfigError: a value that is not allowed, or a file that cannot be read or written.
    """
    from miles_plugin.simulation.sweep import Plan, points

    arguments = simulate_parser().parse_args(argv)
    settings, swept = _settings(arguments)
    plan = Plan(arguments.repetitions, arguments.steps, arguments.warmup_steps, arguments.seed)
    _Simulation(points(settings, swept), plan, arguments).run()


class _Simulation:
    """All points, and what becomes of what is done."""

    def __init__(self, points: Sequence[Point], plan: Plan, arguments: argparse.Namespace) -> None:
        self._points, self._plan, self._json = points, plan, arguments.json
        self._directory = arguments.output or Path("runs") / f"simulation-{time.strftime('%Y%m%d-%H%M%S')}"
        self._outcomes: list[Outcome] = []

    def run(self) -> None:
        """Every line is on disk as soon as its run is done, and Ctrl-C leaves table and picture of the points done."""
        for note in _notes(self._points):
            print(f"note: {note}", file=sys.stderr)
        with interrupt.in_order():
            try:
                self._simulate()
            finally:
                if self._outcomes:
                    self._show()

    def _simulate(self) -> None:
        from miles_plugin.simulation.sweep import Sweep

        every = [point.settings for point in self._points]
        with self._open() as file, _progress(Sweep(self._plan).steps(every)) as on_step:
            sweep = Sweep(self._plan, on_step)
            for point in self._points:
                record = partial(self._record, file, point)
                self._outcomes.append(sweep.outcome(point.settings, record))

    def _open(self) -> TextIO:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return (self._directory / "simulation.jsonl").open("w")
        except OSError as error:
            raise self._not_written(error) from error

    def _record(self, file: TextIO, point: Point, mode: str, repetition: int, run: Run) -> None:
        line = _line(point, self._plan, mode, repetition, run)
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            raise self._not_written(error) from error
        if self._json:
            _print(line)

    def _not_written(self, error: OSError) -> ConfigError:
        return ConfigError(f"--output {self._directory}: {error}; name a directory that can be written")

    def _show(self) -> None:
        from miles_plugin.simulation import text

        swept = len(self._points) > 1
        if not self._json:
            for note in _unsteady(self._points, self._outcomes):
                print(f"note: {note}", file=sys.stderr)
            _print(text.sweep(self._points, self._outcomes) if swept else text.single(self._outcomes[0]))
        written = [self._directory / "simulation.jsonl"]
        if swept:
            written += self._draw(self._directory / "simulation.png")
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)

    def _draw(self, path: Path) -> list[Path]:
        try:
            from miles_plugin.simulation.plot import draw

            draw(self._points, self._outcomes, path)
            return [path]
        except ImportError as error:
            print(f"no {path.name}: {error}; install the extra `train`", file=sys.stderr)
        except OSError as error:
            print(f"no {path.name}: {error}", file=sys.stderr)
        return []


def _print(text: str) -> None:
    """On standard output; status 1, and no word, when its reader has gone."""
    try:
        write_line(sys.stdout, text)
    except BrokenPipeError:
        raise SystemExit(1) from None


def _line(point: Point, plan: Plan, mode: str, repetition: int, run: Run) -> str:
    from miles_plugin.report.record import finite

    line = {
        "mode": mode,
        "repetition": repetition,
        "seed": plan.seed,
        "values": dict(point.values),
        "settings": point.settings.to_dict(),
        "result": run.to_dict(),
    }
    return json.dumps(finite(line), allow_nan=False)


def _notes(points: Sequence[Point]) -> Iterator[str]:
    """What is likely not meant."""
    starved = [point.settings for point in points if _most_in_flight(point.settings) < point.settings.all_slots]
    if starved:
        worst = max(starved, key=lambda settings: settings.all_slots)
        yield (
            f"{worst.all_slots} slots, of which no more than {_most_in_flight(worst)} are used at a time: as many "
            "samples are in flight at most (--async-max-concurrent-samples)"
        )


def _unsteady(points: Sequence[Point], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What is not the pace that would last: the buffer was still filling, or the run ended in a wave."""
    growth = [max((run.growth for run in outcome.asynchronous), key=abs) for outcome in outcomes]
    most = max(growth, key=abs)
    if abs(most) > _GROWTH:
        values = points[growth.index(most)].values
        where = ", ".join(f"{_flag(name)} {value}" for name, value in values.items())
        yield (
            f"not steady: {where + ': ' if where else ''}{100 * abs(most):.0f} % {'more' if most > 0 else 'less'} was "
            "generated than trained on; give more --steps and --warmup-steps"
        )


def _most_in_flight(settings: Settings) -> int:
    return settings.concurrent_groups * settings.n_samples_per_prompt


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's standard error, if rich is installed; else nothing."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(), TextColumn("left")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _settings(arguments: argparse.Namespace) -> tuple[Settings, dict[str, Sequence[Any]]]:
    """The settings, and what has several values: of those, the settings have the first."""
    from miles_plugin.simulation import from_report
    from miles_plugin.simulation.distributions import parse
    from miles_plugin.simulation.settings import Settings
    from miles_plugin.simulation.sweep import SWEPT

    given = {name: getattr(arguments, name) for name in SWEPT}
    plain = {name: getattr(arguments, name) for name in _PLAIN}
    return (
        Settings(
            generation=parse(arguments.generation_seconds, "--generation-seconds", from_report.samples),
            training=parse(arguments.step_seconds, "--step-seconds", from_report.steps),
            prepare=parse(arguments.prepare_seconds, "--prepare-seconds", from_report.preparations),
            update=parse(arguments.update_seconds, "--update-seconds", from_report.pauses),
            **{name: values[0] for name, values in given.items()},
            **plain,
        ),
        {name: list(dict.fromkeys(values)) for name, values in given.items() if len(set(values)) > 1},
    )


_PLAIN = (
    "slots",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "async_unused_samples_handler",
    "async_max_concurrent_samples",
    "rollout_submission_granularity",
    "pause_generation_mode",
)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _bound(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


_bound.__name__ = "number or none"  # argparse says it: invalid ... value


def _add_async(names: Any) -> None:
    parser = names.add_parser(
        "async",
        help="asynchronous and synchronous RL post-training: samples per second, idle time, staleness",
        description="Simulate engines that generate, a buffer, trainers that learn and weight updates, once with all "
        "of it at a time and once in turn, by discrete events. Prints medians and quartiles; writes JSON lines and, of "
        f"several settings, a picture. docs/simulation.md says what is modelled and what is not. DIST is {_FORMS}, or "
        "file:PATH, from which measured seconds are drawn, one a line; for steps and updates also a job's report.",
    )
    _add_times(parser.add_argument_group("times", "what takes how long"))
    _add_cluster(parser.add_argument_group("cluster", "of engines and of trainers several numbers: every combination"))
    _add_loop(parser.add_argument_group("loop", "settings of miles; several values where VALUES is said"))
    how = parser.add_argument_group("simulation", "how long and how often")
    how.add_argument("--steps", type=int, default=100, metavar="N", help="that are measured (default: 100)")
    how.add_argument(
        "--warmup-steps", type=int, default=20, metavar="N", help="before those, not measured (default: 20)"
    )
    how.add_argument("--repetitions", type=int, default=5, metavar="N", help="with other draws (default: 5)")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws (default: 0)")
    output = parser.add_argument_group("output", "what becomes of it")
    output.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write (default: runs/simulation-<date and time>)"
    )
    output.add_argument("--json", action="store_true", help="print the JSON lines, one for each run (default: a table)")


def _add_times(group: Any) -> None:
    group.add_argument(
        "--generation-seconds",
        required=True,
        metavar="DIST",
        help="of a sample in its slot, measured at the load that is simulated (no default)",
    )
    group.add_argument(
        "--step-seconds",
        required=True,
        metavar="DIST",
        help="of a training step if one trainer did all of it, the transport's seconds included (no default)",
    )
    group.add_argument(
        "--prepare-seconds",
        default="0",
        metavar="DIST",
        help="of an update before its pause, in which engines generate and trainers wait (default: 0)",
    )
    group.add_argument(
        "--update-seconds",
        default="0",
        metavar="DIST",
        help="of its pause, in which engines generate nothing (default: 0)",
    )


def _add_cluster(group: Any) -> None:
    group.add_argument("--engines", nargs="+", type=int, default=[1], metavar="N", help="that generate (default: 1)")
    group.add_argument(
        "--slots", type=int, default=64, metavar="N", help="samples that an engine generates at a time (default: 64)"
    )
    group.add_argument(
        "--trainers",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="that share a step evenly, and wait for the slowest of them (default: 1)",
    )


def _add_loop(group: Any) -> None:
    group.add_argument("--rollout-batch-size", type=int, default=32, metavar="N", help="groups of a step (default: 32)")
    group.add_argument(
        "--n-samples-per-prompt", type=int, default=8, metavar="N", help="samples of a group (default: 8)"
    )
    group.add_argument(
        "--update-weights-interval",
        nargs="+",
        type=int,
        default=[1],
        metavar="VALUES",
        help="steps between updates; steps are rounded up to it (default: 1)",
    )
    group.add_argument(
        "--max-weight-staleness",
        nargs="+",
        type=_bound,
        default=[None],
        metavar="VALUES",
        help="updates since the oldest token of a group, at most, or `none` (default: none)",
    )
    group.add_argument(
        "--async-unused-samples-handler",
        default="drop",
        metavar="{drop,retry}",
        help="what becomes of a group beyond that (default: drop)",
    )
    group.add_argument(
        "--async-data-buffer-capacity-factor",
        nargs="+",
        type=float,
        default=[2.0],
        metavar="VALUES",
        help="rollout batches of finished groups; while it is full nothing is submitted (default: 2)",
    )
    group.add_argument(
        "--async-max-concurrent-samples",
        type=int,
        metavar="N",
        help="samples in flight, rounded down to whole groups (default: a rollout batch)",
    )
    group.add_argument(
        "--rollout-submission-granularity",
        default="sample",
        metavar="{sample,group}",
        help="a group is submitted when as many samples have finished, or when a group has (default: sample)",
    )
    group.add_argument(
        "--pause-generation-mode",
        default="retract",
        metavar="{retract,in_place,abort,wait}",
        help="at an update running samples go on after it (retract, in_place), begin anew (abort), or are waited for, "
        "which no job does (wait) (default: retract)",
    )
