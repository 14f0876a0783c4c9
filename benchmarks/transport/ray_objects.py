"""`ray.put` and `ray.get` between two actors."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.transport.peers import Held, Loaded, Peer, Room

_STORED = 1.4  # of the object store per byte it holds: from 80 % on Ray moves objects to the disk
_FREED = 0.8  # and for the batch before, which is not gone at once when it is freed
_EXTRA = 128 << 20


class RayWriter:
    """Implements `Writer`; a ref is a list, since Ray would replace a bare reference by what it refers to."""

    def __init__(self, _service: None) -> None:
        self._batch: dict[str, Any] = {}
        self._refs: list[Any] = []

    def prepare(self, loaded: Loaded) -> None:
        self._batch = loaded.batch

    def put(self) -> list[Any]:
        import ray

        return [ray.put(self._batch)]

    def remove(self, ref: list[Any]) -> None:
        """Nothing: Ray frees an object when no process holds its reference."""

    def close(self) -> None:
        self._batch = {}


class RayReader:
    """Implements `Reader`."""

    def __init__(self, _service: None) -> None:
        pass

    def get(self, ref: list[Any]) -> Held:
        import ray

        return Held(ray.get(ref[0]), lambda: None)

    def close(self) -> None:
        pass


@contextmanager
def cluster(room: Room) -> Iterator[None]:
    """A Ray of our own, which this process is connected to."""
    from miles_plugin.cluster import NodeSpec, local_cluster

    checkout = str(Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, before]))  # of the workers
    try:
        nbytes = int(_STORED * room.stored + _FREED * room.moved) + _EXTRA
        with local_cluster(NodeSpec(cpus=2, object_store_bytes=nbytes), []):
            yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def missing() -> str:
    """Why Ray cannot be measured here."""
    return "" if importlib.util.find_spec("ray") else "ray is not installed: pip install miles-mooncake[train]"


PEERS = (Peer("ray", "ray.put / ray.get", RayWriter, RayReader, 1.2, on_ray=True, missing=missing),)
