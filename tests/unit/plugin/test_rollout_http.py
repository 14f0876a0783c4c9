"""The asynchronous HTTP client of custom functions, against a server that drops connections."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from miles_plugin.engines.sglang import AsyncHTTP, EngineError, SGLangEngine

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


def test_an_engine_that_is_not_there_is_named_at_once() -> None:
    async def use(http: AsyncHTTP, url: str) -> None:
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/generate: no answer: "):
            await http.post("http://127.0.0.1:9/generate", {})

    assert serve([], use) == 0


@pytest.mark.parametrize(
    "text",
    [
        "<html>502 from a proxy</html>",
        "[1, 2]",
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
