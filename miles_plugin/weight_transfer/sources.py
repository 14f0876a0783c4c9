"""Where new weights come from: (Hugging Face name, tensor) pairs, gathered and handed on bucket by bucket."""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

NamedTensor = tuple[str, torch.Tensor]


def full_parameters(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[NamedTensor]:
    """Every weight whole and in `dtype`, under the names and shapes of a checkpoint; collective under FSDP2.

    One parameter is gathered at a time. In memory transformers may hold several weights of a checkpoint as one
    parameter: all experts of a layer are `mlp.experts.gate_up_proj` [experts, 2 x width, hidden]. Engines load
    `mlp.experts.0.gate_proj.weight`, ..., and skip names that they do not know without a word. A tied parameter comes
    once, under the first of its names.

    Raises:
        NotImplementedError: several parameters make up one weight of the checkpoint.
    """
    given: set[str] = set()
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        weights: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: whole.to(dtype)})
        if twice := given.intersection(weights):
            raise NotImplementedError(
                f"{type(model).__name__}: parameter {name} is only a part of checkpoint weight {min(twice)}; sending "
                "such models is not supported"
            )
        given.update(weights)
        yield from weights.items()


def buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Group consecutive tensors into buckets of at most `max_bytes`; a larger tensor is a bucket of its own."""
    bucket: list[NamedTensor] = []
    filled = 0
    for name, tensor in tensors:
        if bucket and filled + tensor.nbytes > max_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket
