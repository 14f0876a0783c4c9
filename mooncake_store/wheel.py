"""The installed mooncake package: whether it can be imported, and what brings it where it cannot."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from mooncake_store.errors import ConfigError, MissingDependency

EXTRAS = {
    "cpu": "mooncake-transfer-engine-non-cuda",
    "cuda": "mooncake-transfer-engine",
    "cuda13": "mooncake-transfer-engine-cuda13",
}
# 0.3.10 zeroed the ends of rows on TCP between nodes.
KNOWN_BAD_VERSIONS = ("0.3.10",)


def load_mooncake() -> Any:
    """Import and return `mooncake.store`.

    Raises:
        MissingDependency: the package or a system library is missing; names what brings it.
        ConfigError: a version known to corrupt data is installed.
    """
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise _missing(error) from error
    for distribution in EXTRAS.values():
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split(".post")[0] in KNOWN_BAD_VERSIONS:
            raise ConfigError(f"{distribution} {version} is known to corrupt batches; install 0.3.13 or later")
    return module


def _missing(error: ImportError) -> MissingDependency:
    extras = ", ".join(f"{extra} ({distribution})" for extra, distribution in EXTRAS.items())
    if "libibverbs" in str(error):
        return MissingDependency(
            f"mooncake cannot be imported: {error}. It needs a system library even for TCP: "
            f"apt-get install libibverbs1 (Debian, Ubuntu) or dnf install libibverbs (Fedora, RHEL)"
        )
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "mooncake":
        return MissingDependency(
            f"backend 'mooncake' needs mooncake: pip install miles-mooncake[EXTRA], EXTRA one of {extras}"
        )
    return MissingDependency(
        f"mooncake is installed but cannot be imported: {error}. CUDA builds need the driver's library; exactly one "
        f"build may be installed, by one extra of miles-mooncake: {extras}"
    )
