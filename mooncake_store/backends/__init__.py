"""Backends carry encoded batches as bytes; everything above them is the same for all.

A backend is a factory `(BackendOptions) -> Carrier`. Ours are in this package; others register the factory under the
entry-point group `mooncake_store.backends`, the entry point's name being the backend's name.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mooncake_store.decode import Source
from mooncake_store.errors import ConfigError, MissingDependency
from mooncake_store.ref import BatchRef, CopyOf
from mooncake_store.rows import Sink

Result = TypeVar("Result")
ENTRY_POINT_GROUP = "mooncake_store.backends"
BUILT_IN = {"ray": "mooncake_store.backends.ray", "mooncake": "mooncake_store.backends.mooncake"}


class Payload(Protocol):
    """An encoded batch that still has to be written somewhere, by either of the two."""

    @property
    def nbytes(self) -> int:
        """Exact size in bytes of the object to allocate."""

    def write_into(self, out: npt.NDArray[np.uint8]) -> str:
        """Fill `out` (uint8, [nbytes]) in one pass and return the digest."""

    def write(self, sink: Sink) -> str:
        """The same in steps, into memory that need not be in one piece."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What `open_store` hands to a backend's factory, as it was asked for; see there."""

    run_id: str
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    replica_num: int = 1
    contribute_segment: bool | None = None
    log_dir: Path | None = None

    @property
    def contributes(self) -> bool:
        """Whether this process lends memory: as asked, else when its LOCAL_RANK is unset or 0."""
        if self.contribute_segment is None:
            return (os.environ.get("LOCAL_RANK") or "0") == "0"
        return self.contribute_segment


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a payload went: its key, its digest, and what of it must travel inside the ref (see BatchRef)."""

    key: str
    digest: str
    handle: Any = None
    copies: tuple[CopyOf, ...] = ()


@dataclass(frozen=True, slots=True)
class Loan:
    """Memory that a reader sees in place, and that is given to others if the batch is removed meanwhile.

    Attributes:
        memory: uint8 [nbytes]; an array apart from that of `Stored`, so that holding it lends nothing.
        check: raises IntegrityError when the memory is seen to belong to another.
        is_kept: whether the store has the batch still, so that nobody else can have been given the memory. False also
            when that cannot be found out.
    """

    memory: npt.NDArray[np.uint8]
    check: Callable[[], None]
    is_kept: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that can be read.

    Attributes:
        source: its bytes, or where they are fetched from. The memory of what is taken stays valid while a view lives.
        shared: the bytes lie where the writer wrote them, and were not moved since; others may be looking at them too.
        loan: whether they still are what was put must be asked; None for memory that nobody else can be given.
    """

    source: Source
    shared: bool = False
    loan: Loan | None = None


class Carrier(Protocol):
    """Moves bytes. Every call ends in bounded time and raises only StoreError."""

    def put(self, payload: Payload) -> Placed:
        """Store one object; when it returns, the object can be read elsewhere."""

    verify_shared: bool  # whether the store checks the payload's digests also where the bytes did not move

    def get(self, ref: BatchRef, whole: bool, use: Callable[[Stored], Result]) -> Result:
        """Return what `use` makes of the object, ref.nbytes long, or of another copy where it raises StoreError.

        Args:
            whole: all of it is wanted; else some, and a backend may let it be fetched in ranges.
        """

    def remove(self, ref: BatchRef) -> None:
        """Free the object; removing what is already gone is not an error."""

    def narrows(self) -> bool:
        """Whether a batch that is put now should be made smaller, though readers then have to make it larger again."""

    def traffic(self) -> Mapping[str, int]:
        """Counters of what this carrier moved over the network, for `ObjectStore.stats`."""

    def close(self) -> None:
        """Give everything back; idempotent. Views handed out stay valid."""


Factory = Callable[[BackendOptions], Carrier]


def known_backends() -> list[str]:
    """Names accepted by `open_store`, built-in ones first."""
    return [*BUILT_IN, *sorted(set(entry_points(group=ENTRY_POINT_GROUP).names) - set(BUILT_IN))]


def find_backend(name: str) -> Factory:
    """Return the factory of the backend called `name`.

    Raises:
        ConfigError: no built-in backend and no entry point has this name.
        MissingDependency: the entry point cannot be imported.
    """
    if not isinstance(name, str):
        raise ConfigError(f"backend {name!r} is a {type(name).__name__}: known backends are {_listed()}")
    if name in BUILT_IN:
        factory: Factory = importlib.import_module(BUILT_IN[name]).open_carrier
        return factory
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            loaded: Factory = entry.load()
        except (ImportError, AttributeError) as error:
            raise MissingDependency(f"backend {name!r} cannot be imported from {entry.value}: {error}") from error
        return loaded
    raise ConfigError(f"unknown backend {name!r}: known backends are {_listed()}")


def _listed() -> str:
    return ", ".join(known_backends())
