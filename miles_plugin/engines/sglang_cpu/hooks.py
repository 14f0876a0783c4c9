"""Functions of SGLang 0.5.23 that assume CUDA memory, replaced through SGLang's own hook registry."""

from collections.abc import Iterator
from typing import Any


def _register_parameters(model: Any, transfer_engine: Any) -> dict[str, tuple[int, int, int]]:
    """Register every parameter with Mooncake's Transfer Engine: name -> (address, elements, bytes per element).

    The original walks the CUDA caching allocator's snapshot; on a CPU each tensor is its own allocation.
    """
    registered = {}
    for name, weight in model.named_parameters():
        address, elements, width = weight.data_ptr(), weight.numel(), weight.element_size()
        code = transfer_engine.register_memory(address, elements * width)
        if code != 0:
            raise RuntimeError(f"Transfer Engine refused to register {name} ({elements * width} bytes): code {code}")
        registered[name] = (address, elements, width)
    return registered


def _iterate_chunks(comparable: Any) -> Iterator[tuple[Any, None]]:
    """Yield the tensor whole; the original copies chunks of it to a CUDA device before hashing."""
    yield comparable.tensor.reshape(-1), None


def _pin_memory(_buffer: Any, _granularity: int | None = None) -> None:
    """Leave a host buffer as it is; the original registers it with CUDA (that of the routed experts, on a CPU)."""


def _keep_config(model_config: Any, _load_config: Any, _tp_size: int) -> Any:
    """Leave the model's sizes as they are; the original rounds its MLP and heads up to what AMX kernels take.

    A tensor-parallel engine then holds what it would hold on GPUs, and one key-value head is copied, not padded to two.
    """
    return model_config


def register() -> None:
    """Queue the replacements; SGLang applies them in `load_plugins()`, which every one of its processes calls."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, replacement in (
        ("sglang.srt.model_loader.remote_instance_weight_loader_utils.register_memory_region_v2", _register_parameters),
        ("sglang.srt.utils.weight_checker_comparator.RawComparable.iter_chunks", _iterate_chunks),
        ("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", _keep_config),
        ("sglang.srt.mem_cache.pool_host.common._cuda_host_register", _pin_memory),
    ):
        HookRegistry.register(target, replacement, HookType.REPLACE)
