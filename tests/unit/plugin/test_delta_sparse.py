"""The sparse encoding: what its functions do by C and by numpy alike, how payloads are cut, and how small they are."""

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_plugin.weight_transfer.disk_delta import codec, hashes, sparse, sparse_numpy
from miles_plugin.weight_transfer.disk_delta.frames import frame_end
from miles_plugin.weight_transfer.disk_delta.hashes import state_hash
from miles_plugin.weight_transfer.disk_delta.kernels import SLACK, native
from tests.unit.plugin.delta_tensors import (
    BLOCK,
    WIDTHS,
    Pair,
    applied,
    each_kernels,
    encoded,
    pair,
    pairs,
    read_as_others_do,
)

needs_both = pytest.mark.skipif(native() is None, reason="_sparse.c was not built: no C compiler")


def u32(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.uint32)


def u8(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.uint8)


def flags_of(payload: bytes) -> list[int]:
    """Of each segment."""
    data, at, found = memoryview(payload)[:-8], struct.calcsize("<BBQ"), []
    while at < len(data):
        flags = data[at]
        found.append(flags)
        at += struct.calcsize("<BQI")
        for _ in range(1 if flags & sparse.DENSE else 2 + (flags & 1) + (flags >> 1 & 1)):
            at = frame_end(data, at)
    return found


@needs_both
@given(tensors=pairs)
@settings(max_examples=300)
def test_both_write_the_same_bytes(tensors: Pair) -> None:
    assert encoded(tensors, "sparse", native()) == encoded(tensors, "sparse", sparse_numpy)


@needs_both
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [1e-4, 0.02, 0.45, 1])
def test_so_they_do_of_several_blocks(width: int, density: float) -> None:
    tensors = pair(3 * BLOCK // width - 1, width, density, "any")
    assert encoded(tensors, "sparse", native()) == encoded(tensors, "sparse", sparse_numpy)


@each_kernels
@given(tensors=pairs)
def test_changes_are_where_values_differ(kernels: Any, tensors: Pair) -> None:
    width, count = tensors.width, tensors.old.size // tensors.width
    out = np.full(count + SLACK + 1, 7, dtype=np.uint32)
    found = kernels.changes(tensors.old, tensors.new, width, out[:-1])
    old, new = (t.view(f"<u{width}") for t in (tensors.old, tensors.new))
    assert out[:found].tolist() == np.flatnonzero(old != new).tolist()
    assert out[-1] == 7


@each_kernels
@pytest.mark.parametrize("is_wide", [False, True])
@given(gaps=st.lists(st.integers(0, 3000) | st.sampled_from([254, 255, 256, 510, 65279, 65280, 70000]), max_size=50))
def test_gaps_are_written_as_symbols_and_read_as_positions(kernels: Any, is_wide: bool, gaps: list[int]) -> None:
    lows = np.empty(len(gaps) if is_wide else 0, dtype=np.uint8)
    symbols = np.full(20_000, 7, dtype=np.uint8)
    used = kernels.symbols(u32(*gaps), symbols, lows)
    assert (symbols[used:] == 7).all()
    positions = (np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1).tolist()
    out, end = np.empty(len(gaps), dtype=np.uint32), positions[-1] + 1 if gaps else 0
    if not gaps:
        is_wide = False  # without any there is no low byte to tell by
    assert kernels.positions(symbols[:used], lows, end, out) == end
    assert out.tolist() == positions
    if gaps:
        with pytest.raises(ValueError, match="do not agree"):
            kernels.positions(symbols[:used], lows, end - 1, out)


def scanning(**changed: Any) -> list[Any]:
    """Arguments of `scan`, some other than right: blocks of four values, of which the first is as it was."""
    arguments = {
        "old": u8(*[0] * 8), "new": u8(0, 0, 0, 0, 0, 4, 0, 99), "width": 1, "block": 4, "positions": u32(*[0] * 12),
        "since": 1, "gaps": u32(0, 0, 0), "nibbles": u8(0, 0), "escapes": u8(0, 0), "changed": 1, "escaped": 1,
        "enough": 9, "update": 0, "state": 0,
    }  # fmt: skip
    return [*(arguments | changed).values()]


def patching(**changed: Any) -> list[Any]:
    """Arguments of `patch`, some other than right."""
    arguments = {
        "block": u8(1, 1, 1, 1), "width": 1, "base": 10, "positions": u32(3, 11, 13, 14), "nibbles": u8(0x0F, 0x0F),
        "escapes": u8(5, 6), "changed": 1, "escaped": 1, "touch": True,
        "update": 0, "state": 0,
    }  # fmt: skip
    return [*(arguments | changed).values()]


@each_kernels
def test_what_changed_is_appended_to_what_is_there(kernels: Any) -> None:
    arguments = scanning()
    assert kernels.scan(*arguments) == (8, 0, 3, 2, 0)
    old, new, _, _, _, _, gaps, nibbles, escapes, *_ = arguments
    assert (old == new).all()
    assert (gaps.tolist(), nibbles.tolist(), escapes.tolist()) == ([0, 6, 1], [0x70, 0x0F], [0, 99])


@each_kernels
def test_where_nothing_is_yet_the_first_block_with_changes_is_the_start(kernels: Any) -> None:
    arguments = scanning(changed=0, since=7)
    assert kernels.scan(*arguments) == (8, 4, 2, 2, 0)
    assert arguments[6].tolist() == [1, 1, 0]


@each_kernels
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ({"enough": 1}, (0, 0, 1, 1, 1)),
        ({"enough": 2, "block": 2}, (6, 0, 2, 1, 0)),
        ({"block": 8, "new": u8(1, 1, 1, 1, 1, 0, 0, 0)}, (0, 0, 1, 1, 1)),
        ({"new": u8(0, 0, 0, 0, 1, 1, 1, 0)}, (4, 0, 1, 1, 5)),
    ],
    ids=["enough", "enough on the way", "dense", "dense on the way"],
)
def test_it_stops_where_there_is_enough_and_before_a_dense_block(
    kernels: Any, stops: dict[str, Any], expected: tuple[int, ...]
) -> None:
    arguments = scanning(**stops)
    assert kernels.scan(*arguments) == expected
    old, new = arguments[0], arguments[1]
    assert (old[: expected[0]] == new[: expected[0]]).all()
    assert not old[expected[0] :].any(), "the rest is as it was"


@each_kernels
def test_a_block_is_patched_from_where_the_last_one_ended(kernels: Any) -> None:
    arguments = patching()
    assert kernels.patch(*arguments) == (3, 2)
    assert arguments[0].tolist() == [1, 0, 1, 6]


@each_kernels
@pytest.mark.parametrize(
    "wrong",
    [
        {"new": u8(0, 0, 0, 0, 0, 4, 0)},
        {"width": 3},
        {"block": 0},
        {"block": -4},
        {"block": 3, "width": 2},
        {"positions": u32(0, 0, 0, 0, 0, 0, 0)},
        {"since": -1},
        {"since": 2**33},
        {"gaps": u32(0, 0)},
        {"nibbles": u8(0)},
        {"escapes": u8(0)},
        {"changed": 4},
        {"changed": -1},
        {"escaped": 2},
        {"escaped": -1},
        {"enough": -1},
    ],
    ids=str,
)
def test_nothing_is_scanned_out_of_bounds(kernels: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"do not agree|allowed are"):
        kernels.scan(*scanning(**wrong))


@each_kernels
@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 5},
        {"base": 12},
        {"base": -1},
        {"positions": u32(3, 9, 13, 14)},
        {"nibbles": u8(0x0F)},
        {"escapes": u8(5)},
        {"escaped": 2},
        {"escaped": -1},
        {"changed": -1},
    ],
    ids=str,
)
def test_nothing_is_patched_out_of_bounds(kernels: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"do not agree|allowed are"):
        kernels.patch(*patching(**wrong))


@each_kernels
def test_no_other_function_leaves_its_bounds(kernels: Any) -> None:
    four, three = u8(1, 2, 3, 4), u8(1, 2, 3)
    for call in (
        lambda: kernels.changes(four, three, 1, u32(*range(8))),
        lambda: kernels.changes(four, four, 1, u32(*range(7))),
        lambda: kernels.changes(three, three, 2, u32(*range(8))),
        lambda: kernels.changes(four, four, -1, u32(*range(8))),
        lambda: kernels.symbols(u32(1, 255), u8(0, 0), u8()),
        lambda: kernels.symbols(u32(1, 2), u8(0), u8()),
        lambda: kernels.symbols(u32(1, 2), u8(0, 0), u8(0)),
        lambda: kernels.positions(u8(1), u8(), 100, u32(0, 0)),
        lambda: kernels.positions(u8(1, 1, 1), u8(), 100, u32(0, 0)),
        lambda: kernels.positions(u8(1, 255), u8(), 1000, u32(0, 0)),
        lambda: kernels.positions(u8(1, 1), u8(1), 1000, u32(0, 0)),
        lambda: kernels.positions(u8(1, 1), u8(), -1, u32(0, 0)),
        lambda: kernels.positions(u8(1, 1), u8(), 1 << 40, u32(0, 0)),
        lambda: kernels.spread(four.copy(), three, 1, u8(0, 0, 0, 0)),
        lambda: kernels.spread(four.copy(), four, 1, u8(0, 0, 0)),
        lambda: kernels.spread(three.copy(), three, 2, u8(0, 0, 0)),
        lambda: kernels.unspread(four.copy(), three, 1),
        lambda: kernels.unspread(three.copy(), three, 2),
    ):
        with pytest.raises(ValueError, match=r"do not agree|allowed are"):
            call()


@each_kernels
def test_a_segment_ends_before_gaps_no_longer_fit(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "SEGMENT_VALUES", BLOCK)
    new = np.zeros(6 * BLOCK, dtype=np.uint8)
    new[[0, BLOCK - 1, BLOCK, 4 * BLOCK, 5 * BLOCK + 7, 6 * BLOCK - 1]] = 1
    tensors = Pair(np.zeros_like(new), new, 1)
    payload = encoded(tensors, "sparse", kernels)
    assert payload is not None
    assert len(flags_of(payload)) == 4
    assert applied(payload, tensors, "sparse", kernels)


def test_many_changes_are_cut_into_segments_that_readers_elsewhere_take() -> None:
    tensors = pair(3 * BLOCK, 1, 0.3, "any")
    payload = encoded(tensors, "sparse")
    assert payload is not None
    assert flags_of(payload) == [sparse.ESCAPES] * 3
    assert (read_as_others_do(payload, tensors, "sparse") == tensors.new).all()


def test_segments_of_every_kind_are_read_elsewhere() -> None:
    parts = [pair(BLOCK // 2, 2, share, "any", seed) for seed, share in enumerate([0.001, 0.9, 0.2, 0, 0.6])]
    tensors = Pair(np.concatenate([p.old for p in parts]), np.concatenate([p.new for p in parts]), 2)
    payload = encoded(tensors, "sparse")
    assert payload is not None
    assert flags_of(payload) == [sparse.WIDE | sparse.ESCAPES, sparse.DENSE, sparse.ESCAPES, sparse.DENSE]
    assert (read_as_others_do(payload, tensors, "sparse") == tensors.new).all()


@each_kernels
@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("shares", [[0, 0.01, 0, 0.9, 0, 0.2], [0.6, 0, 0], [0.3] * 4, [0, 0, 0.0001]], ids=str)
def test_what_is_read_is_hashed_wherever_its_segments_lie(
    kernels: Any, in_c: bool, shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By C between its changes, by Python block after block where the hash cannot be reached from there."""
    if not in_c:
        monkeypatch.setattr(codec, "state_hash", lambda _: None)
    parts = [pair(BLOCK // 2, 2, share, "any", seed) for seed, share in enumerate(shares)]
    parts.append(pair(501, 2, 0.5, "any"))
    tensors = Pair(np.concatenate([p.old for p in parts]), np.concatenate([p.new for p in parts]), 2)
    payload = encoded(tensors, "sparse", kernels)
    assert payload is not None
    assert applied(payload, tensors, "sparse", kernels)
    assert not applied(payload, replace(tensors, old=np.zeros_like(tensors.old)), "sparse", kernels)


@given(sizes=st.lists(st.integers(0, 5000)))
def test_the_hash_in_c_is_that_of_the_package(sizes: list[int]) -> None:
    found = state_hash("xxh3-128")
    assert found is not None
    for _ in range(2):
        found.begin()
        whole = xxhash.xxh3_128()
        for seed, size in enumerate(sizes):
            part = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
            sparse_numpy.patch(part, 1, 0, u32(), u8(), u8(), 0, 0, False, found.function, found.state)
            whole.update(part)
        assert found.hexdigest() == whole.hexdigest()
    assert state_hash("blake3") is None


@pytest.mark.parametrize("wrong", [(hashes, "c_library", lambda: None), (xxhash, "xxh3_128_hexdigest", lambda _: "")])
def test_a_hash_that_cannot_be_reached_or_is_another_is_left_to_the_package(
    wrong: tuple[object, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*wrong)
    assert state_hash("xxh3-128") is None


@pytest.mark.parametrize(
    ("density", "most"), [(0.0005, 1.05), (0.003, 1.05), (0.01, 1.02), (0.05, 1.02), (0.3, 1.03), (0.45, 1.08)]
)
@pytest.mark.parametrize("width", [2, 4])
def test_a_payload_is_about_as_small_as_its_information(width: int, density: float, most: float) -> None:
    count = 4_000_000
    old = np.random.default_rng(1).integers(0, 256, count * width, dtype=np.uint8)
    random = np.random.default_rng(2)
    is_changed = random.random(count) < density
    new = old.copy()
    new.view(f"<u{width}")[is_changed] += random.choice(np.array([1, -1], dtype=f"<i{width}"), is_changed.sum()).view(
        f"<u{width}"
    )
    payload = encoded(Pair(old, new, width), "sparse")
    assert payload is not None
    share = is_changed.mean()
    bits = -count * (share * np.log2(share) + (1 - share) * np.log2(1 - share)) + is_changed.sum()
    assert len(payload) < most * bits / 8


@pytest.mark.parametrize("width", WIDTHS)
def test_a_tensor_that_is_another_altogether_takes_hardly_more_than_itself(width: int) -> None:
    tensors = pair(2 * BLOCK // width, width, 1, "any")
    payload = encoded(tensors, "sparse")
    assert payload is not None
    assert len(payload) < 1.001 * tensors.new.size
