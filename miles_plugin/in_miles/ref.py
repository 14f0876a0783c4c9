"""What a ref of miles holds, and what happens to one that reaches a process without this backend."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_plugin.in_miles.state import installation
from mooncake_store import BatchRef
from mooncake_store.errors import ConfigError


@dataclass(frozen=True)
class MilesRef:
    """A stored batch, and what its readers need to know of what was put.

    Attributes:
        batch: names the stored batch.
        forms: of columns that come back in another form than the transport gives them, by name; see `forms`.
        rows: columns with one item per sample that are worth reading by rows.
        whole: the others, in order.
        lengths: tokens of each sample, where ranks choose their rows before they read any.
    """

    batch: BatchRef
    forms: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.batch, self.forms, self.rows, self.whole, self.lengths)


def _received(*parts: Any) -> MilesRef:
    if not installation.active:
        raise ConfigError(
            "a batch of miles-mooncake's store has reached a process whose miles has its own store: start the driver "
            "with `python -m miles_plugin.run SCRIPT ...`, or call miles_plugin.install() first thing in it"
        )
    return MilesRef(*parts)
