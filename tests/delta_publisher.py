"""A second publisher of disk-deltas, written from the description of the format alone, using nothing of the package.

What it publishes it also keeps, so that what a reader made of it can be compared bit for bit.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"
WIDTHS = {"BOOL": 1, "U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "I16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}


class Tensor(NamedTuple):
    """dtype: as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = Mapping[str, Tensor]


def write_safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + len(tensor.data)]}
        end += len(tensor.data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values()))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: Tensor(
            entry["dtype"], tuple(entry["shape"]), content[8 + length + entry["data_offsets"][0] :][: _nbytes(entry)]
        )
        for name, entry in header.items()
    }


def _nbytes(entry: dict[str, list[int]]) -> int:
    return entry["data_offsets"][1] - entry["data_offsets"][0]


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face directory."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(read_safetensors(path))
    return found


def write_checkpoint(directory: Path, tensors: Tensors, files: int = 2) -> None:
    """A Hugging Face directory, its tensors dealt out to `files` files."""
    directory.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        write_safetensors(directory / file, {name: tensors[name] for name in names[number::files]})
        weight_map.update(dict.fromkeys(names[number::files], file))
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "none"}')


def checksum(data: bytes, kind: str) -> str:
    return xxhash.xxh3_128_hexdigest(data) if kind == "xxh3-128" else f"{zlib.adler32(data):08x}"


def payload(old: bytes, new: bytes, encoding: str) -> bytes:
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        plain = (before ^ after).tobytes()
    else:
        positions = np.flatnonzero(before != after).astype("<u4")
        plain = struct.pack("<I", positions.size) + positions.tobytes() + after[positions].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(plain)


class DeltaPublisher:
    """Publishes in a directory.

    Args:
        base: version 0, which readers have. files: that a version's tensors are dealt out to.
        encode: of old, new, and the bytes of an element, for an encoding that is not described above.

    Attributes:
        versions: what was published, and the base as 0.
    """

    def __init__(
        self,
        root: Path,
        base: Tensors,
        encoding: str = "xor",
        kind: str = "xxh3-128",
        files: int = 2,
        encode: Callable[[bytes, bytes, int], bytes] | None = None,
    ) -> None:
        self.encode = encode
        self.root, self.encoding, self.kind, self.files = root, encoding, kind, files
        self.versions: dict[int, Tensors] = {0: base}
        root.mkdir(parents=True, exist_ok=True)

    def directory(self, version: int) -> Path:
        return self.root / f"weight_v{version:06d}"

    def delta(self, version: int, tensors: Tensors, base: int | None = None) -> None:
        """Publish what became of version `base` (the newest before)."""
        base = max(number for number in self.versions if number < version) if base is None else base
        before = self.versions[base]
        changed = [name for name in tensors if tensors[name].data != before[name].data]
        weight_map: dict[str, str] = {}
        directory = self.directory(version)
        directory.mkdir()
        for number in range(min(self.files, len(changed))):
            names = changed[number :: self.files]
            file = f"model-{number + 1:05d}-of-{self.files:05d}.safetensors"
            payloads = {name: self._payload(before[name], tensors[name]) for name in names}
            write_safetensors(
                directory / file,
                {name: Tensor("U8", (len(data),), data) for name, data in payloads.items()},
                {name: checksum(tensors[name].data, self.kind) for name in names},
            )
            weight_map.update(dict.fromkeys(names, file))
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{base:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.kind,
        }
        self._finish(version, tensors, {"metadata": metadata, "weight_map": weight_map})

    def full(self, version: int, tensors: Tensors) -> None:
        """Publish an anchor."""
        directory = self.directory(version)
        write_checkpoint(directory, tensors, self.files)
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
        metadata = {"total_size": 0, "version": f"{version:06d}", "checksum_format": self.kind}
        self._finish(version, tensors, {"metadata": metadata, "weight_map": weight_map})

    def latest(self, version: int) -> None:
        """Let `latest` say so."""
        (self.root / "latest").write_text(f"{version:06d}\n")

    def _payload(self, before: Tensor, after: Tensor) -> bytes:
        if self.encode is not None:
            return self.encode(before.data, after.data, WIDTHS[after.dtype])
        return payload(before.data, after.data, self.encoding)

    def _finish(self, version: int, tensors: Tensors, index: dict[str, object]) -> None:
        index["layout"] = {name: [tensor.dtype, tensor.shape] for name, tensor in tensors.items()}
        index["checksums"] = {name: checksum(tensor.data, self.kind) for name, tensor in tensors.items()}
        (self.directory(version) / INDEX).write_text(json.dumps(index))
        self.versions[version] = dict(tensors)
        self.latest(version)


def random_tensors(seed: int, shapes: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Of random bits, NaN among them. shapes: name, dtype, shape."""
    generator = np.random.default_rng(seed)
    return {
        name: Tensor(dtype, shape, generator.bytes(WIDTHS[dtype] * int(np.prod(shape, dtype=np.int64))))
        for name, dtype, shape in shapes
    }


def changed(tensors: Tensors, seed: int, density: float, share: float = 1.0) -> dict[str, Tensor]:
    """The next version: of a `share` of the tensors, each element anew with probability `density`."""
    generator = np.random.default_rng(seed)
    after = {}
    for name, tensor in tensors.items():
        width = WIDTHS[tensor.dtype]
        elements = np.frombuffer(tensor.data, np.uint8).reshape(-1, width).copy()
        hit = (generator.random(len(elements)) < density) & (generator.random() < share)
        elements[hit] = np.frombuffer(generator.bytes(width * int(hit.sum())), np.uint8).reshape(-1, width)
        after[name] = tensor._replace(data=elements.tobytes())
    return after
