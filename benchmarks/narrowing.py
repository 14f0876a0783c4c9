"""What storing integers as the narrowest that hold them costs and saves: the measurement behind `compact = "auto"`.

    python -m benchmarks.narrowing [--repeats 9]

First without a network: what laying out, writing and reading take longer, from which follows the speed of a link below
which the saved bytes are worth it. Then over loopback TCP, both ways turn by turn. docs/benchmarks.md has what this
printed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transport import ours
from benchmarks.transport.peers import Room
from benchmarks.turns import batches_to_measure, milliseconds, seconds_in_turns
from mooncake_store import ObjectStore, open_store
from mooncake_store.arrays import Bytes
from mooncake_store.decode import AtHand, Selection, read
from mooncake_store.encode import encode

WAYS = {"as they are": False, "narrowed": True}


def main() -> None:
    for variant, batch, repeats in batches_to_measure(__doc__):
        sizes = {way: encode(batch, narrow=narrow).nbytes for way, narrow in WAYS.items()}
        print(f"{variant}: {' against '.join(f'{size / 1e6:.1f} MB {way}' for way, size in sizes.items())}")
        saved = sizes["as they are"] - sizes["narrowed"]
        if saved:
            without_network(batch, saved, repeats)
            over_loopback(batch, max(sizes.values()), repeats)


def without_network(batch: Mapping[str, Any], saved: int, repeats: int) -> None:
    """Print what narrowing and widening take, and the speed of a link from which on they are not worth it."""
    stored = {way: np.ones(encode(batch, narrow=narrow).nbytes, dtype=np.uint8) for way, narrow in WAYS.items()}
    wide: dict[int, Bytes] = {}  # warm, like the buffers that a store keeps; one column of a batch is large

    def spare(nbytes: int) -> Bytes:
        if nbytes not in wide:
            wide[nbytes] = np.ones(nbytes, dtype=np.uint8)
        return wide[nbytes]

    def put(way: str) -> None:
        encode(batch, narrow=WAYS[way]).write_into(stored[way])

    def get(way: str) -> None:
        read(AtHand(stored[way], spare=spare), Selection())

    for what, step in (("put", put), ("get", get)):
        found = seconds_in_turns(repeats, {way: partial(step, way) for way in WAYS})
        more = found["narrowed"].median - found["as they are"].median
        pays = f"pays below {saved / more / 1e9:.1f} GB/s" if more > 0 else "costs nothing"
        print(f"  {what} without a network: {milliseconds(found)}: {pays}")


def over_loopback(batch: Mapping[str, Any], nbytes: int, repeats: int) -> None:
    """Print how long puts and gets take over TCP."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ours.serve(Room(nbytes, 2 * nbytes), Path(directory)) as init_kwargs,
    ):
        stores = {way: network_store(init_kwargs, narrow) for way, narrow in WAYS.items()}
        try:
            for what in ("put", "get"):
                steps = {way: partial(transfer, store, batch, what) for way, store in stores.items()}
                found = seconds_in_turns(repeats, steps)
                ratio = found["as they are"].median / found["narrowed"].median
                print(f"  {what} over loopback TCP: {milliseconds(found)}: as they are takes {ratio:.2f} times as long")
        finally:
            for store in stores.values():
                store.close()


def network_store(init_kwargs: Mapping[str, Any], narrow: bool) -> ObjectStore:
    compact = "always" if narrow else "never"
    return open_store("mooncake", {**init_kwargs, "share_memory": False, "compact": compact}, contribute_segment=False)


def transfer(store: ObjectStore, batch: Mapping[str, Any], what: str) -> float:
    """Seconds of the put or of the get of a put and a get."""
    began = time.perf_counter()
    ref = store.put(batch)
    done = time.perf_counter()
    with store.get(ref):
        got = time.perf_counter()
    store.remove(ref)
    return done - began if what == "put" else got - done


if __name__ == "__main__":
    main()
