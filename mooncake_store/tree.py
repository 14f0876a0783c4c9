"""Anything that is not a plain column of numbers: msgpack, with arrays kept out of band so that they stay views.

Two msgpack extension types are ours: 1 is a tuple (its items as a msgpack array), 2 is an array (dtype, shape and
byte offset into the column's own leaf buffer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from mooncake_store.arrays import Array, Bytes, as_bytes, cast, dtype_of, name_of, normalise, plain_scalar
from mooncake_store.errors import IntegrityError, MissingDependency
from mooncake_store.tensors import restore

TUPLE, ARRAY = 1, 2
ARRAY_HEADER = b"\xdd"  # msgpack: an array whose length follows in 32 bits
ARRAY_HEADER_BYTES = 5
ALIGNMENT = 64
_MAX_DEPTH = 100  # far below Python's own limit, so that what could be put can be got, however deep the reader's stack
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_KEYS = frozenset({str, int})
_encoder = msgspec.msgpack.Encoder()
_native_is_plain: Callable[[list[Any], int], bool] | None = None
with suppress(ImportError):  # no C compiler where this was installed
    from mooncake_store._native import is_plain as _native_is_plain


class _Leaf(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


_leaf_decoder = msgspec.msgpack.Decoder(_Leaf)


def pack_texts(texts: Sequence[str]) -> list[bytes]:
    """The msgpack form of each text; UnicodeEncodeError when one is not valid Unicode."""
    return list(map(_encoder.encode, texts))


class TreeWriter:
    """Packs the values of one column and gathers their arrays.

    Args:
        dtype: what the arrays are converted to, None to keep theirs.

    Attributes:
        rows: for each packed value the byte pieces of its arrays, padded so that every array starts 64-byte aligned.
    """

    def __init__(self, dtype: np.dtype[Any] | None = None) -> None:
        self._dtype = dtype
        self.rows: list[list[Bytes]] = []
        self._nbytes = 0

    def pack_all(self, values: list[Any]) -> list[bytes]:
        """`pack` of each value; quick where none holds anything but what msgpack has itself."""
        if is_plain(values):
            with suppress(UnicodeEncodeError, OverflowError):  # which value that is, is said below
                blobs = list(map(_encoder.encode, values))
                self.rows += [[]] * len(values)  # one for all: only a value that has arrays gets one of its own
                return blobs
        return list(map(self.pack, values))

    def pack(self, value: Any) -> bytes:
        """Return the msgpack form of `value`.

        Raises:
            TypeError: something other than None, bool, int, float, str, bytes, list, tuple, dict with str or int keys,
                ndarray or tensor, at up to 100 levels.
            OverflowError: an int outside -2**63 .. 2**64-1.
        """
        self.rows.append([])
        try:
            return _encoder.encode(self._plain(value, 0))
        except UnicodeEncodeError as error:
            raise TypeError(f"text that is not valid Unicode: {error}") from None

    def _plain(self, value: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise TypeError(f"nested more than {_MAX_DEPTH} levels deep, or contains itself")
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is list:
            return [item if type(item) in _ATOMS else self._plain(item, depth + 1) for item in value]
        if kind is dict:
            if not _KEYS.issuperset(map(type, value)):
                value = {_key(key): item for key, item in value.items()}
            return {key: item if type(item) in _ATOMS else self._plain(item, depth + 1) for key, item in value.items()}
        if kind is tuple:
            return msgspec.msgpack.Ext(TUPLE, _encoder.encode([self._plain(item, depth + 1) for item in value]))
        if isinstance(value, np.generic):
            plain = plain_scalar(value)
            if type(plain) not in _ATOMS:
                raise TypeError(f"a numpy.{value.dtype} scalar cannot be stored; pass a Python number, or an array")
            return plain
        array = normalise(value)
        if isinstance(array, np.ndarray):
            return self._leaf(array if self._dtype is None else cast(array, self._dtype))
        if array is not value:  # an array of objects or of text: normalise made it a list
            return self._plain(array, depth + 1)
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be stored; allowed: None, bool, int, float, str, bytes, "
            f"lists, tuples and dicts of these, numpy arrays and torch tensors"
        )

    def _leaf(self, array: Array) -> msgspec.msgpack.Ext:
        offset = self._nbytes
        padding = -array.nbytes % ALIGNMENT
        self.rows[-1] += [as_bytes(array), np.zeros(padding, dtype=np.uint8)]
        self._nbytes += array.nbytes + padding
        return msgspec.msgpack.Ext(ARRAY, _encoder.encode(_Leaf(name_of(array.dtype), array.shape, offset)))


def is_plain(values: list[Any]) -> bool:
    """Whether values are seen to be made of nothing but None, bool, int, float, str, bytes, lists, and dicts with keys
    of str and int; never where `_native.c` was not built: to look at each here takes as long as to pack it."""
    return _native_is_plain is not None and _native_is_plain(values, _MAX_DEPTH)


def _key(key: Any) -> str | int:
    if isinstance(key, np.integer):
        return int(key)
    if type(key) not in _KEYS:
        raise TypeError(f"dict key {key!r:.80} is a {type(key).__name__}; allowed: str, int")
    return key  # type: ignore[no-any-return]


def tree_reader(leaves: Bytes, start: int = 0) -> Callable[[Any], Any]:
    """Return the function that turns one packed value (a buffer) back into what it was; arrays are views of `leaves`.

    Args:
        leaves: the column's leaf buffer from byte `start` on, uint8.

    The returned function raises IntegrityError for bytes that `TreeWriter.pack` cannot have written.
    """

    decoder = msgspec.msgpack.Decoder(ext_hook=partial(_extension, leaves, start))

    def read(blob: Any) -> Any:
        try:
            return decoder.decode(blob)
        except MissingDependency:
            raise
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise IntegrityError(f"a packed value cannot be read: {error}") from error

    return read


def _extension(leaves: Bytes, start: int, code: int, data: memoryview) -> Any:
    if code == TUPLE:
        # A decoder of its own: one that its hook knew would be a cycle, and hold the memory until a collection.
        items = msgspec.msgpack.decode(data, ext_hook=partial(_extension, leaves, start))
        if type(items) is not list:
            raise IntegrityError("a packed tuple does not hold an array")
        return tuple(items)
    if code == ARRAY:
        return _view(leaves, start, _leaf_decoder.decode(data))
    raise IntegrityError(f"unknown extension type {code} in a packed value")


def _view(leaves: Bytes, start: int, leaf: _Leaf) -> Any:
    dtype = dtype_of(leaf.dtype)
    nbytes = dtype.itemsize * math.prod(leaf.shape)
    offset = leaf.offset - start
    if min(leaf.shape, default=0) < 0 or not 0 <= offset <= offset + nbytes <= leaves.size:
        raise IntegrityError(f"array {leaf} lies outside its buffer of {leaves.size} bytes")
    return restore(leaves[offset : offset + nbytes].view(dtype).reshape(leaf.shape))
