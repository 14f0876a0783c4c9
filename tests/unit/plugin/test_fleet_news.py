"""Who is in rotation: who leaves, why, what is said of it, and who comes back."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from miles_plugin.engines.fleet import Fleet, Left, Member
from miles_plugin.engines.sglang import EngineError

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


class Server:
    """An engine that serves `version`, or does not answer where that is None; its process may have `ended`."""

    ranks = 1

    def __init__(self, url: str) -> None:
        self.version: str | None = "default"
        self.engine: Any = SimpleNamespace(url=url, weight_version=self.answer)
        self.how: str | None = None

    def answer(self, _seconds: float) -> str:
        if self.version is None:
            raise EngineError("no answer")
        return self.version

    def ended(self, patience: float = 0.0) -> str | None:
        return self.how

    def stop(self) -> None:
        pass


@pytest.fixture
def servers() -> tuple[Server, Server]:
    return Server(A), Server(B)


@pytest.fixture
def fleet(servers: tuple[Server, Server]) -> Fleet:
    return Fleet([cast(Member, server) for server in servers])


def serving(fleet: Fleet) -> list[str]:
    return [engine.url for engine in fleet.serving()]


def test_an_engine_leaves_once_for_the_first_reason_and_each_is_said_once(fleet: Fleet) -> None:
    assert fleet.news() == []
    fleet.leave(Left(A, "generate", "reset"))
    fleet.updated(0, [B], [Left(A, "prepare", "refused")])
    fleet.updated(1, [B], [Left(A, "prepare", "refused")])
    assert serving(fleet) == [B]
    assert fleet.news() == [
        f"warning: an engine left the rotation: {A} failed in generate: reset",
        f"warning: an engine stays out of rotation: {A} failed in prepare: refused",
    ]
    fleet.updated(2, [B], [Left(A, "verify", "b differs")])
    assert fleet.news() == [f"warning: an engine stays out of rotation: {A} failed in verify: b differs"]
    assert [address.life for address in fleet.addresses()] == [4, 0], "each time it may have been started anew since"
    fleet.leave(Left("http://127.0.0.1:3", "generate", "unknown"))
    assert fleet.news() == []


def test_an_engine_that_confirms_an_update_is_back(fleet: Fleet) -> None:
    fleet.leave(Left(A, "generate", "reset"))
    fleet.news()
    fleet.updated(4, [A, B], [])
    assert serving(fleet) == [A, B]
    assert fleet.news() == [f"engine {A} is back in rotation, with version 4"]
    fleet.updated(5, [A, B], [])
    assert fleet.news() == []


def test_the_end_of_its_process_is_why_an_engine_left(fleet: Fleet, servers: tuple[Server, Server]) -> None:
    servers[0].how = f"SGLang at {A} ended with status 137; its log x"
    fleet.leave(Left(A, "generate", "no answer"))
    assert fleet.news() == [f"warning: an engine left the rotation: {A} failed in generate: {servers[0].how}"]
    servers[1].version = None
    fleet.roll_call()
    with pytest.raises(EngineError, match=r"^no engine is in rotation: .*:1 .* ended with status 137.*:2 .*no answer"):
        fleet.serving()


def test_an_engine_that_serves_another_version_than_it_confirmed_waits_for_an_update(
    fleet: Fleet, servers: tuple[Server, Server]
) -> None:
    fleet.updated(3, [A, B], [])
    servers[0].version = servers[1].version = "3"
    assert fleet.roll_call() == []
    servers[0].version = "default"
    assert fleet.roll_call() == [A]
    assert serving(fleet) == [B]
    servers[0].version = None
    assert fleet.roll_call() == [], "it cannot take an update"
    assert len(fleet.news()) == 1


def test_an_engine_that_was_not_asked_is_out(fleet: Fleet) -> None:
    fleet.updated(0, [B], [])
    assert serving(fleet) == [B]
    assert "was not asked" in fleet.news()[0]
