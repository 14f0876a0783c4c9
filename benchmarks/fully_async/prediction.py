"""What `simulate async` says of the same loop, told what was measured of the synchronous turns and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fully_async.settings import SYNCHRONOUS, asynchronous
from benchmarks.measurements import Measurement
from miles_plugin.simulation.predict import Measured, predict
from miles_plugin.simulation.result import Outcome
from miles_plugin.simulation.sweep import Plan

# Operations of a turn: all of a step, and the seconds of each sample, step and update.
STEP, GENERATION, TRAINING, PREPARE, UPDATE = "step", "generation", "training", "prepare", "update"
_REPETITIONS = 20
_FILES = {
    GENERATION: "--generation-seconds",
    TRAINING: "--step-seconds",
    PREPARE: "--prepare-seconds",
    UPDATE: "--update-seconds",
}


def outcomes(measurements: Sequence[Measurement]) -> dict[str, Outcome]:
    """The simulation of each asynchronous mode, by its name; each also has the synchronous one."""
    load = measurements[0].settings
    plan = Plan(_REPETITIONS, load["steps"], load["warmup_steps"], load["seed"])
    seconds = {name: list(_seconds(measurements, name)) for name in _FILES}
    return {
        asynchronous(bound): predict(
            Measured(
                generation_seconds=seconds[GENERATION],
                step_seconds=seconds[TRAINING],
                update_seconds=seconds[UPDATE],
                prepare_seconds=seconds[PREPARE],
                settings=_settings(load) | {"max_weight_staleness": bound},
            ),
            plan,
        )
        for bound in load["bounds"]
    }


def write(measurements: Sequence[Measurement], directory: Path) -> list[Path]:
    """Write what the simulation is told, a number a line; the files."""
    paths = [_file(name, directory) for name in _FILES]
    for name, path in zip(_FILES, paths, strict=True):
        path.write_text("".join(f"{value:.6f}\n" for value in _seconds(measurements, name)))
    return paths


def command(measurements: Sequence[Measurement], directory: Path) -> str:
    """The command that simulates the same, of the files that `write` leaves in a directory."""
    load = measurements[0].settings
    words = ["miles-mooncake simulate async"]
    words += [f"{flag} file:{_file(name, directory)}" for name, flag in _FILES.items()]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in _settings(load).items()]
    words += ["--max-weight-staleness", *("none" if bound is None else str(bound) for bound in load["bounds"])]
    words += [f"--steps {load['steps']} --warmup-steps {load['warmup_steps']}"]
    return " ".join([*words, f"--repetitions {_REPETITIONS} --seed {load['seed']}"])


def _settings(load: Mapping[str, Any]) -> dict[str, Any]:
    """Of the simulation but for the bound; all samples of a batch have a slot, as the stand-in has no queue."""
    return {
        "engines": 1,
        "slots": load["rollout_batch_size"] * load["n_samples_per_prompt"],
        "rollout_batch_size": load["rollout_batch_size"],
        "n_samples_per_prompt": load["n_samples_per_prompt"],
        "async_data_buffer_capacity_factor": load["capacity_factor"],
        "async_unused_samples_handler": "retry",
    }


def _seconds(measurements: Sequence[Measurement], operation: str) -> Iterator[float]:
    """Of the synchronous turns, in which nothing but what is timed goes on."""
    for item in measurements:
        if (item.peer, item.operation) == (SYNCHRONOUS, operation):
            yield from item.latencies or ()


def _file(name: str, directory: Path) -> Path:
    return directory / f"{name}-seconds.txt"
