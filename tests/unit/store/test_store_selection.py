"""Only what is asked for is fetched: rows, columns, partitions and slices, from a source that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_store import IntegrityError, ValueSpec
from mooncake_store.decode import AtHand, Range, Selection, decode, ordinary_memory, read
from mooncake_store.encode import Encoded, encode
from mooncake_store.format import BLOCK_BYTES
from tests.unit.store.test_store_layout import EVERYTHING, SLICED, same

RANDOM = np.random.default_rng(0)


class Far:
    """An object of which only what is fetched can be seen; the rest is garbage."""

    def __init__(self, encoded: Encoded, head_bytes: int | None = None) -> None:
        self.data = np.zeros(encoded.nbytes, dtype=np.uint8)
        encoded.write_into(self.data)
        self.encoded = encoded
        self.peeked: list[Range] = []
        self.taken: list[Range] = []
        self.root = np.zeros(0, dtype=np.uint8)
        self.nbytes = encoded.nbytes
        self.head_bytes = encoded.head_bytes if head_bytes is None else head_bytes
        self.spare = ordinary_memory

    def read(self, **wanted: Any) -> dict[str, Any]:
        return read(self, Selection(**wanted))

    @property
    def moved(self) -> int:
        return sum(end - start for start, end in self.taken)

    def peek(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        self.peeked += ranges
        return [self.data[start:end].copy() for start, end in ranges]

    def take(self, ranges: Sequence[Range]) -> list[np.ndarray]:
        assert not self.taken
        self.taken += ranges
        assert all(start < end for start, end in ranges)
        return [self.data[start:end].copy() for start, end in ranges]


def chosen(batch: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The same, by the rules, without the code under test."""
    whole = decode(stored(encode(batch, SLICED if "experts" in batch else None)))
    picked = {}
    for name, value in whole.items():
        if isinstance(value, np.ndarray):
            picked[name] = value[list(rows)]
        elif isinstance(value, list):
            picked[name] = [value[row] for row in rows]
        else:
            picked[name] = value
    return picked


def stored(encoded: Encoded) -> np.ndarray:
    out = np.zeros(encoded.nbytes, dtype=np.uint8)
    encoded.write_into(out)
    return out


PARTITIONS = [None, [[3, 1], [0, 2]], [[0], [], [2, 3, 1]]]
ROWS = [None, [], [2], [2, 0], [1, 1], [-1], slice(1, 3), slice(None, None, -1), slice(0, 4, 2)]


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("far", [True, False])
def test_rows(rows: Any, partitions: Any, far: bool) -> None:
    encoded = encode(EVERYTHING, SLICED, partitions)
    got = Far(encoded).read(rows=rows) if far else decode(stored(encoded), rows=rows)
    numbers = list(range(4))[rows] if isinstance(rows, slice) else [0, 1, 2, 3] if rows is None else rows
    assert same(got, chosen(EVERYTHING, [number % 4 for number in numbers]))


@pytest.mark.parametrize("partitions", PARTITIONS[1:])
@pytest.mark.parametrize("far", [True, False])
def test_partitions(partitions: Any, far: bool) -> None:
    encoded = encode(EVERYTHING, SLICED, partitions)
    for number, rows in enumerate(partitions):
        got = Far(encoded).read(partition=number) if far else decode(stored(encoded), partition=number)
        assert same(got, chosen(EVERYTHING, rows))
    with pytest.raises(IndexError, match=f"partition {len(partitions)} of a batch that has {len(partitions)}"):
        decode(stored(encoded), partition=len(partitions))


def test_a_batch_without_partitions_has_none() -> None:
    with pytest.raises(IndexError, match="partition 0 of a batch that has 0"):
        decode(stored(encode(EVERYTHING)), partition=0)


@pytest.mark.parametrize("partitions", [[[0, 1], [2]], [[0, 1, 2, 3], [0]], [[0, 1, 2, 4]], [[-1, 0, 1, 2]], []])
def test_partitions_hold_every_row_once(partitions: Any) -> None:
    with pytest.raises(ValueError, match="each of the 4 rows exactly once; row"):
        encode(EVERYTHING, None, partitions)


def test_what_is_wrong_is_named_by_the_row_it_was_put_as() -> None:
    with pytest.raises(TypeError, match=r"column 'x', row 2: a builtins\.object"):
        encode({"x": ["a", "b", object(), "d"]}, None, [[3, 2], [0, 1]])


@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("partitions", PARTITIONS[:2])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("cut", [slice(None), slice(1, 3), slice(-1, None), slice(3, 1), slice(0, 99)])
def test_one_slice_of_every_row(cut: slice, axis: int, partitions: Any, far: bool) -> None:
    rows = [RANDOM.integers(0, 99, (n, 4, 5), dtype=np.int32) for n in (3, 0, 7, 1)]
    encoded = encode({"x": rows, "other": [1, 2, 3, 4]}, {"x": ValueSpec(slice_axis=axis)}, partitions)
    wanted: dict[str, Any] = {"slices": {"x": cut}}
    got = Far(encoded).read(**wanted) if far else decode(stored(encoded), **wanted)
    expected = [row[(slice(None),) * axis + (cut if cut != slice(3, 1) else slice(0, 0),)] for row in rows]
    assert [part.tolist() for part in got["x"]] == [part.tolist() for part in expected]
    assert [part.shape for part in got["x"]] == [part.shape for part in expected]
    assert got["other"].tolist() == [1, 2, 3, 4]


def test_a_slice_for_each_row() -> None:
    rows = [np.arange(n) for n in (5, 3, 8)]
    far = Far(encode({"x": rows}, {"x": ValueSpec(slice_axis=0)}))
    got = far.read(rows=[2, 0], slices={"x": [slice(6, 8), slice(0, 1)]})
    assert [row.tolist() for row in got["x"]] == [[6, 7], [0]]


@pytest.mark.parametrize(
    ("slices", "error", "problem"),
    [
        ({"x": [slice(1)]}, IndexError, "1 slices for 3 rows"),
        ({"x": slice(0, 4, 2)}, TypeError, "leave its step out"),
        ({"y": slice(1)}, TypeError, "'y' has no slice axis"),
        ({"z": slice(1)}, KeyError, "no column 'z'"),
    ],
)
def test_a_slice_that_cannot_be(slices: Any, error: type[Exception], problem: str) -> None:
    batch = {"x": [np.arange(n) for n in (5, 3, 8)], "y": [1, 2, 3]}
    with pytest.raises(error, match=problem):
        decode(stored(encode(batch, {"x": ValueSpec(slice_axis=0)})), slices=slices)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"x": [np.arange(3), np.arange(4)]}, "rank 1, so no slice_axis 1"),
        ({"x": ["a", "b"]}, "not rows of numbers|is not a row"),
        ({"tokens": [[1], [2]], "x": 5}, "is not one row for each of 2 samples"),
    ],
)
def test_a_slice_axis_that_cannot_be(batch: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        encode(batch, {"x": ValueSpec(slice_axis=1)})


def test_rows_and_partition_exclude_each_other() -> None:
    with pytest.raises(TypeError, match="give one of them"):
        Selection(rows=[0], partition=0)


# --- how much is fetched ----------------------------------------------------------------------------------------------

LENGTHS = RANDOM.integers(1000, 3000, 64)
LARGE: dict[str, Any] = {
    "tokens": [RANDOM.integers(0, 1 << 17, n, dtype=np.int32) for n in LENGTHS],
    "experts": [RANDOM.integers(0, 128, (n, 8, 4), dtype=np.int32) for n in LENGTHS],
    "rewards": RANDOM.random(64),
    "text": [f"{n:0500}" for n in range(64)],
    "images": [{"pixels": RANDOM.integers(0, 255, (n, 32), dtype=np.uint8)} for n in LENGTHS],
}
DEAL = [list(range(rank, 64, 8)) for rank in range(8)]


def row_bytes(rows: Sequence[int]) -> int:
    sizes = [4 * n + 4 * 32 * n + 8 + 500 + 32 * n for n in LENGTHS.tolist()]
    return sum(sizes[row] for row in rows)


@pytest.mark.parametrize("specs", [{}, {"experts": ValueSpec(slice_axis=1)}])
def test_a_partition_is_its_rows_in_one_piece_per_buffer(specs: dict[str, ValueSpec]) -> None:
    for rank, rows in enumerate(DEAL):
        far = Far(encode(LARGE, specs, DEAL))
        got = far.read(partition=rank)
        assert same(got, chosen_large(rows))
        assert row_bytes(rows) <= far.moved <= 1.1 * row_bytes(rows)
        assert len(far.taken) <= 6
        assert far.peeked == [(0, far.encoded.head_bytes)]


def test_scattered_rows_are_little_more_than_their_bytes() -> None:
    rows = [3, 60, 17, 40]
    far = Far(encode(LARGE))
    assert same(far.read(rows=rows), chosen_large(rows))
    assert far.moved <= 1.1 * row_bytes(rows)


def test_a_field_is_its_bytes() -> None:
    far = Far(encode(LARGE))
    assert list(far.read(fields=["tokens"])) == ["tokens"]
    assert far.moved == 4 * int(LENGTHS.sum())


def test_a_slice_is_its_share() -> None:
    far = Far(encode(LARGE, {"experts": ValueSpec(slice_axis=1)}))
    got = far.read(fields=["experts"], slices={"experts": slice(2, 4)})
    assert all(np.array_equal(a, b[:, 2:4]) for a, b in zip(got["experts"], LARGE["experts"], strict=True))
    assert far.moved == 4 * 2 * 4 * int(LENGTHS.sum())


def chosen_large(rows: Sequence[int]) -> dict[str, Any]:
    return {name: value[rows] if name == "rewards" else [value[row] for row in rows] for name, value in LARGE.items()}


@pytest.mark.parametrize("head_bytes", [64, 500])
def test_a_head_that_is_larger_than_expected_is_fetched_again(head_bytes: int) -> None:
    far = Far(encode(EVERYTHING), head_bytes)
    assert far.read(fields=["rewards"])["rewards"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert far.peeked == [(0, head_bytes), (0, far.encoded.head_bytes)]


@settings(max_examples=200)
@given(st.data())
def test_whatever_is_flipped_in_what_is_fetched_is_found(draw: st.DataObject) -> None:
    """And what is flipped elsewhere is not, since nobody looked at it."""
    wanted = draw.draw(
        st.sampled_from(
            [{"rows": [1, 3]}, {"partition": 1}, {"fields": ["experts"], "slices": {"experts": slice(1, 2)}}]
        )
    )
    intact = Far(encode(LARGE, {"experts": ValueSpec(slice_axis=1)}, DEAL))
    expected = intact.read(**wanted)
    far = Far(encode(LARGE, {"experts": ValueSpec(slice_axis=1)}, DEAL))
    position = draw.draw(st.integers(far.encoded.head_bytes, far.data.size - 1))
    far.data[position] ^= draw.draw(st.integers(1, 255))
    if any(start <= position < end for start, end in intact.taken):
        with pytest.raises(IntegrityError, match="digest"):
            far.read(**wanted)
    else:
        assert same(far.read(**wanted), expected)


# --- smaller ----------------------------------------------------------------------------------------------------------


def test_a_prompt_of_a_group_is_stored_once() -> None:
    prompts = [f"prompt {n // 8} " + "x" * 1000 for n in range(64)]
    encoded = encode({"prompt": prompts})
    assert encoded.nbytes < sum(map(len, prompts)) / 7
    for rows in (None, [9, 63, 8], slice(3, 20)):
        numbers = list(range(64))[rows] if isinstance(rows, slice) else rows or range(64)
        assert Far(encoded).read(rows=rows)["prompt"] == [prompts[row] for row in numbers]
    assert Far(encode({"prompt": prompts}, None, DEAL)).read(partition=2)["prompt"] == [prompts[row] for row in DEAL[2]]


@pytest.mark.parametrize(
    ("low", "high", "dtype", "nbytes"),
    [
        (0, 1, "int32", 1),
        (0, 128, "int64", 1),
        (-1, 127, "int32", 1),
        (0, 1 << 15, "int32", 2),
        (0, 1 << 16, "int32", 4),
    ],
)
@pytest.mark.parametrize("dense", [True, False])
def test_integers_are_stored_no_wider_than_they_are(low: int, high: int, dtype: str, nbytes: int, dense: bool) -> None:
    array = RANDOM.integers(low, high, (8, 64 << 10), dtype=dtype, endpoint=True)
    array[0, :2] = low, high
    encoded = encode({"x": array if dense else list(array), "y": [1] * 8}, narrow=True)
    assert encoded.nbytes - encoded.head_bytes == pytest.approx(array.size * nbytes, abs=256)
    assert encode({"x": list(array)}).nbytes > array.nbytes
    for got in (Far(encoded).read()["x"], Far(encoded).read(rows=[5, 1])["x"]):
        rows = array if len(got) == 8 else array[[5, 1]]
        assert all(same(a, b) for a, b in zip(got, rows, strict=True))
        assert not got[0].flags.writeable or got[0].base is not None


def test_what_is_small_or_no_integer_is_stored_as_it_is() -> None:
    batch = {
        "x": [np.zeros(10, dtype=np.int64)] * 4,
        "y": np.zeros((4, 1 << 17)),
        "z": [np.ones(1 << 17, dtype=bool)] * 4,
    }
    assert encode(batch, narrow=True).nbytes == encode(batch).nbytes
    assert BLOCK_BYTES == 4096


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("rows", [None, [2, 3], [1, 6]])
def test_what_is_widened_lies_in_memory_of_the_source(dense: bool, rows: list[int] | None) -> None:
    array = np.arange(8 * 2000, dtype=np.int64).reshape(8, 2000) % 200
    far = Far(encode({"x": array if dense else list(array), "y": np.ones((8, 2000))}, narrow=True))
    lent: list[np.ndarray] = []
    far.spare = lambda nbytes: lent.append(np.zeros(nbytes, dtype=np.uint8)) or lent[-1]
    found = far.read(rows=rows)["x"]
    assert lent
    for row, expected in zip(found, array if rows is None else array[rows], strict=True):
        assert np.array_equal(row, expected)
        assert any(np.shares_memory(row, memory) for memory in lent)
        assert not row.flags.writeable


@pytest.mark.parametrize(("dtype", "stored_as"), [("float32", "int8"), ("int32", "float16"), ("bfloat16", "uint16")])
@pytest.mark.parametrize("dense", [True, False])
def test_only_integers_are_widened(dtype: str, stored_as: str, dense: bool) -> None:
    array = np.zeros((4, 100), dtype=np.int32)
    encoded = encode({"x": array if dense else list(array)})
    for part in encoded._parts.values():
        entry = part.entry
        part.entry = lambda digest, entry=entry: msgspec.structs.replace(entry(digest), dtype=dtype, stored=stored_as)
    encoded._place()
    with pytest.raises(IntegrityError, match="column 'x'"):
        decode(stored(encoded))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("numbers", [[0, 1], [0, 127], [-1, 1], [-128, 127], [0, 255], [-129, 0], [0, 40000], []])
def test_the_narrowest_dtype_that_holds_them_is_stored(dtype: str, numbers: list[int]) -> None:
    info = np.iinfo(dtype)
    for extra in ([], [info.min], [info.max], [info.min, info.max]):
        values = [number for number in numbers + extra if info.min <= number <= info.max]
        wide = np.zeros((256, 1024), dtype=dtype)
        wide[-1, : 2 * len(values) : 2] = values
        for array in (wide, np.asfortranarray(wide), wide[:, ::-1]):
            for column in (array, list(array)):
                encoded = encode({"x": column}, narrow=True)
                assert np.array_equal(np.array(decode(stored(encoded))["x"]), array)
                entry = next(iter(encoded._parts.values())).entry(b"")
                assert np.dtype(entry.stored).itemsize == np.min_scalar_type(_span(values)).itemsize


def _span(values: list[int]) -> int:
    """A number that needs as many bytes as the lowest and the highest together."""
    low, high = min([0, *values]), max([0, *values])
    return high if low == 0 else min(low, -high - 1)


@pytest.mark.parametrize("rows", [[5], [6, 2], slice(2, 4), [1, 1]])
@pytest.mark.parametrize("sliced", [True, False])
def test_only_the_rows_that_are_asked_for_are_widened(rows: Any, sliced: bool) -> None:
    """Also where all bytes are at hand: one row does not take the memory of its column."""
    values = [np.arange(2000 + row, dtype=np.int64) % 100 for row in range(8)]
    data = stored(encode({"x": values}, {"x": ValueSpec(slice_axis=0)} if sliced else None, narrow=True))
    taken: list[int] = []

    def spare(nbytes: int) -> np.ndarray:
        taken.append(nbytes)
        return np.zeros(nbytes, dtype=np.uint8)

    cut = {"x": slice(10, 20)} if sliced else {}
    found = read(AtHand(data, spare=spare), Selection(rows=rows, slices=cut))["x"]
    expected = [values[row] for row in (range(8)[rows] if isinstance(rows, slice) else rows)]
    if sliced:
        expected = [row[10:20] for row in expected]
    assert all(map(np.array_equal, found, expected))
    assert sum(taken) == sum(row.nbytes for row in expected)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("rows", [None, [3, 1], slice(0, 2)])
@pytest.mark.parametrize("partitions", [None, [[1, 0], [3, 2]]])
def test_what_is_read_cannot_be_written(narrow: bool, rows: Any, partitions: Any) -> None:
    batch = {"dense": RANDOM.integers(0, 9, (4, 50_000)), "ragged": list(RANDOM.integers(0, 9, (4, 50_000)))}
    data = stored(encode(batch, partitions=partitions, narrow=narrow))
    found = decode(data.data.toreadonly(), rows=rows)
    for array in (found["dense"], *found["ragged"]):
        assert not array.flags.writeable
    for row in found["ragged"]:
        with pytest.raises(ValueError, match="WRITEABLE"):
            row.flags.writeable = True


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("value", [[], np.zeros((0, 4, 2, 3), dtype=np.int16)])
def test_a_batch_without_samples_may_have_a_slice_axis(axis: int, value: Any) -> None:
    spec = {"x": ValueSpec(slice_axis=axis)}
    for partitions in (None, [[], []]):
        data = stored(encode({"x": value}, spec, partitions))
        assert decode(data)["x"] == []
        assert decode(data, slices={"x": slice(0, 1)})["x"] == []
    with pytest.raises(ValueError, match=r"column 'x'.*rank 3, so no slice_axis 3"):
        encode({"x": np.zeros((0, 4, 2, 3))}, {"x": ValueSpec(slice_axis=3)})


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"slices": {"x": [1] * 4}}, "slices of column 'x': 1 is none"),
        ({"slices": {"x": 3}}, "slices of column 'x': 3 is none"),
        ({"slices": slice(2)}, "allowed: a dict of slices by column"),
        ({"rows": [0.5]}, "integer"),
        ({"rows": np.array([True, False])}, "not a mask"),
        ({"fields": "x"}, "sequence of names"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused_before_anything_is_read(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Selection(**wanted)


@pytest.mark.parametrize("partitions", [3, [3], [["0"]], [[0.5]], [[None]]])
def test_partitions_are_numbers_of_rows(partitions: Any) -> None:
    with pytest.raises(TypeError, match=r"partitions = .*allowed: row numbers"):
        encode({"x": [1]}, partitions=partitions)


def test_an_order_of_rows_that_is_none_is_no_batch() -> None:
    encoded = encode({"x": [1, 2, 3]}, partitions=[[2, 0], [1]])
    for order in ([0, 0, 1], [0, 1, 3], [2, 2, 2]):
        encoded._order[:] = np.array(order, dtype="<u4").view(np.uint8)
        with pytest.raises(IntegrityError, match="order of the rows"):
            decode(stored(encoded), rows=[0])
