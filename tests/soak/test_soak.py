"""A load of batches for as long as is asked, with faults that must be survived: nothing is lost, wrong or leaked.

    pytest tests/soak --soak-seconds 3600

Two runs put into one holder's memory. The writer of the steady one lives to the end; that of the other is killed and
replaced under the same run id. Of four readers two map the memory and two use the network; one of each is killed and
replaced. The master is restarted at its address. One line of JSON at the end says what was done and found.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake_store import BatchRef, IntegrityError, MasterProcess, ObjectLost, ObjectNotFound
from mooncake_store.holder import KEEP_SECONDS
from tests.integration.store.store_children import Child
from tests.integration.store.store_services import MIB, batches, holding, keys, metric
from tests.soak import soak_processes as say

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SEGMENT = "128mb"  # room for what both writers may have outstanding, published again at any moment
GAP = (1.0, 12.0)  # seconds between two faults
DRAIN = 600.0  # seconds within which readers and writers come to rest; far above every bound
# What the end of a killed writer's run may do to its batches: they are swept, or not published again, or their memory
# is given away under a view, which is told.
EXPECTED = {ObjectNotFound.__name__, ObjectLost.__name__, IntegrityError.__name__}
# Growth that is not one: what differs between two moments of rest.
ALLOWED = say.Figures(private=16 * MIB, fds=8, threads=4)
ALLOWED_KEYS = 8  # requests of after a restart, which stay until the next


@dataclass(eq=False)
class Party:
    """A writer or reader, and what it said of itself last."""

    name: str
    child: Child
    figures: say.Figures | None = None
    killed: bool = False

    def tell(self, message: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # why it ended is read from it
            self.child.send(message)


@dataclass
class Batch:
    """An acknowledged batch, and what its readers have yet to say: what they found, and that their views are gone."""

    writer: Party
    nbytes: int
    open: dict[str, int]


@dataclass
class Counts:
    batches: int = 0
    bytes: int = 0
    gets: int = 0
    retries: int = 0
    restarts: int = 0
    readers_killed: int = 0
    writers_killed: int = 0
    evicted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lost_with_their_writer: Counter[str] = field(default_factory=Counter)


class Soak:
    """Starts the processes, passes on what they say, injects faults, and keeps the books."""

    def __init__(self, directory: Path, seed: int, stack: ExitStack, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._directory, self._stack, self._rng = directory, stack, random.Random(seed)
        self.counts, self.broken = Counts(), list[str]()
        self.master = MasterProcess(directory / "master.log")
        stack.callback(lambda: self.master.stop())
        self.holder = stack.enter_context(holding(self.master.address, directory, SEGMENT))
        self._segments = _segments(self.holder.record.pid)
        self._batches: dict[str, Batch] = {}
        self._readers_started = 0
        self._faults = ["reader", "master", "writer", "reader"]  # the first of them, so that a short soak has each
        self.steady_writer, self.writer = self._writer("steady"), self._writer("mortal")
        self.steady_readers = [self._reader(share_memory=True), self._reader(share_memory=False)]
        self.readers = [self._reader(share_memory=True), self._reader(share_memory=False)]
        self._tell_readers()

    # --- processes --------------------------------------------------------------------------------------------------

    def _start(self, name: str, function: Callable[..., None], *arguments: Any) -> Party:
        child = Child(function, self.master.address, *arguments)
        self._stack.callback(child.kill)
        return Party(name, child)

    def _writer(self, run_id: str) -> Party:
        return self._start(run_id, say.write, run_id, self._rng.getrandbits(64))

    def _reader(self, share_memory: bool) -> Party:
        self._readers_started += 1
        name = f"{'mapped' if share_memory else 'network'} {self._readers_started}"
        return self._start(name, say.read, self._rng.getrandbits(64), share_memory)

    @property
    def _writers(self) -> list[Party]:
        return [self.steady_writer, self.writer]

    @property
    def _all_readers(self) -> list[Party]:
        return self.steady_readers + self.readers

    def _tell_readers(self) -> None:
        for writer in self._writers:
            writer.tell(say.Readers([reader.name for reader in self._all_readers]))

    # --- what they say ----------------------------------------------------------------------------------------------

    def pump(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Pass on messages for so long, or until something holds; whether it does."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return until()
            parties = {party.child.connection: party for party in self._writers + self._all_readers}
            for connection in wait(list(parties), min(left, 0.2)):
                party = parties[connection]  # type: ignore[index]
                try:
                    message = party.child.receive()
                except EOFError:
                    raise AssertionError(f"{party.name} ended: {party.child.process.exitcode}") from None
                self._take(party, message)
        return True

    def _take(self, party: Party, message: object) -> None:
        match message:
            case say.Put(ref, digest, readers):
                self._announce(party, BatchRef.from_json(ref), digest, readers)
            case say.Outcome():
                self._found(party, message)
                self._close(message.key, party.name)
            case say.Gone(key):
                batch = self._batches[key]
                if not batch.writer.killed:
                    batch.writer.tell(say.Acknowledge(key, party.name))
                self._close(key, party.name)
            case say.Refused(error):
                self.counts.refused[error] += 1
            case say.Figures():
                party.figures = message

    def _announce(self, writer: Party, ref: BatchRef, digest: str, readers: list[str]) -> None:
        self.counts.batches += 1
        self.counts.bytes += ref.nbytes
        living = {reader.name: reader for reader in self._all_readers}
        wanted = [name for name in readers if name in living]
        if wanted:
            self._batches[ref.key] = Batch(writer, ref.nbytes, dict.fromkeys(wanted, 2))
        for name in readers:
            if name in living:
                living[name].tell(say.Read(ref.to_json(), digest))
            else:
                writer.tell(say.Acknowledge(ref.key, name))

    def _found(self, reader: Party, outcome: say.Outcome) -> None:
        self.counts.retries += outcome.retries
        batch = self._batches[outcome.key]
        if outcome.found == say.RIGHT:
            self.counts.gets += 1
        elif batch.writer.killed and outcome.found in EXPECTED:
            self.counts.lost_with_their_writer[outcome.found] += 1
        else:
            self.broken.append(
                f"{reader.name}: batch {outcome.key} of {batch.nbytes} bytes is {outcome.found} {outcome.detail}"
            )
            self._tell(self.broken[-1])

    def _close(self, key: str, reader: str) -> None:
        left = self._batches[key].open
        left[reader] -= 1
        if not left[reader]:
            self._forget(key, reader)

    def _forget(self, key: str, reader: str) -> None:
        left = self._batches[key].open
        left.pop(reader, None)
        if not left:
            del self._batches[key]

    # --- faults -----------------------------------------------------------------------------------------------------

    def load(self, seconds: float, report: Callable[[], None]) -> None:
        """Let them work for so long, with faults at random moments."""
        began = time.monotonic()
        fault, told = began + self._rng.uniform(*GAP), began
        while (now := time.monotonic()) < began + seconds:
            if now >= fault:
                self._next_fault()
                fault = time.monotonic() + self._rng.uniform(*GAP)
            if now >= told + max(seconds / 50, 10.0):
                report()
                told = now
            self.pump(min(fault, began + seconds) - time.monotonic())

    def _next_fault(self) -> None:
        if not self._faults:
            self._faults = self._rng.sample(["master", "writer", "reader", "reader"], 4)
        {"master": self._restart, "writer": self._kill_writer, "reader": self._kill_reader}[self._faults.pop(0)]()

    def _restart(self) -> None:
        """Restart the master, perhaps late, perhaps once more before everybody has noticed."""
        for _ in range(self._rng.choice([1, 1, 2])):
            self.counts.restarts += 1
            self.counts.evicted += int(metric(self.master, "master_evicted_key_count"))
            self.master.stop()
            self.pump(self._rng.choice([0.0, 0.0, 3.0]) * self._rng.random())
            self.master = MasterProcess(self._directory / "master.log", ports=self.master.ports)
            self.pump(3.0 * self._rng.random())

    def _kill_writer(self) -> None:
        self.counts.writers_killed += 1
        self.writer.killed = True
        self.writer.child.kill()
        self.writer = self._writer("mortal")
        self._tell_readers()

    def _kill_reader(self) -> None:
        self.counts.readers_killed += 1
        place = self._rng.randrange(len(self.readers))
        dead = self.readers[place]
        dead.child.kill()
        for key in [key for key, batch in self._batches.items() if dead.name in batch.open]:
            self._forget(key, dead.name)
        self.readers[place] = self._reader(share_memory=dead.name.startswith("mapped"))
        self._tell_readers()
        for writer in self._writers:
            writer.tell(say.Died(dead.name))

    # --- rest -------------------------------------------------------------------------------------------------------

    def rest(self) -> tuple[dict[str, say.Figures], int]:
        """Let all batches be read and freed; what the processes that are never killed take then, and keys left."""
        for parties in (self._writers, self._all_readers):  # readers have read all when writers have nothing left
            for party in parties:
                party.figures = None
                party.tell(say.Measure())
            came = self.pump(DRAIN, lambda: not _silent(parties))  # noqa: B023
            assert came, f"{_silent(parties)} did not come to rest; still open: {self._open()}; {self.broken}"
        assert self.pump(DRAIN, lambda: not self._batches), f"still open: {self._open()}"
        assert self.pump(DRAIN, lambda: not batches(self.master)), f"nobody needs {batches(self.master)[:5]}"
        pid = self.holder.record.pid
        given_back = self.pump(KEEP_SECONDS + 30, lambda: _segments(pid) == self._segments)
        assert given_back, (
            f"the holder has {_segments(pid)} descriptors of segments open, {self._segments} at the start"
        )
        found = {party.name: party.figures for party in [self.steady_writer, *self.steady_readers]}
        figures = {name: said for name, said in found.items() if said is not None}
        return {**figures, "holder": say.figures_of(psutil.Process(pid))}, len(keys(self.master))

    def _open(self) -> list[tuple[str, list[str]]]:
        return [(key, list(batch.open)) for key, batch in list(self._batches.items())[:5]]

    def resume(self) -> None:
        for writer in self._writers:
            writer.tell(say.Resume())

    def end(self) -> None:
        self.counts.evicted += int(metric(self.master, "master_evicted_key_count"))
        for party in self._writers + self._all_readers:
            party.tell(say.End())


def _silent(parties: list[Party]) -> list[str]:
    return [party.name for party in parties if party.figures is None]


def _segments(pid: int) -> int:
    """How many descriptors of segments a process has open; Mooncake has one of its own for each."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(entry))
    return sum("mooncake_segment" in link for link in links)


def _growth(before: dict[str, say.Figures], after: dict[str, say.Figures]) -> dict[str, say.Figures]:
    return {
        name: say.Figures(
            after[name].private - was.private, after[name].fds - was.fds, after[name].threads - was.threads
        )
        for name, was in before.items()
    }


def test_soak(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    seconds = float(request.config.getoption("--soak-seconds"))
    seed = request.config.getoption("--soak-seed")
    seed = secrets.randbits(32) if seed is None else int(seed)

    def tell(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="", flush=True)

    tell(f"soak of {seconds:g} s, seed {seed}")
    began = time.monotonic()

    def report() -> None:
        tell(f"{time.monotonic() - began:.0f} s: {json.dumps(vars(soak.counts))}, {len(soak.broken)} broken")

    with ExitStack() as stack:
        soak = Soak(tmp_path, seed, stack, tell)
        soak.load(seconds / 4, report)  # the warm-up
        before, keys_before = soak.rest()
        soak.resume()
        soak.load(seconds * 3 / 4, report)
        after, keys_after = soak.rest()
        soak.end()
    growth = _growth(before, after)
    summary = {
        "soak_seconds": seconds,
        "seed": seed,
        **vars(soak.counts),
        "broken": len(soak.broken),
        "keys": [keys_before, keys_after],
        "growth": {name: asdict(grown) for name, grown in growth.items()},
        "at_the_end": {name: asdict(figures) for name, figures in after.items()},
    }
    tell(json.dumps(summary) + "\n")
    assert not soak.broken
    assert soak.counts.evicted == 0
    assert keys_after <= keys_before + ALLOWED_KEYS
    for name, grown in growth.items():
        assert grown.private <= ALLOWED.private, name
        assert grown.fds <= ALLOWED.fds, name
        assert grown.threads <= ALLOWED.threads, name
