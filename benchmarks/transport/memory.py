"""Memory: what a put takes beyond the copy that it stores, and whether a run fits into this machine."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.transport.peers import Peer
from miles_plugin.report.units import nbytes as show
from mooncake_store.errors import ConfigError
from mooncake_store.memory import available_bytes

_EVERY_SECONDS = 0.001
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROCESSES = 160 << 20  # bytes that the two processes of a peer take without a batch
_OBJECT = 33  # bytes per item that Python's lists take more than the numbers they hold, the lists' own included
_SHARED_MEMORY = Path("/dev/shm")


class PeakMemory:
    """Within the block, sample the memory of another process that is its own.

    Attributes:
        extra: bytes by which it rose above what it was before, at most; known when the block has ended.

    Files and named memory are left out: where a transport shares memory, the stored copy lies in it. Anonymous memory
    is not, even where it is mapped as if to share it, as Python's mmap does.
    """

    extra: int

    def __init__(self, pid: int) -> None:
        self._statm, self._smaps = Path(f"/proc/{pid}/statm"), Path(f"/proc/{pid}/smaps")
        self._unnamed_before = self._unnamed()
        self._before = self._peak = self._private()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.extra = max(self._peak, self._private()) - self._before + self._unnamed() - self._unnamed_before

    def _sample(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            self._peak = max(self._peak, self._private())

    def _private(self) -> int:
        _, resident, shared, *_ = map(int, self._statm.read_text().split())
        return (resident - shared) * _PAGE

    def _unnamed(self) -> int:
        """Resident bytes of anonymous memory that statm counts as shared."""
        nbytes, counts = 0, False
        for line in self._smaps.read_text().splitlines():
            first, *others = line.split()
            if not first.endswith(":"):
                counts = others[4:] == ["/dev/zero", "(deleted)"]
            elif first == "Rss:" and counts:
                nbytes += int(others[0]) * 1024
        return nbytes


def check_fits(payload: int, items: int, peers: Sequence[Peer], variant: str, readers: int = 1, kept: int = 0) -> None:
    """Raise ConfigError when the peers together take more memory than there is now.

    Args:
        payload: bytes of what is moved at a time.
        items: Python objects that it consists of where it is lists.
        readers: of the batch at a time.
        kept: bytes that each peer leaves in its store, if it has one.
    """
    per_peer = sum(int(peer.footprint * payload) + _PROCESSES + (readers - 1) * _PROCESSES // 2 for peer in peers)
    stores = Counter(peer.service for peer in peers if peer.reader)
    per_store = sum(max(sharing * kept - payload, 0) for sharing in stores.values())  # one batch is in the footprint
    lists = items * _OBJECT * (len(peers) + 2) if variant == "lists" else 0
    need, have = payload + per_peer + per_store + lists, available_bytes()
    if need > have:
        staying, less = (f", {show(kept)} of it in the store of each", " fewer --repeats,") if kept else ("", "")
        raise ConfigError(
            f"variant {variant!r}: a batch of {show(payload)} takes about {show(need)} with {len(peers)} peers at a "
            f"time{staying}, {show(have)} are available; measure fewer --peers or --variants,{less} or a smaller batch"
        )
    on_ray = sum(int(peer.footprint * payload) + max(kept - payload, 0) for peer in peers if peer.name == "ray")
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    if on_ray > free:
        raise ConfigError(
            f"Ray's object store takes {show(on_ray)} of {_SHARED_MEMORY}, which has {show(free)} free: enlarge it "
            "(of a container: --shm-size), leave out --peers ray, or measure a smaller batch"
        )
