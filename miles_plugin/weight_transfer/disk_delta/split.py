"""Which trainer rank publishes which tensor: whole ones, each the one that has the fewest bytes so far.

All ranks see all tensors and follow this rule without asking; a digest tells rank 0 whether they came to the same.
"""

from __future__ import annotations

import torch
import xxhash

from miles_plugin.weight_transfer.disk_delta.format import Layout, check_layout, nbytes_of
from miles_plugin.weight_transfer.disk_delta.tensor_file import alignment_order

DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.int64: "I64", torch.uint64: "U64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip


class WeightsChanged(RuntimeError):
    """The trainer sends other tensors than before, or its ranks send different ones; the message names one."""


def layout_of(name: str, tensor: torch.Tensor) -> Layout:
    """dtype and shape as files spell them; raises WeightsChanged for a dtype or a name that files cannot hold."""
    if tensor.dtype not in DTYPES:
        raise WeightsChanged(f"weight {name} is {tensor.dtype}; can be published: {', '.join(map(str, DTYPES))}")
    layout = DTYPES[tensor.dtype], tuple(tensor.shape)
    check_layout(name, layout, "the trainer's weights")
    return layout


class Split:
    """The tensors of a model and their ranks.

    Attributes:
        layout: of all tensors. owners: rank by name.
    """

    def __init__(self, size: int) -> None:
        self.layout: dict[str, Layout] = {}
        self.owners: dict[str, int] = {}
        self._loads = [0] * size

    def add(self, name: str, layout: Layout) -> int:
        """One more tensor; its rank. Raises WeightsChanged when there is one of this name."""
        if name in self.layout:
            raise WeightsChanged(f"weight {name} came twice in one update; send each once")
        owner = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._loads[owner] += nbytes_of(layout)
        self.layout[name], self.owners[name] = layout, owner
        return owner

    def digest(self) -> str:
        """The same on all ranks that have the same tensors and owners."""
        told = repr(sorted((name, layout, self.owners[name]) for name, layout in self.layout.items()))
        return str(xxhash.xxh3_128_hexdigest(told.encode()))

    def files(self, most_bytes: int) -> list[tuple[int, list[str]]]:
        """What files a full version has, as (rank, names of tensors in their order): each has at most `most_bytes` of
        tensors, or one tensor. A rank without tensors has none."""
        files: list[tuple[int, list[str]]] = []
        for rank in range(len(self._loads)):
            mine = {name: layout for name, layout in self.layout.items() if self.owners[name] == rank}
            filled = most_bytes
            for name in alignment_order(mine):
                nbytes = nbytes_of(mine[name])
                if filled + nbytes > most_bytes or not files or files[-1][0] != rank:
                    files.append((rank, []))
                    filled = 0
                files[-1][1].append(name)
                filled += nbytes
        return files
