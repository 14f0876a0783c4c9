"""A backend in memory, and a batch to put into it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mooncake_store import BatchRef, ObjectNotFound
from mooncake_store.backends import BackendOptions, Loan, Payload, Placed, Result, Stored
from mooncake_store.decode import AtHand

BATCH = {"tokens": [[1, 2], [3]], "weight_versions": [["4"], ["6"]], "rollout_ids": [8, 8], "round_number": 1}


class Memory:
    """A backend that keeps objects in a dict.

    Attributes:
        shared: whether it says that the bytes it returns did not move.
        check: what it checks them with.
        kept: whether it says that objects are kept.
        during: called in each put and get.
    """

    verify_shared = True

    def __init__(self, options: BackendOptions) -> None:
        self.options = options
        self.objects: dict[str, np.ndarray] = {}
        self.closed = 0
        self.gets = 0
        self.shared = False
        self.check: Callable[[], None] = lambda: None
        self.kept = True
        self.during: Callable[[], object] = lambda: None

    def put(self, payload: Payload) -> Placed:
        self.during()
        out = np.empty(payload.nbytes, dtype=np.uint8)
        digest = payload.write_into(out)
        out.flags.writeable = False
        key = f"run/{self.options.run_id}/b/{len(self.objects)}"
        self.objects[key] = out
        return Placed(key, digest)

    def get(self, ref: BatchRef, whole: bool, use: Callable[[Stored], Result]) -> Result:
        self.gets += 1
        self.during()
        if ref.key not in self.objects:
            raise ObjectNotFound(ref.key)
        # An array of its own at the root of all views, as a reader makes it.
        root = np.frombuffer(memoryview(self.objects[ref.key]), dtype=np.uint8)
        memory = self.objects[ref.key]
        loan = Loan(memory, lambda: self.check(), lambda: self.kept)
        return use(Stored(AtHand(root), self.shared, loan))

    def remove(self, ref: BatchRef) -> None:
        self.objects.pop(ref.key, None)

    def narrows(self) -> bool:
        return False

    def traffic(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed += 1
