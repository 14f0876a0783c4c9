"""Rows copied back to back by the extension: the bytes numpy would write, and their digests, or nothing at all."""

import math
import time
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_store import gather as gathering
from mooncake_store.arrays import as_bytes
from mooncake_store.gather import gather
from mooncake_store.tensors import TORCH_DTYPES

pytestmark = pytest.mark.skipif(not gathering.IS_BUILT, reason="mooncake_store/_native.c was not built: no C compiler")


def gathered(rows: list[Any], target: Any, in_place: bool = True) -> list[int] | None:
    """All rows as one block."""
    return gather(rows, target, np.array([target.size]), in_place, math.inf)


ROWS = st.lists(hnp.arrays(np.dtype("<i4"), hnp.array_shapes(min_dims=0, min_side=0, max_dims=3)), max_size=20)


@given(ROWS, st.data(), st.booleans())
def test_all_bytes_lie_back_to_back_and_every_block_has_its_digest(rows: list[Any], data: Any, in_place: bool) -> None:
    expected = b"".join(row.tobytes() for row in rows)
    cuts = data.draw(st.lists(st.integers(0, len(expected)), max_size=6).map(sorted))
    target = np.full(len(expected) + 2, 0x55, dtype=np.uint8)
    sums = gather(rows, target[1:-1], np.array([*cuts, len(expected)]), in_place, math.inf)
    assert target[1:-1].tobytes() == expected
    assert (target[0], target[-1]) == (0x55, 0x55)
    blocks = [expected[start:end] for start, end in zip([0, *cuts], [*cuts, len(expected)], strict=True)]
    assert sums == list(map(xxhash.xxh3_64_intdigest, blocks))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("at", [0, 1, 4, 63, 64])
@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 319, 4096, 70_001])
def test_rows_of_every_length_are_copied_to_every_place(nbytes: int, at: int, in_place: bool) -> None:
    """Those that are blocks of their own go past the caches, by whole lines of 64 bytes."""
    rows = [np.random.default_rng(seed).integers(0, 256, nbytes + seed, dtype=np.uint8) for seed in range(3)]
    ends = np.cumsum([row.size for row in rows])
    memory = np.full(int(ends[-1]) + 192, 0x55, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + at
    sums = gather(rows, memory[start : start + int(ends[-1])], ends, in_place, math.inf)
    assert memory[start : start + int(ends[-1])].tobytes() == b"".join(row.tobytes() for row in rows)
    assert (memory[:start] == 0x55).all()
    assert (memory[start + int(ends[-1]) :] == 0x55).all()
    assert sums == [xxhash.xxh3_64_intdigest(row.data) for row in rows]


@pytest.mark.parametrize("ends", [[], [7], [9], [4, 3, 8], [-1, 8], [8, 16]])
def test_blocks_that_are_not_all_of_the_target_are_not_copied(ends: list[int]) -> None:
    target = np.full(8, 0x55, dtype=np.uint8)
    assert gather([np.zeros(8, dtype=np.uint8)], target, np.array(ends, dtype=np.int64), True, math.inf) is None
    assert (target == 0x55).all()


def test_no_block_is_begun_when_time_is_up() -> None:
    """A process that was stopped may not own the memory any more."""
    target = np.full(8, 0x55, dtype=np.uint8)
    with pytest.raises(TimeoutError):
        gather([np.zeros(8, dtype=np.uint8)], target, np.array([4, 8]), True, time.monotonic() - 1.0)
    assert (target == 0x55).all()
    assert gather([np.zeros(8, dtype=np.uint8)], target, np.array([4, 8]), True, time.monotonic() + 600.0)


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_rows_that_do_not_fill_the_target_are_not_copied(nbytes: int) -> None:
    target = np.full(nbytes, 0x55, dtype=np.uint8)
    assert gathered([np.zeros(8, dtype=np.uint8)], target) is None
    assert (target == 0x55).all()


@pytest.mark.parametrize(
    "row",
    [np.zeros((4, 4), dtype=np.uint8).T[1:], np.zeros(8, dtype=np.uint8)[::2], np.broadcast_to(np.uint8(1), 3)],
)
def test_rows_that_are_not_contiguous_are_left_to_numpy(row: Any) -> None:
    target = np.full(row.size + 1, 0x55, dtype=np.uint8)
    assert gathered([np.zeros(1, dtype=np.uint8), row], target) is None
    assert (target == 0x55).all()


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_rows_of_any_dtype_are_copied_or_left(dtype: Any) -> None:
    row = np.arange(6, dtype=f"u{dtype.itemsize}").view(dtype)
    target = np.zeros(row.nbytes, dtype=np.uint8)
    assert gathered([row], target) is None or (target == as_bytes(row)).all()


def test_times_are_copied() -> None:
    row = np.array(["2026-11-30", "NaT"], dtype="datetime64[s]")
    target = np.zeros(row.nbytes, dtype=np.uint8)
    assert gathered([row], target) is None or (target == as_bytes(row)).all()


def test_memory_that_is_read_only_is_not_written() -> None:
    target = np.zeros(4, dtype=np.uint8)
    target.flags.writeable = False
    assert gathered([np.ones(4, dtype=np.uint8)], target) is None


def test_without_the_library_s_function_numpy_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_HASH", 0)
    target = np.zeros(4, dtype=np.uint8)
    assert gathered([np.ones(4, dtype=np.uint8)], target) is None


class Shortens(np.ndarray):
    """Takes all rows out of the list that it is in when its bytes are asked for."""

    rows: list[Any]

    def __buffer__(self, flags: int) -> memoryview:
        self.rows.clear()
        return memoryview(bytes(4))


def test_a_list_that_is_shortened_meanwhile_is_an_error_and_no_crash() -> None:
    first: Any = np.zeros(4, dtype=np.uint8).view(Shortens)
    first.rows = rows = [first, *(np.zeros(4, dtype=np.uint8) for _ in range(3))]
    target = np.zeros(16, dtype=np.uint8)
    try:
        assert gathered(rows, target) is not None  # where classes have no say in their buffers (before Python 3.12)
    except IndexError:
        assert not rows
