"""Whether engines hold the trainer's weights: both sides compute a checksum of every parameter of every rank.

The trainer fuses and cuts its weights as the engine does (`layout.py`), so what is compared are the bytes that the
engine computes with, however they got there.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch

from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.weight_transfer.layout import Layout, Placement
from mooncake_store.errors import ConfigError

Checksum = Callable[[torch.Tensor], str]

# Caches that an engine computes from its model's config. SGLang 0.5.23 leaves them out of its checksums by these parts
# of their names; others leave them in.
_COMPUTED = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "freqs_cis", "expert_mask_gpu")
_NAMED = 5  # differences in a message


class WeightsDiffer(EngineError):
    """An engine does not hold the trainer's weights; the message names the first parameters that differ."""


def checksum_of(device: str) -> Checksum:
    """The function by which SGLang 0.5.23 tells tensors apart: 16 hex digits of a tensor's bytes, whatever its shape.

    Args:
        device: of the engine. "cpu": the first 8 bytes of SHA-256. "cuda": a kernel of SGLang's own, which takes
            tensors on a GPU; it was never run here, where there is none.

    Raises:
        ConfigError: the engine is on CUDA and SGLang cannot be imported beside the trainer.
    """
    if device == "cpu":
        return _sha256
    try:
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash
    except ImportError as error:
        raise ConfigError(
            f"check_weight_update_equal=True: engines on {device} hash their weights with a kernel of SGLang, which "
            f"cannot be imported here ({error}); install sglang on the trainers, or leave the flag out"
        ) from error
    return lambda tensor: f"{gpu_tensor_hash(tensor):016x}"


def _sha256(tensor: torch.Tensor) -> str:
    contents = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(contents).hexdigest()[:16]


class Expected:
    """The checksums that engines must report, computed while an update's weights pass by in any order.

    Memory: of each parameter of which some parts have come and some have not, as much as all ranks hold of it. With
    weights in the order of a checkpoint that is one parameter at a time: at most the experts of a layer, or a padded
    embedding. A parameter that is one whole weight is hashed where it is.

    Args:
        layout: of the engines.
        checksum: of `checksum_of`.
    """

    def __init__(self, layout: Layout, checksum: Checksum = _sha256) -> None:
        self._layout, self._checksum = layout, checksum
        self._parameter = {weight: name for name, each in layout.parameters.items() for weight in each.weights}
        self._missing = {name: set(each.weights) for name, each in layout.parameters.items()}
        self._partial: dict[str, list[torch.Tensor]] = {}
        self._checksums: list[dict[str, str]] = [{} for _ in range(layout.tp)]

    def add(self, weight: str, tensor: torch.Tensor) -> None:
        """Take in one weight, whole and in the engines' dtype; it is not kept.

        Args:
            weight: Hugging Face name. tensor: as the checkpoint shapes it.

        Raises:
            ConfigError: the engines have no place for it, or it has another shape or dtype, or came before.
        """
        placed = self._layout.placements(weight, tensor.shape)
        name = self._parameter.get(weight)
        if name is None:
            return
        if tensor.dtype != self._layout.dtype:
            raise ConfigError(f"weight {weight} is {tensor.dtype}, where engines hold {self._layout.dtype}; cast it")
        if weight not in self._missing[name]:
            raise ConfigError(f"weight {weight} came twice in one update")
        self._missing[name].remove(weight)
        shape = self._layout.parameters[name].shape
        parts = [[(placement, placement.part(tensor)) for placement in each] for each in placed]
        if all(sum(part.numel() for _, part in each) == prod(shape) for each in parts):
            known: dict[Placement, str] = {}  # ranks may hold the same
            for checksums, ((placement, part),) in zip(self._checksums, parts, strict=True):
                known[placement] = checksums[name] = known.get(placement) or self._checksum(part)
            return
        if name not in self._partial:
            self._partial[name] = [tensor.new_zeros(prod(shape)) for _ in placed]  # padding is zero in engines too
        for memory, each in zip(self._partial[name], parts, strict=True):
            for placement, part in each:
                memory[placement.offset : placement.offset + part.numel()].view(part.shape).copy_(part)
        if not self._missing[name]:
            for checksums, memory in zip(self._checksums, self._partial.pop(name), strict=True):
                checksums[name] = self._checksum(memory.view(shape))

    def checksums(self) -> list[dict[str, str]]:
        """By rank: the checksum of every parameter, under SGLang's name.

        Raises:
            ConfigError: some weight has not come, so that nothing would prove it.
        """
        if missing := sorted(weight for weights in self._missing.values() for weight in weights):
            raise ConfigError(
                f"{len(missing)} weights of the model were not in the update, the first is {missing[0]}; the trainer's "
                "model is not the one that the engines serve"
            )
        return self._checksums

    def check(self, engine: SGLangEngine) -> int:
        """The number of tensors that `engine` has proven to hold; raises what `checksums` and `compare` raise."""
        return compare(self.checksums(), engine.checksums(), engine.url)


def compare(expected: Sequence[Mapping[str, str]], reported: Sequence[Mapping[str, str]], engine: str) -> int:
    """The number of tensors, on all ranks, that an engine has proven to hold.

    Args:
        expected: of `Expected.checksums`. reported: of `SGLangEngine.checksums`. engine: its address.

    Raises:
        WeightsDiffer: another number of ranks, a parameter that differs or is not reported, or one that is reported
            and that nothing was expected of.
    """
    if len(expected) != len(reported):
        raise WeightsDiffer(f"engine {engine} reports {len(reported)} ranks, where {len(expected)} are expected")
    differences: list[str] = []
    for rank, (wanted, held) in enumerate(zip(expected, reported, strict=True)):
        for name, checksum in wanted.items():
            if held.get(name) != checksum:
                differences.append(f"{name} on rank {rank} is {held.get(name, 'not reported')}, not {checksum}")
        for name in held.keys() - wanted.keys():
            if not any(part in name for part in _COMPUTED):
                differences.append(f"{name} on rank {rank} is no parameter that the trainer knows")
    total = sum(map(len, expected))
    if differences:
        more = f", and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        raise WeightsDiffer(
            f"engine {engine} does not hold the trainer's weights: {len(differences)} of {total} tensors differ: "
            f"{'; '.join(differences[:_NAMED])}{more}"
        )
    return total
