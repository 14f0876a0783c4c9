"""One weight update, whatever carries the bytes:

    allocate -> prepare (engines serve) -> pause -> flush -> begin -> transfer -> stamp -> end -> verify
    -> announce -> resume -> commit

Where engines load what was delivered beside them, they serve during the transfer too, and then load and are stamped at
once:

    allocate -> prepare -> transfer (engines serve) -> pause -> flush -> load -> verify -> announce -> resume -> commit

An engine is stamped where only one that took all of it can be, within the session or with the load, and says the number
before it resumes: so one that was started anew meanwhile, from its checkpoint, is found out.

Every engine must confirm every step. One that fails leaves the rotation, and the update goes on with the others: it
may hold a mixture of two policies, so it is not resumed and gets no request before it has confirmed a later update,
which sends it everything again. The manager knows a version before the first engine resumes with it, so no sample can
carry a version that the manager has not heard of. Where no engine is left, or a trainer rank fails, the update raises:
its engines stay paused, and its number is a hole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from miles_plugin.engines.fleet import EngineAddress, Left
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.weight_transfer.ranks import Ranks, Steps
from miles_plugin.weight_transfer.sources import NamedTensor, Source
from mooncake_store.errors import StoreError

Result = TypeVar("Result")
PHASES = ("prepare", "pause", "flush", "transfer", "verify", "activate", "resume", "converge")


class UpdateFailed(EngineError):
    """No engine took an update; the message says why, engine by engine."""


@dataclass(frozen=True)
class Bounds:
    """Seconds that engines get: to say that they are there, for a request, to join a process group, to join one alone,
    all together to find out who joins whom where not all do, for a bucket."""

    answer: float = 10.0
    call: float = 60.0
    join: float = 60.0
    alone: float = 15.0
    search: float = 300.0
    bucket: float = 300.0


@dataclass(frozen=True)
class Sent:
    """What one rank sent.

    nbytes: of weights, once, whatever the number of engines. failed: why, by the engine's URL. broken: why engines that
    did not fail must be connected anew and sent everything; empty if they have it. share: what a delivery is told.
    """

    nbytes: int
    failed: Mapping[str, str] = field(default_factory=dict)
    broken: str = ""
    share: Any = None


class Transport(Protocol):
    """How weights travel. There is one on every trainer rank; each method is called on all ranks at once."""

    def connect(self, engines: Sequence[EngineAddress]) -> Mapping[str, str]:
        """Make ready to send to these engines and no others, while they serve. Bounded.

        Returns why it failed, by URL; those engines are left out.
        """

    def send(self, tensors: Iterable[NamedTensor]) -> Sent:
        """Send all weights, and return when every engine that did not fail has them. Takes `tensors` to its end."""

    def close(self) -> None:
        """Let go of the engines; idempotent."""


@dataclass(frozen=True)
class Delivered:
    """What came of a delivery.

    nbytes: that were written, of `of` bytes of weights. failed: why engines do not have them, by URL.
    """

    nbytes: int
    of: int
    failed: Mapping[str, str] = field(default_factory=dict)


class Delivery(Protocol):
    """A transport that leaves weights where engines load them from. It is on every rank, as the transport, whose `send`
    then writes what changed."""

    def begin(self, version: int) -> None:
        """On every rank: what is sent next is this version."""

    def wants_all(self, sent: Sequence[Sent]) -> bool:
        """On rank 0, told what every rank sent: whether what changed is not enough."""

    def send_all(self) -> Sent:
        """On every rank, if so: write all weights, as `send` took them."""

    def deliver(self, version: int, sent: Sequence[Sent], engines: Sequence[EngineAddress]) -> Delivered:
        """On rank 0: bring what all ranks sent to the engines' hosts. Bounded."""

    def abandon(self, version: int) -> None:
        """On rank 0, when no rank is in a step any more: a version that was begun comes to nothing."""

    def load(self, engine: SGLangEngine, version: int) -> None:
        """On rank 0, of each engine to whose host it was brought: load it, as `version`. Raises EngineError."""


class Authority(Protocol):
    """Who hands out policy versions, as trainer rank 0 calls it; see `miles_plugin.version`."""

    def allocate(self) -> int: ...
    def verify(self, version: int, /) -> None:
        """Raise VersionFenced unless the number is still this trainer's to give to engines."""

    def announce(self, version: int, /) -> None: ...
    def commit(self, version: int, confirmed: Sequence[str], left: Sequence[Left], /) -> None: ...


class Proof(Protocol):
    """What engines must hold after an update."""

    def add(self, name: str, tensor: torch.Tensor, /) -> None:
        """One more of the weights that are sent."""

    def check(self, engine: SGLangEngine, /) -> int:
        """Raise EngineError unless `engine` holds all that was added; return how many tensors were compared."""


@dataclass(frozen=True)
class WeightUpdate:
    """What one update did.

    Attributes:
        nbytes: that travelled, once, whatever the number of engines.
        density: share of the model's bytes that travelled.
        seconds: by phase; `converge` is from the first step to the last engine's resuming.
        confirmed: URLs of the engines that serve it.
        left: the engines that failed.
        proven: tensors that each engine was proven to hold; 0 unless that was asked for.
    """

    version: int
    nbytes: int
    density: float
    seconds: dict[str, float]
    confirmed: tuple[str, ...]
    left: tuple[Left, ...]
    proven: int = 0


@dataclass(frozen=True)
class Updater:
    """Updates weights. There is one on every trainer rank, and all are called at once.

    Attributes:
        transport: this rank's.
        ranks: the trainer ranks.
        authority: on rank 0, None on the others.
        pause_mode: what becomes of requests in flight: abort, retract or in_place. After an update beside frozen ones
            later requests may share a prefix that the old weights computed.
        prove: makes what engines are checked against after an update; None: they are not.
        delivery: of a transport that leaves weights where engines load them from, itself; None of others.
        progress: told on rank 0 how many bytes were taken from the source so far.
        clients: of the engines, by URL; they stay between updates.
        served: what each engine said it serves when it confirmed an update. reborn: how often one said something else
            before the next, and so was started anew, which nobody may have noticed.
    """

    transport: Transport
    ranks: Ranks
    authority: Authority | None
    pause_mode: str
    prove: Callable[[], Proof] | None = None
    delivery: Delivery | None = None
    progress: Callable[[int], None] | None = None
    bounds: Bounds = Bounds()
    clients: dict[str, SGLangEngine] = field(default_factory=dict)
    served: dict[str, str] = field(default_factory=dict)
    reborn: Counter[str] = field(default_factory=Counter)

    def update(self, source: Source, engines: Sequence[EngineAddress] = ()) -> WeightUpdate | None:
        """Bring engines to the weights of `source`, under a new version; collective.

        Args:
            source: gives all weights, anew each time that it is called; the same on every rank.
            engines: as rank 0 knows them.

        Returns what was done on rank 0, None on the others.

        Raises:
            UpdateFailed: no engine took it.
            RankFailed, RuntimeError: a trainer rank failed.
            VersionFenced: another trainer has taken over.
        """
        if self.authority is None:
            steps: dict[str, Callable[..., Any]] = {"send": lambda: self.transport.send(source())}
            self.ranks.follow(steps | self.own_steps())
            return None
        try:
            return _Update(self, self.authority, source, engines).run()
        finally:
            self.ranks.dismiss()

    def own_steps(self) -> dict[str, Callable[..., Any]]:
        """What every rank does alike when rank 0 says so."""
        steps: dict[str, Callable[..., Any]] = {"connect": self.transport.connect}
        if self.delivery is not None:
            steps |= {"begin": self.delivery.begin, "send all": self.delivery.send_all}
        return steps

    def client(self, url: str) -> SGLangEngine:
        if url not in self.clients:
            self.clients[url] = SGLangEngine(url, self.bounds.call)
        return self.clients[url]

    def close(self) -> None:
        """Let go of the engines; idempotent."""
        self.transport.close()
        while self.clients:
            self.clients.popitem()[1].close()


class _Update:
    """One update, on rank 0."""

    def __init__(
        self, settings: Updater, authority: Authority, source: Source, engines: Sequence[EngineAddress]
    ) -> None:
        self._settings, self._authority, self._source = settings, authority, source
        self._engines = list(engines)
        self._left: list[Left] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._proof: Proof | None = None
        self._pool = ThreadPoolExecutor(max(1, len(engines)), thread_name_prefix="update")
        self._steps: Steps = {"send": lambda: settings.transport.send(self._observed()), **settings.own_steps()}

    def run(self) -> WeightUpdate:
        pause_mode, delivery = self._settings.pause_mode, self._settings.delivery
        with self._pool, self._timed("converge"):
            version = self._authority.allocate()
            with self._timed("prepare"):
                self._greet()
                self._connect()
            if delivery is not None:
                with self._timed("transfer"):
                    nbytes, of = self._deliver(delivery, version)
            self._authority.verify(version)
            with self._timed("pause"):
                self._on_each("pause", lambda engine: engine.pause(pause_mode))
            with self._timed("flush"):
                self._on_each("flush", _flush_unless_busy if pause_mode == "in_place" else _flush)
            if delivery is None:
                with self._timed("transfer"):
                    self._on_each("begin", _begin)
                    nbytes = of = self._transfer()
                self._authority.verify(version)  # a transfer takes long
                with self._timed("activate"):
                    self._on_each("stamp", lambda engine: engine.stamp(version))
                    self._on_each("end", lambda engine: engine.end_update())
            else:
                with self._timed("activate"):
                    self._on_each("load", lambda engine: delivery.load(engine, version))
            with self._timed("verify"):
                proven = self._verify()
            with self._timed("activate"):
                self._authority.announce(version)
            with self._timed("resume"):
                self._on_each("resume", lambda engine: _resume(engine, version))
        confirmed = tuple(engine.url for engine in self._engines)
        self._settings.served.update(dict.fromkeys(confirmed, str(version)))
        self._authority.commit(version, confirmed, self._left)
        density = nbytes / of if of else 1.0
        return WeightUpdate(version, nbytes, density, self._seconds, confirmed, tuple(self._left), proven)

    def _greet(self) -> None:
        """Leave out who does not answer, and take who was started anew since its last update for another engine."""
        # One that hangs, and is offered every update, must not hold each up for long.
        seconds, served, reborn = self._settings.bounds.answer, self._settings.served, self._settings.reborn
        versions = self._on_each("prepare", lambda engine: engine.weight_version(seconds))
        for engine, version in zip(self._engines, versions, strict=True):
            reborn[engine.url] += served.get(engine.url, version) != version
        self._engines = [replace(engine, life=engine.life + reborn[engine.url]) for engine in self._engines]

    def _connect(self) -> None:
        for failed in self._settings.ranks.take(self._steps, "connect", self._engines):
            self._drop("prepare", failed)

    def _deliver(self, delivery: Delivery, version: int) -> tuple[int, int]:
        """Write what changed, or all, and have it brought to the engines' hosts; bytes written, and of how many."""
        ranks = self._settings.ranks
        self._proof = self._settings.prove() if self._settings.prove is not None else None
        try:
            ranks.take(self._steps, "begin", version)
            sent: list[Sent] = ranks.take(self._steps, "send")
            if delivery.wants_all(sent):
                sent = ranks.take(self._steps, "send all")
            delivered = delivery.deliver(version, sent, self._engines)
        except BaseException:
            with suppress(StoreError):  # the place may be what failed; what is left there does no harm
                delivery.abandon(version)
            raise
        self._drop("transfer", delivered.failed)
        return delivered.nbytes, delivered.of

    def _transfer(self) -> int:
        """Send until all engines that are left have everything; bytes sent."""
        blameless = 0  # attempts that failed for no engine's sake
        while True:
            self._connect()  # without those that left since
            self._proof = self._settings.prove() if self._settings.prove is not None else None
            sent: list[Sent] = self._settings.ranks.take(self._steps, "send")
            engines = self._engines
            for each in sent:
                self._drop("transfer", each.failed)
            broken = [each.broken for each in sent if each.broken]
            if not broken:
                return sum(each.nbytes for each in sent)
            blameless += self._engines == engines
            if blameless > 1:
                self._drop("transfer", dict.fromkeys((each.url for each in engines), broken[0]))

    def _observed(self) -> Iterator[NamedTensor]:
        """The source, as it goes past who counts and who proves."""
        progress, taken = self._settings.progress, 0
        for name, tensor in self._source():
            if self._proof is not None:
                self._proof.add(name, tensor)
            taken += tensor.nbytes
            if progress is not None:
                progress(taken)
            yield name, tensor

    def _verify(self) -> int:
        proof = self._proof
        if proof is None:
            return 0
        return min(self._on_each("verify", lambda engine: proof.check(engine)))

    def _on_each(self, phase: str, action: Callable[[SGLangEngine], Result]) -> list[Result]:
        """Do one thing on every engine at once; those on which it fails leave. What it returned on the others."""
        jobs = {each.url: self._pool.submit(action, self._settings.client(each.url)) for each in self._engines}
        failed, results = {}, []
        for url, job in jobs.items():
            try:
                results.append(job.result())
            except EngineError as error:
                failed[url] = str(error)
        self._drop(phase, failed)
        return results

    def _drop(self, phase: str, failed: Mapping[str, str]) -> None:
        gone = [each for each in self._engines if each.url in failed]
        self._left += [Left(each.url, phase, failed[each.url]) for each in gone]
        self._engines = [each for each in self._engines if each.url not in failed]
        if not self._engines:
            reasons = "; ".join(map(str, self._left)) or "the run has none"
            raise UpdateFailed(f"no engine took the weight update: {reasons}")

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - started


def _flush(engine: SGLangEngine) -> None:
    engine.flush_cache()


def _flush_unless_busy(engine: SGLangEngine) -> None:
    """Requests that are frozen keep what was computed for them, and with it the whole cache; without any it goes, so
    that nobody who asks later attends to what the old weights computed."""
    try:
        engine.flush_cache()
    except EngineError as error:
        if error.status != 400:
            raise


def _resume(engine: SGLangEngine, version: int) -> None:
    if (served := engine.weight_version()) != str(version):
        raise EngineError(f"{engine.url} serves version {served!r}, not {version}: it was started anew meanwhile")
    engine.resume()


def _begin(engine: SGLangEngine) -> None:
    """Open an update; one that was left open by an update that failed is closed first."""
    try:
        engine.begin_update()
    except EngineError as error:
        if error.status != 400:
            raise
        engine.end_update()
        engine.begin_update()
