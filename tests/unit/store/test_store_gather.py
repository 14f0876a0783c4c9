"""Rows copied back to back by the extension: the bytes numpy would write, or nothing at all."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_store import gather as gathering
from mooncake_store.arrays import as_bytes
from mooncake_store.gather import gather
from mooncake_store.tensors import TORCH_DTYPES

pytestmark = pytest.mark.skipif(not gathering.IS_BUILT, reason="mooncake_store/_native.c was not built: no C compiler")


@given(st.lists(hnp.arrays(np.dtype("<i4"), hnp.array_shapes(min_dims=0, min_side=0, max_dims=3)), max_size=20))
def test_all_bytes_lie_back_to_back(rows: list[Any]) -> None:
    expected = b"".join(row.tobytes() for row in rows)
    target = np.full(len(expected) + 2, 0x55, dtype=np.uint8)
    assert gather(rows, target[1:-1])
    assert target[1:-1].tobytes() == expected
    assert (target[0], target[-1]) == (0x55, 0x55)


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_rows_that_do_not_fill_the_target_are_not_copied(nbytes: int) -> None:
    target = np.full(nbytes, 0x55, dtype=np.uint8)
    assert not gather([np.zeros(8, dtype=np.uint8)], target)
    assert (target == 0x55).all()


@pytest.mark.parametrize(
    "row",
    [np.zeros((4, 4), dtype=np.uint8).T[1:], np.zeros(8, dtype=np.uint8)[::2], np.broadcast_to(np.uint8(1), 3)],
)
def test_rows_that_are_not_contiguous_are_left_to_numpy(row: Any) -> None:
    target = np.full(row.size + 1, 0x55, dtype=np.uint8)
    assert not gather([np.zeros(1, dtype=np.uint8), row], target)
    assert (target == 0x55).all()


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_rows_of_any_dtype_are_copied_or_left(dtype: Any) -> None:
    row = np.arange(6, dtype=f"u{dtype.itemsize}").view(dtype)
    target = np.zeros(row.nbytes, dtype=np.uint8)
    assert not gather([row], target) or (target == as_bytes(row)).all()


def test_times_are_copied() -> None:
    row = np.array(["2026-11-30", "NaT"], dtype="datetime64[s]")
    target = np.zeros(row.nbytes, dtype=np.uint8)
    assert not gather([row], target) or (target == as_bytes(row)).all()


def test_memory_that_is_read_only_is_not_written() -> None:
    target = np.zeros(4, dtype=np.uint8)
    target.flags.writeable = False
    assert not gather([np.ones(4, dtype=np.uint8)], target)


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
        assert gather(rows, target)  # where classes have no say in their buffers (before Python 3.12)
    except IndexError:
        assert not rows
