"""What each Mooncake Store status code means to a caller: one table.

Names follow the public `ErrorCode` enum of Mooncake; which codes heal by waiting was measured on mooncake 0.3.13.post1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_store.errors import (
    IntegrityError,
    ObjectLost,
    ObjectNotFound,
    StoreError,
    StoreFull,
    StoreUnavailable,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Meaning of one status code: Mooncake's name, the error class to raise, and whether waiting can heal it."""

    name: str
    error: type[StoreError]
    retryable: bool = False


OK = 0
NO_SPACE = -200
NOT_FOUND = -704
TRANSFER_FAILED = -800
INVALID_PARAMS = -600
NOT_READY, BUSY = -703, -714
BEING_REPLACED = (NOT_READY, BUSY)  # what a key may answer in the midst of `replace`
RPC_FAILED, RPC_TIMEOUT = -900, -901
UNANSWERED = (RPC_FAILED, RPC_TIMEOUT)  # by the master; each costs its caller seconds

OUTCOMES: dict[int, Outcome] = {
    -1: Outcome("INTERNAL_ERROR", StoreError),
    -10: Outcome("BUFFER_OVERFLOW", StoreError),
    -101: Outcome("SEGMENT_NOT_FOUND", StoreError),
    -103: Outcome("CLIENT_NOT_FOUND", StoreError),
    NO_SPACE: Outcome("NO_AVAILABLE_HANDLE", StoreFull, retryable=True),
    -400: Outcome("INVALID_KEY", StoreError),
    INVALID_PARAMS: Outcome("INVALID_PARAMS", StoreError),
    -601: Outcome("ILLEGAL_CLIENT", StoreError),
    NOT_READY: Outcome("REPLICA_IS_NOT_READY", StoreUnavailable, retryable=True),
    NOT_FOUND: Outcome("OBJECT_NOT_FOUND", ObjectNotFound),
    -705: Outcome("OBJECT_ALREADY_EXISTS", StoreError),
    -706: Outcome("OBJECT_HAS_LEASE", StoreUnavailable, retryable=True),
    -707: Outcome("LEASE_EXPIRED", StoreUnavailable, retryable=True),
    -708: Outcome("OBJECT_HAS_REPLICATION_TASK", StoreUnavailable, retryable=True),
    -712: Outcome("REPLICA_IS_GONE", ObjectLost),
    BUSY: Outcome("REPLICA_BUSY", StoreUnavailable, retryable=True),
    TRANSFER_FAILED: Outcome("TRANSFER_FAIL", StoreUnavailable, retryable=True),
    -801: Outcome("CHECKSUM_MISMATCH", IntegrityError),
    RPC_FAILED: Outcome("RPC_FAIL", StoreUnavailable, retryable=True),
    RPC_TIMEOUT: Outcome("RPC_TIMEOUT", StoreUnavailable, retryable=True),
    -1010: Outcome("UNAVAILABLE_IN_CURRENT_STATUS", StoreUnavailable, retryable=True),
    -1011: Outcome("UNAVAILABLE_IN_CURRENT_MODE", StoreError),
    -1012: Outcome("NOT_ALLOWED_IN_THIS_MODE", StoreError),
}
UNKNOWN = Outcome("UNKNOWN", StoreError)


def outcome_of(code: int) -> Outcome:
    """Return the meaning of a negative status `code`; a code outside the table is a plain, final StoreError."""
    return OUTCOMES.get(code, UNKNOWN)


def error_for(code: int, operation: str, subject: str, hint: str = "") -> StoreError:
    """Build the error for a failed `operation` on `subject` (a key or an address); it is returned, not raised."""
    outcome = outcome_of(code)
    message = f"Mooncake {operation} of {subject} answered {code} ({outcome.name})"
    return outcome.error(f"{message}; {hint}" if hint else message, retryable=outcome.retryable, code=code)
