"""HTTP to engines: each request is bounded in seconds as a whole, from connecting to the last byte of the answer.

A timeout of httpcore is for each wait: an engine that sends a byte now and then would hold a request for ever. And it
looks at every connection before each request: with a thousand of them it does little else. Where requests are many,
aiohttp has them.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import httpcore
import httpx


class EngineError(RuntimeError):
    """An engine answered with an error, not at all, or with nonsense; the message names engine and request.

    Attributes:
        status: HTTP status of the answer; None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class EngineTimeout(EngineError):
    """An engine did not answer, or not to the end, within the seconds that the message names."""


GENERATE_SECONDS = 3600.0  # the answer may be a whole rollout batch; an engine that ends closes its connections at once
_CONNECT_SECONDS = 15.0  # the link may be down for a few; who is not there refuses at once
# SGLang closes a connection that was idle for 5 seconds.
_IDLE_SECONDS = 1.0
_ATTEMPTS = 3
_LATE = "no answer, or only a part of it,"


class HTTP:
    """Requests to one server, from any thread, each by a connection of its own.

    Between two hosts one that was closed while idle may not be known as such, and a request on it, unlike a connection
    that cannot be made, may not be sent again.

    Args:
        url: e.g. "http://127.0.0.1:30000".
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._headers = [(b"Host", httpx.URL(url).netloc), (b"Content-Type", b"application/json")]
        self._pool = httpcore.ConnectionPool(
            max_connections=None, max_keepalive_connections=0, network_backend=_Bounding()
        )

    def request(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
        """The body of the answer.

        Raises:
            EngineTimeout: it is not there, whole, after `seconds`.
            EngineError: an error, or no answer.
        """
        url = f"{self._url}{path}"
        timeout = {"connect": min(seconds, _CONNECT_SECONDS), "read": seconds, "write": seconds}
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            answer = self._pool.request(
                method, url, headers=self._headers, content=content, extensions={"timeout": timeout}
            )
        except httpcore.ConnectTimeout as error:
            raise _too_late(url, "no connection", timeout["connect"]) from error
        except httpcore.TimeoutException as error:
            raise _too_late(url, _LATE, seconds) from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise _no_answer(url, error) from error
        if answer.status >= 400:
            raise _refused(url, answer.status, answer.content.decode(errors="replace"))
        return answer.content

    def close(self) -> None:
        self._pool.close()


class _Bounding(httpcore.NetworkBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        began = time.monotonic()
        stream = httpcore.SyncBackend().connect_tcp(host, port, timeout, local_address, socket_options)
        return _Bounded(stream, began)


class _Bounded(httpcore.NetworkStream):
    """A connection of one request, whose timeout counts from `began`, whatever is received or sent meanwhile."""

    def __init__(self, stream: httpcore.NetworkStream, began: float) -> None:
        self._stream, self._began = stream, began
        self._socket: socket.socket = stream.get_extra_info("socket")

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        rest = memoryview(buffer)
        while rest:  # what the stream would send as often as needed, each time within its timeout
            self._socket.settimeout(self._left(timeout, httpcore.WriteTimeout))
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError as error:
                raise httpcore.WriteTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def _left(self, timeout: float | None, too_late: type[httpcore.TimeoutException]) -> float:
        assert timeout is not None, "every request has its bound"
        left = self._began + timeout - time.monotonic()
        if left <= 0.0:
            raise too_late(f"more than {timeout:g} s")
        return left


class AsyncHTTP:
    """Posts JSON to any server, many requests at once. Bound to the event loop that first uses it.

    Args:
        connections: requests in flight at most; more wait.
        seconds: that each may take once it has its turn.
    """

    def __init__(self, connections: int, seconds: float = GENERATE_SECONDS) -> None:
        self._session: aiohttp.ClientSession | None = None  # it can be made in the event loop only
        self._turn, self._seconds = asyncio.Semaphore(connections), seconds
        self._waiting: set[tuple[str, asyncio.Task[Any]]] = set()  # for answers, with the URLs asked

    async def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer. Sent again when its connection ends without one: the server may close an idle one just as it
        is used.

        Raises:
            EngineTimeout: it is not there, whole, after `seconds`.
            EngineError: an error, no answer, or the server was given up meanwhile.
        """
        asking = asyncio.get_running_loop().create_task(self._post(url, body))
        self._waiting.add((url, asking))
        try:
            await asyncio.wait({asking})
        finally:
            asking.cancel()
            self._waiting.remove((url, asking))
        if asking.cancelled():
            raise EngineError(f"{url}: given up, its server takes no part any more")
        return asking.result()

    async def give_up(self, server: str) -> None:
        """Wait no more for what a server (its URL) was asked."""
        for url, asking in self._waiting:
            if url.startswith(f"{server}/"):
                asking.cancel()

    async def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        try:
            async with self._turn, asyncio.timeout(self._seconds):
                status, content = await self._answer(url, body)
        except TimeoutError as error:
            raise _too_late(url, _LATE, self._seconds) from error
        if status >= 400:
            raise _refused(url, status, content.decode(errors="replace"))
        try:
            return json.loads(content)
        except ValueError as error:
            raise EngineError(f"{url}: an answer that makes no sense: {error}", status) from error

    async def _answer(self, url: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            self._session = _session()
        for attempt in range(_ATTEMPTS):
            try:
                async with self._session.post(url, json=body, allow_redirects=False) as answer:
                    return answer.status, await answer.read()
            except aiohttp.ConnectionTimeoutError as error:
                raise _too_late(url, "no connection", _CONNECT_SECONDS) from error
            except (aiohttp.ClientConnectorError, aiohttp.InvalidURL, UnicodeError) as error:  # no name of a host
                raise _no_answer(url, error) from error
            except aiohttp.ClientError as error:
                if attempt + 1 == _ATTEMPTS:
                    raise _no_answer(url, error) from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _session() -> aiohttp.ClientSession:
    """Without bounds of its own, but for how long a connection may take to be made or to lie idle."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
        # Its sock_connect would be for each address of a host by itself, and not for finding them.
        timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _too_late(url: str, what: str, seconds: float) -> EngineTimeout:
    return EngineTimeout(f"{url}: {what} within {seconds:g} s; see in the engine's log what it does, or restart it")


def _no_answer(url: str, error: Exception) -> EngineError:
    return EngineError(f"{url}: no answer: {str(error) or type(error).__name__}")


def _refused(url: str, status: int, text: str) -> EngineError:
    return EngineError(f"{url}: HTTP {status}: {text[:500]}", status)
