"""Payloads that were damaged or made up: found, and never a crash, a hang or memory for what they only claim."""

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_plugin.weight_transfer.disk_delta import bytewise, codec
from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS, Decoder
from mooncake_store.errors import IntegrityError
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
)

_COMPRESSOR = zstandard.ZstdCompressor(level=1)


def is_harmless(payload: bytes, tensors: Pair, encoding: str, kernels: Any) -> bool:
    """Refused; or the checksum tells; or the tensor is right after all (zstd has bits that mean nothing)."""
    around = np.zeros(tensors.old.size + 128, dtype=np.uint8)
    tensor = around[64 : 64 + tensors.old.size]
    tensor[:] = tensors.old
    try:
        checksum = Decoder("xxh3-128", kernels).apply([(encoding, payload)], tensor, tensors.width)
    except IntegrityError:
        return True
    finally:
        assert not around[:64].any()
        assert not around[64 + tensors.old.size :].any()
    return bool((tensor == tensors.new).all()) or checksum != hash_of(tensors.new)


def forged(data: bytes) -> bytes:
    """A sparse payload whose digest is right."""
    return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


SMALL = [
    pytest.param(pair(40, 2, 0.3), id="few"),
    pytest.param(pair(30, 4, 0.3, "any"), id="escapes"),
    pytest.param(pair(40, 2, 1), id="dense"),
    pytest.param(pair(2000, 1, 0.003, seed=1), id="wide"),
]


@each_kernels
@each_encoding
@pytest.mark.parametrize("tensors", SMALL)
def test_every_changed_byte_is_found(encoding: str, kernels: Any, tensors: Pair) -> None:
    payload = encoded(tensors, encoding)
    assert payload is not None
    for at in range(len(payload)):
        for flip in (0x01, 0x10, 0x80, 0xFF, payload[at] or 0x55):
            damaged = payload[:at] + bytes([payload[at] ^ flip]) + payload[at + 1 :]
            assert is_harmless(damaged, tensors, encoding, kernels), (at, flip)
            if encoding == "sparse":
                with pytest.raises(IntegrityError):
                    applied(damaged, tensors, encoding, kernels)
                # Whoever also forges the digest gets no further than to wrong values.
                assert is_harmless(forged(damaged[:-8]), tensors, encoding, kernels), (at, flip)


@each_kernels
@each_encoding
@pytest.mark.parametrize("tensors", SMALL)
def test_every_cut_and_every_addition_is_found(encoding: str, kernels: Any, tensors: Pair) -> None:
    payload = encoded(tensors, encoding)
    assert payload is not None
    wrong = [payload[:end] for end in range(len(payload))]
    wrong += [payload + b"\0", payload + payload, b"\0" + payload, payload[1:]]
    for damaged in wrong:
        with pytest.raises(IntegrityError):
            applied(damaged, tensors, encoding, kernels)
    if encoding == "sparse":
        for damaged in wrong:
            with pytest.raises(IntegrityError):
                applied(forged(damaged[:-8]), tensors, encoding, kernels)


@each_encoding
def test_a_payload_cut_between_blocks_is_found(encoding: str) -> None:
    tensors = pair(3 * BLOCK, 1, 0.2, "any")
    payload = encoded(tensors, encoding)
    assert payload is not None
    for end in range(0, len(payload), len(payload) // 50):
        with pytest.raises(IntegrityError):
            applied(payload[:end], tensors, encoding)


@each_encoding
@given(tensors=pairs, other=pairs)
def test_a_payload_for_another_tensor_does_not_pass_for_right(encoding: str, tensors: Pair, other: Pair) -> None:
    payload = encoded(other, encoding)
    if payload is not None:
        assert is_harmless(payload, tensors, encoding, None)


@each_kernels
@given(encoding=st.sampled_from(ENCODINGS), payload=st.binary(max_size=200), tensors=pairs)
@example(encoding="xor", payload=b"", tensors=pair(3, 1, 1))
@example(encoding="sparse", payload=forged(b""), tensors=pair(3, 1, 1))
def test_bytes_of_any_kind_never_crash(kernels: Any, encoding: str, payload: bytes, tensors: Pair) -> None:
    assert is_harmless(payload, tensors, encoding, kernels)


contents = st.binary(max_size=40) | st.builds(
    lambda value, count: bytes([value]) * count, st.sampled_from([0, 1, 15, 254, 255]), st.integers(0, 3000)
)
frames = contents.map(_COMPRESSOR.compress) | contents.map(lambda content: _COMPRESSOR.compress(content)[:-1])
segments = st.builds(
    lambda flags, start, count, parts: struct.pack("<BQI", flags, start, count) + b"".join(parts),
    st.integers(0, 5) | st.integers(0, 255),
    st.sampled_from([0, 0, 0, BLOCK, BLOCK // 2, 2**63, 2**64 - 1]) | st.integers(0, 300),
    st.integers(0, 50) | st.sampled_from([2**31, 2**32 - 1, BLOCK, 1000]),
    st.lists(frames, max_size=4),
)


@each_kernels
@given(tensors=pairs, parts=st.lists(segments, max_size=3), version=st.sampled_from([1, 1, 1, 0, 2]))
@settings(max_examples=400)
def test_sparse_payloads_made_up_of_plausible_parts_never_crash(
    kernels: Any, tensors: Pair, parts: list[bytes], version: int
) -> None:
    data = struct.pack("<BBQ", version, tensors.width, tensors.old.size) + b"".join(parts)
    assert is_harmless(forged(data), tensors, "sparse", kernels)


@each_kernels
@given(tensors=pairs, content=contents, count=st.integers(0, 60))
@settings(max_examples=200)
def test_overwrite_payloads_made_up_of_plausible_parts_never_crash(
    kernels: Any, tensors: Pair, content: bytes, count: int
) -> None:
    content = (struct.pack("<I", count) + content * 10)[: 4 + 5 * count]
    assert is_harmless(_COMPRESSOR.compress(content), tensors, "overwrite", kernels)


@pytest.mark.parametrize("positions", [[3, 3], [5, 3], [3, 100], [2**32 - 1], [5, 6, 3, 4], [3, 4, 4, 5]])
@pytest.mark.parametrize("chunk", [2, 100])
def test_positions_that_do_not_rise_inside_the_tensor_are_refused(
    chunk: int, positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytewise, "CHUNK", chunk)
    content = np.array([len(positions), *positions], dtype="<u4").tobytes() + bytes(len(positions))
    tensors = pair(100, 1, 0)
    with pytest.raises(IntegrityError, match="positions do not rise"):
        applied(_COMPRESSOR.compress(content), tensors, "overwrite")


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("whole", [0, 1 << 20])
@pytest.mark.parametrize("more", [b"\0", _COMPRESSOR.compress(b"more"), b"\x50\x2a\x4d\x18\0\0\0\0"])
def test_what_follows_the_frame_is_found_before_the_tensor_changes(
    encoding: str, whole: int, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "WHOLE_BYTES", whole)
    tensors = pair(1000, 2, 0.1)
    payload, tensor = encoded(tensors, encoding), tensors.old.copy()
    assert payload is not None
    with pytest.raises(IntegrityError, match=f"{len(more)} bytes follow the zstd frame"):
        Decoder("adler32").apply([(encoding, payload + more)], tensor, 2)
    assert (tensor == tensors.old).all()


@pytest.mark.parametrize("count", [0, 1, 3, 2**32 - 1])
def test_a_count_that_the_content_does_not_have_is_refused(count: int) -> None:
    content = np.array([count, 3, 5], dtype="<u4").tobytes() + bytes(2)
    with pytest.raises(IntegrityError, match=f"{count} changes in 14 bytes"):
        applied(_COMPRESSOR.compress(content), pair(100, 1, 0), "overwrite")


def segment(flags: int, start: int, count: int, *streams: bytes) -> bytes:
    return struct.pack("<BQI", flags, start, count) + b"".join(map(_COMPRESSOR.compress, streams))


# Of a tensor of BLOCK + 100 values of one byte.
WRONG = {
    "count of none": segment(0, 0, 0, b"", b""),
    "more changes than values": segment(0, BLOCK, 101, bytes(101), bytes(51)),
    "starts inside a block": segment(0, 5, 1, b"\0", b"\0"),
    "starts behind the end": segment(0, 2 * BLOCK, 1, b"\0", b"\0"),
    "unknown flags": segment(8, 0, 1, b"\0", b"\0"),
    "dense and wide": segment(5, 0, BLOCK, bytes(BLOCK)),
    "dense, less than its block": segment(4, 0, BLOCK - 1, bytes(BLOCK - 1)),
    "dense, more than is left": segment(4, BLOCK, 101, bytes(101)),
    "dense frame too short": segment(4, BLOCK, 100, bytes(99)),
    "a gap beyond the end": segment(0, BLOCK, 2, bytes([50, 50]), b"\0"),
    "a gap that goes on for ever": segment(0, 0, 2, bytes([255] * 50), b"\0"),
    "a gap cut off": segment(0, 0, 2, bytes([1, 255]), b"\0"),
    "gaps left over": segment(0, 0, 2, bytes([1, 1, 1]), b"\0"),
    "too few gaps": segment(0, 0, 2, bytes([1]), b"\0"),
    "low bytes missing": segment(1, 0, 2, bytes([1, 1]), bytes(1), b"\0"),
    "a wide gap beyond the end": segment(1, BLOCK, 1, b"\1", b"\0", b"\0"),
    "too few nibbles": segment(0, 0, 3, bytes(3), b"\0"),
    "too many nibbles": segment(0, 0, 2, bytes(2), b"\0\0"),
    "an escape without its value": segment(0, 0, 1, b"\0", b"\x0f"),
    "escapes, and one more": segment(2, 0, 2, bytes(2), b"\xff", b"\1"),
    "values that no escape asks for": segment(2, 0, 1, b"\0", b"\0", b"\1"),
    "no values where there are some": segment(2, 0, 2, bytes(2), b"\xff", b""),
    "overlapping segments": segment(0, 0, 1, b"\0", b"\0") + segment(0, 0, 1, b"\1", b"\0"),
    "segments in no order": segment(0, BLOCK, 1, b"\0", b"\0") + segment(0, 0, 1, b"\0", b"\0"),
    "a dense block twice": segment(4, BLOCK, 100, bytes(100)) * 2,
    "a change in a dense block": segment(4, BLOCK, 100, bytes(100)) + segment(0, BLOCK, 1, b"\0", b"\0"),
    "a header cut off": segment(0, 0, 1, b"\0", b"\0") + b"\0\0\0",
    "a frame missing": segment(0, 0, 1, b"\0"),
    "a skippable frame": struct.pack("<BQI", 0, 0, 1) + b"\x50\x2a\x4d\x18\1\0\0\0a" * 2,
    "nothing": b"",
}


@each_kernels
@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_each_thing_that_the_writer_cannot_have_written_is_refused(kernels: Any, data: bytes) -> None:
    tensors = pair(BLOCK + 100, 1, 0)
    with pytest.raises(IntegrityError):
        applied(forged(struct.pack("<BBQ", 1, 1, tensors.old.size) + data), tensors, "sparse", kernels)


def test_payloads_like_those_are_read_when_nothing_is_wrong_with_them() -> None:
    tensors = pair(BLOCK + 100, 1, 0)
    data = segment(2, 0, 2, bytes(2), b"\xf0", b"\1") + segment(0, BLOCK, 2, bytes([50, 48]), b"\0")
    assert not applied(forged(struct.pack("<BBQ", 1, 1, tensors.old.size) + data), tensors, "sparse")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sparse_payload_says_whose_it_is(width: int) -> None:
    tensors = pair(1000, width, 0.1)
    payload = encoded(tensors, "sparse")
    assert payload is not None
    body = payload[1:-8]
    with pytest.raises(IntegrityError, match="version 2, this package reads version 1"):
        applied(forged(b"\2" + body), tensors, "sparse")
    others = [pair(1001, width, 0.1), pair(2000, width // 2, 0.1) if width > 1 else pair(500, 2, 0.1)]
    for other in others:
        with pytest.raises(IntegrityError, match=f"for {1000 * width} bytes in values of {width}"):
            applied(payload, other, "sparse")


def claiming(nbytes: int, blocks: bytes = b"\x01\0\0") -> bytes:
    """A frame whose header says that it holds `nbytes`, looking back as far as zstd can."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", nbytes) + blocks


@pytest.mark.parametrize("nbytes", [0, 99, 101, 1 << 30, 1 << 50, (1 << 64) - 1])
def test_no_memory_is_given_for_what_a_frame_only_claims(nbytes: int) -> None:
    tensors = pair(100, 1, 0)
    head = struct.pack("<BBQ", 1, 1, 100) + struct.pack("<BQI", 4, 0, 100)
    payloads = {"xor": claiming(nbytes), "overwrite": claiming(nbytes), "sparse": forged(head + claiming(nbytes))}
    for encoding, payload in payloads.items():
        tracemalloc.start()
        try:
            with pytest.raises(IntegrityError):
                applied(payload, tensors, encoding)
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()


def test_a_frame_that_must_be_looked_back_in_too_far_is_refused() -> None:
    nbytes = 32 << 20
    tensor = np.zeros(nbytes, dtype=np.uint8)
    far = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=25, write_content_size=True)
    ).compress(np.ones(nbytes, dtype=np.uint8))
    with pytest.raises(IntegrityError, match="memory"):
        Decoder("adler32").apply([("xor", far)], tensor, 1)


def test_a_frame_that_holds_more_than_it_says_is_refused() -> None:
    """Also where it was unpacked in steps, and all that was expected came."""
    nbytes = 13 << 20
    run = (BLOCK // 2 << 3 | 1 << 1).to_bytes(3, "little") + b"\1"
    window = b"\x28\xb5\x2f\xfd\x80\x58" + struct.pack("<I", nbytes)
    blocks = nbytes // (BLOCK // 2)
    exact, more = (window + run * (blocks + extra) + b"\x01\0\0" for extra in (0, 1))
    tensor = np.zeros(nbytes, dtype=np.uint8)
    Decoder("adler32").apply([("xor", exact)], tensor, 1)
    assert (tensor == 1).all()
    with pytest.raises(IntegrityError):
        Decoder("adler32").apply([("xor", more)], tensor, 1)
