"""Where new weights come from: (Hugging Face name, tensor) pairs, gathered and handed on bucket by bucket."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

NamedTensor = tuple[str, torch.Tensor]


def full_parameters(model: nn.Module, dtype: torch.dtype) -> Iterator[NamedTensor]:
    """Every parameter whole and in `dtype`, one at a time; collective when the model is sharded by FSDP2.

    A tied parameter comes once, under the first of its names.
    """
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole.to(dtype)


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
