"""A model of any size with the proportions of Qwen3-0.6B, and its weights: bytes that are others in every turn."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from miles_plugin.weight_transfer.layout import Layout
from miles_plugin.weight_transfer.sources import NamedTensor
from mooncake_store.arrays import Bytes

DTYPE = torch.bfloat16
_LAYERS, _HEADS, _KEY_VALUE_HEADS, _VOCABULARY, _MLP = 28, 16, 8, 148, 3  # the last two in hidden sizes
# Of bfloat16 per hidden size squared: the embedding; q, k, v, o and three of the MLP in each layer.
_BYTES = 2 * (_VOCABULARY + _LAYERS * (2 + 1 + 1 + 2 + 3 * _MLP))
_STEP = 64  # hidden sizes are multiples of it
_ALIGNMENT = 64


def config_of(nbytes: int) -> Any:
    """A Qwen3 config whose weights take about `nbytes` in bfloat16: 310 tensors, at least 4.5 MB."""
    hidden = max(1, round(sqrt(nbytes / _BYTES) / _STEP)) * _STEP
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        hidden_size=hidden,
        head_dim=hidden // _KEY_VALUE_HEADS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_VALUE_HEADS,
        num_hidden_layers=_LAYERS,
        intermediate_size=_MLP * hidden,
        vocab_size=_VOCABULARY * hidden,
        tie_word_embeddings=True,
    )


def size_of(config: Any) -> int:
    """Bytes of all weights."""
    return sum(prod(shape) for shape in Layout(config, 1, DTYPE).weights.values()) * DTYPE.itemsize


def save(config: Any, directory: Path) -> None:
    """A checkpoint that a stand-in engine starts from: with one weight, which it does not mind."""
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    save_file({"model.norm.weight": torch.ones(config.hidden_size, dtype=DTYPE)}, directory / "model.safetensors")


def places(config: Any) -> dict[str, slice]:
    """Where each weight lies in a block of all: bytes, in the order of the model, aligned."""
    found, end = {}, 0
    for name, shape in Layout(config, 1, DTYPE).weights.items():
        nbytes = prod(shape) * DTYPE.itemsize
        found[name] = slice(end, end + nbytes)
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return found


def block_bytes(config: Any) -> int:
    """Of a block of all weights."""
    end = max(int(place.stop) for place in places(config).values())
    return -(-end // _ALIGNMENT) * _ALIGNMENT


class Weights:
    """All weights in one block of memory, as every trainer rank has them one after the other when it gathers.

    Args:
        block: their bytes (uint8 [n]), as `places` says; random ones without it.

    Attributes:
        nbytes: of the weights, without what lies between them.
    """

    def __init__(self, config: Any, block: Bytes | None = None) -> None:
        shapes, lie = Layout(config, 1, DTYPE).weights, places(config)
        contents = random_bytes(block_bytes(config), seed=0) if block is None else block
        self._block = torch.from_numpy(contents)
        self._tensors = {name: self._block[lie[name]].view(DTYPE).view(shape) for name, shape in shapes.items()}
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def change(self) -> None:
        """Make every byte another one, the same on all ranks."""
        count_up(self._block.numpy())

    def __call__(self) -> Iterator[NamedTensor]:
        """Implements `Source`."""
        yield from self._tensors.items()


def random_bytes(nbytes: int, seed: int) -> Bytes:
    """The same for the same numbers; nbytes: a multiple of 8."""
    return np.random.default_rng(seed).integers(0, 2**64, nbytes // 8, dtype=np.uint64).view(np.uint8)


def count_up(memory: Bytes) -> None:
    """Change every byte in place, to what it was in none of the last 255 turns."""
    memory += np.uint8(1)
