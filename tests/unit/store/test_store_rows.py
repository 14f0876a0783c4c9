"""A batch written by two threads is the one that a thread writes alone, and whatever goes wrong ends both."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mooncake_store import encode as encoding
from mooncake_store.decode import decode
from mooncake_store.encode import Into, encode
from mooncake_store.rows import STEP_BYTES
from mooncake_store.worker import Worker
from tests.unit.store.store_values import CASES


@pytest.fixture
def helper() -> Iterator[Worker]:
    worker = Worker("half")
    yield worker
    worker.close(10)


class Helped(Into):
    """Notes which thread reserved what."""

    def __init__(self, out: Any, helper: Worker) -> None:
        super().__init__(out)
        self.helper = helper
        self.reserved: list[tuple[bool, int, int]] = []

    def reserve(self, position: int, nbytes: int) -> Any:
        self.reserved.append((threading.current_thread() is threading.main_thread(), position, nbytes))
        return super().reserve(position, nbytes)


def wide(rows: int) -> dict[str, Any]:
    """Small rows, rows larger than a step, text, and a column that is converted."""
    rng = np.random.default_rng(0)
    return {
        "tokens": [rng.integers(0, 99, int(n), dtype="<i4") for n in rng.integers(0, 9000, rows)],
        "large": [rng.random((int(n), 3)) for n in rng.integers(0, STEP_BYTES // 4, rows)],
        "loss_masks": [rng.integers(0, 2, 100) for _ in range(rows)],
        "metadata": [{"id": row, "tags": ["a", row]} for row in range(rows)],
        "reward": rng.random(rows),
    }


def test_two_threads_write_the_same_bytes_and_about_half_each(helper: Worker) -> None:
    encoded = encode(wide(100))
    alone, together = bytearray(encoded.nbytes), bytearray(encoded.nbytes)
    digest = encoded.write_into(alone)
    sink = Helped(together, helper)
    assert encoded.write(sink) == digest
    assert together == alone
    by_main = sum(nbytes for is_main, _, nbytes in sink.reserved if is_main)
    assert 0.4 < by_main / encoded.nbytes < 0.6
    assert sum(nbytes for *_, nbytes in sink.reserved) == encoded.nbytes, "each byte once"


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_value_is_written_the_same(case: str, helper: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "SHARED_BYTES", 0)
    value, spec = CASES[case].values, CASES[case].spec
    encoded = encode({"tokens": [[1, 2], [], [3]], "value": value}, {"value": spec} if spec else None)
    alone, together = bytearray(encoded.nbytes), bytearray(encoded.nbytes)
    assert encoded.write(Helped(together, helper)) == encoded.write_into(alone)
    assert together == alone


def test_a_small_batch_wakes_nobody(helper: Worker) -> None:
    encoded = encode({"tokens": [[1, 2], [3]]})
    sink = Helped(bytearray(encoded.nbytes), helper)
    encoded.write(sink)
    assert all(is_main for is_main, *_ in sink.reserved)


class Lost(Exception):
    pass


@pytest.mark.parametrize("in_main", [True, False])
def test_what_either_half_raises_ends_the_write_when_both_are_done(in_main: bool, helper: Worker) -> None:
    encoded = encode(wide(100))
    both = threading.Barrier(2, timeout=10)

    class Sink(Helped):
        def __init__(self) -> None:
            super().__init__(bytearray(encoded.nbytes), helper)
            self.seen: set[bool] = set()

        def reserve(self, position: int, nbytes: int) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main not in self.seen:
                self.seen.add(is_main)
                both.wait()  # both are at work
                if is_main is in_main:
                    raise Lost
            return super().reserve(position, nbytes)

    sink = Sink()
    with pytest.raises(Lost):
        encoded.write(sink)
    done = len(sink.reserved)
    helper.submit(lambda: None).result(10)
    assert len(sink.reserved) == done, "nobody writes any more"
    assert any(is_main is not in_main for is_main, *_ in sink.reserved)


def test_what_two_threads_wrote_is_read_back(helper: Worker) -> None:
    batch = wide(40)
    encoded = encode(batch)
    out = bytearray(encoded.nbytes)
    encoded.write(Helped(out, helper))
    read = decode(memoryview(out))
    assert read["metadata"] == batch["metadata"]
    for name in ("tokens", "large", "loss_masks"):
        assert all(np.array_equal(a, b) for a, b in zip(read[name], batch[name], strict=True))
