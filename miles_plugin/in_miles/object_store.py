"""The Mooncake backend under miles's own interface; imported only inside a miles process."""

import atexit
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from miles.utils.object_store import BaseObjectStore, ObjectStoreGetResult, StoreObjectRef
from miles.utils.object_store import ValueSpec as MilesValueSpec

from miles_plugin.in_miles.names import LOG_PROBS
from miles_plugin.in_miles.ref import MilesRef
from mooncake_store import BATCH_LEVEL, GetResult, ValueSpec, open_store
from mooncake_store.arrays import is_array


class MooncakeObjectStore(BaseObjectStore):  # type: ignore[misc]  # of miles, which need not be installed
    """miles's `MooncakeObjectStore`, carried by `mooncake_store`.

    Args:
        args: miles's; read are mooncake_store_init_kwargs, mooncake_replica_num and delay_split_train_data_by_dp.
        contribute_segment: whether this process sees to it that its node lends memory.

    Raises:
        ConfigError, StoreUnavailable: as `open_store`; a ConfigError is a ValueError.
    """

    def __init__(self, args: Namespace, *, contribute_segment: bool) -> None:
        self._store = open_store(
            "mooncake",
            init_kwargs=args.mooncake_store_init_kwargs or {},
            replica_num=args.mooncake_replica_num,
            contribute_segment=contribute_segment,
        )
        self._splits_late = bool(getattr(args, "delay_split_train_data_by_dp", False))
        atexit.register(self._store.close)
        # miles calls torch.from_numpy on large rows and only reads the tensors. Theirs are pages that others read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

    def put(self, value: Mapping[str, Any], value_spec: Mapping[str, MilesValueSpec] | None = None) -> StoreObjectRef:
        """Store a batch; raises what `ObjectStore.put` does."""
        batch = {name: list(column) if isinstance(column, range) else column for name, column in value.items()}
        specs = {name: ValueSpec(spec.codec, spec.dtype) for name, spec in (value_spec or {}).items() if name in batch}
        ref = self._store.put(batch, specs)
        arrays = {name for name, spec in specs.items() if spec.codec == "ndarray"}
        by_rows = {name: _has_rows(name, column, ref.num_rows) for name, column in batch.items()}
        return StoreObjectRef(
            MilesRef(
                ref,
                lists=frozenset(name for name, column in batch.items() if isinstance(column, list)) - arrays,
                rows=tuple(name for name, has in by_rows.items() if has),
                whole=tuple(name for name, has in by_rows.items() if not has),
                lengths=tuple(map(len, batch["tokens"])) if self._splits_late else (),
            )
        )

    def get(self, ref: StoreObjectRef) -> ObjectStoreGetResult:
        """Read a batch; its arrays are read-only views. Raises what `ObjectStore.get` does."""
        result = self._store.get(ref.inner.batch)
        return ObjectStoreGetResult(as_miles(result.value, ref.inner.lists), lambda _: result.release())

    def get_some(
        self, ref: MilesRef, fields: Sequence[str] | None, rows: Sequence[int] | None
    ) -> tuple[dict[str, Any], GetResult]:
        """Some fields and rows of a batch as `get` gives them, and what is to be released."""
        result = self._store.get(ref.batch, fields=fields, rows=rows)
        return as_miles(result.value, ref.lists), result

    def remove(self, ref: StoreObjectRef) -> None:
        """Free a batch; removing it again does nothing."""
        self._store.remove(ref.inner.batch)

    def stats(self) -> dict[str, int]:
        """Counters since open: see `ObjectStore.stats`."""
        return self._store.stats()

    def close(self) -> None:
        """Disconnect; idempotent."""
        self._store.close()
        atexit.unregister(self._store.close)


def as_miles(batch: Mapping[str, Any], lists: frozenset[str]) -> dict[str, Any]:
    """A batch in the form in which miles's trainer takes it.

    Numbers that went in as one list come back as one, since miles adds lists up; rows are numpy arrays, whichever type
    they had, for torch.from_numpy and torch.tensor; those of log-probabilities are tensors.
    """
    return {name: _as_miles(name, column, name in lists) for name, column in batch.items()}


def _as_miles(name: str, column: Any, was_list: bool) -> Any:
    if name in LOG_PROBS and isinstance(column, list):
        return [torch.tensor(row) if is_array(row) else row for row in column]
    return column.tolist() if was_list and is_array(column) else column


def _has_rows(name: str, column: Any, num_rows: int) -> bool:
    """Whether it is a column of rows, texts or mappings: small numbers cost less to read than to leave out."""
    if name in BATCH_LEVEL or not isinstance(column, list) or len(column) != num_rows:
        return False
    return any(isinstance(item, list | tuple | dict | str) or is_array(item) for item in column)
