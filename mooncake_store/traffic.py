"""How many bytes a connection moved."""

from __future__ import annotations

import threading


class Traffic:
    """Bytes that a client's transfers moved to and from the memory of others. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = self._received = 0

    def sent(self, nbytes: int) -> None:
        with self._lock:
            self._sent += nbytes

    def received(self, nbytes: int) -> None:
        with self._lock:
            self._received += nbytes

    def counters(self) -> dict[str, int]:
        """bytes_sent and bytes_received so far."""
        with self._lock:
            return {"bytes_sent": self._sent, "bytes_received": self._received}
