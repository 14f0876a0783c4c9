"""What a run of weight updates was asked for, checked before anything is started."""

from __future__ import annotations

import argparse
import time
import uuid
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.report.units import nbytes
from mooncake_store.config import parse_size
from mooncake_store.errors import ConfigError
from mooncake_store.memory import memory_limit

FULL = "full"  # what travels: every weight of the model
_BYTES, _QUICK_BYTES = 1_200_000_000, 20_000_000
_RANKS = (1, 2, 4, 8)  # of an engine: what the model's heads can be shared out to


@dataclass(frozen=True)
class Case:
    """Who takes part. engines: each of `tp` ranks. ranks: of the trainer."""

    engines: int
    tp: int
    ranks: int

    @property
    def name(self) -> str:
        parts = ["1 engine" if self.engines == 1 else f"{self.engines} engines"]
        parts += [f"tp {self.tp}"] if self.tp > 1 else []
        parts += [f"{self.ranks} trainer ranks"] if self.ranks > 1 else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        nbytes: of the model, about. bucket_bytes: that are sent at a time. workers: that write peer to peer.
        repeats, warmup: rounds.
    """

    run: str
    cases: tuple[Case, ...]
    nbytes: int
    bucket_bytes: int
    workers: int
    repeats: int
    warmup: int
    output: Path

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    def memory(self, case: Case) -> int:
        """Bytes that a case takes: the model in every engine and trainer rank, three times for the limits; buckets."""
        buckets = (case.engines * case.tp + 2) * min(self.bucket_bytes, self.nbytes)
        return (case.engines + case.ranks + 3) * self.nbytes + buckets

    def load(self, case: Case) -> dict[str, Any]:
        """What two runs must have in common to be compared."""
        return {
            "what": FULL, "engines": case.engines, "tp": case.tp, "ranks": case.ranks, "size": self.nbytes,
            "bucket": self.bucket_bytes, "workers": self.workers,
        }  # fmt: skip


def resolve(arguments: argparse.Namespace) -> Settings:
    """Check the flags; the job's own defaults hold for what a job would be told.

    Raises:
        ConfigError: a value that cannot be used, with what is allowed.
    """
    quick, job = arguments.quick, TrainConfig.model_fields
    for name, values in (("engines", arguments.engines), ("ranks", arguments.ranks)):
        for value in values:
            at_least(1, name, value, 1)
    if wrong := [tp for tp in arguments.tp if tp not in _RANKS]:
        raise ConfigError(f"--tp {wrong[0]}: allowed are {', '.join(map(str, _RANKS))}")
    run = run_id()
    found = Settings(
        run=run,
        cases=tuple(Case(*each) for each in product(arguments.engines, arguments.tp, arguments.ranks)),
        nbytes=size_of("size", arguments.size, quick),
        bucket_bytes=_size("bucket", arguments.bucket, job["update_weight_buffer_size"].default),
        workers=job["p2p_transfer_num_workers"].default,
        repeats=at_least(1, "repeats", arguments.repeats, 2 if quick else 7),
        warmup=at_least(0, "warmup", arguments.warmup, 1),
        output=arguments.output or Path("runs") / f"weights-{run}",
    )
    for case in found.cases:
        if (needed := found.memory(case)) > (limit := memory_limit().nbytes):
            raise ConfigError(
                f"--size: {case.name} would take {nbytes(needed)} of memory, and there are {nbytes(limit)}; ask for a "
                "smaller model, or for fewer engines or ranks"
            )
    return found


def run_id() -> str:
    """Of a run that starts now."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def at_least(least: int, flag: str, given: int | None, default: int) -> int:
    """What a flag says, or its default. Raises ConfigError below `least`."""
    value = default if given is None else given
    if value < least:
        raise ConfigError(f"--{flag} {value}: allowed is a whole number of at least {least}")
    return value


def size_of(flag: str, given: str | None, quick: bool) -> int:
    """Bytes of the model that a flag asks for. Raises ConfigError when it cannot be read."""
    return _size(flag, given, _QUICK_BYTES if quick else _BYTES)


def _size(flag: str, given: str | None, default: int) -> int:
    if given is None:
        return default
    try:
        size = parse_size(given)
    except ConfigError as error:
        raise ConfigError(f"--{flag} {given}: {error}") from error
    if size < 1:
        raise ConfigError(f"--{flag} {given}: allowed is at least one byte")
    return size
