"""A batch survives its encoding, equal batches have equal bytes, and no corruption passes."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_store import BATCH_LEVEL, IntegrityError, ValueSpec, as_lists, batch_digest
from mooncake_store.arrays import DTYPES
from mooncake_store.decode import decode
from mooncake_store.encode import Into, encode
from mooncake_store.format import FORMAT, HEADER, MAGIC, aligned
from mooncake_store.gather import IS_BUILT
from mooncake_store.tensors import TORCH_DTYPES, is_tensor, restore
from mooncake_store.tree import TreeWriter, is_plain

NUMPY_DTYPES = [np.dtype(name) for name in DTYPES if name not in TORCH_DTYPES] + [np.dtype(">i4"), np.dtype(">f8")]
Specs = dict[str, ValueSpec]


def stored(batch: dict[str, Any], specs: Specs | None = None, memory: int = 0xAA, **how: Any) -> np.ndarray:
    encoded = encode(batch, specs, **how)
    out = np.full(encoded.nbytes, memory, dtype=np.uint8)  # what an earlier object left there
    assert encoded.write_into(out) == encoded.digest
    return out


# Every kind of column: what a forger may change.
EVERYTHING: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4], [], [5, 6]],
    "rewards": [1.0, 2.0, 3.0, 4.0],
    "half": np.arange(8, dtype=np.float16).reshape(4, 2),
    "text": ["one", "two", "one", "one"],
    "meta": [{"a": np.ones(3)}, None, (1, 2), "x"],
    "images": [np.ones((2, n), dtype=np.uint8) for n in range(1, 5)],
    "experts": [np.full((n, 4, 2), n, dtype=np.int32) for n in range(4)],
    "round_number": 7,
}
SLICED = {"experts": ValueSpec(slice_axis=1)}
REFUSED = (IndexError, KeyError, TypeError)  # what a selection may be told of a batch that lacks rows or columns
selections = st.sampled_from(
    [
        {},
        {"rows": [2, 0]},
        {"rows": slice(1, 3)},
        {"partition": 0},
        {"fields": ["experts", "text"], "slices": {"experts": slice(1, 3)}},
    ]
)


def round_trip(batch: dict[str, Any], specs: Specs | None = None, **options: Any) -> dict[str, Any]:
    return decode(stored(batch, specs), **options)


def same(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape and value, NaN being equal to itself."""
    if is_tensor(a):
        kind = {1: torch.uint8, 2: torch.int16}[a.itemsize]
        return is_tensor(b) and a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float | complex):
        return bool(a == b) or repr(a) == repr(b)
    return bool(a == b)


# --- what comes back, by kind of column -----------------------------------------------------------------------------


def test_layouts_of_memory_do_not_matter() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (np.asfortranarray(base), base[:, ::-1][:, ::-1], base.astype(">f4"), np.repeat(base, 2, 1)[:, ::2]):
        assert same(round_trip({"x": array})["x"], base)
        assert batch_digest({"x": array}) == batch_digest({"x": base})
        assert same(round_trip({"x": list(array)})["x"], list(base))


def test_arrays_inside_dicts_are_views() -> None:
    values = [
        {"pixels": np.arange(6, dtype=np.float16).reshape(2, 3), "grid": np.array([7, 8, 9])},
        None,
        {"pixels": np.zeros((0, 3)), "grid": np.array(True)},
    ]
    data = stored({"multimodal_train_inputs": values})
    got = decode(data)["multimodal_train_inputs"]
    assert same(got, values)
    assert np.shares_memory(got[0]["pixels"], data)
    assert (got[0]["grid"].ctypes.data - data.ctypes.data) % 64 == 0


def test_numeric_columns_are_views_and_read_only_when_the_buffer_is() -> None:
    data = stored({"tokens": [[1, 2], [3]], "r": [0.5, 0.25]})
    data.flags.writeable = False
    got = decode(data)
    for array in (got["tokens"][0], got["r"]):
        assert np.shares_memory(array, data)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_empty_batches() -> None:
    assert round_trip({}) == {}
    assert same(round_trip({"tokens": [], "rewards": []}), {"tokens": [], "rewards": []})


# --- specs ----------------------------------------------------------------------------------------------------------


def test_columns_of_a_rollout_batch_have_their_dtypes() -> None:
    got = round_trip({"tokens": [[1, 2], [3]], "loss_masks": [[True], [0, 1]], "rollout_log_probs": [[-0.1], [-2]]})
    assert {row.dtype.name for row in got["tokens"] + got["loss_masks"]} == {"int32"}
    assert {row.dtype.name for row in got["rollout_log_probs"]} == {"float32"}
    assert got["rollout_log_probs"][0][0] == np.float32(-0.1)


@pytest.mark.parametrize("tokens", [[[1], [2**31]], [np.array([1]), np.array([2**31])]])
def test_tokens_beyond_int32_are_refused(tokens: Any) -> None:
    with pytest.raises(OverflowError, match=r"column 'tokens', row 1: .*int32"):
        encode({"tokens": tokens})


def test_routed_experts_as_nested_lists_with_an_empty_row() -> None:
    rows = [np.arange(n * 6, dtype=np.int32).reshape(n, 2, 3) for n in (2, 0, 1)]
    batch = {"tokens": [[1] * (len(row) + 1) for row in rows], "rollout_routed_experts": [row.tolist() for row in rows]}
    assert same(round_trip(batch)["rollout_routed_experts"], rows)


def test_a_known_column_with_missing_rows_is_kept() -> None:
    values = [[-0.5], None]
    assert same(round_trip({"tokens": [[1], [2]], "teacher_log_probs": values})["teacher_log_probs"], values)
    assert round_trip({"tokens": [[1], [2]], "teacher_log_probs": None})["teacher_log_probs"] is None


def test_an_explicit_spec_wins() -> None:
    got = round_trip({"tokens": [[1], [2]]}, {"tokens": ValueSpec("typed_ragged", "int64")})
    assert got["tokens"][0].dtype == np.int64


@pytest.mark.parametrize("values", [["a", "b"], [None, 1], [[1, 2], [3]], [[1], [1.5]], [{}, {}]])
def test_rows_that_are_not_one_array(values: list[Any]) -> None:
    with pytest.raises(TypeError, match="column 'x'"):
        encode({"x": values}, {"x": ValueSpec("ndarray")})


@pytest.mark.parametrize("dtype", ["torch.int32", np.int32, np.dtype("int32"), "int32", "<i4"])
def test_spec_dtypes(dtype: Any) -> None:
    assert ValueSpec("typed_ragged", dtype).dtype == "int32"


@pytest.mark.parametrize("kwargs", [{"codec": "pickle"}, {"dtype": "longdouble"}, {"dtype": "str"}, {"dtype": "nope"}])
def test_spec_refuses(kwargs: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        ValueSpec(**kwargs)


# --- refusals, which name the column and the row --------------------------------------------------------------------


@pytest.mark.parametrize("row", [[1.5], [None], ["a"], [[1], 2], [["a"]], [[2**70]], "ab", 7, np.array([1.5])])
def test_a_row_that_contradicts_its_spec(row: Any) -> None:
    with pytest.raises(TypeError, match=r"column 'x', row 1"):
        encode({"x": [[1], row]}, {"x": ValueSpec("typed_ragged", "int32")})


def test_a_known_column_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match="'loss_masks' has 1 rows, the batch has 2"):
        encode({"tokens": [[1], [2]], "loss_masks": [[1]]})


def test_names_are_strings_and_specs_have_columns() -> None:
    with pytest.raises(TypeError, match="column name 3"):
        encode({3: [1]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="absent"):
        encode({"x": [1]}, {"absent": ValueSpec()})


# --- rows, fields, batch-level values -------------------------------------------------------------------------------

BATCH: dict[str, Any] = {
    "tokens": [[1, 2], [3], [4, 5, 6], [7]],
    "rewards": [0.0, 0.5, 1.0, 1.5],
    "prompt": ["a", "b", "c", "d"],
    "pair": np.arange(8).reshape(4, 2),
    "round_number": 3,
    "num_microbatches": [2, 2, 2, 2],
    "total_lengths": [9, 9, 9, 9, 9],
    "shape": (1, 2, 3, 4),
}


@pytest.mark.parametrize("rows", [slice(1, 3), slice(None, None, -2), [3, 0], [-1], [], range(2), np.array([2, 2])])
def test_rows_select_samples_and_leave_batch_values(rows: Any) -> None:
    got = as_lists(round_trip(BATCH, rows=rows))
    picked = list(range(4))[rows] if isinstance(rows, slice) else [range(4)[int(row)] for row in rows]
    for name in ("tokens", "rewards", "prompt"):
        assert got[name] == [BATCH[name][row] for row in picked]
    assert got["pair"] == BATCH["pair"][picked].tolist()
    for name in ("round_number", "num_microbatches", "total_lengths", "shape"):
        assert same(got[name], BATCH[name])


def test_batch_level_names_are_never_sliced() -> None:
    for name in BATCH_LEVEL:
        assert round_trip({"tokens": [[1], [2]], name: [5, 6]}, rows=[0])[name] == [5, 6]


def test_num_rows_without_tokens_is_the_most_common_length() -> None:
    assert encode({"a": [1], "b": [1, 2], "c": [3, 4]}).num_rows == 2
    assert encode({"a": [1], "b": [1, 2]}).num_rows == 1
    assert encode({"a": 1, "b": "text"}).num_rows == 0


@pytest.mark.parametrize("row", [4, -5])
def test_a_row_beyond_the_batch(row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of a batch of 4"):
        round_trip(BATCH, rows=[row])


def test_a_mask_is_not_row_numbers() -> None:
    for mask in ([True, False, True, False], np.array([True, False, True, False])):
        with pytest.raises(TypeError, match="mask"):
            round_trip(BATCH, rows=mask)


def test_fields() -> None:
    assert list(round_trip(BATCH, fields=["rewards", "tokens"])) == ["rewards", "tokens"]
    with pytest.raises(KeyError, match="did you mean 'tokens'"):
        round_trip(BATCH, fields=["token"])


def test_key_order_is_kept() -> None:
    assert list(round_trip(dict(reversed(BATCH.items())))) == list(reversed(BATCH))


# --- properties -----------------------------------------------------------------------------------------------------


class Mode(enum.IntEnum):
    FAST = 1


atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
arrays = hnp.arrays(
    st.sampled_from(NUMPY_DTYPES) | hnp.datetime64_dtypes() | hnp.timedelta64_dtypes(),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
bfloat16 = hnp.arrays(np.uint16, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)).map(
    lambda bits: restore(bits.view(TORCH_DTYPES["bfloat16"]))
)
trees = st.recursive(
    atoms | arrays | bfloat16,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=6,
)


def columns(rows: int) -> st.SearchStrategy[Any]:
    def of(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(items, min_size=rows, max_size=rows)

    return st.one_of(
        of(st.booleans()),
        of(st.integers(-(2**63), 2**63 - 1)),
        of(st.floats()),
        of(trees).filter(fits),
        of(st.none() | arrays),
        of(bfloat16),
        of(st.lists(st.integers(-9, 9), max_size=4)),
        of(st.lists(st.floats(width=32), max_size=4)),
        of(st.lists(st.booleans(), max_size=4)),
        of(hnp.arrays(np.int32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=3))),
        hnp.arrays(np.float16, st.tuples(st.just(rows), st.integers(0, 3))),
        trees.filter(fits),
    )


def fits(column: Any) -> bool:
    """Whether no number of what may be a column of numbers, or rows of them, is refused for exceeding int64."""
    rows = column if isinstance(column, list) else []
    numbers = [number for row in rows for number in (row if isinstance(row, list) else [row])]
    return all(type(number) is not int or number < 2**63 for number in numbers)


batches = st.integers(0, 4).flatmap(
    lambda rows: st.dictionaries(st.sampled_from("abcdefgh"), columns(rows), max_size=5).map(
        lambda batch: {"tokens": [[row] * row for row in range(rows)], **batch}
    )
)


@settings(max_examples=300)
@given(batches)
def test_encoding_what_was_decoded_gives_the_same_bytes(batch: dict[str, Any]) -> None:
    data = stored(batch)
    got = decode(data)
    assert list(got) == list(batch)
    assert np.array_equal(stored(got, memory=0x55), data)
    assert batch_digest(as_lists({"tokens": got["tokens"]})) == batch_digest({"tokens": batch["tokens"]})


@given(st.lists(trees, max_size=5))
def test_values_packed_together_are_as_one_by_one(values: list[Any]) -> None:
    alone, together = TreeWriter(), TreeWriter()
    assert together.pack_all(values) == list(map(alone.pack, values))
    assert len(together.rows) == len(alone.rows)


@given(trees)
def test_plain_is_what_msgpack_has_itself(value: Any) -> None:
    def plain(value: Any) -> bool:
        if type(value) is list:
            return all(map(plain, value))
        if type(value) is dict:
            return all(map(plain, value.values()))
        return type(value) in (type(None), bool, int, float, str, bytes)

    assert is_plain([value]) == (IS_BUILT and plain(value))


@pytest.mark.parametrize(
    "value", [{True: 1}, {1.5: 1}, {np.int64(1): 1}, np.float64(1), (1,), {1}, Mode.FAST, "a\ud800"]
)
def test_what_only_looks_plain_is_packed_with_care(value: Any) -> None:
    for values in ([value], [[value]], [{"a": [value]}]):
        assert is_plain(values) == (IS_BUILT and type(value) is str)
        outcomes = []
        for pack in (lambda writer, values: writer.pack_all(values), lambda writer, values: [writer.pack(*values)]):
            try:
                outcomes.append(pack(TreeWriter(), values))
            except TypeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_values_that_hold_themselves_often_are_seen_at_once() -> None:
    loop: list[Any] = []
    loop += [loop] * 1000
    assert not is_plain([loop, {"a": loop}])


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_values_are_plain_as_deep_as_they_may_be_packed(make: Callable[[Any], Any]) -> None:
    value: Any = 1
    for _ in range(99):
        value = make(value)
    assert is_plain([value]) == IS_BUILT
    for _ in range(2):
        value = make(value)
    assert not is_plain([value])
    assert TreeWriter().pack_all([value]), "one by one"
    with pytest.raises(TypeError, match="nested more than 100 levels deep"):
        TreeWriter().pack_all([make(value)])


@settings(max_examples=200)
@given(batches)
def test_values_survive(batch: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic) or is_tensor(value):
            return plain(value.tolist())
        if isinstance(value, list | tuple):
            return type(value)(map(plain, value))
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return value

    assert same(plain(round_trip(batch)), plain(batch))


@settings(max_examples=300)
@given(batches, st.data())
def test_a_flipped_byte_is_caught_or_was_padding(batch: dict[str, Any], draw: st.DataObject) -> None:
    data = stored(batch)
    intact = decode(data.copy())
    position = draw.draw(st.integers(0, data.size - 1))
    data[position] ^= draw.draw(st.integers(1, 255))
    try:
        got = decode(data)
    except IntegrityError:
        return
    assert position >= HEADER.size
    assert same(got, intact)


@settings(max_examples=200)
@given(batches, st.data())
def test_a_cut_object_is_caught(batch: dict[str, Any], draw: st.DataObject) -> None:
    data = stored(batch)
    with pytest.raises(IntegrityError):
        decode(data[: draw.draw(st.integers(0, data.size - 1))])


_INDEX = {"dense": 5, "ragged": 7, "tree": 4}  # position of the index's span in an entry


def forged(
    data: np.ndarray,
    change: Callable[[Any], Any] = lambda table: table,
    change_indexes: Callable[[np.ndarray], None] | None = None,
) -> np.ndarray:
    """The object with its table or its indexes changed and every digest of them made right again."""
    _, version, zero, _, table_bytes, head_bytes, _, zeros = HEADER.unpack_from(data.data)
    start = aligned(HEADER.size + table_bytes)
    indexes = data[start:head_bytes].copy()
    table = msgspec.msgpack.decode(data[HEADER.size : HEADER.size + table_bytes].tobytes())
    if change_indexes is not None:
        change_indexes(indexes)
        for span in [table[2], *(entry[_INDEX[entry[0]]] for entry in table[3])]:
            span[2] = xxhash.xxh3_128_digest(indexes[span[0] : span[0] + span[1]].tobytes())
    packed = msgspec.msgpack.encode(change(table))
    head = packed + bytes(-(HEADER.size + len(packed)) % 64) + indexes.tobytes()
    nbytes = HEADER.size + len(head) + data.size - head_bytes
    digest = xxhash.xxh3_128_digest(packed)
    header = HEADER.pack(MAGIC, version, zero, nbytes, len(packed), HEADER.size + len(head), digest, zeros)
    return np.frombuffer(header + head + data[head_bytes:].tobytes(), dtype=np.uint8)


def test_an_unchanged_forgery_is_the_object() -> None:
    data = stored(EVERYTHING, SLICED, partitions=[[3, 1], [0, 2]])
    assert np.array_equal(forged(data), data)
    assert np.array_equal(forged(data, change_indexes=lambda _: None), data)


numbers = st.integers(-3, 70) | st.sampled_from([2**31, 2**32, 2**62, 2**63, -(2**63)])


@settings(max_examples=500)
@given(st.data())
def test_a_forged_table_raises_only_integrity_errors(draw: st.DataObject) -> None:
    def change(node: Any) -> Any:
        """Replace one number, name or kind anywhere in the table."""
        paths = []

        def walk(value: Any, path: tuple[int, ...]) -> None:
            if isinstance(value, list):
                for index, item in enumerate(value):
                    walk(item, (*path, index))
            elif isinstance(value, int | str):
                paths.append(path)

        walk(node, ())
        path = draw.draw(st.sampled_from(paths))
        parent = node
        for index in path[:-1]:
            parent = parent[index]
        old = parent[path[-1]]
        parent[path[-1]] = draw.draw(
            numbers
            if isinstance(old, int)
            else st.sampled_from(["dense", "ragged", "tree", "int8", "float64", "object"])
        )
        return node

    partitions = draw.draw(st.sampled_from([None, [[3, 1], [0, 2]]]))
    data = forged(stored(EVERYTHING, SLICED, partitions=partitions), change)
    for verify in (True, False):
        with contextlib.suppress(IntegrityError, *REFUSED):
            decode(data, verify=verify, **draw.draw(selections))


@settings(max_examples=500)
@given(st.data())
def test_a_forged_index_raises_only_integrity_errors(draw: st.DataObject) -> None:
    def change(indexes: np.ndarray) -> None:
        for _ in range(draw.draw(st.integers(1, 3))):
            words = indexes.view("<i8")
            words[draw.draw(st.integers(0, words.size - 1))] = draw.draw(numbers.filter(lambda n: n < 2**63))

    partitions = draw.draw(st.sampled_from([None, [[3, 1], [0, 2]]]))
    data = forged(stored(EVERYTHING, SLICED, partitions=partitions), change_indexes=change)
    for verify in (True, False):
        with contextlib.suppress(IntegrityError, *REFUSED):
            decode(data, verify=verify, **draw.draw(selections))


@settings(max_examples=300)
@given(st.data())
def test_unverified_payloads_raise_only_integrity_errors(draw: st.DataObject) -> None:
    data = stored(EVERYTHING, SLICED)
    start = HEADER.unpack_from(data.data)[5]
    for _ in range(3):
        data[draw.draw(st.integers(start, data.size - 1))] = draw.draw(st.integers(0, 255))
    with contextlib.suppress(IntegrityError):
        decode(data, verify=False)


@pytest.mark.parametrize(
    ("batch", "index", "problem"),
    [
        ({"x": [np.array([1, 2]), np.array([3])]}, [-8, 24], "overlap"),
        ({"x": [np.array([1, 2]), np.array([3])]}, [32, 24], "overlap"),
        ({"x": [np.array([1, 2]), np.array([3])]}, [12, 24], "not made of items"),
        ({"x": [np.array([1, 2]), np.array([3])]}, [16, 16], "do not fill"),
        ({"x": [np.ones((2, 1)), np.ones((1, 3))]}, [-2, -1], "negative"),
        ({"x": [np.ones((2, 1)), np.ones((1, 3))]}, [1 << 62, 1 << 62], "do not fit"),
        ({"x": [np.ones((2, 1)), np.ones((1, 3))]}, [1, 1], "do not fit"),
    ],
)
def test_sizes_that_contradict_each_other_are_caught(batch: dict[str, Any], index: list[int], problem: str) -> None:
    def change(indexes: np.ndarray) -> None:
        indexes.view("<i8")[:2] = index

    with pytest.raises(IntegrityError, match=problem):
        decode(forged(stored(batch), change_indexes=change), verify=False)


# --- the header -----------------------------------------------------------------------------------------------------


def test_another_format_is_refused_with_both_numbers() -> None:
    data = stored({"x": [1]})
    data[8] = FORMAT + 6
    with pytest.raises(IntegrityError, match=r"format 7.*format 1"):
        decode(data)


def test_another_batch_is_refused() -> None:
    ours, theirs = encode({"x": [1]}), stored({"x": [2]})
    with pytest.raises(IntegrityError, match="another batch"):
        decode(theirs, digest=ours.digest)


def test_a_writer_that_died_midway_leaves_nothing_readable() -> None:
    class Died(Exception):
        pass

    class Dies(Into):
        def reserve(self, position: int, nbytes: int) -> np.ndarray:
            if position < encoded.head_bytes:
                raise Died
            return super().reserve(position, nbytes)

    encoded = encode(BATCH)
    memory = np.zeros(encoded.nbytes, dtype=np.uint8)
    with pytest.raises(Died):
        encoded.write(Dies(memory))
    assert memory[encoded.head_bytes :].any()
    with pytest.raises(IntegrityError, match="did not finish"):
        decode(memory)


def test_every_column_of_the_same_batch_has_one_digest_whatever_carried_it() -> None:
    rows = [[1, 2, 3], [4]]
    digests = {
        batch_digest({"tokens": tokens})
        for tokens in (
            rows,
            [np.array(row) for row in rows],
            [np.array(row, dtype=np.int32) for row in rows],
            [np.array(row, dtype=">i2") for row in rows],
            [torch.tensor(row) for row in rows],
            [tuple(row) for row in rows],
        )
    }
    assert len(digests) == 1


@pytest.mark.parametrize("selection", [{"rows": [1.5]}, {"rows": ["1"]}, {"fields": "tokens"}])
def test_a_selection_of_the_wrong_type_is_refused(selection: dict[str, Any]) -> None:
    encoded = encode({"tokens": [[1], [2, 3]]})
    stored = np.zeros(encoded.nbytes, dtype=np.uint8)
    encoded.write_into(stored)
    with pytest.raises(TypeError):
        decode(stored, **selection)
