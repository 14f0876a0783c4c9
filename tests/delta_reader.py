"""A reader of published weights, written from the description of the format alone: it shares no line with the package.

SOURCE/weight_v000012/model.safetensors.index.json: metadata, weight_map, and of all tensors layout and checksums
a version without base_version is an ordinary checkpoint; the others hold payloads against their base, U8 [n]
version 0 is the reader's own checkpoint, unless there is a weight_v000000
"""

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
import zstandard

BLOCK = 256 << 10  # bytes of a tensor; a segment of a sparse payload begins with one
WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
Read = Callable[[str], bytes]  # the contents of an object, by its name; FileNotFoundError


class Held(NamedTuple):
    """A tensor: dtype as safetensors spells it, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    contents: bytes


Model = dict[str, Held]


def checksum(kind: str, contents: bytes) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(contents):08x}"
    if kind == "blake3":
        import blake3

        return str(blake3.blake3(contents).hexdigest())
    assert kind == "xxh3-128"
    return str(xxhash.xxh3_128_hexdigest(contents))


def read_file(data: bytes) -> tuple[Model, dict[str, str]]:
    """The tensors of a safetensors file, and what it says of itself. The tensors fill the file without a gap."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == end, f"{name} begins at {start}, the one before it ends at {end}"
        tensors[name] = Held(entry["dtype"], tuple(entry["shape"]), data[8 + length + start : 8 + length + stop])
        end = stop
    assert 8 + length + end == len(data)
    return tensors, metadata


def read_checkpoint(directory: Path) -> Model:
    """All tensors of a local checkpoint."""
    tensors: Model = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= read_file(file.read_bytes())[0]
    return tensors


def from_directory(source: Path) -> Read:
    return lambda name: (source / name).read_bytes()


def rebuild(read: Read, base: Path, version: int) -> Model:
    """The model of a version, every checksum on the way checked."""
    folder = f"weight_v{version:06d}"
    try:
        index = json.loads(read(f"{folder}/model.safetensors.index.json"))
    except FileNotFoundError:
        if version == 0:
            return read_checkpoint(base)
        raise
    metadata: dict[str, Any] = index["metadata"]
    assert metadata["version"] == f"{version:06d}"
    if "base_version" not in metadata:
        model = _read_full(read, folder, index)
    else:
        assert metadata["compression_format"] == "zstd"
        model = rebuild(read, base, int(metadata["base_version"]))
        _apply(read, folder, index, model)
    assert index["layout"] == {name: [held.dtype, list(held.shape)] for name, held in model.items()}
    kind = metadata["checksum_format"]
    assert index["checksums"] == {name: checksum(kind, held.contents) for name, held in model.items()}
    return model


def _read_full(read: Read, folder: str, index: Mapping[str, Any]) -> Model:
    assert "delta_encoding" not in index["metadata"]
    model: Model = {}
    for file in set(index["weight_map"].values()):
        tensors, _ = read_file(read(f"{folder}/{file}"))
        assert tensors.keys() == {name for name, where in index["weight_map"].items() if where == file}
        model |= tensors
    assert index["metadata"]["total_size"] == sum(len(held.contents) for held in model.values())
    read(f"{folder}/config.json")
    return model


def _apply(read: Read, folder: str, index: Mapping[str, Any], model: Model) -> None:
    metadata = index["metadata"]
    for file in set(index["weight_map"].values()):
        payloads, checksums = read_file(read(f"{folder}/{file}"))
        assert payloads.keys() == checksums.keys() == {n for n, where in index["weight_map"].items() if where == file}
        for name, payload in payloads.items():
            assert payload.dtype == "U8"
            assert len(payload.shape) == 1
            old = model[name]
            new = patched(metadata["delta_encoding"], old.contents, payload.contents, WIDTHS[old.dtype])
            assert checksum(metadata["checksum_format"], new) == checksums[name], name
            model[name] = Held(old.dtype, old.shape, new)


def patched(encoding: str, old: bytes, payload: bytes, width: int) -> bytes:
    """What a payload makes of a tensor. width: bytes of an element."""
    if encoding == "sparse":
        return _patched_sparsely(old, payload, width)
    plain, rest = _frame(payload)
    assert not rest
    if encoding == "xor":
        assert len(plain) == len(old)
        return _number(int.from_bytes(plain, "little") ^ int.from_bytes(old, "little"), len(old))
    assert encoding == "overwrite"
    (count,) = struct.unpack("<I", plain[:4])
    assert len(plain) == 4 + 5 * count
    new = bytearray(old)
    for at, value in zip(struct.unpack(f"<{count}I", plain[4 : 4 + 4 * count]), plain[4 + 4 * count :], strict=True):
        new[at] = value
    return bytes(new)


def _patched_sparsely(old: bytes, payload: bytes, width: int) -> bytes:
    new, rest = bytearray(old), payload[:-8]
    assert payload[-8:] == _number(xxhash.xxh3_64_intdigest(rest), 8)
    assert struct.unpack("<BBQ", rest[:10]) == (1, width, len(old))
    rest = rest[10:]

    def add(at: int, coded: int) -> None:
        """The differences 0, -1, 1, -2, 2 ... are coded as 0, 1, 2, 3, 4 ..."""
        place = slice(at * width, (at + 1) * width)
        difference = -(coded + 1) // 2 if coded % 2 else coded // 2
        new[place] = _number((int.from_bytes(new[place], "little") + difference) % (1 << 8 * width), width)

    while rest:
        (flags, at, count), rest = struct.unpack("<BQI", rest[:13]), rest[13:]
        assert at % (BLOCK // width) == 0
        if flags & 4:
            planes, rest = _frame(rest)
            for value in range(count):
                add(at + value, sum(planes[byte * count + value] << 8 * byte for byte in range(width)))
            continue
        gaps, rest = _frame(rest)
        lows, rest = _frame(rest) if flags & 1 else (b"", rest)
        nibbles, rest = _frame(rest)
        kept, rest = _frame(rest) if flags & 2 else (b"", rest)
        symbols = iter(gaps)
        for change in range(count):
            gap = symbol = next(symbols)
            while symbol == 255:
                symbol = next(symbols)
                gap += symbol
            at += gap << 8 | lows[change] if flags & 1 else gap
            nibble = nibbles[change // 2] >> (4 if change % 2 else 0) & 15
            if nibble == 15:
                new[at * width : (at + 1) * width], kept = kept[:width], kept[width:]
            else:
                add(at, nibble + 1)
            at += 1
        assert not kept
        assert next(symbols, None) is None
    return bytes(new)


def _frame(data: bytes) -> tuple[bytes, bytes]:
    """The content of the frame that comes first, which states its size, and what follows."""
    stream = zstandard.ZstdDecompressor().decompressobj()
    content = stream.decompress(data)
    assert stream.eof
    assert zstandard.frame_content_size(data) == len(content)
    return content, stream.unused_data


def _number(value: int, nbytes: int) -> bytes:
    return value.to_bytes(nbytes, "little")
