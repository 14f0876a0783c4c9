"""The Mooncake backend under miles's own interface; imported only inside a miles process."""

import atexit
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from miles.utils.object_store import BaseObjectStore, ObjectStoreGetResult, StoreObjectRef
from miles.utils.object_store import ValueSpec as MilesValueSpec

from miles_plugin.in_miles.forms import form_of, is_read_by_rows, restored, specs_for
from miles_plugin.in_miles.ref import MilesRef
from mooncake_store import GetResult, open_store


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

    def put(self, value: Mapping[str, Any], value_spec: Mapping[str, MilesValueSpec] | None = None) -> StoreObjectRef:  # noqa: ARG002
        """Store a batch; raises what `ObjectStore.put` does. The values say how they are stored, not `value_spec`."""
        batch = {name: list(column) if isinstance(column, range) else column for name, column in value.items()}
        try:
            ref = self._store.put(batch)
        except (TypeError, OverflowError, ValueError):
            ref = self._store.put(batch, specs_for(batch))
        by_rows = {name: is_read_by_rows(name, column, ref.num_rows) for name, column in batch.items()}
        forms = {name: form_of(name, column) for name, column in batch.items()}
        return StoreObjectRef(
            MilesRef(
                ref,
                forms={name: form for name, form in forms.items() if form is not None},
                rows=tuple(name for name, has in by_rows.items() if has),
                whole=tuple(name for name, has in by_rows.items() if not has),
                lengths=tuple(map(len, batch["tokens"])) if self._splits_late else (),
            )
        )

    def get(self, ref: StoreObjectRef) -> ObjectStoreGetResult:
        """Read a batch; its arrays are read-only views. Raises what `ObjectStore.get` does."""
        result = self._store.get(ref.inner.batch)
        return ObjectStoreGetResult(as_miles(result.value, ref.inner.forms), lambda _: result.release())

    def get_some(
        self, ref: MilesRef, fields: Sequence[str] | None, rows: Sequence[int] | None
    ) -> tuple[dict[str, Any], GetResult]:
        """Some fields and rows of a batch as `get` gives them, and what is to be released."""
        result = self._store.get(ref.batch, fields=fields, rows=rows)
        return as_miles(result.value, ref.forms), result

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


def as_miles(batch: Mapping[str, Any], forms: Mapping[str, str]) -> dict[str, Any]:
    """A batch in the form in which miles's trainer takes it; see `forms`."""
    return {name: restored(name, column, forms.get(name)) for name, column in batch.items()}
