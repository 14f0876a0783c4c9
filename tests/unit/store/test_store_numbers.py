"""Python numbers become an array of one dtype alike, whether the extension converts them or Python does."""

import math
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store import arrays
from mooncake_store.arrays import dtype_of, pack

pytestmark = pytest.mark.skipif(
    arrays._native_numbers is None, reason="mooncake_store/_native.c was not built: no C compiler"
)

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")
EDGES = [
    0,
    *(sign * (1 << bits) + more for bits in (7, 8, 15, 16, 31, 32, 63, 64) for sign in (1, -1) for more in (-1, 0, 1)),
]
NAN_PAYLOAD = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_DEAD_BEEF))[0]


class Level(IntEnum):
    HIGH = 3


class Large(float):
    def __float__(self) -> float:
        return 1.0


NUMBERS = st.one_of(
    st.sampled_from(EDGES),
    st.integers(),
    st.floats(),
    st.floats(width=32),
    st.sampled_from([3.4028235677973366e38, 65520.0, NAN_PAYLOAD, Large(7.0), Level.HIGH, True, None, "1", 1j]),
    st.sampled_from([np.int32(5), np.float32(0.5), np.bool_(True), np.datetime64(1, "s")]),
)


def outcome(convert: Callable[[], Any]) -> Any:
    """What is returned, to the bit, or what is raised."""
    try:
        array = convert()
    except (TypeError, OverflowError) as error:
        return type(error), str(error)
    return array.dtype, array.shape, array.tobytes()


def without_extension(values: list[Any], dtype: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_native_numbers", None)
        return outcome(lambda: pack(values, dtype))


@given(st.lists(NUMBERS, max_size=4), st.sampled_from(INTEGERS + FLOATS))
def test_any_values_come_out_alike(values: list[Any], name: str) -> None:
    dtype = dtype_of(name)
    assert outcome(lambda: pack(values, dtype)) == without_extension(values, dtype)


@given(st.data(), st.sampled_from(INTEGERS + FLOATS[1:]))
def test_what_fits_comes_out_as_it_is(data: st.DataObject, name: str) -> None:
    dtype = dtype_of(name)
    if dtype.kind == "f":
        values: list[Any] = data.draw(st.lists(st.floats(width=8 * dtype.itemsize), max_size=50))
    else:
        limits = np.iinfo(dtype)
        values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), max_size=50))
    packed = pack(values, dtype)
    assert (packed.dtype, packed.shape) == (dtype, (len(values),))
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(packed.tolist(), values, strict=True))


@pytest.mark.parametrize("name", INTEGERS)
def test_the_first_number_beyond_is_refused_on_both_sides(name: str) -> None:
    limits = np.iinfo(name)
    for value in (int(limits.min) - 1, int(limits.max) + 1, -(1 << 70), 1 << 70):
        with pytest.raises(OverflowError, match=rf"element 1 \({value}\) does not fit {name}"):
            pack([0, value, 1], dtype_of(name))


def test_the_extension_looks_at_what_it_writes_into() -> None:
    native = arrays._native_numbers
    assert native is not None
    assert native([], np.empty(0, "<i4"), "i")
    for values, out, kind in (
        ([1, 2], np.empty(3, "u1"), "i"),  # not as many items
        ([1, 2], np.empty(6, "u1"), "i"),  # of three bytes
        ([1, 2], np.empty(0, "u1"), "i"),
        ([1, 2], np.empty(32, "u1"), "i"),  # of sixteen
        ([1.0], np.empty(1, "<f2"), "f"),
        ([1], np.empty(1, "<i8"), "x"),
    ):
        assert not native(values, out, kind), (values, out.nbytes, kind)
    frozen = np.empty(1, "<i8")
    frozen.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        native([1], frozen, "i")
    for wrong in ((1,), "12"):
        with pytest.raises(TypeError):
            native(wrong, np.empty(1, "<i8"), "i")  # type: ignore[arg-type]
