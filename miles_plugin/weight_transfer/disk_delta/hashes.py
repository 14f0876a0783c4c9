"""Checksums of whole tensors, taken block by block."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import xxhash

from mooncake_store.arrays import Bytes
from mooncake_store.errors import ConfigError, MissingDependency

CHECKSUMS = ("xxh3-128", "blake3", "adler32")


class Hash(Protocol):
    """As in hashlib."""

    def update(self, data: memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


class Adler32:
    """zlib's checksum, eight digits."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hash_maker(checksum: str) -> Callable[[], Hash]:
    """What begins a checksum of that kind.

    Raises:
        ConfigError: there is no such kind.
        MissingDependency: it needs a package that is not installed.
    """
    if checksum == "xxh3-128":
        return xxhash.xxh3_128
    if checksum == "adler32":
        return Adler32
    if checksum == "blake3":
        try:
            from blake3 import blake3
        except ImportError as error:
            raise MissingDependency("checksum blake3 needs the package blake3: pip install blake3") from error
        return blake3
    raise ConfigError(f"checksum {checksum!r} is unknown; allowed: {', '.join(CHECKSUMS)}")


def hash_of(tensor: Bytes, make: Callable[[], Hash]) -> str:
    """Of all bytes at once."""
    digest = make()
    digest.update(tensor.data)
    return digest.hexdigest()
