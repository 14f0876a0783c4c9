"""The installed mooncake package: whether it can be imported, and what brings it where it cannot."""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import cache
from typing import Any

from mooncake_store.errors import ConfigError, MissingDependency

EXTRAS = {
    "cpu": "mooncake-transfer-engine-non-cuda",
    "cuda": "mooncake-transfer-engine",
    "cuda13": "mooncake-transfer-engine-cuda13",
}
# 0.3.10 zeroed the ends of rows on TCP between nodes.
KNOWN_BAD_VERSIONS = ("0.3.10",)
_EXTRAS_NAMED = ", ".join(f"{extra} ({distribution})" for extra, distribution in EXTRAS.items())


def load_mooncake() -> Any:
    """Import and return `mooncake.store`.

    Raises:
        MissingDependency: the package or a system library is missing; names what brings it.
        ConfigError: a version known to corrupt data is installed, or two distributions that bring the same module.
    """
    owners = _owners()
    if len(owners) > 1:
        raise ConfigError(
            f"{' and '.join(owners)} both bring the module 'mooncake', so that files of one lie over the other's; "
            f"uninstall all of them, then install one: {_EXTRAS_NAMED}"
        )
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise _missing(error) from error
    for distribution in owners:
        version = importlib.metadata.version(distribution)
        if version.split(".post")[0] in KNOWN_BAD_VERSIONS:
            raise ConfigError(f"{distribution} {version} is known to corrupt batches; install 0.3.13 or later")
    return module


@cache  # a tenth of a second
def _owners() -> tuple[str, ...]:
    """The distributions that bring the module `mooncake`, by name."""
    return tuple(sorted(set(importlib.metadata.packages_distributions().get("mooncake", ()))))


def _missing(error: ImportError) -> MissingDependency:
    if "libibverbs" in str(error):
        return MissingDependency(
            f"mooncake cannot be imported: {error}. It needs a system library even for TCP: "
            f"apt-get install libibverbs1 (Debian, Ubuntu) or dnf install libibverbs (Fedora, RHEL)"
        )
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "mooncake":
        return MissingDependency(
            f"backend 'mooncake' needs mooncake: pip install miles-mooncake[EXTRA], EXTRA one of {_EXTRAS_NAMED}"
        )
    return MissingDependency(
        f"mooncake is installed but cannot be imported: {error}. CUDA builds need the driver's library; exactly one "
        f"build may be installed, by one extra of miles-mooncake: {_EXTRAS_NAMED}"
    )
