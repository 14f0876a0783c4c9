"""The HTTP clients of engines, against servers that drop connections, make no sense, or send a byte now and then."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from miles_plugin.engines import http as engine_http
from miles_plugin.engines import sglang
from miles_plugin.engines.http import HTTP, AsyncHTTP, EngineError, EngineTimeout
from miles_plugin.engines.sglang import SGLangEngine

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"ok": 1}'
BROKEN = b"HTTP/1.1 500 Oh\r\nContent-Length: 7\r\n\r\nno luck"


def serve(answers: list[bytes], use: Callable[[AsyncHTTP, str], Awaitable[object]]) -> int:
    """Run `use` against a server that gives the answers in turn (b"": closes instead); returns how many it gave."""
    given = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal given
        while await reader.read(65536):
            given += 1
            if not answers[given - 1]:
                break
            writer.write(answers[given - 1])
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        http = AsyncHTTP(connections=2)
        try:
            await use(http, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            await http.close()
            server.close()

    asyncio.run(run())
    return given


def test_a_request_whose_connection_ends_unanswered_is_sent_again() -> None:
    async def use(http: AsyncHTTP, url: str) -> None:
        for _ in range(2):
            assert await http.post(url, {}) == {"ok": 1}

    assert serve([OK, b"", b"", OK], use) == 4


@pytest.mark.parametrize(
    ("answers", "expected"), [([b"", b"", b""], "no answer: .*[a-zA-Z]"), ([BROKEN], "HTTP 500: no luck")]
)
def test_what_stays_unanswered_or_is_an_error_is_an_engine_error(answers: list[bytes], expected: str) -> None:
    async def use(http: AsyncHTTP, url: str) -> None:
        with pytest.raises(EngineError, match=f"^{url}.*: {expected}"):
            await http.post(url, {})

    assert serve(answers, use) == len(answers)


def test_what_a_server_that_was_given_up_was_asked_ends_and_nothing_else() -> None:
    async def use(http: AsyncHTTP, url: str) -> None:
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
        gone = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        asked = asyncio.create_task(http.post(f"{gone}/generate", {}))
        await asyncio.sleep(0)
        await http.give_up(url)
        await asyncio.sleep(0)
        assert not asked.done()
        await http.give_up(gone)
        with pytest.raises(EngineError, match=f"^{gone}/generate: given up"):
            await asked
        assert await http.post(url, {}) == {"ok": 1}
        silent.close()

    assert serve([OK], use) == 1


def test_what_steers_an_engine_goes_by_a_connection_of_its_own() -> None:
    """One that the engine has closed meanwhile, unseen behind a link that was down, would lose the request."""
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for reply in (OK, b""):  # the first request is answered, and a second one on the same connection is not
            if await reader.read(65536):
                writer.write(reply)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        engine = SGLangEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(3):
            await asyncio.to_thread(engine.begin_update)
        engine.close()
        server.close()

    asyncio.run(run())
    assert connections == 3


@pytest.mark.parametrize("gone", ["http://127.0.0.1:9", "http://two..dots", "http://[::1", "htp://127.0.0.1:9"])
def test_an_engine_that_is_not_there_is_named_at_once(gone: str) -> None:
    async def use(http: AsyncHTTP, url: str) -> None:
        with pytest.raises(EngineError, match=f"^{re.escape(gone)}/generate: no answer: "):
            await http.post(f"{gone}/generate", {})

    assert serve([], use) == 0


def test_a_host_that_is_not_found_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find its address is a part of connecting."""
    monkeypatch.setattr(engine_http, "_CONNECT_SECONDS", BOUND)

    async def run() -> None:
        async def silent(*_: object, **__: object) -> None:
            await asyncio.sleep(60)

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", silent)
        http = AsyncHTTP(connections=1)
        with pytest.raises(EngineTimeout, match=f"^http://engine/generate: no connection within {BOUND} s; see in "):
            await asyncio.wait_for(http.post("http://engine/generate", {}), 20)
        await http.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "text",
    [
        "<html>502 from a proxy</html>",
        "[1, 2]",
        "[1]",
        '[{"output_ids": 1, "meta_info": []}]',
        "null",
        "{}",
        '{"ranks": 1, "remote_instance_transfer_engine_info": {}}',
    ],
)
@pytest.mark.parametrize(
    "ask",
    [
        SGLangEngine.weight_version,
        SGLangEngine.checksums,
        lambda engine: engine.registered_memory(0),
        lambda engine: engine.generate([[1]], {}),
    ],
    ids=["version", "checksums", "memory", "generate"],
)
def test_an_answer_that_makes_no_sense_is_an_engine_error(ask: Callable[[SGLangEngine], object], text: str) -> None:
    """So that an update, or a rollout, goes on without that engine."""

    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(65536)
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        engine = SGLangEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            with pytest.raises(EngineError, match=engine.url):
                await asyncio.to_thread(ask, engine)
        finally:
            engine.close()
            server.close()

    asyncio.run(run())


BOUND = 0.1  # seconds
DRIPS = {
    "its head": b"HTTP/1.1 200 OK\r\nServer: ",
    "its body": b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",
    "": b"",
}
CALLS: dict[str, Callable[[SGLangEngine], object]] = {
    "/generate": lambda engine: engine.generate([[1]], {}),
    "/pause_generation": lambda engine: engine.pause("retract"),
    "/continue_generation": SGLangEngine.resume,
    "/flush_cache": SGLangEngine.flush_cache,
    "/init_weights_update_group": lambda engine: engine.init_weights_group("127.0.0.1", 1, 1, 2, "name", "gloo"),
    "/destroy_weights_update_group": lambda engine: engine.destroy_weights_group("name", BOUND),
    "/begin_weight_update": SGLangEngine.begin_update,
    "/update_weights_from_distributed": lambda engine: engine.receive_bucket([], [], [], "name", BOUND),
    "/update_weights_from_disk": lambda engine: engine.load_checkpoint("/model", BOUND, 7),
    "/end_weight_update": SGLangEngine.end_update,
    "/update_weight_version": lambda engine: engine.stamp(7),
    "/model_info": SGLangEngine.weight_version,
    "/server_info": SGLangEngine.server_info,
    "/weights_checker": SGLangEngine.checksums,
    "/remote_instance_transfer_engine_info": lambda engine: engine.registered_memory(0),
}


class Dripping:
    """A server that takes any request and never comes to the end of its answer, of which it sends byte after byte."""

    def __init__(self, start: bytes) -> None:
        self._start = start

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(self._start)
        with suppress(ConnectionError):  # whoever asked has given up
            while self._start:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(BOUND / 10)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "GENERATE_SECONDS", BOUND)
    monkeypatch.setattr(sglang, "_READY_SECONDS", BOUND)


@pytest.mark.parametrize("start", DRIPS.values(), ids=DRIPS)
def test_an_answer_that_drips_is_given_up_when_its_time_is_up_whatever_was_asked(start: bytes, impatient: None) -> None:
    """A timeout of each read alone would never end it."""

    async def run() -> None:
        async with Dripping(start) as url:
            engine = SGLangEngine(url, timeout=BOUND)

            async def ask(path: str) -> None:
                with pytest.raises(EngineTimeout) as caught:
                    await asyncio.to_thread(CALLS[path], engine)
                told = str(caught.value)
                assert told.startswith(f"{url}{path}")
                assert f": no answer, or only a part of it, within {BOUND} s; see in the engine's log" in told
                assert caught.value.status is None

            await asyncio.wait_for(asyncio.gather(*map(ask, CALLS)), 20)
            assert not await asyncio.to_thread(engine.ready)
            engine.close()

    asyncio.run(run())


def test_every_request_that_an_engine_can_be_sent_is_among_those() -> None:
    """So that a new one comes with its bound."""
    asked: list[str] = []

    class Asked(Exception):
        pass

    class Recorder(HTTP):
        def request(self, method: str, path: str, body: Any, seconds: float) -> bytes:
            asked.append(path.partition("?")[0])
            assert seconds > 0
            raise Asked

    engine = SGLangEngine("http://127.0.0.1:9")
    engine._http = Recorder(engine.url)
    methods = {name for name in vars(SGLangEngine) if not name.startswith("_")} - {"close", "ready"}
    same = {"weight_version", "model_info"}  # of one endpoint
    assert len(methods - same) + 1 == len(CALLS)
    for call in CALLS.values():
        with pytest.raises(Asked):
            call(engine)
    assert asked == list(CALLS)


@pytest.mark.parametrize("start", DRIPS.values(), ids=DRIPS)
def test_one_of_many_requests_that_drips_is_given_up_too(start: bytes) -> None:
    async def run() -> None:
        async with Dripping(start) as url:
            http = AsyncHTTP(connections=1, seconds=BOUND)  # the second one waits for its turn, which is not counted
            asked = [asyncio.create_task(http.post(f"{url}/generate", {})) for _ in range(2)]
            await asyncio.wait_for(asyncio.wait(asked), 20)
            for each in asked:
                with pytest.raises(
                    EngineTimeout, match=f"^{url}/generate: no answer, or only a part of it, within {BOUND} s; see in "
                ):
                    await each
            await http.close()

    asyncio.run(run())


def test_a_request_that_is_taken_in_byte_by_byte_is_given_up_too() -> None:
    """What a rollout asks for may be more than a connection holds."""

    async def run() -> None:
        ended = asyncio.Event()

        async def sip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while not ended.is_set() and await reader.read(4096):
                await asyncio.sleep(BOUND / 10)
            writer.close()

        server = await asyncio.start_server(sip, "127.0.0.1", 0, limit=4096)
        engine = HTTP(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        body = {"input_ids": "1" * (16 << 20)}
        with pytest.raises(
            EngineTimeout, match=f"/generate: no answer, or only a part of it, within {BOUND} s; see in "
        ):
            await asyncio.wait_for(asyncio.to_thread(engine.request, "POST", "/generate", body, BOUND), 20)
        ended.set()
        engine.close()
        server.close()

    asyncio.run(run())


def test_a_request_costs_no_more_beside_many_others() -> None:
    """A client that looks at all connections for each request is busy with nothing else where a thousand are open."""

    def calls_per_request(together: int) -> float:
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        async def run() -> None:
            all_there, asked = asyncio.Event(), 0

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                nonlocal asked
                while await reader.read(65536):
                    asked += 1
                    if asked == together:
                        all_there.set()
                    await all_there.wait()
                    writer.write(OK)
                writer.close()

            server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=together)
            http = AsyncHTTP(connections=together)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await asyncio.gather(*(http.post(url, {}) for _ in range(together)))  # connects
            sys.setprofile(count)
            try:
                await asyncio.gather(*(http.post(url, {}) for _ in range(together)))
            finally:
                sys.setprofile(None)
            await http.close()
            server.close()

        asyncio.run(run())
        return calls / together

    assert calls_per_request(256) < 1.5 * calls_per_request(16)
