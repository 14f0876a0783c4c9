"""The weights of a stand-in engine: in one block of memory per tensor-parallel rank, which others may write to."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from miles_plugin.engines.stand_in.layout import make_layout
from mooncake_store.errors import ConfigError

NamedTensor = tuple[str, torch.Tensor]

_ALIGNMENT = 64
# A policy with more different values than this is not one that a test filled with constants.
_MOST_VALUES = 8


@dataclass(frozen=True)
class State:
    """What the weights are at one moment.

    digest: xxh3-128 of all bytes of all ranks, in hex.
    policy: the different values in them, ascending; None if there are more than a few, as in any trained model.
    """

    digest: str
    policy: tuple[float, ...] | None


class Weights:
    """What an engine serves, under the engine's own parameter names.

    Args:
        directory: Hugging Face checkpoint with safetensors, of a model small enough to be hashed at every token.
        tp: tensor-parallel ranks.

    Raises:
        ConfigError: no such checkpoint, or no layout for it.
    """

    def __init__(self, directory: Path, tp: int) -> None:
        self.config = _read_config(directory)
        try:
            shapes = {name: list(tensor.shape) for name, tensor in read_checkpoint(directory)}
        except OSError as error:
            raise ConfigError(f"--model {directory}: {error}; name a Hugging Face checkpoint directory") from error
        self._layout = make_layout(self.config, shapes, tp)
        self._dtype: torch.dtype = getattr(
            torch, str(self.config.get("dtype") or self.config.get("torch_dtype")), torch.bfloat16
        )
        self._ranks = [_Rank(self._layout.parameters(rank), self._dtype) for rank in range(tp)]
        self._state = State("", None)
        self.load(read_checkpoint(directory))

    @property
    def memory(self) -> list[torch.Tensor]:
        """By rank, the block that holds its parameters: uint8, one-dimensional."""
        return [rank.block for rank in self._ranks]

    def addresses(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """Where each parameter of a rank is: (address, elements, bytes per element)."""
        return {
            name: (tensor.data_ptr(), tensor.numel(), tensor.element_size())
            for name, tensor in self._ranks[rank].parameters.items()
        }

    def load(self, tensors: Iterable[NamedTensor], middle: Callable[[], None] | None = None) -> None:
        """Load weights by their Hugging Face names; names that the engine does not know are skipped, as in SGLang.

        Args:
            middle: called once, when half of the tensors are loaded.
        """
        listed = list(tensors)
        for position, (name, tensor) in enumerate(listed):
            if middle is not None and position == len(listed) // 2:
                middle()
            for rank, placements in zip(self._ranks, self._layout.placements(name, tensor.shape), strict=True):
                for placement in placements:
                    axis = placement.axis
                    part = tensor if axis is None else tensor.narrow(axis, placement.start, placement.length)
                    flat = rank.parameters[placement.parameter].view(-1)
                    flat[placement.offset : placement.offset + part.numel()].copy_(part.reshape(-1))

    def state(self) -> State:
        """What the weights are now, whoever wrote them."""
        hasher = xxhash.xxh3_128()
        for rank in self._ranks:
            hasher.update(rank.block.numpy().data)
        digest = hasher.hexdigest()
        if digest != self._state.digest:
            self._state = State(digest, _values(self._ranks))
        return self._state

    def checksums(self, skip: Iterable[str]) -> list[dict[str, str]]:
        """By rank, parameter -> the first 8 bytes of the SHA-256 of its bytes, in hex, as SGLang has it on a CPU."""
        skipped = tuple(skip)
        return [
            {
                name: hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data).hexdigest()[:16]
                for name, tensor in rank.parameters.items()
                if not any(pattern in name for pattern in skipped)
            }
            for rank in self._ranks
        ]


class _Rank:
    """The parameters of one rank, as views of one zeroed block."""

    def __init__(self, shapes: Mapping[str, Any], dtype: torch.dtype) -> None:
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            size = prod(shape) * dtype.itemsize
            spans[name] = (end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.block = torch.zeros(end, dtype=torch.uint8)
        self.parameters = {
            name: self.block[start:stop].view(dtype).view(list(shapes[name])) for name, (start, stop) in spans.items()
        }


def read_checkpoint(directory: Path) -> Iterator[NamedTensor]:
    """Every tensor of a directory's safetensors files.

    Raises:
        OSError: there are none, or one cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    yield name, file.get_tensor(name)
        except Exception as error:  # safetensors has an exception of its own
            raise OSError(f"{path}: {error}") from error


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {directory}: its config.json cannot be read ({error}); name a Hugging Face checkpoint directory"
        ) from error


def _values(ranks: Iterable[_Rank]) -> tuple[float, ...] | None:
    found: set[float] = set()
    for rank in ranks:
        for tensor in rank.parameters.values():
            flat = tensor.view(-1)
            for part in (flat[:64], flat):  # a trained tensor is known by its first few elements
                found.update(torch.unique(part.float()).tolist())
                if len(found) > _MOST_VALUES:
                    return None
    return tuple(sorted(found))
