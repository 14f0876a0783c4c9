"""Checksums of whole tensors, taken block by block."""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
import xxhash

from mooncake_store.arrays import Bytes
from mooncake_store.errors import ConfigError, MissingDependency
from mooncake_store.xxhash_c import address_of, c_library

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


class _Digest128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


class StateHash:
    """xxh3-128 that C adds to, without the interpreter's lock.

    Attributes:
        function, state: addresses, for function(state, data, nbytes).

    Raises:
        AttributeError: the xxhash package is built so that its functions cannot be found.
    """

    def __init__(self) -> None:
        library = c_library()
        self.function = address_of(library, ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"))
        self._update = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(self.function)
        make, free, self._reset, self._digest = (
            ctypes.PYFUNCTYPE(result, *takes)(address_of(library, (name,)))
            for name, result, takes in (
                ("XXH3_createState", ctypes.c_void_p, ()),
                ("XXH3_freeState", ctypes.c_int, (ctypes.c_void_p,)),
                ("XXH3_128bits_reset", ctypes.c_int, (ctypes.c_void_p,)),
                ("XXH3_128bits_digest", _Digest128, (ctypes.c_void_p,)),
            )
        )
        self.state: int = make()
        weakref.finalize(self, free, self.state).atexit = False  # threads may still add to it then
        self.begin()

    def begin(self) -> None:
        """Forget all that was added."""
        self._reset(self.state)

    def update(self, data: memoryview, /) -> None:
        self._update(self.state, np.frombuffer(data, np.uint8).ctypes.data, data.nbytes)

    def hexdigest(self) -> str:
        digest = self._digest(self.state)
        return f"{digest.high:016x}{digest.low:016x}"


def state_hash(checksum: str) -> StateHash | None:
    """A new one, if that is the checksum and it gives what the package gives; None: it is done in Python."""
    if checksum != "xxh3-128":
        return None
    with suppress(AttributeError):
        found, sample = StateHash(), bytes(range(256)) * 16
        found.update(memoryview(sample))
        if found.hexdigest() == xxhash.xxh3_128_hexdigest(sample):
            found.begin()
            return found
    return None


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
