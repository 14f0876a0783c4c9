"""What a safetensors file begins with: where its tensors are."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from miles_plugin.weight_transfer.disk_delta.format import Layout, check_layout, nbytes_of
from mooncake_store.errors import IntegrityError

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000  # what the safetensors package reads
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Place:
    """Where a tensor is. start, end: in bytes of the file."""

    layout: Layout
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """tensors: by name. metadata: what else the file says of itself."""

    tensors: Mapping[str, Place]
    metadata: Mapping[str, str]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def pack_header(tensors: Iterable[tuple[str, Layout]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file, behind which the tensors lie back to back in this order."""
    header: dict[str, _Entry | Mapping[str, str]] = {_METADATA: metadata} if metadata else {}
    end = 0
    for name, layout in tensors:
        start, end = end, end + nbytes_of(layout)
        header[name] = _Entry(*layout, (start, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def read_header(file: memoryview, source: str) -> Header:
    """Where the tensors of a file are.

    Args:
        file: all of it. source: where it comes from, for messages.

    Raises:
        IntegrityError: it is no safetensors file, or a tensor lies outside of it or has a dtype that is not known.
    """
    length = _LENGTH.unpack(file[: _LENGTH.size])[0] if file.nbytes >= _LENGTH.size else _MOST_HEADER_BYTES
    begin = _LENGTH.size + length
    if length > _MOST_HEADER_BYTES or begin > file.nbytes:
        raise IntegrityError(f"{source}: {file.nbytes} bytes are no safetensors file, or not all of one; copy it anew")
    try:
        raw = msgspec.json.decode(file[_LENGTH.size : begin], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{source}: no safetensors file: {error}") from error
    return Header({name: _place(name, entry, begin, file.nbytes, source) for name, entry in entries.items()}, metadata)


def alignment_order(tensors: Mapping[str, Layout]) -> list[str]:
    """Names such that tensors which lie back to back in this order are aligned: the widest elements first."""
    return sorted(tensors, key=lambda name: (-_width(tensors[name]), name))


def _width(layout: Layout) -> int:
    return nbytes_of((layout[0], ()))


def _place(name: str, entry: _Entry, begin: int, size: int, source: str) -> Place:
    layout = (entry.dtype, entry.shape)
    check_layout(name, layout, source)
    start, end = entry.data_offsets
    if not 0 <= start <= end <= size - begin or end - start != nbytes_of(layout):
        raise IntegrityError(
            f"{source}: tensor {name}, {layout[0]} {list(layout[1])}, at bytes {start} to {end} of {size - begin}; "
            "the file is damaged or not all there"
        )
    return Place(layout, begin + start, begin + end)
