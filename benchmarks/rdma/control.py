"""The two hosts talk: one asks, one serves. JSON lines over one connection; what was started for it ends with it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from miles_plugin.bench_commands import BenchFailed

ANSWER_SECONDS = 180.0  # memory is touched first
HELLO_SECONDS = 10.0  # for whoever connects to say something: others wait
SILENT_SECONDS = 900.0  # between two questions of one who measures
FORMAT = 1
_LONGEST = 1 << 20


class Peer:
    """The other host, asked.

    Raises:
        BenchFailed: it does not answer, or is of another version.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS)
        except OSError as error:
            raise BenchFailed(f"{address}: {error}; is `miles-mooncake bench rdma --serve` running there?") from error
        self._lines = self._socket.makefile("rb")
        there = self.ask("hello")
        if there.get("format") != FORMAT:
            self.close()
            raise BenchFailed(f"{address} speaks format {there.get('format')}, this host {FORMAT}: update one of them")

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Let it do something; what it answers. BenchFailed, with its words, where it could not."""
        try:
            self._socket.sendall(json.dumps({"do": what, **arguments}).encode() + b"\n")
            line = self._lines.readline(_LONGEST)
        except OSError as error:
            raise BenchFailed(f"{self._address} did not answer to {what!r}: {error}") from error
        if not line:
            raise BenchFailed(f"{self._address} ended the connection at {what!r}; what it printed says why")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchFailed(f"{self._address}: {answer['error']}")
        return answer

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def serve_one(connection: socket.socket, does: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer until the other side goes away. What raises is answered, too."""
    connection.settimeout(HELLO_SECONDS)
    with connection, connection.makefile("rb") as lines:
        while line := lines.readline(_LONGEST):
            connection.settimeout(SILENT_SECONDS)
            try:
                asked = json.loads(line)
                what = asked.pop("do")
                if what not in does:
                    raise ValueError(f"asked to {what!r}; can {', '.join(does)}")
                answer = does[what](**asked)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.sendall(json.dumps(answer).encode() + b"\n")
