"""A batch written by two threads is the one that a thread writes alone, and whatever goes wrong ends both."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mooncake_store import encode as encoding
from mooncake_store.decode import decode
from mooncake_store.encode import Into, encode
from mooncake_store.gather import IS_BUILT
from mooncake_store.rows import IN_PLACE_BYTES, STEP_BYTES
from mooncake_store.worker import Worker
from tests.unit.store.store_values import CASES


@pytest.fixture
def helper() -> Iterator[Worker]:
    worker = Worker("half")
    yield worker
    worker.close(10)


class Helped(Into):
    """Notes which thread reserved what; each waits for the other before its first step, so that both have some."""

    def __init__(self, out: Any, helper: Worker, in_place: bool = False, together: bool = True) -> None:
        super().__init__(out)
        self.helper, self.in_place = helper, in_place
        self.reserved: list[tuple[bool, int, int]] = []
        self._both = threading.Barrier(2, timeout=10) if together else None

    def reserve(self, position: int, nbytes: int) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        if self._both is not None and is_main not in {of_main for of_main, *_ in self.reserved}:
            self._both.wait()
        self.reserved.append((is_main, position, nbytes))
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


@pytest.mark.parametrize("in_place", [True, False])
def test_two_threads_write_the_same_bytes_and_each_byte_once(helper: Worker, in_place: bool) -> None:
    encoded = encode(wide(100))
    alone, together = bytearray(encoded.nbytes), bytearray(encoded.nbytes)
    digest = encoded.write_into(alone)
    sink = Helped(together, helper, in_place)
    assert encoded.write(sink) == digest
    assert together == alone
    assert {is_main for is_main, *_ in sink.reserved} == {True, False}
    assert sum(nbytes for *_, nbytes in sink.reserved) == encoded.nbytes, "each byte once"
    assert max(nbytes for *_, nbytes in sink.reserved) <= (IN_PLACE_BYTES if in_place else STEP_BYTES)


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_value_is_written_the_same(case: str, helper: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "SHARED_BYTES", 0)
    value, spec = CASES[case].values, CASES[case].spec
    encoded = encode({"tokens": [[1, 2], [], [3]], "value": value}, {"value": spec} if spec else None)
    alone, together = bytearray(encoded.nbytes), bytearray(encoded.nbytes)
    for in_place in (True, False):
        assert encoded.write(Helped(together, helper, in_place, together=False)) == encoded.write_into(alone)
        assert together == alone


def test_a_small_batch_wakes_nobody(helper: Worker) -> None:
    encoded = encode({"tokens": [[1, 2], [3]]})
    sink = Helped(bytearray(encoded.nbytes), helper, together=False)
    encoded.write(sink)
    assert all(is_main for is_main, *_ in sink.reserved)


class Lost(Exception):
    pass


@pytest.mark.parametrize("in_main", [True, False])
def test_what_either_half_raises_ends_the_write_when_both_are_done(in_main: bool, helper: Worker) -> None:
    encoded = encode(wide(100))

    class Sink(Helped):
        def reserve(self, position: int, nbytes: int) -> Any:
            target = super().reserve(position, nbytes)
            if self.reserved[-1][0] is in_main:
                raise Lost
            return target

    sink = Sink(bytearray(encoded.nbytes), helper)
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


@pytest.mark.skipif(not IS_BUILT, reason="mooncake_store/_native.c was not built: no C compiler")
def test_a_process_that_was_stopped_asks_again_before_it_goes_on() -> None:
    """Its memory may have been given to others; what says so must be heard before the next block."""
    encoded = encode({"tokens": [np.arange(2000, dtype="<i4")] * 400})

    class Sink(Into):
        def __init__(self, lasts: list[float]) -> None:
            super().__init__(bytearray(encoded.nbytes))
            self.in_place, self.lasts = True, lasts

        def reserve(self, position: int, nbytes: int) -> Any:
            if not self.lasts:
                raise Lost
            self.until = time.monotonic() + self.lasts.pop(0)
            return super().reserve(position, nbytes)

    whole = bytearray(encoded.nbytes)
    digest = encoded.write_into(whole)
    sink = Sink([-1.0, -1.0, *[600.0] * 20])
    assert encoded.write(sink) == digest
    assert sink.reserve(0, encoded.nbytes).tobytes() == whole
    refused = Sink([-1.0])
    with pytest.raises(Lost):
        encoded.write(refused)
    refused.lasts = [600.0]
    assert not refused.reserve(0, encoded.nbytes).any(), "nothing was written"
