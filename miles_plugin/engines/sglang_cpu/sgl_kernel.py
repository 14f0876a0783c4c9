"""Stand-in for the CPU build of `sgl_kernel`, which has no wheel.

Only what a CPU run without AMX reaches is implemented. Any other kernel imports, since SGLang binds names at import
time, and raises when it is called, so that a silent wrong result is impossible.
"""

from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _row_stride: int,
) -> None:
    """Write each request's new cache slots into its row of the request-to-token table.

    Args:
        req_pool_indices: [n] int, the row of each request.
        req_to_token: [rows, max_context] int32, updated in place.
        start, end: [n] int, the half-open span of positions that request i gained.
        out_cache_loc: [sum(end - start)] int, the slots of all requests one after another.
    """
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += last - first


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def unavailable(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU implementation here; run SGLang on a GPU, or start it with "
            "--attention-backend torch_native --sampling-backend pytorch, which does not need it"
        )

    return unavailable
