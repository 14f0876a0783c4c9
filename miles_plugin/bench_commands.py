"""`miles-mooncake bench`: measurements of this machine. What they do is in benchmarks/, which only a checkout has."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake_store.errors import ConfigError

_PROG = "miles-mooncake bench"
_CHECKOUT = Path(__file__).parents[1]
_PACKAGES = {"async": "fully_async"}  # a keyword is no name of a package


class BenchFailed(RuntimeError):
    """A measurement that cannot be believed, or a target that was missed; the message says which."""


def bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Measure this machine. Needs a checkout of the repository: the measurements are not installed.",
        epilog=f"`{_PROG} NAME --help` lists its flags and their defaults.",
    )
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME", help="what to measure")
    _add_transport(names)
    _add_rdma(names)
    _add_weights(names)
    _add_async(names)
    return parser


def run_bench(argv: Sequence[str]) -> None:
    """Run one benchmark.

    Raises:
        ConfigError: a value that cannot be used, or no checkout.
        BenchFailed: a peer failed, a payload was wrong, or with --check a target was missed.
    """
    arguments = bench_parser().parse_args(argv)
    _find_benchmarks()
    package = _PACKAGES.get(arguments.benchmark, arguments.benchmark)
    importlib.import_module(f"benchmarks.{package}.command").run(arguments)


def _find_benchmarks() -> None:
    """Make `benchmarks` importable; ConfigError when it is not there."""
    if not (_CHECKOUT / "benchmarks" / "__init__.py").exists():
        raise ConfigError(
            f"there are no benchmarks beside {_CHECKOUT / 'miles_plugin'}: they are not installed. Clone the "
            "repository, `pip install -e .[cpu,train]` in the clone, and run the command again"
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.insert(0, str(_CHECKOUT))


def _add_transport(names: Any) -> None:
    parser = names.add_parser(
        "transport",
        help="how long a rollout batch takes from one process to another, beside Ray and Mooncake's own transfer",
        description="Put a rollout batch in one process and get it in another, by this transport, by others and at the "
        "machine's limits, in rounds in which all take turns. Every batch that was read is compared with what was put. "
        "Prints a table; writes JSON lines, the table as Markdown and a plot. docs/benchmarks.md says what is timed.",
    )
    load = parser.add_argument_group("load", "the batch that is moved")
    load.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="rows of the batch (default: 512; with --quick 32, with --scaling 4096)",
    )
    load.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        metavar=("LO", "HI"),
        help="of a sample, uniform between (default: 1024 8192; with --quick 128 1024, with --scaling 128 384)",
    )
    load.add_argument(
        "--payload-gib",
        type=float,
        metavar="GIB",
        help="as many samples as make a batch of this size, instead of --samples (default: by --samples)",
    )
    load.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help="what the values are: numpy, torch, lists, or routed, which is numpy with routed experts (default: all; "
        "with --quick numpy lists, with --scaling numpy)",
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of the batch's contents (default: 0)")
    how = parser.add_argument_group("measurement", "what is measured, and how often")
    how.add_argument(
        "--peers",
        nargs="+",
        metavar="NAME",
        help="ours, ours-verified, ours-network, ray, bundle, bundle-own, transfer-queue, memcpy, raw (default: all "
        "that are installed; with --fresh ours ray bundle memcpy, with --scaling ours ours-network ray)",
    )
    how.add_argument(
        "--repeats", type=int, metavar="N", help="rounds (default: 9; with --quick, --fresh or --scaling 3)"
    )
    how.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="rounds before those (default: 2; with --quick, --fresh or --scaling 1)",
    )
    how.add_argument(
        "--quick", action="store_true", help="a run of seconds that proves only that it works (default: off)"
    )
    how.add_argument(
        "--fresh",
        action="store_true",
        help="remove no batch before its variant ends, and start stores anew for the next, so that every put lands in "
        "memory that its store has not used; takes the memory of all its batches (default: off: a batch is removed "
        "after its turn, and its memory used again)",
    )
    how.add_argument(
        "--scaling",
        action="store_true",
        help="instead, how cost grows: 1 to 64 batches outstanding, 10 to 100,000 samples, 1 to 8 readers "
        "(default: off)",
    )
    output = _add_output(parser, "transport")
    output.add_argument("--check", action="store_true", help="end with status 1 when a target is missed (default: 0)")


def _add_rdma(names: Any) -> None:
    parser = names.add_parser(
        "rdma",
        help="objects between two hosts over any protocol, beside the link and Mooncake's raw transfer engine",
        description="Put objects into the memory of another host and get them back, by the store's client, in rounds "
        "in which Mooncake's transfer_engine_bench, a plain socket, and iperf3 and ib_write_bw where both hosts have "
        "them, take turns. On the other host start `miles-mooncake bench rdma --serve` first. Prints a table; writes "
        "JSON lines, the table as Markdown and a plot. With --protocol rdma the devices' own counters must have seen "
        "the bytes.",
    )
    hosts = parser.add_argument_group("hosts", "which of the two this is")
    hosts.add_argument("--serve", action="store_true", help="be the other host, until Ctrl-C (default: measure)")
    hosts.add_argument(
        "--listen", default="0.0.0.0", metavar="HOST[:PORT]", help="with --serve, where to (default: 0.0.0.0:50060)"
    )
    hosts.add_argument("--peer", metavar="HOST[:PORT]", help="the host that serves (default port: 50060)")
    hosts.add_argument(
        "--address", metavar="HOST", help="of this host, for the other one (default: the one that leads to --peer)"
    )
    hosts.add_argument(
        "--protocol", metavar="{tcp,rdma}", help="how bytes travel (default: MOONCAKE_PROTOCOL, else rdma)"
    )
    hosts.add_argument(
        "--device", metavar="NAMES", help="RDMA devices of this host, on each its own (default: MOONCAKE_DEVICE)"
    )
    load = parser.add_argument_group("load", "what is moved; of several values every combination")
    load.add_argument(
        "--sizes", nargs="+", metavar="SIZE", help="of an object (default: 64kb 1mb 16mb 64mb; with --quick 64kb 1mb)"
    )
    load.add_argument(
        "--batch", nargs="+", type=int, default=[1], metavar="N", help="objects that an operation moves (default: 1)"
    )
    load.add_argument(
        "--workers", nargs="+", type=int, default=[1], metavar="N", help="processes that put or get (default: 1)"
    )
    load.add_argument(
        "--placement",
        nargs="+",
        default=["peer"],
        metavar="{peer,here}",
        help="whose memory it lies in (default: peer)",
    )
    load.add_argument(
        "--registration",
        nargs="+",
        default=["warm"],
        metavar="{warm,cold}",
        help="of the memory it is sent from: before, or every time (default: warm)",
    )
    how = parser.add_argument_group("measurement", "how often")
    how.add_argument("--repeats", type=int, metavar="N", help="rounds (default: 5; with --quick 2)")
    how.add_argument("--warmup", type=int, metavar="N", help="rounds before those (default: 1)")
    how.add_argument(
        "--round-bytes", metavar="SIZE", help="that a worker moves in a round (default: 256mb; with --quick 8mb)"
    )
    how.add_argument(
        "--quick", action="store_true", help="a run of seconds that proves only that it works (default: off)"
    )
    _add_output(parser, "rdma")


def _add_weights(names: Any) -> None:
    parser = names.add_parser(
        "weights",
        help="how fast new weights reach engines, by mode, beside what this machine can do at most",
        description="Bring stand-in engines to the weights of a synthetic Qwen3, by broadcast (gloo) and peer to peer "
        "(tcp), in rounds in which raw writes of Mooncake's Transfer Engine, one broadcast of torch, a plain socket "
        "and a copy in memory take turns. After every turn the engines' checksums must be those of what was sent. "
        "With --deltas, instead, make and apply what changed between two versions, by disk-delta's encodings and by "
        "what there is without them; all of it is compared bit by bit. Prints tables; writes JSON lines, the tables as "
        "Markdown and a plot. docs/benchmarks.md says what is timed.",
    )
    load = parser.add_argument_group("load", "who sends what to whom; of several numbers every combination")
    load.add_argument(
        "--size",
        metavar="SIZE",
        help="of the model in bfloat16, about (default: 1.2 GB, a Qwen3-0.6B; with --quick 20 MB)",
    )
    load.add_argument("--engines", nargs="+", type=int, default=[1], metavar="N", help="that are updated (default: 1)")
    load.add_argument(
        "--tp", nargs="+", type=int, default=[1], metavar="N", help="tensor-parallel ranks of an engine (default: 1)"
    )
    load.add_argument(
        "--ranks", nargs="+", type=int, default=[1], metavar="N", help="processes of the trainer (default: 1)"
    )
    load.add_argument(
        "--bucket",
        metavar="SIZE",
        help="that is sent at a time (default: the job's --update-weight-buffer-size, 512mb)",
    )
    how = parser.add_argument_group("measurement", "how often")
    how.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="rounds (default: 7; with --quick 2); with --deltas turns of each of five processes (default: 3; with "
        "--quick 1, of two)",
    )
    how.add_argument("--warmup", type=int, default=1, metavar="N", help="rounds or turns before those (default: 1)")
    how.add_argument(
        "--quick", action="store_true", help="a run of seconds that proves only that it works (default: off)"
    )
    how.add_argument(
        "--deltas",
        action="store_true",
        help="instead, disk-delta: each encoding beside xor by numpy, zstd-1 and xxh3-128, of 1 and 5 %% of the values "
        "and of a step of AdamW; then published and materialized; written to runs/deltas-<run id> (default: off)",
    )
    output = _add_output(parser, "weights")
    output.add_argument("--check", action="store_true", help="end with status 1 when a target is missed (default: 0)")


def _add_async(names: Any) -> None:
    parser = names.add_parser(
        "async",
        help="samples per second of fully asynchronous training beside synchronous, and what the simulation says",
        description="Run the rollout manager as a job does, once in turn with training and once beside it, by each "
        "bound, against a stand-in engine whose samples take long-tailed times, the same in all modes; training and "
        "the transfer of weights are waited for. In rounds in which all take turns. Then simulate the same loop from "
        "what was measured of the synchronous turns. Prints tables; writes JSON lines, the tables as Markdown and a "
        "plot. docs/benchmarks.md says what is real.",
    )
    load = parser.add_argument_group("load", "what takes how long")
    load.add_argument(
        "--generation-seconds",
        metavar="DIST",
        help="of a sample, as `simulate async` has it (default: lognormal:0.4,0.8,3.2; with --quick "
        "lognormal:0.05,0.8,0.4)",
    )
    load.add_argument(
        "--step-seconds", type=float, metavar="X", help="of a training step (default: 1.2; with --quick 0.1)"
    )
    load.add_argument(
        "--update-seconds",
        type=float,
        metavar="X",
        help="that weights travel while engines are paused (default: 0.1; with --quick 0.01)",
    )
    loop = parser.add_argument_group("loop", "settings of the job")
    loop.add_argument(
        "--rollout-batch-size", type=int, metavar="N", help="groups of a step (default: 8; with --quick 4)"
    )
    loop.add_argument(
        "--n-samples-per-prompt", type=int, metavar="N", help="samples of a group (default: 4; with --quick 2)"
    )
    loop.add_argument(
        "--max-weight-staleness",
        nargs="+",
        default=["2", "4"],
        metavar="VALUES",
        help="of the asynchronous turns, each its own; or `none` (default: 2 4)",
    )
    loop.add_argument(
        "--async-data-buffer-capacity-factor",
        type=float,
        default=1.0,
        metavar="X",
        help="rollout batches of finished groups that may wait (default: 1)",
    )
    how = parser.add_argument_group("measurement", "how often")
    how.add_argument("--steps", type=int, metavar="N", help="of a turn that are measured (default: 8; with --quick 3)")
    how.add_argument(
        "--warmup-steps", type=int, metavar="N", help="before those, in each turn (default: 3; with --quick 1)"
    )
    how.add_argument("--repeats", type=int, metavar="N", help="rounds (default: 3; with --quick 1)")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and times (default: 0)")
    how.add_argument(
        "--quick", action="store_true", help="a run of seconds that proves only that it works (default: off)"
    )
    output = _add_output(parser, "async")
    output.add_argument("--check", action="store_true", help="end with status 1 when a target is missed (default: 0)")


def _add_output(parser: argparse.ArgumentParser, name: str) -> Any:
    output = parser.add_argument_group("output", "what becomes of it")
    output.add_argument("--output", type=Path, metavar="DIR", help=f"where to write (default: runs/{name}-<run id>)")
    output.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="measurements.jsonl of an earlier run of the same load: print what changed (default: nothing)",
    )
    output.add_argument(
        "--document",
        type=Path,
        metavar="FILE",
        help="replace what lies between the marks of this benchmark in a Markdown file (default: none)",
    )
    return output
