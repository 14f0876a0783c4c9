"""Pairs of tensors that differ here and there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import xxhash
from hypothesis import strategies as st

from miles_plugin.weight_transfer.disk_delta import sparse_numpy
from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS, Decoder, Encoder
from miles_plugin.weight_transfer.disk_delta.kernels import Kernels, native
from mooncake_store.arrays import Bytes
from tests.delta_reader import patched

BLOCK = 256 << 10
WIDTHS = (1, 2, 4, 8)
_NOT_BUILT = pytest.mark.skipif(native() is None, reason="_sparse.c was not built: no C compiler")
KERNELS = [pytest.param(native(), id="c", marks=_NOT_BUILT), pytest.param(sparse_numpy, id="numpy")]

each_kernels = pytest.mark.parametrize("kernels", KERNELS)
each_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


@dataclass(frozen=True)
class Pair:
    """A tensor before and after: uint8 [n] each, read-only; values of `width` bytes."""

    old: Bytes
    new: Bytes
    width: int


def pair(count: int, width: int, density: float, change: str = "ulp", seed: int = 0) -> Pair:
    """`count` values, of which about `density` change: by 1 or 2 ("ulp") or to anything, NaNs among it ("any")."""
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, count * width, dtype=np.uint8)
    new = old.copy()
    values = new.view(f"<u{width}")
    is_changed = random.random(count) < density
    if change == "ulp":
        values[is_changed] += random.choice(np.array([1, 2, -1, -2], dtype=f"<i{width}"), is_changed.sum()).view(
            values.dtype
        )
    else:
        values[is_changed] = random.integers(0, 256, is_changed.sum() * width, dtype=np.uint8).view(values.dtype)
    old.flags.writeable = new.flags.writeable = False
    return Pair(old, new, width)


pairs = st.builds(
    pair,
    count=st.sampled_from([0, 1, 2, 3, 15, 63, 64, 65, 127, 128, 129, 1000, 4097]) | st.integers(0, 3000),
    width=st.sampled_from(WIDTHS),
    density=st.sampled_from([0, 0.001, 0.01, 0.03, 0.3, 0.49, 0.51, 0.9, 1]) | st.floats(0, 1),
    change=st.sampled_from(["ulp", "any"]),
    seed=st.integers(0, 2**32),
)


def encoded(tensors: Pair, encoding: str, kernels: Kernels | None = None) -> bytes | None:
    """The payload; the encoder's other promises are checked."""
    old = tensors.old.copy()
    payload, checksum = Encoder(encoding, "xxh3-128", kernels).encode(old, tensors.new, tensors.width)
    assert (old == tensors.new).all()
    assert checksum == hash_of(tensors.new)
    return payload


def applied(payload: bytes, tensors: Pair, encoding: str, kernels: Kernels | None = None) -> bool:
    """Whether the tensor and its checksum are the new one's."""
    tensor = tensors.old.copy()
    checksum = Decoder("xxh3-128", kernels).apply([(encoding, payload)], tensor, tensors.width)
    assert checksum == hash_of(tensor)
    return checksum == hash_of(tensors.new)


def hash_of(tensor: Bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(tensor.tobytes()))


def read_as_others_do(payload: bytes, tensors: Pair, encoding: str) -> Bytes:
    """The new tensor, by a reader that knows the formats' descriptions alone."""
    return np.frombuffer(patched(encoding, tensors.old.tobytes(), payload, tensors.width), dtype=np.uint8)
