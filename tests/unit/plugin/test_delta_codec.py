"""One tensor, old -> new and back: for every encoding, by C and by numpy, bit for bit."""

import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_plugin.weight_transfer.disk_delta import bytewise, codec
from miles_plugin.weight_transfer.disk_delta.codec import CHECKSUMS, ENCODINGS, Decoder, Encoder, checksum_of
from mooncake_store.errors import ConfigError, IntegrityError, MissingDependency
from tests.unit.plugin.delta_tensors import (
    BLOCK,
    WIDTHS,
    Pair,
    applied,
    each_encoding,
    each_kernels,
    encoded,
    hash_of,
    pair,
    pairs,
    read_as_others_do,
)


@each_kernels
@each_encoding
@given(tensors=pairs)
def test_a_tensor_comes_back_bit_for_bit(encoding: str, kernels: Any, tensors: Pair) -> None:
    payload = encoded(tensors, encoding, kernels)
    if payload is None:
        assert (tensors.old == tensors.new).all()
        return
    assert (tensors.old != tensors.new).any()
    assert applied(payload, tensors, encoding, kernels)
    assert (read_as_others_do(payload, tensors, encoding) == tensors.new).all()


@each_kernels
@each_encoding
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("density", [1e-5, 0.01, 0.3, 0.7])
@pytest.mark.parametrize("values_more", [-1, 0, 1, BLOCK])
def test_so_does_one_of_several_blocks(
    encoding: str, kernels: Any, width: int, density: float, values_more: int
) -> None:
    tensors = pair(2 * BLOCK // width + values_more // width, width, density)
    payload = encoded(tensors, encoding, kernels)
    if payload is None:
        assert (tensors.old == tensors.new).all()
    else:
        assert applied(payload, tensors, encoding, kernels)


@each_encoding
@pytest.mark.parametrize("width", WIDTHS)
def test_blocks_that_change_much_little_and_not_at_all_follow_each_other(encoding: str, width: int) -> None:
    parts = [
        pair(BLOCK // width, width, density, "any", seed)
        for seed, density in enumerate([0, 0.01, 0.9, 0.02, 0, 0.001, 1, 1, 0, 0.4, 0])
    ]
    tensors = Pair(np.concatenate([p.old for p in parts]), np.concatenate([p.new for p in parts]), width)
    payload = encoded(tensors, encoding)
    assert payload is not None
    assert applied(payload, tensors, encoding)


@each_encoding
def test_signed_zeros_and_what_a_nan_carries_are_bits_like_others(encoding: str) -> None:
    old = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x00000000, 0x7F800001, 0x3F800000], dtype="<u4")
    new = np.array([0x7FC00001, 0x7FC00000, 0x7FC00000, 0x80000000, 0xFFFFFFFF, 0x3F800000], dtype="<u4")
    tensors = Pair(old.view(np.uint8), new.view(np.uint8), 4)
    payload = encoded(tensors, encoding)
    assert payload is not None
    assert applied(payload, tensors, encoding)


@pytest.mark.parametrize("fold", [1, 3, 8])
@given(data=st.data(), width=st.sampled_from(WIDTHS), count=st.integers(1, 500))
@settings(max_examples=40)
def test_several_payloads_at_once_do_what_they_do_one_after_another(
    fold: int, data: st.DataObject, width: int, count: int
) -> None:
    state = pair(count, width, 0).old.copy()
    first, payloads = state.copy(), []
    for seed in range(data.draw(st.integers(0, 10))):
        density = data.draw(st.sampled_from([0.01, 0.2, 1]))
        target = state.copy()
        is_changed = np.random.default_rng(seed).random(state.size) < density
        target[is_changed] += 1
        encoding = data.draw(st.sampled_from(ENCODINGS))
        payload, _ = Encoder(encoding, "adler32").encode(state, target, width)
        if payload is not None:
            payloads.append((encoding, payload))
    one_by_one, together = first.copy(), first
    for step in payloads:
        Decoder("adler32").apply([step], one_by_one, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "FOLD", fold)
        assert Decoder("xxh3-128").apply(payloads, together, width) == hash_of(state)
    assert (together == state).all()
    assert (one_by_one == state).all()


@each_encoding
def test_several_payloads_over_several_blocks(encoding: str) -> None:
    state = pair(3 * BLOCK // 2 + 5, 2, 0).old.copy()
    tensor, payloads = state.copy(), []
    for seed in range(10):
        target = state.copy()
        target[np.random.default_rng(seed).integers(0, state.size, 3000)] ^= 1
        payload, _ = Encoder(encoding, "adler32").encode(state, target, 2)
        assert payload is not None
        payloads.append((encoding, payload))
    assert Decoder("xxh3-128").apply(payloads, tensor, 2) == hash_of(state)


def test_without_payloads_the_checksum_is_that_of_what_is_there() -> None:
    tensors = pair(1000, 2, 0.1)
    assert Decoder("xxh3-128").apply([], tensors.old.copy(), 2) == hash_of(tensors.old)


@each_encoding
def test_a_payload_for_a_tensor_of_no_bytes_is_refused(encoding: str) -> None:
    payload = encoded(pair(10, 2, 1), encoding)
    assert payload is not None
    assert encoded(pair(0, 2, 1), encoding) is None
    with pytest.raises(IntegrityError):
        Decoder("adler32").apply([(encoding, payload)], np.empty(0, dtype=np.uint8), 2)


@each_encoding
@pytest.mark.parametrize("whole", [0, 1 << 20])
def test_a_payload_is_applied_to_memory_that_a_file_has(
    encoding: str, whole: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "WHOLE_BYTES", whole)
    tensors = pair(BLOCK // 2 + 77, 2, 0.02)
    payload = encoded(tensors, encoding)
    assert payload is not None
    (tmp_path / "tensor").write_bytes(b"abc" + tensors.old.tobytes() + b"def")
    mapped = np.memmap(tmp_path / "tensor", dtype=np.uint8, mode="r+")
    inner = np.asarray(mapped)[3:-3]  # at no round address
    checksum = Decoder("xxh3-128").apply([(encoding, memoryview(payload))], inner, 2)
    mapped.flush()
    assert checksum == hash_of(tensors.new)
    assert (tmp_path / "tensor").read_bytes() == b"abc" + tensors.new.tobytes() + b"def"


class Fails:
    """A checksum that fails once, after blocks were encoded."""

    left = 2

    def update(self, data: memoryview, /) -> None:
        self.left -= 1
        if not self.left:
            raise OSError("made to fail")

    def hexdigest(self) -> str:
        return ""


@each_encoding
def test_a_codec_goes_on_after_a_call_that_failed(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, decoder = Encoder(encoding, "xxh3-128"), Decoder("xxh3-128")
    tensors = pair(BLOCK, 2, 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "_new_hash", Fails)
        patch.setattr(encoder, "_in_c", None)
        with pytest.raises(OSError, match="made to fail"):
            encoder.encode(tensors.old.copy(), tensors.new, 2)
    payload, _ = encoder.encode(tensors.old.copy(), tensors.new, 2)
    assert payload == encoded(tensors, encoding)
    assert payload is not None
    with pytest.raises(IntegrityError):
        decoder.apply([(encoding, payload[:-1])], tensors.old.copy(), 2)
    assert decoder.apply([(encoding, payload)], tensors.old.copy(), 2) == hash_of(tensors.new)


@each_encoding
def test_memory_that_cannot_be_written_is_refused(encoding: str) -> None:
    tensors = pair(100, 2, 0.1)
    payload = encoded(tensors, encoding)
    assert payload is not None
    for call in (
        lambda: Encoder(encoding, "adler32").encode(tensors.old, tensors.new, 2),
        lambda: Decoder("adler32").apply([(encoding, payload)], tensors.old, 2),
    ):
        with pytest.raises(ValueError, match="must be writable"):
            call()


@each_encoding
def test_threads_with_codecs_of_their_own_do_not_disturb_each_other(encoding: str) -> None:
    def both_ways(seed: int) -> bool:
        tensors = pair(200_000, 2, 0.02, "any", seed)
        payload = encoded(tensors, encoding)
        return payload is not None and applied(payload, tensors, encoding)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(both_ways, range(16)))


@each_kernels
@each_encoding
@pytest.mark.parametrize("density", [0.01, 0.4, 1])
def test_memory_is_bounded_however_large_the_tensor(encoding: str, kernels: Any, density: float) -> None:
    tensors = pair(10 << 20, 2, density, "any")
    tensor, old = tensors.old.copy(), tensors.old.copy()
    encoder, decoder = Encoder(encoding, "xxh3-128", kernels), Decoder("xxh3-128", kernels)
    tracemalloc.start()
    try:
        payload, _ = encoder.encode(old, tensors.new, 2)
        assert payload is not None
        # What is written to grows by an eighth at a time, and may be copied once.
        assert tracemalloc.get_traced_memory()[1] < 2.2 * len(payload) + (16 << 20)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        decoder.apply([(encoding, payload)], tensor, 2)
        assert tracemalloc.get_traced_memory()[1] - before < 14 << 20
    finally:
        tracemalloc.stop()
    assert (tensor == tensors.new).all()


@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_every_checksum_is_the_one_of_the_whole_tensor(checksum: str) -> None:
    if checksum == "blake3":
        pytest.importorskip("blake3")
    tensors = pair(BLOCK + 3, 1, 0.1)
    payload, told = Encoder("sparse", checksum).encode(tensors.old.copy(), tensors.new, 1)
    assert payload is not None
    tensor = tensors.old.copy()
    assert Decoder(checksum).apply([("sparse", payload)], tensor, 1) == told == checksum_of(tensors.new, checksum)
    assert told != checksum_of(tensors.old, checksum)


def test_checksums_are_those_that_others_compute() -> None:
    digits = np.frombuffer(b"123456789", dtype=np.uint8)
    assert checksum_of(digits, "adler32") == "091e01de"
    assert checksum_of(digits[:0], "adler32") == "00000001"
    assert checksum_of(digits[:0], "xxh3-128") == "99aa06d3014798d86001c324468d497f"


def test_blake3_is_the_published_one() -> None:
    pytest.importorskip("blake3")
    published = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert checksum_of(np.empty(0, dtype=np.uint8), "blake3") == published


def test_a_checksum_whose_package_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    for make in (lambda: Encoder("xor", "blake3"), lambda: Decoder("blake3")):
        with pytest.raises(MissingDependency, match="pip install blake3"):
            make()


def test_what_is_unknown_is_named_with_what_is_known() -> None:
    with pytest.raises(ConfigError, match="'zip' is unknown; allowed: xor, overwrite, sparse"):
        Encoder("zip", "xxh3-128")
    for make in (lambda: Encoder("xor", "crc"), lambda: Decoder("crc"), lambda: checksum_of(pair(1, 1, 0).old, "crc")):
        with pytest.raises(ConfigError, match="'crc' is unknown; allowed: xxh3-128, blake3, adler32"):
            make()
    with pytest.raises(IntegrityError, match="'zip' is unknown; allowed: xor, overwrite, sparse"):
        Decoder("adler32").apply([("zip", b"")], np.zeros(4, dtype=np.uint8), 2)


@each_encoding
@pytest.mark.parametrize(
    ("old", "new", "width"),
    [
        (np.zeros(6, dtype=np.uint8), np.zeros(6, dtype=np.uint8), 4),
        (np.zeros(6, dtype=np.uint8), np.zeros(6, dtype=np.uint8), 3),
        (np.zeros(6, dtype=np.uint8), np.zeros(6, dtype=np.uint8), 0),
        (np.zeros(6, dtype=np.uint8), np.zeros(8, dtype=np.uint8), 2),
        (np.zeros(12, dtype=np.uint8)[::2], np.zeros(6, dtype=np.uint8), 2),
        (np.zeros(6, dtype=np.uint16), np.zeros(6, dtype=np.uint16), 2),
        (np.zeros((2, 3), dtype=np.uint8), np.zeros((2, 3), dtype=np.uint8), 2),
    ],
)
def test_arguments_that_are_no_such_tensors_are_refused(encoding: str, old: Any, new: Any, width: int) -> None:
    with pytest.raises(ValueError, match="tensor"):
        Encoder(encoding, "adler32").encode(old, new, width)


def test_a_tensor_too_large_for_overwrite_is_refused_and_not_cut() -> None:
    class Large:
        size = 1 << 32

    with pytest.raises(ConfigError, match="use encoding sparse or xor"):
        bytewise.OverwriteWriter(codec.fastest()).write(Large(), Large(), 2, Large())  # type: ignore[arg-type]
