"""The machine and the installed parts that a run was made with."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# Under each name the distributions that may bring it: three wheels own the module `mooncake`.
_PARTS = {
    "miles-mooncake": ("miles-mooncake",),
    "Mooncake": (
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
    ),
    "SGLang": ("sglang",),
    "torch": ("torch",),
    "Ray": ("ray",),
    "transformers": ("transformers",),
}


def describe_machine() -> dict[str, Any]:
    """CPUs, names of the GPUs that torch sees, platform, versions of Python and of the parts that are installed."""
    return {
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {part: found for part, names in _PARTS.items() if (found := _version(names))},
    }


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _gpus() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
