"""The turns of a round: an update in each mode, without and with proof, and each limit; all of them verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.processes import SpawnedProcess
from benchmarks.weights import model
from benchmarks.weights.limits import FORMS, Far, Near
from benchmarks.weights.settings import Case, Settings
from benchmarks.weights.trainer import BROADCAST, HOST, MODES, P2P, Plan, Took, Trainer
from miles_plugin.bench_commands import BenchFailed
from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.stand_in.process import StandIn
from mooncake_store.process import free_ports

# Seconds by operation: "transfer" of a limit, every phase of an update.
Seconds = Mapping[str, float]
PROVEN = {mode: f"{mode}, proven" for mode in MODES}
RAW_BROADCAST, SOCKET, MEMCPY = "raw broadcast", "socket", "memcpy"
RAW_WRITES = {form: f"raw write, {form}" for form in FORMS}
LIMITS = {BROADCAST: (RAW_BROADCAST,), P2P: tuple(RAW_WRITES.values())}


class Stage:
    """Everything that one case needs, running; `turns` by the name of who takes it.

    Attributes:
        nbytes: of the model.
    """

    def __init__(self, settings: Settings, case: Case, logs: Path, stack: ExitStack) -> None:
        config = model.config_of(settings.nbytes)
        checkpoint = logs / "checkpoint"
        model.save(config, checkpoint)
        self.nbytes = model.size_of(config)
        engines = []
        for number in range(case.engines):
            engine = StandIn(checkpoint, logs / f"engine-{number}.log", host=HOST, tp=case.tp, transfer_engine=True)
            stack.callback(engine.stop)
            engines.append(engine)
        self._engines = [EngineAddress(engine.url, case.tp) for engine in engines]
        port, limits_port = free_ports(2, HOST)
        plans = [
            Plan(rank, case.ranks, port, checkpoint, case.tp, settings.bucket_bytes, settings.workers)
            for rank in range(case.ranks)
        ]
        self._trainers = [_start(stack, f"trainer-{plan.rank}", logs, Trainer, plan) for plan in plans]
        self._near = _start(stack, "near", logs, Near, self.nbytes, limits_port)
        self._far = _start(stack, "far", logs, Far, self.nbytes, limits_port)
        for process in (*self._trainers, self._near, self._far):  # which meet: all are started before the first wait
            process.wait()
        self.turns: dict[str, Callable[[], Seconds]] = {
            **{mode: partial(self._update, mode, False) for mode in MODES},
            **{name: partial(self._update, mode, True) for mode, name in PROVEN.items()},
            **{name: partial(self._write, form) for form, name in RAW_WRITES.items()},
            RAW_BROADCAST: self._broadcast,
            SOCKET: self._send,
            MEMCPY: self._copy,
        }

    def _update(self, mode: str, prove: bool) -> Seconds:
        running = [trainer.start("update", mode, self._engines, prove) for trainer in self._trainers]
        took: Took
        took, *_ = [result() for result in running]
        if not prove:
            self._trainers[0].call("verify", self._engines)
        return took.seconds

    def _write(self, form: str) -> Seconds:
        self._change()
        seconds = self._near.call("write", self._engines, form)
        self._near.call("verify", self._engines)
        return {"transfer": seconds}

    def _broadcast(self) -> Seconds:
        return self._to_far("join_broadcast", "broadcast")

    def _send(self) -> Seconds:
        return self._to_far("receive", "send", self._far.call("port"))

    def _copy(self) -> Seconds:
        return {"transfer": self._near.call("copy")}

    def _to_far(self, there: str, here: str, *arguments: object) -> Seconds:
        expected = self._change()
        receiving = self._far.start(there)
        seconds = self._near.call(here, *arguments)
        receiving()
        if self._far.call("digest") != expected:
            raise BenchFailed(f"{here}: other bytes arrived than were sent")
        return {"transfer": seconds}

    def _change(self) -> str:
        return str(self._near.call("change"))


@contextmanager
def stage(settings: Settings, case: Case, number: int) -> Iterator[Stage]:
    """Start what a case needs, and end it."""
    logs = settings.logs / f"case-{number}"
    logs.mkdir(parents=True)
    with ExitStack() as stack:
        running = Stage(settings, case, logs, stack)
        yield running


def _start(stack: ExitStack, name: str, logs: Path, make: Callable[..., object], *arguments: object) -> SpawnedProcess:
    process = SpawnedProcess(name, logs, make, *arguments)
    stack.callback(process.kill)
    return process
