"""`miles-mooncake bench rdma`, given its parsed flags."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from benchmarks import measurements
from benchmarks.measurements import Measurement
from benchmarks.outcome import LINES, Outcome, prepare, tell
from benchmarks.processes import SpawnedProcess
from benchmarks.progress import Steps
from benchmarks.rdma import counters, plot, report
from benchmarks.rdma.baselines import Baseline, available
from benchmarks.rdma.control import Peer
from benchmarks.rdma.counters import Link
from benchmarks.rdma.service import serve
from benchmarks.rdma.settings import OPERATIONS, Case, Settings, host_and_port, resolve_settings
from benchmarks.rdma.worker import Worker
from benchmarks.recorder import Recorder
from miles_plugin.bench_commands import BenchFailed
from miles_plugin.interrupt import in_order, no_descendant_left
from mooncake_store.config import fit_to_host
from mooncake_store.holder import start_holder
from mooncake_store.master import master_command
from mooncake_store.process import ManagedProcess, free_ports

STORE, MARK = "store", "rdma"
# Of the bytes that were moved the part that the RDMA devices' own counters must have seen.
SEEN = 0.9


def run(arguments: argparse.Namespace) -> None:
    """Serve, or measure, write and print.

    Raises:
        ConfigError: a value that cannot be used, or a protocol without a device.
        BenchFailed: the other host failed, bytes were wrong, or RDMA was asked for and did not carry them.
    """
    if arguments.serve:
        listen = host_and_port("--listen", arguments.listen)
        with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as directory, no_descendant_left(), in_order():
            serve(listen, arguments.device, Path(directory), lambda text: print(text, flush=True))
        return
    settings = resolve_settings(arguments)
    fit_to_host(settings.config, contributes=False)
    old = prepare(arguments, MARK, settings.logs, {case.name: settings.load(case) for case in settings.cases})
    path = settings.output / LINES
    found, context = _measure(settings, path)
    text = report.text(found, context)

    def draw(directory: Path) -> Sequence[Path]:
        return plot.draw(found, context, directory)

    tell(arguments, Outcome(settings.output, path, MARK, found, (STORE,), text, draw), old)


def _measure(settings: Settings, path: Path) -> tuple[Sequence[Measurement], report.Context]:
    resource_tracker.ensure_running()
    with ExitStack() as stack:
        stack.enter_context(no_descendant_left())
        stack.enter_context(in_order())
        peer = Peer(settings.peer)
        stack.callback(peer.close)
        there = peer.ask("hello")
        steps = stack.enter_context(Steps(settings.repeats * len(settings.cases)))
        run = _Run(settings, peer, there, path, steps, stack)
        for reason in run.left_out:
            steps.say(f"not measured: {reason}")
        for case in settings.cases:
            run.measure(case)
        return run.found, run.context()


def check_counters(protocol: str, before: Link, after: Link, moved: int) -> None:
    """Raise BenchFailed when RDMA was asked for and the devices' own counters did not see what was moved."""
    seen = after.moved - before.moved
    if protocol == "rdma" and seen < SEEN * moved:
        raise BenchFailed(
            f"protocol rdma was asked for, but the counters of {after.name} grew by {seen} bytes while {moved} were "
            f"moved: they travelled another way, and these are no figures of RDMA; check MOONCAKE_DEVICE on both "
            f"hosts, and that Mooncake's wheel was built with RDMA"
        )


class _Run:
    """One measurement: what was started here, and what was found so far."""

    def __init__(
        self, settings: Settings, peer: Peer, there: Mapping[str, Any], path: Path, steps: Steps, stack: ExitStack
    ) -> None:
        self._settings, self._peer, self._there, self._steps = settings, peer, there, steps
        self._stack = stack
        self._recorder = Recorder(settings.run, path)
        self.found = self._recorder.measurements
        rpc, metrics = free_ports(2, settings.address)
        master = ManagedProcess(
            "mooncake_master", master_command(settings.address, rpc, metrics), settings.logs / "mooncake_master.log"
        )
        stack.callback(master.stop)
        self._config = replace(settings.config, master_server_address=f"{settings.address}:{rpc}")
        self._segments = self._lend()
        count = max(case.workers for case in settings.cases)
        self._workers = {
            where: [self._start(where, number, segment) for number in range(count)]
            for where, segment in self._segments.items()
        }
        self._baselines, self.left_out = available(settings, peer, there)

    def measure(self, case: Case) -> None:
        """All rounds of a case, baselines and store taking turns."""
        settings = self._settings
        for number in range(-settings.warmup, settings.repeats):
            if number >= 0:
                self._steps.next(f"{case.name}, round {number + 1} of {settings.repeats}")
            for operation in OPERATIONS:
                for baseline in self._baselines:
                    if operation in baseline.operations and case.placement == "peer":
                        self._measure_baseline(case, operation, baseline, number)
                self._measure_store(case, operation, number)

    def context(self) -> report.Context:
        settings = self._settings
        links = {"here": self._link(), "there": Link(**self._peer.ask("link", protocol=settings.protocol))}
        rates = [link.rate for link in links.values() if link.rate]
        return report.Context(
            run=settings.run,
            protocol=settings.protocol,
            here=str(self._recorder.machine),
            there=str(measurements.machine_of(self._there["machine"])),
            versions=self._recorder.versions,
            links=", ".join(f"{link.name} {where}" for where, link in links.items()),
            rate=min(rates) if len(rates) == len(links) else None,
            left_out=tuple(self.left_out),
        )

    # --- parts ------------------------------------------------------------------------------------------------------

    def _lend(self) -> dict[str, str]:
        """Segments by where they are."""
        settings, segments = self._settings, {}
        places = {case.placement for case in settings.cases}
        if "peer" in places:
            segments["peer"] = self._peer.ask(
                "lend",
                master=self._config.master_server_address,
                protocol=settings.protocol,
                nbytes=settings.segment_bytes,
            )["segment"]
        if "here" in places:
            config = replace(self._config, global_segment_size=settings.segment_bytes)
            holder = start_holder(fit_to_host(config, contributes=True), settings.logs / "holder.log")
            self._stack.callback(holder.stop)
            segments["here"] = holder.record.name
        return segments

    def _start(self, where: str, number: int, segment: str) -> SpawnedProcess:
        worker = SpawnedProcess(f"worker-{where}-{number}", self._settings.logs, Worker, self._config, segment)
        return self._stack.enter_context(worker)

    def _link(self) -> Link:
        return counters.read(self._settings.protocol, self._settings.config.device_name, self._settings.address)

    # --- measurements -----------------------------------------------------------------------------------------------

    def _measure_store(self, case: Case, operation: str, number: int) -> None:
        workers = self._workers[case.placement][: case.workers]
        there, before = self._peer.ask("cost")["cpu_seconds"], self._link()
        pending = [worker.start("run", case, operation, self._settings.round_bytes) for worker in workers]
        rounds = [result() for result in pending]
        there = self._peer.ask("cost")["cpu_seconds"] - there
        moved = sum(each.nbytes for each in rounds)
        if case.placement == "peer":
            check_counters(self._settings.protocol, before, self._link(), moved)
        self._add(
            case,
            STORE,
            operation,
            number,
            max(each.seconds for each in rounds),
            moved,
            latencies=[latency for each in rounds for latency in each.latencies],
            cpu_seconds={"here": sum(each.cpu_seconds for each in rounds), "there": there},
        )

    def _measure_baseline(self, case: Case, operation: str, baseline: Baseline, number: int) -> None:
        speed = baseline.bytes_per_second(case, operation)
        # As the seconds that the same bytes would take: runs are compared by seconds.
        moved = max(1, self._settings.round_bytes // case.payload) * case.payload * case.workers
        self._add(case, baseline.name, operation, number, moved / speed, moved)

    def _add(self, case: Case, who: str, operation: str, number: int, seconds: float, moved: int, **more: Any) -> None:
        if number < 0:  # a warm-up
            return
        self._recorder.add(
            settings=self._settings.load(case),
            variant=case.name,
            peer=who,
            operation=operation,
            round=number,
            seconds=seconds,
            bytes=moved,
            **more,
        )
