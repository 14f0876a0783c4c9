"""Where new weights come from: (Hugging Face name, tensor) pairs, gathered and handed on bucket by bucket.

Any iterable of such pairs is a source, as long as every trainer rank iterates it in the same order: `full_parameters`
of a model under FSDP2, `named_weights` of a state dict or of whatever another trainer yields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

NamedTensor = tuple[str, torch.Tensor]
# All weights, anew each time that it is called: an update may have to send them again. A tensor that was yielded must
# stay as it is until the update is over: it is sent while the next ones are gathered.
Source = Callable[[], Iterable[NamedTensor]]


class CopiesDiffer(RuntimeError):
    """Copies of one weight that must be identical are not; the message names it."""


def full_parameters(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[NamedTensor]:
    """Every weight whole and in `dtype`, under the names and shapes of a checkpoint; collective under FSDP2.

    One parameter is gathered at a time, and cast when it is whole. In memory transformers may hold several weights of a
    checkpoint as one parameter: all experts of a layer are `mlp.experts.gate_up_proj` [experts, 2 x width, hidden].
    Engines load `mlp.experts.0.gate_proj.weight`, ..., and skip names that they do not know without a word. A tied
    parameter comes once, under the first of its names; so do two that should be one, where something has untied them.

    Raises:
        NotImplementedError: several parameters make up one weight of the checkpoint.
        CopiesDiffer: ranks that hold copies of a parameter hold different ones, or two parameters that are tied differ.
    """
    names = {name for name, _ in model.named_parameters()}
    two = {copy: original for copy, original in tied_weights(model).items() if {copy, original} <= names}
    yield from _once(_converted(model, dtype), two, two.values())


def _converted(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[NamedTensor]:
    given: set[str] = set()
    for name, parameter in model.named_parameters():
        check_replicas(name, parameter.detach())
        weights: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: _whole(parameter).to(dtype)})
        if twice := given.intersection(weights):
            raise NotImplementedError(
                f"{type(model).__name__}: parameter {name} is only a part of checkpoint weight {min(twice)}; sending "
                "such models is not supported"
            )
        given.update(weights)
        yield from weights.items()


def named_weights(
    weights: Mapping[str, torch.Tensor] | Iterable[NamedTensor],
    dtype: torch.dtype,
    tied: Mapping[str, str] | None = None,
) -> Iterator[NamedTensor]:
    """The weights of a state dict, or of any trainer that yields them under Hugging Face names, in `dtype`, each once.

    A tensor that is sharded (a DTensor) is gathered, on all ranks at once. A name that comes twice, and one that is
    tied to another, is checked to be the same and left out.

    Args:
        tied: name of a tied weight -> the weight that it is a copy of, and is sent as; see `tied_weights`.

    Raises:
        CopiesDiffer: copies of a weight differ.
    """
    tied = tied or {}
    if isinstance(weights, Mapping):  # no name comes twice
        yield from _once(_gathered(weights.items(), dtype), tied, tied.values())
    else:
        yield from _once(_gathered(weights, dtype), tied)


def _gathered(weights: Iterable[NamedTensor], dtype: torch.dtype) -> Iterator[NamedTensor]:
    for name, tensor in weights:
        check_replicas(name, tensor.detach())
        yield name, _whole(tensor).to(dtype)


def _once(
    weights: Iterable[NamedTensor], tied: Mapping[str, str], again: Collection[str] | None = None
) -> Iterator[NamedTensor]:
    """Each weight under the name of its original when it first comes; raises CopiesDiffer if another comes later.

    Args:
        again: what may come again; None: any.
    """
    seen: dict[str, tuple[str, str]] = {}
    for name, whole in weights:
        original = tied.get(name, name)
        digest = digest_of(whole) if again is None or original in again else ""
        if original not in seen:
            seen[original] = name, digest
            yield original, whole
        elif seen[original][1] != digest:
            first, expected = seen[original]
            raise CopiesDiffer(
                f"weight {name} must equal {first}, which was sent before it: digests {digest}, {expected}; the "
                "trainer updated one of two copies"
            )


def tied_weights(model: PreTrainedModel) -> dict[str, str]:
    """Which names of a model's checkpoint are copies, and of which: {"lm_head.weight": "model.embed_tokens.weight"}."""
    tied: dict[str, str] = dict(model.all_tied_weights_keys) if model.config.tie_word_embeddings else {}
    return tied


def check_replicas(name: str, tensor: torch.Tensor) -> None:
    """Raise CopiesDiffer unless all ranks that hold a copy of `tensor` hold the same; collective.

    Copies are what a DTensor replicates along a dimension of its mesh, and any other tensor on all ranks. It raises on
    all ranks or on none, whichever hold what differs: one that went on would wait for the others in the next gather.
    """
    if isinstance(tensor, DTensor):
        mesh, local = tensor.device_mesh, tensor.to_local()
        replicated = [mesh.get_group(dim) for dim, placed in enumerate(tensor.placements) if placed.is_replicate()]
        everyone = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    else:
        world = dist.group.WORLD
        replicated = everyone = [world] if world is not None else []
        local = tensor
    replicated = [group for group in replicated if dist.get_world_size(group) > 1]
    if not replicated:
        return
    local = local.contiguous()
    equal = torch.ones((), dtype=torch.int, device=local.device)
    for group in replicated:
        first = local.clone()
        dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
        equal *= _same_bits(first, local)
    for group in everyone:
        dist.all_reduce(equal, dist.ReduceOp.MIN, group=group)
    if not equal.item():
        raise CopiesDiffer(
            f"weight {name} [{', '.join(map(str, tensor.shape))}] is replicated, but trainer ranks hold different "
            "copies; engines would get that of one rank: find why it was not updated alike"
        )


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


def digest_of(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes, in hex."""
    return str(xxhash.xxh3_128_hexdigest(_bits(tensor).cpu().numpy().data))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bits(one), _bits(other))  # NaN equals itself


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
