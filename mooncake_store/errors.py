"""Typed outcomes of the transport. A caller branches on the class, or on `.retryable`; never on the text."""

from __future__ import annotations

from typing import ClassVar


class StoreError(Exception):
    """Base of every error the transport raises on purpose.

    Attributes:
        retryable: the same call may succeed later without any change by the caller.
        code: the Mooncake status code behind the error, or None when there is none.
    """

    default_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retryable: bool | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.retryable = self.default_retryable if retryable is None else retryable
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by calling cls(*args), which would lose the keyword state when crossing Ray.
        return type(self), self.args, {"retryable": self.retryable, "code": self.code}


class ConfigError(StoreError, ValueError):
    """A setting is missing, malformed or contradicts the host; the message names the field, value and source."""


class MissingDependency(ConfigError):
    """A package or system library that this backend needs is not installed; the message names what brings it."""


class StoreUnavailable(StoreError):
    """The master, an owner of memory or Ray cannot be reached right now."""

    default_retryable = True


class StoreFull(StoreError):
    """No room was freed within the bounded wait. Retryable: removing batches makes room."""

    default_retryable = True


class ObjectNotFound(StoreError):
    """The store does not hold the object: it was removed, or never put."""


class ObjectLost(StoreError):
    """The object was put and not removed, yet its bytes are gone (its owner died)."""


class IntegrityError(StoreError):
    """The bytes are not what was put: wrong checksum, wrong length, or a malformed or unknown format."""


class StoreClosed(StoreError):
    """The store, the client or the result was closed, or belongs to the parent of this forked process."""
