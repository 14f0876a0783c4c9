"""What a run of deltas was asked for, checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.weights.settings import at_least, run_id, size_of
from miles_plugin.report.units import nbytes
from mooncake_store.errors import ConfigError
from mooncake_store.memory import memory_limit

DELTAS = "deltas"  # what travels, and what the table and the pictures are called
THREADS = 2
_PROCESSES, _QUICK_PROCESSES = 5, 2
_REPEATS, _QUICK_REPEATS = 3, 1
# Of the model, at the most: files of it and copies; and what lies in caches.
_COPIES = 8
_OF_ENGINES = ("engines", "tp", "ranks")


@dataclass(frozen=True)
class Case:
    """What changed between two versions. density: of values, at random; None: what a step of AdamW changes."""

    name: str
    density: float | None


FEW, MANY, ADAMW = Case("1 % uniform", 0.01), Case("5 % uniform", 0.05), Case("AdamW, lr 1e-6", None)
CASES = (FEW, MANY, ADAMW)


@dataclass(frozen=True)
class DeltaSettings:
    """One run.

    Attributes:
        nbytes: of the model, about.
        processes: of each codec, one after the other and each fresh. warmup, repeats: turns in each.
    """

    run: str
    nbytes: int
    processes: int
    repeats: int
    warmup: int
    output: Path

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    def load(self, case: Case) -> dict[str, Any]:
        """What two runs must have in common to be compared."""
        return {"what": DELTAS, "case": case.name, "size": self.nbytes, "threads": THREADS}


def resolve(arguments: argparse.Namespace) -> DeltaSettings:
    """Check the flags.

    Raises:
        ConfigError: a value that cannot be used, with what is allowed.
    """
    given = [f"--{name}" for name in _OF_ENGINES if getattr(arguments, name) != [1]]
    given += ["--bucket"] if arguments.bucket is not None else []
    if given:
        raise ConfigError(f"--deltas: there are no engines in such a run, which {given[0]} is of; leave it out")
    quick, run = arguments.quick, run_id()
    found = DeltaSettings(
        run=run,
        nbytes=size_of("size", arguments.size, quick),
        processes=_QUICK_PROCESSES if quick else _PROCESSES,
        repeats=at_least(1, "repeats", arguments.repeats, _QUICK_REPEATS if quick else _REPEATS),
        warmup=at_least(1, "warmup", arguments.warmup, 1),
        output=arguments.output or Path("runs") / f"deltas-{run}",
    )
    if (needed := _COPIES * found.nbytes) > (limit := memory_limit().nbytes):
        raise ConfigError(
            f"--size: such a model would take {nbytes(needed)} of memory, and there are {nbytes(limit)}; ask for a "
            "smaller one"
        )
    return found
