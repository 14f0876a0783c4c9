"""The thread that keeps a run alive goes on whatever fails in it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mooncake_store import StoreUnavailable
from mooncake_store.backends import mooncake as backend
from mooncake_store.backends.mooncake import MooncakeCarrier
from mooncake_store.config import resolve
from tests.unit.store.store_master import Content, Lent, Master


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), ValueError("a fault of ours")])
@pytest.mark.parametrize("part", ["_outstanding.tick", "_owners.all"])
def test_beats_go_on_after_a_failure(error: Exception, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "KEEPER_SECONDS", 0.01)
    master: Any = Master(Lent("a"))
    monkeypatch.setattr(master, "close", lambda: None, raising=False)
    monkeypatch.setattr(master, "beside", lambda: master, raising=False)
    config = resolve({"master_server_address": "h:1", "protocol": "tcp", "local_hostname": "h"}, {})
    carrier = MooncakeCarrier(master, config, "r")
    carrier.put(Content(b"x" * 100))
    beats, failures = threading.Semaphore(0), [error] * 3
    beat = carrier._claim.beat
    monkeypatch.setattr(carrier._claim, "beat", lambda segment: (beat(segment), beats.release()))
    owner, method = part.split(".")
    works = getattr(getattr(carrier, owner), method)

    def fail_first() -> Any:
        if failures:
            raise failures.pop()
        return works()

    monkeypatch.setattr(getattr(carrier, owner), method, fail_first)
    for _ in range(6):
        assert beats.acquire(timeout=20)
    assert not failures
    carrier.close()
