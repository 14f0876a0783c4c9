"""The weights of a stand-in engine: in one block of memory per tensor-parallel rank, which others may write to."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from transformers import AutoConfig

from miles_plugin.weight_transfer.layout import Layout, Placement
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
    """What an engine serves, as SGLang lays it out in the memory of its tensor-parallel ranks.

    Args:
        directory: Hugging Face checkpoint with safetensors, of a model small enough to be hashed at every token.
        tp: ranks.

    Attributes:
        config: the checkpoint's.

    Raises:
        ConfigError: no such checkpoint, or its layout is not known.
    """

    def __init__(self, directory: Path, tp: int) -> None:
        if not (directory / "config.json").is_file():
            raise ConfigError(f"--model {directory}: no config.json there; name a Hugging Face checkpoint directory")
        self.config = AutoConfig.from_pretrained(directory)
        self._layout = Layout(self.config, tp, self.config.dtype or torch.bfloat16)
        self._ranks = [_Rank(self._layout) for _ in range(tp)]
        self._places = {
            weight: [
                (
                    placement,
                    rank.parameters[placement.parameter].view(-1).narrow(0, placement.offset, _size(placement, shape)),
                )
                for rank, placements in zip(self._ranks, self._layout.placements(weight, shape), strict=True)
                for placement in placements
            ]
            for weight, shape in self._layout.weights.items()
        }
        self._state = State("", None)
        try:
            self.load(read_checkpoint(directory))
        except OSError as error:
            raise ConfigError(f"--model {directory}: {error}; name a Hugging Face checkpoint directory") from error

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

        Raises:
            ConfigError: a weight has another shape; those before it are loaded.
        """
        listed = list(tensors)
        for position, (weight, tensor) in enumerate(listed):
            if middle is not None and position == len(listed) // 2:
                middle()
            if weight in self._places:
                self._layout.placements(weight, tensor.shape)  # checks the shape
                for placement, place in self._places[weight]:
                    place.copy_(placement.part(tensor).reshape(-1))

    def state(self) -> State:
        """What the weights are now, whoever wrote them."""
        hasher = xxhash.xxh3_128()
        for rank in self._ranks:
            hasher.update(rank.block.numpy().data)
        digest = hasher.hexdigest()
        if digest != self._state.digest:
            self._state = State(digest, self._values())
        return self._state

    def checksums(self, skip: Iterable[str]) -> list[dict[str, str]]:
        """By rank, parameter -> the first 8 bytes of the SHA-256 of its bytes, in hex, as SGLang has it on a CPU.

        Args:
            skip: parts of names of parameters to leave out.
        """
        skipped = tuple(skip)
        return [
            {
                name: hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data).hexdigest()[:16]
                for name, tensor in rank.parameters.items()
                if not any(pattern in name for pattern in skipped)
            }
            for rank in self._ranks
        ]

    def _values(self) -> tuple[float, ...] | None:
        """The different values, without those of padding, which is never written."""
        found: set[float] = set()
        for places in self._places.values():
            for _, place in places:
                for part in (place[:64], place):  # trained weights are known by their first few elements
                    found.update(torch.unique(part.float()).tolist())
                    if len(found) > _MOST_VALUES:
                        return None
        return tuple(sorted(found))


class _Rank:
    """The parameters of one rank, as views of one zeroed block."""

    def __init__(self, layout: Layout) -> None:
        width = layout.dtype.itemsize
        starts: dict[str, int] = {}
        end = 0
        for name, parameter in layout.parameters.items():
            starts[name] = end
            end += -(-parameter.numel * width // _ALIGNMENT) * _ALIGNMENT
        self.block = torch.zeros(end, dtype=torch.uint8)
        self.parameters = {
            name: self.block.narrow(0, starts[name], parameter.numel * width).view(layout.dtype).view(parameter.shape)
            for name, parameter in layout.parameters.items()
        }


def _size(placement: Placement, shape: Sequence[int]) -> int:
    """Elements of the part of a weight that is placed."""
    return prod(placement.length if axis == placement.axis else size for axis, size in enumerate(shape))


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
