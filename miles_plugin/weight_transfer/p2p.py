"""Peer to peer: Mooncake's Transfer Engine writes weights straight into the memory that engines registered.

Every trainer rank has every weight for a moment, when it was gathered, and writes a share of it: pieces of at most
`PIECE_BYTES`, each given to the rank that has the fewest bytes so far, by a rule that all ranks follow without asking.
A piece is written to every engine that holds it: over TCP from where it is, if the engine holds it as it is, else from
a registered stage, into which it is copied, cut as the engine holds it (`layout.py`). There are two stages: one is
written from while the other is filled. What an engine rank gets is written one stage after the other, so that each goes
its own pace, up to a stage behind or ahead of another.

Over TCP a write is complete when the engine's side says that the last byte is in its memory (Mooncake's acknowledged
framing; MC_TCP_PROTO=1 would turn that off), over RDMA when the device says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.weight_transfer.layout import Layout, LayoutMismatch, check_registered, check_served
from miles_plugin.weight_transfer.pieces import Piece, pieces
from miles_plugin.weight_transfer.sources import NamedTensor
from miles_plugin.weight_transfer.stage import Stage, Writes
from miles_plugin.weight_transfer.transfer import Bounds, Sent
from miles_plugin.weight_transfer.transfer_engine import start_transfer_engine
from mooncake_store.bounded import bounded

PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class _Peer:
    """An engine that can be written to. sessions, memory: by rank; memory: parameter -> (address, elements, width)."""

    address: EngineAddress
    layout: Layout
    sessions: tuple[str, ...]
    memory: tuple[Mapping[str, tuple[int, int, int]], ...]


class PeerWriter:
    """One trainer rank's side.

    Args:
        host: address of this rank's node, reachable from the engines.
        rank, size: of the trainer ranks.
        layout: of an engine with so many ranks; raises ConfigError where none is known.
        stage_bytes: that are written at a time to one engine rank, of which there are two. After each the processes
            that carry the bytes wait for one another: with 128 MiB two engines got 0.89 of a raw write's speed on two
            processors, with 512 MiB 0.99.
        workers: writes at a time. timeout: seconds that each may take.
        protocol: "tcp" or "rdma". device: where stages are; with RDMA "cuda" works without a copy to the host.
        device_name: of the RDMA device; empty: any.

    Raises:
        ConfigError: the Transfer Engine does not start.
    """

    def __init__(
        self,
        host: str,
        rank: int,
        size: int,
        layout: Callable[[int], Layout],
        stage_bytes: int,
        workers: int = 4,
        timeout: float = 30.0,
        protocol: str = "tcp",
        device: str = "cpu",
        device_name: str = "",
        piece_bytes: int = PIECE_BYTES,
        bounds: Bounds = Bounds(),  # noqa: B008  (frozen)
    ) -> None:
        self._rank, self._size, self._layout = rank, size, layout
        self._timeout, self._bounds = timeout, bounds
        self._stage_bytes, self._piece_bytes, self._device = stage_bytes, min(piece_bytes, stage_bytes), device
        self._in_place = protocol == "tcp"  # RDMA reads registered memory only
        self._transfer_engine = start_transfer_engine(host, protocol, device_name)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="p2p")
        self._peers: dict[EngineAddress, _Peer] = {}
        self._stages: list[Stage] = []
        self._latest: dict[tuple[str, int], Future[None]] = {}  # by engine and rank: its write that was asked for last
        # Writes that took too long, by URL: one that lands later would tear what a later update wrote.
        self._late: dict[str, list[threading.Event]] = {}
        self._abandoned: list[Stage] = []  # which those may still read

    def connect(self, engines: Sequence[EngineAddress]) -> Mapping[str, str]:
        """Learn where each engine's memory is, unless that is known of its present life."""
        self._forget_ended()
        peers: dict[EngineAddress, _Peer] = {}
        failed: dict[str, str] = {}
        meeting = {engine: self._pool.submit(self._meet, engine) for engine in engines if engine not in self._peers}
        for engine in engines:
            try:
                self._check_late(engine.url)
                peers[engine] = meeting[engine].result() if engine in meeting else self._peers[engine]
            except (EngineError, LayoutMismatch) as error:
                failed[engine.url] = str(error)
        self._peers = peers
        return failed

    def send(self, tensors: Iterable[NamedTensor]) -> Sent:
        """Write this rank's share of all weights. An engine that fails is written to no more."""
        failed: dict[str, str] = {}
        self._stages = self._stages or [self._new_stage(), self._new_stage()]
        try:
            nbytes = self._take(tensors, failed)
            self._start(self._stages[0], failed)
        finally:  # an update that raises leaves nothing for the next one to write
            self._stages = [self._finish(stage, failed) for stage in self._stages]
            self._latest = {}
        return Sent(nbytes, failed)

    def close(self) -> None:
        """Let go of the engines; idempotent."""
        self._peers = {}
        self._pool.shutdown()
        self._release(self._stages)

    def _meet(self, address: EngineAddress) -> _Peer:
        layout = self._layout(address.ranks)
        client = SGLangEngine(address.url, self._bounds.call)
        try:
            # Under some settings names and sizes agree, and yet other weights lie there.
            check_served(layout, client.server_info(), address.url)
            told = [client.registered_memory(rank) for rank in range(address.ranks)]
        finally:
            client.close()
        for rank, (_, memory) in enumerate(told):
            check_registered(layout, rank, memory)
        return _Peer(address, layout, tuple(session for session, _ in told), tuple(memory for _, memory in told))

    def _forget_ended(self) -> None:
        """Forget late writes that have ended, and the stages that they read when all have."""
        late = {url: [ended for ended in events if not ended.is_set()] for url, events in self._late.items()}
        self._late = {url: events for url, events in late.items() if events}
        if not self._late:
            self._release(self._abandoned)

    def _check_late(self, url: str) -> None:
        if url in self._late:
            raise EngineError(
                f"{url}: {len(self._late[url])} writes of an earlier update have not ended; they may land at any time"
            )

    def _take(self, tensors: Iterable[NamedTensor], failed: dict[str, str]) -> int:
        """Take in this rank's share, and write all but what comes last; bytes of all of it."""
        nbytes, shares = 0, [0] * self._size
        layouts = {peer.layout.tp: peer.layout for peer in self._peers.values()}
        counted = min(layouts, default=0)  # what engines of another size are sent besides are the same weights
        for name, tensor in tensors:
            for tp, layout in layouts.items():
                for piece in pieces(layout, name, tensor, self._piece_bytes):
                    whose = min(range(self._size), key=shares.__getitem__)
                    shares[whose] += piece.source.nbytes
                    if whose != self._rank:
                        continue
                    nbytes += piece.source.nbytes * (tp == counted)
                    here = self._stages[0].take(piece.source)
                    if here is None:
                        self._turn(failed)
                        here = self._stages[0].take(piece.source)
                        assert here is not None, "a piece is no longer than a stage"
                    for peer in self._peers.values():
                        if peer.layout.tp == tp:
                            _add(self._stages[0], peer, piece, here)
        return nbytes

    def _turn(self, failed: dict[str, str]) -> None:
        """Have what was taken into one stage written; the other one is filled next, when it was."""
        filled, written = self._stages
        self._start(filled, failed)
        self._stages = [written, filled]
        self._stages[0] = self._finish(written, failed)

    def _start(self, stage: Stage, failed: Mapping[str, str]) -> None:
        """Start what is to be written from a stage."""
        if stage.memory.is_cuda:
            torch.cuda.synchronize(stage.memory.device)
        by_url = {peer.address.url: peer for peer in self._peers.values()}
        for (url, rank), writes in stage.writes.items():
            if url not in failed:
                before = self._latest.get((url, rank))
                job = self._pool.submit(self._write, url, by_url[url].sessions[rank], writes, before)
                self._latest[url, rank] = job
                stage.writing.setdefault(url, []).append(job)
        stage.writes = {}

    def _finish(self, stage: Stage, failed: dict[str, str]) -> Stage:
        """Wait for what is written from a stage; an empty one, another if some write is late and may still read it."""
        for url, jobs in stage.writing.items():
            for job in jobs:
                try:
                    job.result()
                except EngineError as error:
                    failed[url] = str(error)
        if not self._late.keys().isdisjoint(stage.writing):
            self._abandoned.append(stage)
            return self._new_stage()
        stage.clear()
        return stage

    def _write(self, url: str, session: str, writes: Writes, before: Future[None] | None) -> None:
        # Not both at once: who waits for a write over TCP does so busily, and takes the time of those who carry it. Nor
        # is anything written behind one that failed, or is late.
        if before is not None:
            before.result()
        ended = threading.Event()

        def write() -> int:
            try:
                return int(
                    self._transfer_engine.batch_transfer_sync_write(session, writes.here, writes.there, writes.nbytes)
                )
            finally:
                ended.set()

        total = sum(writes.nbytes)
        code = bounded(write, self._timeout, "p2p write")
        if code is None:
            self._late.setdefault(url, []).append(ended)
            raise EngineError(
                f"{url}: a write of {total} bytes to {session} has not ended after {self._timeout:.0f} s "
                "(p2p_transfer_timeout)"
            )
        if code != 0:
            raise EngineError(f"{url}: a write of {total} bytes to {session} failed with code {code}")

    def _new_stage(self) -> Stage:
        return Stage(self._stage_bytes, self._device, self._register, self._in_place)

    def _release(self, stages: list[Stage]) -> None:
        while stages:
            self._transfer_engine.unregister_memory(stages.pop().memory.data_ptr())

    def _register(self, address: int, nbytes: int) -> None:
        code = self._transfer_engine.register_memory(address, nbytes)
        if code != 0:
            raise EngineError(f"the Transfer Engine refused to register {nbytes} bytes: code {code}")


def _add(stage: Stage, peer: _Peer, piece: Piece, here: int) -> None:
    for place in piece.places:
        address, _, width = peer.memory[place.rank][place.parameter]
        writes = stage.writes.setdefault((peer.address.url, place.rank), Writes())
        writes.here.append(here)
        writes.there.append(address + place.offset * width)
        writes.nbytes.append(piece.source.nbytes)
