"""How the tensor-parallel ranks of an SGLang engine share out an axis of a weight, and whether they can at all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mooncake_store.errors import ConfigError

Config = Any  # transformers.PreTrainedConfig, with the defaults that SGLang reads too
_VOCABULARY_ALIGNMENT = 64


@dataclass(frozen=True)
class Dimension:
    """One axis of a weight.

    size: in the checkpoint. held: on each rank, padding included. spans: by rank, the (start, length) that it holds.
    """

    size: int
    held: int
    spans: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        return all(span == (0, self.size) for span in self.spans)


class Uneven(ConfigError):
    """Something of a model cannot be shared out to so many ranks; the message has its number and what is allowed."""


def whole(size: int, tp: int) -> Dimension:
    """Every rank has all of it."""
    return Dimension(size, size, ((0, size),) * tp)


def even(field: str, count: int, tp: int, width: int = 1) -> Dimension:
    """`count` units of `width`, equally many to each rank."""
    if count % tp:
        raise _uneven(field, count, tp, "a divisor of it")
    held = count // tp * width
    return Dimension(count * width, held, tuple((rank * held, held) for rank in range(tp)))


def key_value(config: Config, tp: int) -> Dimension:
    """Heads that ranks share out while there are enough, and hold copies of beyond that."""
    heads: int = config.num_key_value_heads
    if heads >= tp:
        return even("num_key_value_heads", heads, tp, head_dim(config))
    if tp % heads:
        raise _uneven("num_key_value_heads", heads, tp, "a divisor or a multiple of it")
    copies, width = tp // heads, head_dim(config)
    return Dimension(heads * width, width, tuple((rank // copies * width, width) for rank in range(tp)))


def vocabulary(config: Config, tp: int) -> Dimension:
    """Rows padded to a multiple of 64 and cut evenly: the last ranks may hold few or none. Padding is never written."""
    size: int = config.vocab_size
    padded = -(-size // _VOCABULARY_ALIGNMENT) * _VOCABULARY_ALIGNMENT
    if padded % tp:
        alignment = _VOCABULARY_ALIGNMENT * tp
        padded = -(-size // alignment) * alignment
    held = padded // tp
    starts = [min(rank * held, size) for rank in range(tp + 1)]
    return Dimension(size, held, tuple((start, end - start) for start, end in pairwise(starts)))


def experts(config: Config, tp: int) -> Dimension:
    """Every rank holds a part of each; SGLang refuses fewer experts than ranks."""
    number: int = config.num_experts
    if number < tp:
        raise Uneven(f"num_experts={number} are fewer than {tp} ranks; allowed is at most that many")
    return whole(number, tp)


def _uneven(field: str, count: int, tp: int, allowed: str) -> Uneven:
    return Uneven(f"{field}={count} cannot be shared out to {tp} ranks evenly; allowed is {allowed}")


def head_dim(config: Config) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


DIMENSIONS: Mapping[str, Callable[[Config, int], Dimension]] = {
    "hidden": lambda config, tp: whole(config.hidden_size, tp),
    "head": lambda config, tp: whole(head_dim(config), tp),
    "query": lambda config, tp: even("num_attention_heads", config.num_attention_heads, tp, head_dim(config)),
    "key_value": key_value,
    "mlp": lambda config, tp: even("intermediate_size", config.intermediate_size, tp),
    "experts": experts,
    "expert_mlp": lambda config, tp: even("moe_intermediate_size", config.moe_intermediate_size, tp),
    "vocabulary": vocabulary,
}
