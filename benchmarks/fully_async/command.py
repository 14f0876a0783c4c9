"""`miles-mooncake bench async`, given its parsed flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from benchmarks.fully_async import plot, prediction, report
from benchmarks.fully_async.engine import EngineProcess, Plan, Sample
from benchmarks.fully_async.loop import STORE, Job
from benchmarks.fully_async.prediction import GENERATION, PREPARE, STEP, TRAINING, UPDATE
from benchmarks.fully_async.settings import Settings, resolve
from benchmarks.fully_async.turn import Step, seconds_of, summary
from benchmarks.measurements import Measurement
from benchmarks.outcome import LINES, Outcome, prepare, tell
from benchmarks.processes import SpawnedProcess
from benchmarks.progress import Steps
from benchmarks.recorder import Recorder
from benchmarks.targets import check
from miles_plugin.arguments import TrainConfig
from miles_plugin.interrupt import in_order, no_descendant_left
from miles_plugin.object_store import start_segment_holder
from mooncake_store.master import MasterProcess

MARK = "async"


def run(arguments: argparse.Namespace) -> None:
    """Measure, simulate, write, print.

    Raises:
        ConfigError: a value that cannot be used.
        BenchFailed: a rollout was not what it must be, or with --check a target was missed.
    """
    settings = resolve(arguments)
    old = prepare(arguments, MARK, settings.logs, {settings.generation_seconds: settings.load()})
    recorder = Recorder(settings.run, settings.output / LINES)
    _measure(settings, recorder)
    _tell(arguments, settings, recorder, old)


def _measure(settings: Settings, recorder: Recorder) -> None:
    modes = list(settings.modes)
    with no_descendant_left(), in_order(), ExitStack() as stack, Steps(settings.repeats * len(modes)) as steps:
        steps.say("starting a master, a segment holder and the engine")
        checkpoint = settings.logs / "checkpoint"
        master = stack.enter_context(MasterProcess(settings.logs / "mooncake_master.log")).address
        holder = start_segment_holder(_lender(), master, settings.logs / "segment-holder.log")
        if holder is not None:
            stack.callback(holder.stop)
        plan = Plan(checkpoint, settings.generation, settings.n_samples_per_prompt, settings.seed)
        engine = stack.enter_context(SpawnedProcess("engine", settings.logs, EngineProcess, plan))
        address = engine.call("address")
        job = stack.enter_context(SpawnedProcess("job", settings.logs, Job, settings, address, master, checkpoint))
        for number in range(settings.repeats):
            first = number % len(modes)
            for mode in modes[first:] + modes[:first]:
                steps.next(f"round {number + 1} of {settings.repeats}, {mode}")
                taken = _turn(settings, mode, number, job)
                _record(settings, mode, number, taken, engine.call("take"), recorder)


def _turn(settings: Settings, mode: str, number: int, job: SpawnedProcess) -> list[Step]:
    """All steps, the warm-up's first."""
    job.call("begin", mode, number)
    steps = [job.call("step", step) for step in range(settings.warmup_steps + settings.steps)]
    job.call("end")
    return steps


def _record(
    settings: Settings, mode: str, number: int, steps: Sequence[Step], samples: Sequence[Sample], recorder: Recorder
) -> None:
    measured = steps[settings.warmup_steps :]
    came_to = summary(measured, samples, settings.rollout_batch_size, settings.n_samples_per_prompt)
    each = {
        GENERATION: seconds_of(samples, steps),
        TRAINING: [step.trained for step in measured],
        PREPARE: [step.prepared for step in measured],
        UPDATE: [step.paused for step in measured],
    }
    lines = {name: {"seconds": fmean(seconds), "latencies": seconds} for name, seconds in each.items()}
    lines[STEP] = {"seconds": (measured[-1].ended - measured[0].began) / len(measured), "loop": came_to}
    for operation, more in lines.items():
        recorder.add(
            settings=settings.load(),
            variant=settings.generation_seconds,
            peer=mode,
            operation=operation,
            round=number,
            bytes=0,
            **more,
        )


def _lender() -> TrainConfig:
    return TrainConfig(object_store_backend="mooncake", mooncake_store_init_kwargs=STORE)


def _tell(arguments: argparse.Namespace, settings: Settings, recorder: Recorder, old: Sequence[Measurement]) -> None:
    """Print and write what was measured, the table first."""
    measurements = recorder.measurements
    found = report.results(measurements)
    outcomes = prediction.outcomes(measurements)
    text = report.text(measurements, outcomes, found)

    def draw(directory: Path) -> Sequence[Path]:
        inputs = prediction.write(measurements, directory)
        return [*inputs, *plot.draw(measurements, outcomes, directory)]

    modes = list(settings.modes)
    tell(arguments, Outcome(settings.output, recorder.path, MARK, measurements, modes, text, draw), old)
    print(f"the simulation by itself: {prediction.command(measurements, settings.output)}")
    if arguments.check:
        check(found)
