"""When a batch is removed: after its turn, in a fresh run when its variant ends; and room for what stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.progress import Steps
from benchmarks.transport import memory, roles, rounds, stage
from benchmarks.transport.peers import Held, Loaded, Peer, Room
from benchmarks.transport.recorder import Recorder
from benchmarks.transport.roles import ReadingRole, WritingRole
from benchmarks.transport.settings import PEERS, Settings, resolve
from benchmarks.transport.stage import Batch, Pair
from miles_plugin.bench_commands import BenchFailed, bench_parser
from mooncake_store.errors import ConfigError


@dataclass
class Store:
    """A store in this process. It holds `most` batches, and then forgets the oldest.

    Attributes:
        held: batches by ref.
        calls: what was asked of it, with how many batches it then held.
    """

    most: int = 1 << 20
    held: dict[int, Any] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    batch: dict[str, Any] = field(default_factory=dict)
    puts: int = 0

    def prepare(self, loaded: Loaded) -> None:
        self.batch = loaded.batch

    def put(self) -> int:
        self.puts += 1
        self.held[self.puts] = deepcopy(self.batch)
        while len(self.held) > self.most:
            del self.held[min(self.held)]
        self.calls.append(("put", len(self.held)))
        return self.puts

    def get(self, ref: int) -> Held:
        if ref not in self.held:
            raise BenchFailed(f"batch {ref} is gone")
        self.calls.append(("get", len(self.held)))
        return Held(dict(self.held[ref]), lambda: None)

    def remove(self, ref: int) -> None:
        del self.held[ref]
        self.calls.append(("remove", len(self.held)))

    def close(self) -> None:
        pass


class Here:
    """Implements `Process`: the object lives in this one."""

    def __init__(self, made: Any) -> None:
        self._made, self.pid = made, os.getpid()

    def wait(self) -> None:
        pass

    def start(self, method: str, *arguments: Any) -> Callable[[], Any]:
        result = self.call(method, *arguments)
        return lambda: result

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._made, method)(*arguments)

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass


def peer_of(name: str, store: Store) -> Peer:
    return Peer(name, name, lambda _service: store, lambda _service: store, 1.0)


def settings(peers: list[Peer], output: Path, *flags: str) -> Settings:
    found = resolve(bench_parser().parse_args(["transport", "--peers", "memcpy", "--output", str(output), *flags]))
    return replace(found, peers=tuple(peers))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    """Runs the rounds of peers that live in this process."""

    @contextmanager
    def pairs(peers: list[Peer], batch: Batch, *_: Any) -> Iterator[list[Pair]]:
        made = []
        for peer in peers:
            writer = WritingRole(peer, None)
            batch.loaded(peer, writer.load(batch.workload, batch.path))
            made.append(Pair(peer, [Here(writer)], [Here(ReadingRole(peer, None))]))
        yield made

    monkeypatch.setattr(stage, "pairs", pairs)
    monkeypatch.setattr(roles.gc, "collect", int)  # slow where all of pytest is looked through

    def measure(peers: list[Peer], *flags: str) -> Recorder:
        run = settings(peers, tmp_path, "--quick", "--samples", "3", "--variants", "numpy", *flags)
        recorder = Recorder(run)
        rounds.measure(run, {}, recorder, Steps(rounds.turns(run)))
        return recorder

    return measure


def test_a_batch_is_removed_before_the_next_is_put(measured: Callable[..., Recorder]) -> None:
    store, other = Store(), Store()
    recorder = measured([peer_of("one", store), peer_of("other", other)], "--repeats", "2", "--warmup", "1")
    assert store.calls == other.calls == [("put", 1), ("get", 1), ("remove", 0)] * 3
    assert not any(item.fresh for item in recorder.measurements)


def test_in_a_fresh_run_nothing_is_removed_before_its_variant_ends(measured: Callable[..., Recorder]) -> None:
    store, other = Store(), Store()
    recorder = measured([peer_of("one", store), peer_of("other", other)], "--fresh", "--repeats", "2")
    for calls in (store.calls, other.calls):
        assert calls[:6] == [(name, held) for held in (1, 2, 3) for name in ("put", "get")]
        assert calls[6:9] == [("get", 3)] * 3, "all are read again"
        assert calls[9:] == [("remove", 2), ("remove", 1), ("remove", 0)]
    assert all(item.fresh for item in recorder.measurements)
    counted = [(item.peer, item.round) for item in recorder.measurements if item.operation == "get"]
    assert sorted(counted) == [("one", 0), ("one", 1), ("other", 0), ("other", 1)], "the second reading is not timed"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_store_that_let_go_of_a_batch_ends_a_fresh_run(measured: Callable[..., Recorder], most: int) -> None:
    with pytest.raises(BenchFailed, match="batch 1 is gone"):
        measured([peer_of("one", Store()), peer_of("forgetful", Store(most=most))], "--fresh", "--repeats", "3")


def test_a_store_that_wrote_over_a_batch_ends_a_fresh_run(measured: Callable[..., Recorder]) -> None:
    store = Store()
    put = store.put

    def over() -> int:
        ref = put()
        store.held = dict.fromkeys(store.held, store.held[ref])
        return ref

    store.put = over  # type: ignore[method-assign]
    with pytest.raises(BenchFailed, match="not what was put in columns loss_masks, rollout_log_probs, tokens"):
        measured([peer_of("one", store)], "--fresh")


def test_every_variant_of_a_fresh_run_has_services_of_its_own(tmp_path: Path) -> None:
    flags = ("--variants", "numpy", "lists", "routed")
    parts = rounds.parts(settings([], tmp_path, *flags, "--fresh"))
    assert [[workload.variant for workload in part.workloads] for part in parts] == [["numpy"], ["lists"], ["routed"]]
    used = settings([], tmp_path, *flags)
    assert rounds.parts(used) == [used]


OURS = ("ours", "ours-verified", "ours-network")


@pytest.mark.parametrize(
    ("flags", "stored"),
    [
        ((), {"ours": 1, "raw": 1}),
        (("--fresh",), {"ours": 3 * 4, "raw": 4}),
        (("--fresh", "--repeats", "1", "--warmup", "2"), {"ours": 3 * 3, "raw": 3}),
    ],
)
def test_services_have_room_for_what_stays_and_buffers_for_one_batch(
    flags: tuple[str, ...], stored: dict[str, int], tmp_path: Path
) -> None:
    rooms: dict[str, Room] = {}

    @contextmanager
    def serve(name: str, room: Room) -> Iterator[None]:
        assert name not in rooms
        rooms[name] = room
        yield

    peers = [
        replace(PEERS[name], serve=lambda room, _directory, name=PEERS[name].service: serve(name, room))
        for name in (*OURS, "memcpy", "raw")
    ]
    run = settings(peers, tmp_path, "--variants", "numpy", "--samples", "8", *flags)
    (workload,) = run.workloads
    with stage.services(run.peers, rounds.capacity(run), rounds.kept(run), tmp_path):
        for name, batches in stored.items():
            assert rooms[name] == Room(workload.nbytes, batches * workload.nbytes)


def test_lists_have_room_for_numbers_of_eight_bytes(tmp_path: Path) -> None:
    run = settings([], tmp_path, "--variants", "lists", "--fresh", "--repeats", "1")
    (workload,) = run.workloads
    assert rounds.kept(run) == 2 * (workload.nbytes + workload.number_bytes())


def test_what_stays_counts_when_a_run_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = settings([PEERS[name] for name in (*OURS, "memcpy")], tmp_path, "--variants", "routed", "--fresh")
    (workload,) = run.workloads
    # The batch; segment, buffers and the target of a memcpy; what the three keep, one batch being in the footprint.
    need = (1 + 1.2 + 2.4 + 1.0 + 3 * 4 - 1) * workload.nbytes + 4 * memory._PROCESSES
    monkeypatch.setattr(memory, "available_bytes", lambda: int(need) + 8)
    rounds.capacity(run)
    monkeypatch.setattr(memory, "available_bytes", lambda: int(need) - 8)
    with pytest.raises(ConfigError, match=r"in the store of each.*fewer --repeats"):
        rounds.capacity(run)


def test_the_default_fresh_run_fits_into_twenty_gibibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = bench_parser().parse_args
    present = {name: replace(peer, missing=lambda: "") for name, peer in PEERS.items()}
    run = resolve(parse(["transport", "--fresh", "--variants", "numpy", "lists", "routed"]), present)
    monkeypatch.setattr(memory, "available_bytes", lambda: 20 << 30)
    monkeypatch.setattr(memory, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _path: SimpleNamespace(free=12 << 30))
    for part in rounds.parts(run):
        rounds.capacity(part)
