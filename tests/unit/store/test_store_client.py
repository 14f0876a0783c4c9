"""The guarded client against a scripted Mooncake: every answer becomes the promised outcome, in bounded time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_store import codes
from mooncake_store.bounded import bounded
from mooncake_store.client import Limits, MooncakeClient
from mooncake_store.errors import (
    IntegrityError,
    ObjectLost,
    ObjectNotFound,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from mooncake_store.master import probe_master

QUICK = Limits(probe=0.2, setup=0.2, put=0.1, get=0.1, remove=0.1, first_pause=0.01, longest_pause=0.02)
NBYTES = 128


def descriptor(size: int = NBYTES, status: str = "COMPLETE") -> Any:
    memory = SimpleNamespace(buffer_descriptor=SimpleNamespace(size=size))
    return SimpleNamespace(
        status=SimpleNamespace(name=status), is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory
    )


class Script:
    """Stands in for MooncakeDistributedStore: answers from lists, the last answer for ever; records the calls."""

    def __init__(self, descriptors: list[Any] | None = None, **answers: list[int]) -> None:
        self.answers = answers
        self.descriptors = [descriptor()] if descriptors is None else descriptors
        self.calls: list[tuple[Any, ...]] = []
        self.closed = 0

    def __getattr__(self, operation: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((operation, *arguments))
            answers = self.answers.get(operation, [0])
            return answers.pop(0) if len(answers) > 1 else answers[0]

        return call

    def get_replica_desc(self, key: str) -> list[Any]:
        self.calls.append(("get_replica_desc", key))
        return self.descriptors

    def close(self) -> int:
        self.closed += 1
        return 0

    def keys(self, operation: str) -> list[str]:
        return [call[1] for call in self.calls if call[0] == operation]


def client(script: Script, limits: Limits = QUICK) -> MooncakeClient:
    return MooncakeClient(script, SimpleNamespace, "127.0.0.1:1", limits)


FINAL = [code for code, outcome in codes.OUTCOMES.items() if not outcome.retryable]
RETRYABLE = [code for code, outcome in codes.OUTCOMES.items() if outcome.retryable]


@pytest.mark.parametrize("code", [*FINAL, -1705])
def test_final_codes_raise_at_the_first_answer(code: int) -> None:
    script = Script(put_from=[code], get_into=[code], remove=[code])
    with pytest.raises(StoreError) as caught:
        client(script).put("run/r/b", 1, NBYTES)
    assert len(script.keys("put_from")) == 1
    assert not caught.value.retryable
    with pytest.raises(StoreError):
        client(script).get_into("k", 1, NBYTES)
    assert len(script.keys("get_into")) == 1


@pytest.mark.parametrize("code", RETRYABLE)
def test_retryable_codes_heal_or_end_typed(code: int) -> None:
    healing = Script(put_from=[code, code, 0], get_into=[code, NBYTES], remove=[code, code, 0])
    connection = client(healing)
    connection.put("run/r/b", 1, NBYTES)
    connection.get_into("k", 1, NBYTES)
    healing.answers["remove"] = [code, 0]
    connection.remove("k")

    stuck = client(Script(put_from=[code], get_into=[code], remove=[code]))
    for call in (lambda: stuck.put("p", 1, NBYTES), lambda: stuck.get_into("k", 1, NBYTES), lambda: stuck.remove("k")):
        with pytest.raises(StoreError) as caught:
            call()
        assert type(caught.value) in (codes.outcome_of(code).error, ObjectLost)
        assert caught.value.code == code


def test_a_full_store_is_waited_for_and_then_named() -> None:
    script = Script(put_from=[-200])
    with pytest.raises(StoreFull, match=r"128 bytes, after 0.*remove batches") as caught:
        client(script).put("run/r/b", 1, NBYTES)
    assert caught.value.retryable
    assert len(script.keys("put_from")) > 2
    assert not script.keys("remove")  # nothing was allocated


def test_every_put_uses_a_fresh_key_and_a_hard_pin() -> None:
    script = Script(put_from=[-800, -703, 0])
    key = client(script).put("run/r/b", 1, NBYTES, replica_num=1)
    keys = script.keys("put_from")
    assert len(set(keys)) == 3
    assert key == keys[-1]
    assert all(name.startswith("run/r/b/") for name in keys)
    assert script.keys("remove") == keys[:2]  # what a failed attempt may have left
    assert all(call[4].with_hard_pin and call[4].replica_num == 1 for call in script.calls if call[0] == "put_from")


@pytest.mark.parametrize(
    "descriptors", [[], [descriptor()], [descriptor(), descriptor(64)], [descriptor(), descriptor(status="PROCESSING")]]
)
def test_a_put_with_too_few_replicas_is_undone(descriptors: list[Any]) -> None:
    script = Script(descriptors)
    with pytest.raises(StoreUnavailable, match=rf"{min(1, len(descriptors))} of 2 replicas"):
        client(script).put("run/r/b", 1, NBYTES, replica_num=2)
    assert script.keys("remove") == script.keys("put_from")


@pytest.mark.parametrize("arguments", [(1, 0), (1, -1), (0, 8)])
def test_a_put_of_nothing_never_reaches_mooncake(arguments: tuple[int, int]) -> None:
    script = Script()
    with pytest.raises(ValueError, match="needs bytes"):
        client(script).put("p", *arguments)
    assert not script.calls


@pytest.mark.parametrize("answer", [0, NBYTES - 1, NBYTES + 1, -600])
def test_a_get_of_another_length_is_an_integrity_error(answer: int) -> None:
    with pytest.raises(IntegrityError, match="128 bytes"):
        client(Script(get_into=[answer])).get_into("k", 1, NBYTES)


def test_missing_and_lost_are_told_apart() -> None:
    with pytest.raises(ObjectNotFound):
        client(Script(get_into=[-704])).get_into("k", 1, NBYTES)
    for answers in ([-800, -704], [-800]):
        with pytest.raises(ObjectLost):
            client(Script(get_into=answers)).get_into("k", 1, NBYTES)


def test_remove_is_forced_and_idempotent() -> None:
    script = Script(remove=[0, -704])
    connection = client(script)
    connection.remove("k")
    connection.remove("k")
    assert script.calls == [("remove", "k", True)] * 2


def test_after_close_nothing_reaches_mooncake() -> None:
    script = Script()
    connection = client(script)
    connection.close()
    connection.close()
    assert script.closed == 1
    for call in (
        lambda: connection.put("p", 1, NBYTES),
        lambda: connection.get_into("k", 1, NBYTES),
        lambda: connection.remove("k"),
        lambda: connection.register(1, 1),
    ):
        with pytest.raises(StoreClosed):
            call()
    connection.unregister(1)
    assert not script.calls


def test_one_operation_at_a_time() -> None:
    running, most = 0, 0

    class Slow(Script):
        def get_into(self, _key: str, _address: int, nbytes: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            time.sleep(0.01)
            running -= 1
            return nbytes

    connection = client(Slow())
    threads = [threading.Thread(target=connection.get_into, args=("k", 1, NBYTES)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_close_waits_for_the_operation_in_flight() -> None:
    entered, leave, order = threading.Event(), threading.Event(), []

    class Slow(Script):
        def get_into(self, _key: str, _address: int, nbytes: int) -> int:
            entered.set()
            leave.wait(10)
            order.append("get")
            return nbytes

        def close(self) -> int:
            order.append("close")
            return 0

    connection = client(Slow())
    reader = threading.Thread(target=connection.get_into, args=("k", 1, NBYTES))
    reader.start()
    assert entered.wait(10)
    closer = threading.Thread(target=connection.close)
    closer.start()
    leave.set()
    reader.join()
    closer.join()
    assert order == ["get", "close"]


def test_a_forked_child_is_refused() -> None:
    script = Script()
    connection = client(script)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child reports through the pipe and never returns into pytest
        try:
            connection.close()
            connection.remove("k")
            os.write(write_end, b"no error")
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__} {error} closed={script.closed}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    report = os.read(read_end, 4096).decode()
    os.close(read_end)
    assert report.startswith("StoreClosed")
    assert "spawn" in report
    assert "closed=0" in report
    connection.remove("k")  # the parent works on


def test_a_dropped_client_disconnects() -> None:
    script = Script()
    client(script)
    assert script.closed == 1


def test_bounded_returns_raises_or_gives_up() -> None:
    assert bounded(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 5)
    leave = threading.Event()
    assert bounded(lambda: int(leave.wait(60)), 0.05) is None
    leave.set()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_probe(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    probe_master(f"127.0.0.1:{port}")
    probe_master(f"etcd://127.0.0.1:1;127.0.0.1:{port}")
    listener.close()
    with pytest.raises(StoreUnavailable, match=rf"127\.0\.0\.1:{port}.*master_server_address \(from init_kwargs\)"):
        probe_master(f"127.0.0.1:{port}", source="init_kwargs")
