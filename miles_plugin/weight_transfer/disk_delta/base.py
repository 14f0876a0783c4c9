"""The checkpoint that readers start from: its tensors, and what else a checkpoint is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from miles_plugin.weight_transfer.disk_delta.format import INDEX, Layout
from miles_plugin.weight_transfer.disk_delta.tensor_file import Place, read_header
from mooncake_store.arrays import Bytes
from mooncake_store.errors import ConfigError

_BLOCK = 1 << 20
# Weights in whatever form, and indices of them.
_NOT_COMPANIONS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".tmp"),
    ".index.json",
)


class BaseCheckpoint:
    """A directory with safetensors files.

    Raises:
        ConfigError: there are none. IntegrityError: one is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._places = self._find()
        except OSError as error:
            raise ConfigError(
                f"base={directory}: {error.filename or ''} cannot be read ({error.strerror or error}); name the "
                "checkpoint that the engines start from"
            ) from error

    @property
    def layout(self) -> Mapping[str, Layout]:
        """dtype and shape of every tensor."""
        return {name: place.layout for name, (_, place) in self._places.items()}

    def read(self, name: str) -> Bytes:
        """The bytes of a tensor (uint8 [n]), read-only and read when looked at."""
        file, place = self._places[name]
        if place.start == place.end:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(file, dtype=np.uint8, mode="r", offset=place.start, shape=(place.end - place.start,))

    def holds(self, name: str, layout: Layout, contents: Bytes) -> bool:
        """Whether a tensor is there with these bits."""
        if name not in self._places or self._places[name][1].layout != layout:
            return False
        mine = self.read(name)
        blocks = range(0, mine.size, _BLOCK)  # comparing makes an array as long as what it compares
        return all(np.array_equal(mine[at : at + _BLOCK], contents[at : at + _BLOCK]) for at in blocks)

    def companions(self) -> Iterator[Path]:
        """config.json, the tokenizer's files, and whatever else is no weights."""
        for path in sorted(self.directory.iterdir()):
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_NOT_COMPANIONS):
                yield path

    def _find(self) -> dict[str, tuple[Path, Place]]:
        places: dict[str, tuple[Path, Place]] = {}
        for file in self._files():
            contents = np.memmap(file, dtype=np.uint8, mode="r").data if file.stat().st_size else memoryview(b"")
            header = read_header(contents, str(file))
            places.update({name: (file, place) for name, place in header.tensors.items()})
        return places

    def _files(self) -> list[Path]:
        index = self.directory / INDEX
        if index.is_file():
            try:
                named = msgspec.json.decode(index.read_bytes(), type=dict[str, msgspec.Raw])["weight_map"]
                return [
                    self.directory / name
                    for name in sorted({*msgspec.json.decode(named, type=dict[str, str]).values()})
                ]
            except (msgspec.DecodeError, KeyError) as error:
                raise ConfigError(f"base={index}: no index of a checkpoint: {error!r}; copy it anew") from error
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"base={self.directory}: no safetensors file there; name the Hugging Face checkpoint that the engines "
                "start from, saved as safetensors"
            )
        return files
