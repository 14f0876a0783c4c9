"""`miles-mooncake holder`, `ls` and `sweep`: a store's memory and what is in it, without a job."""

import argparse
import json
import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from miles_plugin.report.units import nbytes
from mooncake_store import inventory
from mooncake_store.addresses import endpoints
from mooncake_store.claim import sweep, sweep_dead
from mooncake_store.client import MooncakeClient
from mooncake_store.config import (
    DEFAULTS,
    MASTER_VARIABLE,
    MISTAKEN_MASTER_VARIABLE,
    PROTOCOLS,
    VARIABLES,
    MooncakeConfig,
    fit_to_host,
    resolve,
)
from mooncake_store.errors import ConfigError
from mooncake_store.holder import serve
from mooncake_store.inventory import Lent, Metrics, Run
from mooncake_store.records import Records
from mooncake_store.segment import SegmentRecord

_PROG = "miles-mooncake"
_GIVEN_BY = "the command line"


def holder_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_PROG} holder",
        description="Lend this node's memory to a store, in the foreground, until Ctrl-C or SIGTERM. One per node is "
        "enough; jobs that find one start none of their own. What lies in it is gone when it ends.",
    )
    _add_store(parser)
    group = parser.add_argument_group("memory", "what is lent, for good")
    _add_setting(group, "global_segment_size", "SIZE", "bytes, or text such as 8gb")
    return parser


def run_holder(argv: Sequence[str]) -> None:
    """Lend memory until a signal; Ctrl-C is a KeyboardInterrupt, SIGTERM an ordinary end."""
    config = fit_to_host(_resolve(holder_parser().parse_args(argv)), contributes=True)
    if config.global_segment_size == 0:
        raise config.settings["global_segment_size"].complain("a segment holder lends memory; set a size, e.g. 8gb")

    def say(record: SegmentRecord) -> None:
        size = nbytes(record.nbytes)
        print(f"lending {size} as segment {record.name} to the master {config.master_server_address}", flush=True)

    if serve(config, uuid.uuid4().hex, say) == signal.SIGINT:
        raise KeyboardInterrupt


def ls_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_PROG} ls",
        description="List the runs that have something in a store, and who lends it memory. A run is dead when its "
        "process is seen to be gone, or, where it cannot be seen, its heartbeat does not change for 45 seconds: to say "
        "so takes as long.",
    )
    _add_store(parser)
    _add_metrics(parser)
    group = parser.add_argument_group("output", "how it is shown")
    group.add_argument("--json", action="store_true", help="one JSON object (default: tables)")
    return parser


def run_ls(argv: Sequence[str]) -> None:
    """Print the inventory."""
    arguments = ls_parser().parse_args(argv)
    config = _resolve(arguments)
    with _connected(config) as (client, records):
        metrics = _metrics(arguments, config)
        lent, runs = inventory.lent(client, records, metrics), inventory.runs(client, records, metrics)
    print(_json(runs, lent) if arguments.json else _text(runs, lent))


def sweep_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_PROG} sweep",
        description="Free what dead runs have left in a store. A run that is alive is never touched.",
    )
    _add_store(parser)
    _add_metrics(parser)
    group = parser.add_argument_group("runs", "which to sweep; one of the two is needed")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--dead", action="store_true", help="all that are dead (default: only the one of --run)")
    which.add_argument("--run", metavar="ID", help="this one; refused when it is alive (no default)")
    group.add_argument("--dry-run", action="store_true", help="say what would be freed, free nothing (default: free)")
    return parser


def run_sweep(argv: Sequence[str]) -> None:
    """Free what dead runs left, or list it, and say so; ConfigError for a living run."""
    arguments = sweep_parser().parse_args(argv)
    config = _resolve(arguments)
    with _connected(config) as (client, records):
        if arguments.dry_run:
            found = inventory.runs(client, records, _metrics(arguments, config))
            _say_what_would_go(found, arguments.run)
        elif arguments.run is not None:
            _say_what_went({arguments.run: sweep(client, records, arguments.run)})
        else:
            run_ids = inventory.run_ids(_metrics(arguments, config))
            _say_what_went(sweep_dead(client, records, run_ids))


def _say_what_would_go(runs: Sequence[Run], wanted: str | None) -> None:
    for run in runs:
        if run.alive and run.run_id == wanted:
            raise ConfigError(f"run {run.run_id!r} is alive ({run.owner}); end it first, then sweep")
    dead = [run for run in runs if not run.alive and wanted in (None, run.run_id)]
    for run in dead:
        print(f"run {run.run_id}: {_batches(run.batches)}, {nbytes(run.nbytes)} would be freed")
    if not dead:
        print("nothing to free")


def _say_what_went(freed: dict[str, int]) -> None:
    for run_id, objects in freed.items():
        print(f"run {run_id}: {objects} object{'s'[: objects != 1]} freed" if objects else f"run {run_id} left nothing")
    if not freed:
        print("nothing to free")


def _batches(number: int) -> str:
    return f"{number} batch{'es' if number != 1 else ''}"


def _add_store(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("store", "which one, and how this process reaches it")
    _add_setting(group, "master_server_address", "HOST:PORT", "the mooncake_master, or etcd://HOST:PORT")
    _add_setting(group, "protocol", f"{{{','.join(PROTOCOLS)}}}", "how bytes travel")
    _add_setting(group, "device_name", "NAMES", "RDMA devices, separated by commas")
    _add_setting(group, "local_hostname", "HOST", "under which other hosts reach this process")


def _add_setting(group: Any, name: str, metavar: str, meaning: str) -> None:
    default = "the address that leads to the master" if name == "local_hostname" else DEFAULTS[name] or "none"
    group.add_argument(
        f"--{name.replace('_', '-')}", metavar=metavar, help=f"{meaning} (default: {VARIABLES[name]}, else {default})"
    )


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("metrics", "where the master lists what is in the store")
    group.add_argument(
        "--metrics-url",
        metavar="URL",
        help=f"its HTTP port (default: http://HOST:{inventory.METRICS_PORT}, HOST as in the master's address)",
    )


def _resolve(arguments: argparse.Namespace) -> MooncakeConfig:
    given = {name: value for name, value in vars(arguments).items() if name in DEFAULTS}
    if not given["master_server_address"] and not {MASTER_VARIABLE, MISTAKEN_MASTER_VARIABLE} & os.environ.keys():
        raise ConfigError(f"no master is named: give --master-server-address HOST:PORT, or set {MASTER_VARIABLE}")
    return resolve(given, os.environ, given_by=_GIVEN_BY)


def _metrics(arguments: argparse.Namespace, config: MooncakeConfig) -> Metrics:
    host, _ = endpoints(config.master_server_address)[0]
    default = f"http://{f'[{host}]' if ':' in host else host}:{inventory.METRICS_PORT}"
    return Metrics(arguments.metrics_url or default, "--metrics-url")


@contextmanager
def _connected(config: MooncakeConfig) -> Iterator[tuple[MooncakeClient, Records]]:
    client = MooncakeClient.connect(config)
    try:
        yield client, Records(client)
    finally:
        client.close()


def _json(runs: Sequence[Run], lent: Sequence[Lent]) -> str:
    return json.dumps(
        {
            "runs": [asdict(run) | {"owner": str(run.owner) if run.owner else None} for run in runs],
            "segments": [
                {
                    "name": segment.name,
                    "used": segment.used,
                    "size": segment.size,
                    "holder": segment.holder.holder if segment.holder else None,
                    "pid": segment.holder.pid if segment.holder else None,
                    "epoch": segment.holder.epoch if segment.holder else None,
                }
                for segment in lent
            ],
        }
    )


def _text(runs: Sequence[Run], lent: Sequence[Lent]) -> str:
    run_rows = [
        [run.run_id, "alive" if run.alive else "dead", str(run.batches), nbytes(run.nbytes), str(run.owner or "nobody")]
        for run in runs
    ]
    lent_rows = [
        [
            segment.name,
            nbytes(segment.used),
            nbytes(segment.size),
            f"process {segment.holder.pid}" if segment.holder else "not a segment holder",
        ]
        for segment in lent
    ]
    return "\n\n".join(
        [
            _table(["run", "state", "batches", "bytes", "owner"], run_rows) if runs else "no run has anything here",
            _table(["segment", "used", "size", "holder"], lent_rows) if lent else "nobody lends memory",
        ]
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
