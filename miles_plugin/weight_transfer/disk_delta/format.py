"""The published format: names of versions, and the index that says what a version is made of.

    SOURCE/weight_v000012/model.safetensors.index.json      written last: a directory without one does not exist
    SOURCE/weight_v000012/model-00001-of-00002.safetensors  and more; of a full version also config.json and the like
    SOURCE/latest                                           "000012" and a newline
    SOURCE/readers/<reader id>.json                         how far each reader is

A full version is an ordinary Hugging Face checkpoint. A delta holds what became of its base: of each tensor that
changed a payload, a 1-D U8 tensor under its name; the file's `__metadata__` maps its name to the checksum of the whole
new tensor. The index of either has the checksums of all tensors, so that a reader also knows those that never changed
to be the trainer's. Version 0 is the checkpoint that readers start from, unless there is a weight_v000000: that is full
then, and a reader has it only when it has read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from miles_plugin.weight_transfer.disk_delta.codec import CHECKSUMS, ENCODINGS
from mooncake_store.errors import IntegrityError

INDEX = "model.safetensors.index.json"
LATEST = "latest"
READERS = "readers"
COMPRESSION = "zstd"
# Bytes per element, by dtype as safetensors spells it. Those that are no whole bytes are left out.
WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
# dtype and shape. A scalar's shape is ().
Layout = tuple[str, tuple[int, ...]]

_DIGITS = re.compile(r"[0-9]{6}|[1-9][0-9]{6,17}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_HEX = {"xxh3-128": 32, "blake3": 64, "adler32": 8}
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class Index:
    """What one version is made of.

    Attributes:
        base: the version that a delta changes; None for a full version. encoding: of its payloads; None likewise.
        checksum: which one, of `codec.CHECKSUMS`.
        files: name of a tensor -> file that holds it; of a delta only those that changed.
        layout, checksums: of all tensors of the model, also of a delta; checksums in hex, of what they are then.
    """

    version: int
    base: int | None
    encoding: str | None
    checksum: str
    files: Mapping[str, str]
    layout: Mapping[str, Layout]
    checksums: Mapping[str, str]


class _Metadata(msgspec.Struct, omit_defaults=True):
    version: str
    checksum_format: str
    base_version: str | None = None
    delta_encoding: str | None = None
    compression_format: str | None = None
    total_size: int | None = None


class _Written(msgspec.Struct, omit_defaults=True):
    metadata: _Metadata
    weight_map: dict[str, str]
    layout: dict[str, tuple[str, tuple[int, ...]]]
    checksums: dict[str, str] = {}


def version_text(version: int) -> str:
    """A version as files spell it: "000012"."""
    return f"{version:06d}"


def parse_version_text(text: str) -> int | None:
    """The version that files spell so; None if none is."""
    return int(text) if _DIGITS.fullmatch(text) else None


def version_name(version: int) -> str:
    """The directory of a version: "weight_v000012"."""
    return f"weight_v{version_text(version)}"


def parse_version_name(text: str) -> int | None:
    """The version whose directory has this name; None if it is no such name."""
    return parse_version_text(text.removeprefix("weight_v")) if text.startswith("weight_v") else None


def nbytes_of(layout: Layout) -> int:
    """Bytes of a tensor."""
    dtype, shape = layout
    return WIDTHS[dtype] * prod(shape)


def check_tensor_name(name: str, source: str) -> None:
    """Raise IntegrityError unless a tensor may have this name: it is no path, and no key of a file's header."""
    if not name or "/" in name or "\\" in name or ".." in name or name == "__metadata__" or not name.isprintable():
        raise IntegrityError(
            f"{source}: a tensor named {name!r}; allowed is what prints, has no slash, backslash or '..', and is "
            "not __metadata__"
        )


def check_layout(name: str, layout: Layout, source: str) -> None:
    """Raise IntegrityError unless a tensor may have this name, dtype and shape."""
    check_tensor_name(name, source)
    dtype, shape = layout
    if dtype not in WIDTHS:
        raise IntegrityError(f"{source}: tensor {name} is of dtype {dtype!r}; known are {', '.join(WIDTHS)}")
    if any(size < 0 for size in shape) or WIDTHS[dtype] * prod(max(size, 1) for size in shape) > _MOST_BYTES:
        raise IntegrityError(f"{source}: tensor {name} has shape {list(shape)}, which no tensor can have")


def pack_index(index: Index) -> bytes:
    """The index as a file, such that `read_index` returns it; raises IntegrityError if it would refuse it."""
    _check(index, f"index of {version_name(index.version)}")
    is_delta = index.base is not None
    metadata = _Metadata(
        version=version_text(index.version),
        checksum_format=index.checksum,
        base_version=version_text(index.base) if index.base is not None else None,
        delta_encoding=index.encoding,
        compression_format=COMPRESSION if is_delta else None,
        total_size=None if is_delta else sum(map(nbytes_of, index.layout.values())),
    )
    written = _Written(metadata, dict(index.files), dict(index.layout), dict(index.checksums))
    return msgspec.json.encode(written) + b"\n"


def read_index(data: bytes | memoryview, source: str) -> Index:
    """An index, checked.

    Args:
        source: where it comes from, for messages.

    Raises:
        IntegrityError: it is not one, or says what cannot be.
    """
    try:
        written = msgspec.json.decode(data, type=_Written)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(
            f"{source}: no index of a published version: {error}; whoever publishes there must write layout and "
            "checksums as this package does"
        ) from error
    metadata = written.metadata
    base = None if metadata.base_version is None else _version(metadata.base_version, "base_version", source)
    index = Index(
        _version(metadata.version, "version", source),
        base,
        metadata.delta_encoding,
        metadata.checksum_format,
        written.weight_map,
        written.layout,
        written.checksums,
    )
    if base is not None and metadata.compression_format != COMPRESSION:
        raise _wrong(source, "compression_format", metadata.compression_format, COMPRESSION)
    _check(index, source)
    return index


def _version(text: str, field_name: str, source: str) -> int:
    version = parse_version_text(text)
    if version is None:
        raise _wrong(source, field_name, text, "a version as six digits or more")
    return version


def _check(index: Index, source: str) -> None:
    if index.checksum not in CHECKSUMS:
        raise _wrong(source, "checksum_format", index.checksum, ", ".join(CHECKSUMS))
    for name, layout in index.layout.items():
        check_layout(name, layout, source)
    for name, file in index.files.items():
        if not _FILE.fullmatch(file) or ".." in file:
            raise _wrong(source, f"weight_map of {name}", file, "a .safetensors file beside the index")
        if name not in index.layout:
            raise IntegrityError(f"{source}: weight_map names {name}, layout does not; the index is not whole")
    if odd := index.checksums.keys() ^ index.layout.keys():
        raise IntegrityError(f"{source}: {min(odd)} is in only one of layout and checksums; the index is not whole")
    for name, checksum in index.checksums.items():
        if not re.fullmatch(f"[0-9a-f]{{{_HEX[index.checksum]}}}", checksum):
            allowed = f"{_HEX[index.checksum]} hex digits, for {index.checksum}"
            raise _wrong(source, f"checksum of {name}", checksum, allowed)
    if index.base is None:
        _check_full(index, source)
    else:
        _check_delta(index, index.base, source)


def _check_full(index: Index, source: str) -> None:
    if index.encoding is not None:
        raise _wrong(source, "delta_encoding", index.encoding, "none without a base_version")
    if missing := index.layout.keys() - index.files.keys():
        raise IntegrityError(f"{source}: a full version without the file of {min(missing)}")


def _check_delta(index: Index, base: int, source: str) -> None:
    if index.encoding not in ENCODINGS:
        raise _wrong(source, "delta_encoding", index.encoding, ", ".join(ENCODINGS))
    if base >= index.version:
        raise _wrong(source, "base_version", version_text(base), f"less than version {version_text(index.version)}")


def _wrong(source: str, field_name: str, value: Any, allowed: str) -> IntegrityError:
    return IntegrityError(f"{source}: {field_name}={value!r:.80}; allowed: {allowed}")
