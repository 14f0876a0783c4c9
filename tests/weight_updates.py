"""An updater of one trainer rank, and a version authority that remembers what it was asked, for tests."""

from collections.abc import Callable, Sequence
from typing import Any

from miles_plugin.engines.fleet import Left
from miles_plugin.weight_transfer.broadcast import Broadcaster
from miles_plugin.weight_transfer.ranks import Ranks
from miles_plugin.weight_transfer.transfer import Bounds, Proof, Transport, Updater

BUCKET_BYTES = 64 * 1024  # several per update, and tensors larger than a bucket
BOUNDS = Bounds(call=10, join=10, bucket=10)


class Versions:
    """Hands out numbers from `first` on; `events` are the calls in order."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self.events: list[tuple[Any, ...]] = []

    def allocate(self) -> int:
        self.next += 1
        self.events.append(("allocate", self.next - 1))
        return self.next - 1

    def announce(self, version: int) -> None:
        self.events.append(("announce", version))

    def commit(self, version: int, confirmed: Sequence[str], left: Sequence[Left]) -> None:
        self.events.append(("commit", version, tuple(confirmed), tuple(each.url for each in left)))


def broadcasting(
    versions: Versions,
    pause_mode: str = "retract",
    bounds: Bounds = BOUNDS,
    bucket_bytes: int = BUCKET_BYTES,
    prove: Callable[[], Proof] | None = None,
    transport: Transport | None = None,
) -> Updater:
    """An updater that broadcasts from this process, the only trainer rank."""
    transport = transport or Broadcaster("127.0.0.1", "test", "gloo", bucket_bytes, bounds)
    return Updater(transport, Ranks(), versions, pause_mode, prove=prove, bounds=bounds)
