"""A broadcast gathers the next bucket while one is on its way, into memory from which nothing is sent."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("transformers", reason="the extra `train` is not installed")

from miles_plugin.engines.fleet import EngineAddress  # noqa: E402
from miles_plugin.engines.sglang import EngineError  # noqa: E402
from miles_plugin.weight_transfer.broadcast import Broadcaster  # noqa: E402
from miles_plugin.weight_transfer.group import Bucket, EngineGroup  # noqa: E402

ENGINES = (EngineAddress("http://10.0.0.1:30000"),)
PATIENCE = 10.0  # seconds


class Group:
    """In place of a process group: a bucket has arrived only when the next one was gathered."""

    engines = ENGINES

    def __init__(self, number: int) -> None:
        self.gathered = [threading.Event() for _ in range(number)]
        self.sent: list[tuple[list[str], list[int]]] = []

    def send(self, bucket: Bucket) -> Mapping[str, str]:
        at = len(self.sent)
        if at + 1 < len(self.gathered):
            assert self.gathered[at + 1].wait(PATIENCE), "the next bucket is not gathered meanwhile"
        self.sent.append((bucket.names, bucket.flat.tolist()))
        return {}

    def leave(self) -> None: ...


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_the_next_bucket_is_gathered_while_one_is_sent(number: int) -> None:
    group = Group(number)
    broadcaster = Broadcaster("127.0.0.1", "test", "gloo", bucket_bytes=8)
    broadcaster._group = cast(EngineGroup, group)
    assert broadcaster.connect(ENGINES) == {}

    def weights() -> Iterator[tuple[str, Any]]:
        for index in range(number):
            yield f"w{index}", torch.full((8,), index, dtype=torch.uint8)
            # Asked for what comes next: this one is in its bucket's memory, or about to be copied there.
            group.gathered[index].set()

    sent = broadcaster.send(weights())
    assert (sent.nbytes, sent.failed, sent.broken) == (8 * number, {}, "")
    assert group.sent == [([f"w{index}"], [index] * 8) for index in range(number)], "as it was when it was gathered"
    broadcaster.close()


class Connecting:
    """In place of torch's process group, one whose first broadcast does not return before every engine takes part."""

    def __init__(self, taken: threading.Event) -> None:
        self._taken = taken

    def broadcast(self, _flat: Any, root: int) -> Any:
        assert root == 0
        self._taken.wait(PATIENCE)
        return cast(Any, SimpleNamespace(is_completed=lambda: True, wait=lambda: None))


@pytest.mark.parametrize(
    ("outcome", "why"), [("hangs", "it took more than 0 s"), ("refuses", "an engine refused it"), ("takes part", "")]
)
def test_a_broadcast_that_connects_first_is_bounded_and_ends_with_a_refusal(outcome: str, why: str) -> None:
    taken, loading = threading.Event(), Future[None]()
    group = object.__new__(EngineGroup)
    group._group = cast(Any, Connecting(taken))
    if outcome == "refuses":
        loading.set_exception(EngineError("no"))
    elif outcome == "takes part":
        taken.set()
    seconds = 0.05 if outcome == "hangs" else PATIENCE
    assert group._broadcast(torch.zeros(1), [loading], seconds) == why
    taken.set()
