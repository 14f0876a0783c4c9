"""A Hugging Face checkpoint on this host, mapped into memory: read, or changed in place."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from miles_plugin.weight_transfer.disk_delta.format import INDEX, WIDTHS, Layout
from miles_plugin.weight_transfer.disk_delta.tensor_file import Place, read_header
from mooncake_store.arrays import Bytes
from mooncake_store.errors import ConfigError, IntegrityError

_SAMPLE_BYTES = 4096


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's weights: those that its index names, or without one every *.safetensors.

    Raises:
        ConfigError: there are none, or the index names a file elsewhere.
    """
    index = directory / INDEX
    if not index.is_file():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{directory}: no *.safetensors there; give a Hugging Face checkpoint in that format")
        return found
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{index}: no index of a checkpoint ({error}); restore it") from error
    if odd := [name for name in names if name != Path(name).name or not name.endswith(".safetensors")]:
        raise ConfigError(f"{index}: weight_map names {odd[0]!r}; allowed is a .safetensors file beside it")
    return [directory / name for name in sorted(names)]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of a local Hugging Face checkpoint, mapped into memory. The mappings go with the last view of them.

    Attributes:
        path: its directory.
        layout: dtype and shape of every tensor.
        files: its weights.

    Raises:
        ConfigError: there are no weights, or two tensors of one name. IntegrityError: a file is damaged.
        OSError: a file cannot be read.
    """

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.path = path
        self.files = weight_files(path)
        self._maps: dict[Path, mmap.mmap] = {}
        self._places: dict[str, tuple[Path, Place]] = {}
        for file in self.files:
            self._maps[file] = mapped = _map(file, writable)
            places = read_header(memoryview(mapped), str(file)).tensors
            _check_apart(places, str(file))
            for name, place in places.items():
                if name in self._places:
                    raise ConfigError(f"{path}: {name} is in {self._places[name][0].name} and in {file.name}; drop one")
                self._places[name] = file, place
        self.layout: dict[str, Layout] = {name: place.layout for name, (_, place) in self._places.items()}

    def tensor(self, name: str) -> Bytes:
        """The bytes of a tensor, uint8 [n]: a view of the file."""
        file, place = self._places[name]
        return np.frombuffer(self._maps[file], np.uint8, place.end - place.start, place.start)

    def width(self, name: str) -> int:
        """Bytes of an element."""
        return WIDTHS[self.layout[name][0]]

    def files_of(self, names: Iterable[str]) -> list[Path]:
        """The files in which these tensors lie."""
        return sorted({self._places[name][0] for name in names})

    def fingerprint(self) -> str:
        """Tells this checkpoint from others: of every tensor the name, dtype, shape, and a sample of its bytes.

        Not of all bytes, which would take as long as to read it; two models that were trained apart differ nearly
        everywhere.
        """
        digest = xxhash.xxh3_128()
        for name in sorted(self.layout):
            tensor = self.tensor(name)
            digest.update(msgspec.json.encode([name, self.layout[name]]))
            for start in (0, (tensor.size - _SAMPLE_BYTES) // 2, tensor.size - _SAMPLE_BYTES):
                digest.update(tensor[max(start, 0) :][:_SAMPLE_BYTES].tobytes())
        return digest.hexdigest()

    def flush(self, file: Path) -> None:
        """Wait until what was changed in a file, by whomever, is on the disk."""
        self._maps[file].flush()


def _check_apart(places: Mapping[str, Place], source: str) -> None:
    """What is changed in place may lie in no other tensor."""
    end = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start < end:
            raise IntegrityError(f"{source}: tensor {name} begins within another one; copy the checkpoint anew")
        end = place.end


def _map(path: Path, writable: bool) -> mmap.mmap:
    with path.open("r+b" if writable else "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise IntegrityError(f"{path} is empty; copy the checkpoint anew")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
