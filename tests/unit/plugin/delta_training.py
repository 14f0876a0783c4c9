"""A trainer's ranks that publish, one after another in this process, and a model that changes a little each step."""

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from miles_plugin.weight_transfer.disk_delta.publish import Published, Publisher
from miles_plugin.weight_transfer.disk_delta.storage import Storage
from tests.delta_reader import Held, Model

Weights = dict[str, torch.Tensor]
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def some_weights(seed: int = 0) -> Weights:
    """Tensors of several dtypes and shapes: matrices, odd ones, a scalar, an empty one."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(37, 16, generator=numbers).bfloat16(),
        "model.layers.0.q.weight": torch.randn(16, 16, generator=numbers).bfloat16(),
        "model.layers.0.scale": torch.randn((), generator=numbers),
        "model.layers.0.bias": torch.randn(7, generator=numbers).half(),
        "model.layers.1.experts": torch.randn(3, 5, 7, generator=numbers).bfloat16(),
        "model.norm.weight": torch.randn(16, generator=numbers).double(),
        "model.steps": torch.arange(9),
        "model.empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "model.mask": torch.randint(0, 255, (33,), dtype=torch.uint8, generator=numbers),
    }


def step(weights: Weights, seed: int, density: float = 0.2) -> None:
    """Change some bytes of some tensors; any bit pattern may come of it, also NaN."""
    numbers = np.random.default_rng(seed)
    for tensor in weights.values():
        contents = tensor.reshape(-1).view(torch.uint8).numpy()
        if numbers.random() < 0.8:
            changed = numbers.random(contents.size) < density
            contents[changed] ^= numbers.integers(1, 256, int(changed.sum()), dtype=np.uint8)


def make_base(directory: Path, weights: Weights, files: int = 1) -> Path:
    """A checkpoint of these weights."""
    directory.mkdir(parents=True)
    for number in range(files):
        part = {name: tensor.clone() for at, (name, tensor) in enumerate(weights.items()) if at % files == number}
        save_file(part, directory / f"model-{number + 1:05d}-of-{files:05d}.safetensors")
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def held(weights: Weights) -> Model:
    """What a reader must have."""
    return {
        name: Held(DTYPES[each.dtype], tuple(each.shape), each.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, each in weights.items()
    }


class Ranks:
    """Publishers of all ranks, which take steps as a trainer's ranks do."""

    def __init__(
        self,
        storages: Sequence[Storage],
        base: Path,
        encoding: str = "xor",
        checksum: str = "xxh3-128",
        anchor_every: int = 0,
        **more: Any,
    ) -> None:
        size = len(storages)
        self.publishers = [
            Publisher(storage, rank, size, encoding, checksum, base, anchor_every, **more)
            for rank, storage in enumerate(storages)
        ]

    def publish(self, version: int, weights: Weights | Iterable[tuple[str, torch.Tensor]]) -> Published:
        """One version, as the trainer publishes it; what ranks tell each other is pickled. It is abandoned if it
        fails."""
        tensors = list(weights.items() if isinstance(weights, dict) else weights)
        first = self.publishers[0]
        try:
            shares = [pickle.loads(pickle.dumps(each.encode(version, iter(tensors)))) for each in self.publishers]
            if first.needs_full(shares):
                shares = [pickle.loads(pickle.dumps(each.full(version))) for each in self.publishers]
            return first.finish(version, shares)
        except Exception:
            first.abandon(version)
            raise

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
