"""One tensor, old -> new, as a payload, and back; with the checksum of what it is then.

Both ways a tensor is gone through once, in blocks that stay in the core's own cache while they are compared or changed,
hashed and, encoding, copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles_plugin.weight_transfer.disk_delta.bytewise import OverwriteReader, OverwriteWriter, XorReader, XorWriter
from miles_plugin.weight_transfer.disk_delta.frames import blocks
from miles_plugin.weight_transfer.disk_delta.hashes import CHECKSUMS, Hash, StateHash, hash_maker, hash_of, state_hash
from miles_plugin.weight_transfer.disk_delta.kernels import Kernels, fastest
from miles_plugin.weight_transfer.disk_delta.sparse import SparseReader, SparseWriter
from mooncake_store.arrays import Bytes
from mooncake_store.errors import ConfigError, IntegrityError

__all__ = ["CHECKSUMS", "ENCODINGS", "Decoder", "Encoder", "checksum_of"]

ENCODINGS = ("xor", "overwrite", "sparse")
# Payloads that are applied in one pass. A reader needs up to some 2 MB.
FOLD = 8
# Of an xor that may be unpacked at once, by all readers of a pass together.
WHOLE_BYTES = 12 << 20


class _Writer(Protocol):
    def write(self, old: Bytes, new: Bytes, width: int, digest: Hash) -> bytes | None: ...


class _Reader(Protocol):
    def patch(self, block: Bytes, at: int) -> None: ...

    def finish(self) -> None: ...


class Encoder:
    """Makes payloads. Not for two threads at once: each has its own.

    Args:
        encoding: one of ENCODINGS.
        checksum: one of CHECKSUMS.
        kernels: the extension, else numpy, unless given.

    Raises:
        ConfigError: there is no such encoding or checksum.
        MissingDependency: the checksum needs a package that is not installed.
    """

    def __init__(self, encoding: str, checksum: str, kernels: Kernels | None = None) -> None:
        self._writer = _writer(encoding, kernels or fastest())
        self._new_hash = hash_maker(checksum)
        self._in_c = state_hash(checksum) if encoding == "sparse" else None

    def encode(self, old: Bytes, new: Bytes, width: int) -> tuple[bytes | None, str]:
        """What makes `new` of `old`, and the checksum of `new`, in hexadecimal digits.

        `old` is `new` afterwards; after an exception it may be anything between.

        Args:
            old: uint8 [n], contiguous, writable. new: uint8 [n], contiguous.
            width: bytes of an element: 1, 2, 4 or 8; n is a multiple of it.

        Returns:
            The payload (None: nothing changed) and the checksum.

        Raises:
            ConfigError: this encoding is not for tensors of that size.
            ValueError: the arguments are not as described.
        """
        _check(new, width)
        _check_writable(old, width)
        if old.size != new.size:
            raise ValueError(f"the old tensor has {old.size} bytes, the new one {new.size}")
        digest = _begun(self._in_c) or self._new_hash()
        return self._writer.write(old, new, width, digest), digest.hexdigest()


class Decoder:
    """Applies payloads. Not for two threads at once: each has its own.

    Args:
        checksum: one of CHECKSUMS.
        kernels: the extension, else numpy, unless given.

    Raises:
        ConfigError: there is no such checksum.
        MissingDependency: it needs a package that is not installed.
    """

    def __init__(self, checksum: str, kernels: Kernels | None = None) -> None:
        self._kernels = kernels or fastest()
        self._new_hash = hash_maker(checksum)
        self._in_c = state_hash(checksum)

    def apply(self, payloads: Sequence[tuple[str, bytes | memoryview]], tensor: Bytes, width: int) -> str:
        """Apply (encoding, payload) pairs, the oldest first, in one pass over the tensor for each FOLD of them.

        Args:
            payloads: as `Encoder.encode` returned them, each for what those before it make of the tensor.
            tensor: uint8 [n], contiguous, writable; changed in place.
            width: bytes of an element: 1, 2, 4 or 8; n is a multiple of it.

        Returns:
            The checksum of the tensor afterwards, in hexadecimal digits. A payload that is sound but for another tensor
            shows only here.

        Raises:
            IntegrityError: a payload is one that `encode` cannot have written. The tensor may have changed in part.
            ValueError: the tensor is not as described.
        """
        _check_writable(tensor, width)
        digest = self._new_hash()
        for start in range(0, max(1, len(payloads)), FOLD):
            group = payloads[start : start + FOLD]
            readers = [self._reader(*payload, tensor.size, width, WHOLE_BYTES // len(group)) for payload in group]
            is_last = start + FOLD >= len(payloads)
            if is_last and len(readers) == 1 and isinstance(readers[0], SparseReader) and (in_c := _begun(self._in_c)):
                readers[0].patch(tensor, 0, in_c)
                readers[0].finish()
                return in_c.hexdigest()
            for part in blocks(tensor.size):
                block = tensor[part]
                for reader in readers:
                    reader.patch(block, part.start)
                if is_last:
                    digest.update(block.data)
            for reader in readers:
                reader.finish()
        return digest.hexdigest()

    def _reader(self, encoding: str, payload: bytes | memoryview, nbytes: int, width: int, whole: int) -> _Reader:
        if encoding == "xor":
            return XorReader(payload, nbytes, whole)
        if encoding == "overwrite":
            return OverwriteReader(payload, nbytes)
        if encoding == "sparse":
            return SparseReader(payload, nbytes, width, self._kernels)
        raise IntegrityError(f"a payload's encoding {encoding!r} is unknown; allowed: {', '.join(ENCODINGS)}")


def checksum_of(tensor: Bytes, checksum: str) -> str:
    """Of uint8 [n], contiguous, in hexadecimal digits.

    Raises:
        ConfigError: there is no such checksum.
        MissingDependency: it needs a package that is not installed.
    """
    return hash_of(tensor, hash_maker(checksum))


def _begun(digest: StateHash | None) -> StateHash | None:
    if digest is not None:
        digest.begin()
    return digest


def _writer(encoding: str, kernels: Kernels) -> _Writer:
    if encoding == "xor":
        return XorWriter()
    if encoding == "overwrite":
        return OverwriteWriter(kernels)
    if encoding == "sparse":
        return SparseWriter(kernels)
    raise ConfigError(f"encoding {encoding!r} is unknown; allowed: {', '.join(ENCODINGS)}")


def _check(tensor: Bytes, width: int) -> None:
    if width not in (1, 2, 4, 8) or tensor.size % width:
        raise ValueError(f"a tensor of {tensor.size} bytes in elements of {width}; allowed: whole ones of 1, 2, 4, 8")
    if tensor.dtype != "u1" or tensor.ndim != 1 or not tensor.flags.c_contiguous:
        raise ValueError(f"a tensor must be contiguous uint8 [n], not {tensor.dtype} {list(tensor.shape)}")


def _check_writable(tensor: Bytes, width: int) -> None:
    _check(tensor, width)
    if not tensor.flags.writeable:
        raise ValueError(f"a tensor of {tensor.size} bytes must be writable, for it is changed in place")
