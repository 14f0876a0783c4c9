"""What a run was asked for, checked before anything is started."""

from __future__ import annotations

import argparse
import importlib.util
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.transport import bundle_transfer, limits, ours, ray_objects, transfer_queue
from benchmarks.transport.peers import Peer
from benchmarks.transport.workload import VARIANTS, Workload, samples_for
from mooncake_store.errors import ConfigError

PEERS = {
    peer.name: peer for module in (ours, ray_objects, bundle_transfer, transfer_queue, limits) for peer in module.PEERS
}
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class Defaults:
    """Of flags that were not given."""

    samples: int = 512
    tokens: tuple[int, int] = (1024, 8192)
    variants: tuple[str, ...] = VARIANTS
    peers: tuple[str, ...] | None = None  # None: all that can be measured here
    repeats: int = 9
    warmup: int = 2


FULL = Defaults()
QUICK = Defaults(32, (128, 1024), ("numpy", "lists"), None, 3, 1)
SCALING = Defaults(4096, (128, 384), ("numpy",), ("ours", "ours-network", "ray"), 3, 1)
FRESH_PEERS = ("ours", "ray", "bundle", "memcpy")  # whom the targets name: every batch of every other stays, too


@dataclass(frozen=True)
class Settings:
    """A run.

    Attributes:
        run: its id.
        workloads: one per variant.
        peers: in the order of tables.
        skipped: what was left out, and why.
        repeats, warmup: rounds.
        quick, fresh, scaling: which kind of run it is.
        output: directory for what it writes.
    """

    run: str
    workloads: tuple[Workload, ...]
    peers: tuple[Peer, ...]
    skipped: tuple[str, ...]
    repeats: int
    warmup: int
    quick: bool
    fresh: bool
    scaling: bool
    output: Path

    @property
    def logs(self) -> Path:
        """Directory of what the processes print."""
        return self.output / "logs"

    def load(self, workload: Workload) -> dict[str, int]:
        """What determines the load beside its variant, by name: two runs can be compared where these are equal."""
        return workload.load() | ({"fresh": True} if self.fresh else {})


def resolve(arguments: argparse.Namespace, known: Mapping[str, Peer] = PEERS) -> Settings:
    """The settings that the flags ask for.

    Args:
        arguments: as `miles_plugin.bench_commands` parses them.
        known: the peers there are, by name.

    Raises:
        ConfigError: a value that cannot be used, with the flag and what is allowed.
    """
    if arguments.fresh and arguments.scaling:
        raise ConfigError("--fresh and --scaling are two kinds of run; give one of them")
    defaults = SCALING if arguments.scaling else QUICK if arguments.quick else FULL
    if arguments.fresh:
        defaults = replace(defaults, peers=FRESH_PEERS, repeats=3, warmup=1)
    shortest, longest = arguments.tokens or defaults.tokens
    if not 2 <= shortest <= longest <= _MAX_TOKENS:
        raise ConfigError(f"--tokens {shortest} {longest}: allowed is 2 <= LO <= HI <= {_MAX_TOKENS}")
    if arguments.samples is not None and arguments.payload_gib is not None:
        raise ConfigError("--samples and --payload-gib both say how large the batch is; give one of them")
    if arguments.payload_gib is not None and not 0 < arguments.payload_gib < 1024:
        raise ConfigError(f"--payload-gib {arguments.payload_gib:g}: allowed is more than 0 and less than 1024")
    variants = _chosen("--variants", arguments.variants or defaults.variants, VARIANTS)
    if "torch" in variants and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "--variants torch: torch is not installed; pip install miles-mooncake[train], or leave it out"
        )
    asked = arguments.peers or defaults.peers
    peers, skipped = _available([known[name] for name in _chosen("--peers", asked or known, known)], asked is not None)
    samples = _at_least(1, "--samples", arguments.samples, defaults.samples)

    def samples_of(variant: str) -> int:
        gib = arguments.payload_gib
        return samples if gib is None else samples_for(gib, variant, shortest, longest)

    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    return Settings(
        run=run,
        workloads=tuple(Workload(name, samples_of(name), shortest, longest, arguments.seed) for name in variants),
        peers=tuple(peers),
        skipped=tuple(skipped),
        repeats=_at_least(1, "--repeats", arguments.repeats, 3 if arguments.quick else defaults.repeats),
        warmup=_at_least(1, "--warmup", arguments.warmup, defaults.warmup),
        quick=arguments.quick,
        fresh=arguments.fresh,
        scaling=arguments.scaling,
        output=arguments.output or Path("runs") / f"transport-{run}",
    )


def _chosen(flag: str, asked: Iterable[str], known: Iterable[str]) -> list[str]:
    allowed = list(known)
    for name in asked:
        if name not in allowed:
            raise ConfigError(f"{flag} {name}: allowed are {', '.join(allowed)}")
    return [name for name in allowed if name in set(asked)]


def _available(peers: Sequence[Peer], named: bool) -> tuple[list[Peer], list[str]]:
    """Those that can be measured; of the others why not. ConfigError when one of them was asked for by name."""
    reasons = {peer.name: peer.missing() for peer in peers}
    skipped = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if skipped and named:
        raise ConfigError(f"--peers {skipped[0]}")
    return [peer for peer in peers if not reasons[peer.name]], skipped


def _at_least(least: int, flag: str, given: int | None, default: int) -> int:
    value = default if given is None else given
    if value < least:
        raise ConfigError(f"{flag} {value}: allowed is at least {least}")
    return value
