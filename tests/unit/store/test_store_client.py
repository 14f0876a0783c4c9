"""The guarded client against a scripted Mooncake: every answer becomes the promised outcome, in bounded time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_store import codes
from mooncake_store.bounded import attempts, bounded
from mooncake_store.client import Limits, Location, MooncakeClient, Range
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

QUICK = Limits(probe=0.2, setup=0.2, put=0.1, get=0.1, remove=0.1)
FINAL = [*(code for code, outcome in codes.OUTCOMES.items() if not outcome.retryable), -1705]
RETRYABLE = [code for code, outcome in codes.OUTCOMES.items() if outcome.retryable]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_store.bounded.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("mooncake_store.bounded.LONGEST_PAUSE", 0.02)


@pytest.fixture(autouse=True)
def master_accepts(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Why the master's address refuses connections, one entry; None when it does not."""
    reasons: list[str | None] = [None]
    monkeypatch.setattr("mooncake_store.client.unreachable", lambda *_: reasons[0])
    return reasons


def descriptor(status: str = "COMPLETE", memory: bool = True, address: int = 4096) -> Any:
    """How Mooncake describes one replica."""
    buffer = SimpleNamespace(transport_endpoint="host:1", buffer_address=address, size=128)
    described = SimpleNamespace(buffer_descriptor=buffer)
    return SimpleNamespace(
        status=SimpleNamespace(name=status), is_memory_replica=lambda: memory, get_memory_descriptor=lambda: described
    )


class Script:
    """Stands in for MooncakeDistributedStore: answers from lists, the last answer for ever; records the calls."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []
        self.closed = 0

    def __getattr__(self, operation: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((operation, *arguments))
            answers = self.answers.get(operation, [0])
            return answers.pop(0) if len(answers) > 1 else answers[0]

        return call

    def close(self) -> int:
        self.closed += 1
        return 0

    def called(self, operation: str) -> list[tuple[Any, ...]]:
        """Arguments of the calls of one operation."""
        return [call[1:] for call in self.calls if call[0] == operation]


def client(script: Script, limits: Limits = QUICK) -> MooncakeClient:
    return MooncakeClient(script, SimpleNamespace, "127.0.0.1:1", limits)


def got(*answers: int) -> list[Any]:
    """Answers of get_into_ranges to a read of one range."""
    return [[[[answer]]] for answer in answers]


ONE = [Range("k", 0, 0, 8)]
Call = Callable[[MooncakeClient], object]
# By operation of Mooncake: the call that makes it, how a code is answered, and what says that all is well.
ONCE: dict[str, tuple[Call, Callable[[int], Any]]] = {
    "mount_segment": (
        lambda c: c.mount("/proc/self/fd/3", 64, "tcp"),
        lambda code: {"ret": code, "segment_ids": ["id"]},
    ),
    "batch_put_session_start": (lambda c: c.allocate(["k"], [8], "host"), lambda code: [code]),
    "batch_put_from_multi_buffer_ranges": (lambda c: c.write("k", 0, 1, 8), lambda code: [code]),
    "batch_put_session_end": (lambda c: c.commit(["k"]), lambda code: [code]),
    "register_buffer": (lambda c: c.register(1, 8), lambda code: code),
}
REPEATED: dict[str, tuple[Call, Callable[[int], Any], Any]] = {
    "batch_is_exist": (lambda c: c.exist(["k"]), lambda code: [code], [1]),
    "get_into_ranges": (lambda c: c.read(0, ONE), lambda code: [[[code]]], [[[8]]]),
    "remove": (lambda c: c.remove("k"), lambda code: code, 0),
    "remove_by_regex": (lambda c: c.remove_matching("^k"), lambda code: code, 3),
}


def test_the_table_of_codes_has_both_kinds() -> None:
    assert len(FINAL) > 5
    assert len(RETRYABLE) > 5


@pytest.mark.parametrize("code", [*FINAL, *RETRYABLE])
@pytest.mark.parametrize("operation", ONCE)
def test_what_is_not_repeated_raises_at_the_first_answer(operation: str, code: int) -> None:
    call, answer = ONCE[operation]
    script = Script(**{operation: [answer(code)]})
    with pytest.raises(StoreError) as caught:
        call(client(script))
    outcome = codes.outcome_of(code)
    assert (type(caught.value), caught.value.code) == (outcome.error, code)
    assert caught.value.retryable is outcome.retryable
    assert f"{code} ({outcome.name})" in str(caught.value)
    again = (operation, code) == ("batch_put_session_start", codes.INVALID_PARAMS)  # see the next test
    assert len(script.called(operation)) == (2 if again else 1)


def test_an_allocation_that_a_lost_master_left_open_is_closed_first() -> None:
    script = Script(batch_put_session_start=[[-600, 0, -705], [0, 0, 0]])
    client(script).allocate(["a", "b", "c"], [8, 8, 8], "host")
    assert [keys for keys, *_ in script.called("batch_put_session_start")] == [["a", "b", "c"]] * 2
    assert script.called("batch_put_session_revoke") == [(["a", "b"],)]
    assert not script.called("batch_remove")  # what another put under that key stays


@pytest.mark.parametrize("code", FINAL)
@pytest.mark.parametrize("operation", REPEATED)
def test_final_codes_raise_at_the_first_answer(operation: str, code: int) -> None:
    call, answer, _ = REPEATED[operation]
    if (operation, code) == ("get_into_ranges", codes.INVALID_PARAMS):
        return  # the answer of an owner that is away, which may come back
    script = Script(**{operation: [answer(code)]})
    if code == codes.NOT_FOUND and operation != "get_into_ranges":
        call(client(script))  # an answer, not a failure
    else:
        with pytest.raises(StoreError) as caught:
            call(client(script))
        assert not caught.value.retryable
    assert len(script.called(operation)) == 1


@pytest.mark.parametrize("code", RETRYABLE)
@pytest.mark.parametrize("operation", REPEATED)
def test_retryable_codes_heal_or_end_typed(operation: str, code: int) -> None:
    call, answer, well = REPEATED[operation]
    failures = 1 if operation == "batch_is_exist" else 2  # callers of `exist` repeat more than that question
    healing = Script(**{operation: [*[answer(code)] * failures, well]})
    call(client(healing, Limits(remove=10.0, get=10.0)))
    assert len(healing.called(operation)) == failures + 1

    stuck = Script(**{operation: [answer(code)]})
    with pytest.raises(StoreError) as caught:
        call(client(stuck))
    lost = operation == "get_into_ranges" and code == codes.TRANSFER_FAILED
    assert type(caught.value) is (ObjectLost if lost else codes.outcome_of(code).error)
    assert caught.value.code == code
    assert len(stuck.called(operation)) > 1


def test_attempts_are_bounded_and_the_last_is_told() -> None:
    for seconds in (0, -1):
        assert next(attempts(seconds)).is_last()
    assert len(list(attempts(0))) == 1
    assert len(list(attempts(0.1))) > 2


def test_an_attempt_that_took_long_is_the_last() -> None:
    attempt, asked_before = next(attempts(0.05)), next(attempts(0.05))
    assert not asked_before.is_last()
    time.sleep(0.06)
    assert attempt.is_last()
    assert not asked_before.is_last()  # whoever was told that another follows gets one


def test_who_was_told_of_another_attempt_gets_it() -> None:
    made = attempts(0.05)
    assert not next(made).is_last()
    time.sleep(0.06)
    assert next(made).is_last()
    assert next(made, None) is None


@pytest.mark.parametrize("code", codes.UNANSWERED)
def test_a_master_that_did_not_answer_is_looked_for_before_it_is_asked_again(
    code: int, master_accepts: list[str | None]
) -> None:
    script = Script(batch_put_session_end=[[code], [0]])
    connection = client(script)
    with pytest.raises(StoreUnavailable):
        connection.commit(["a"])
    master_accepts[0] = "connection refused"
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"does not answer .connection refused."):
            connection.commit(["a"])
    assert len(script.called("batch_put_session_end")) == 1
    connection.register(4096, 64)
    connection.unregister(4096)  # what asks no master works without one
    master_accepts[0] = None
    connection.commit(["a"])
    assert len(script.called("batch_put_session_end")) == 2


# --- mounting ---------------------------------------------------------------------------------------------------------


def test_mount_and_unmount() -> None:
    script = Script(mount_segment=[{"ret": 0, "segment_ids": ["id"]}], unmount_segment=[-101])
    connection = client(script)
    assert connection.mount("/proc/self/fd/3", 64, "tcp") == "id"
    connection.unmount("id")  # the master may have forgotten it
    assert script.called("mount_segment") == [("/proc/self/fd/3", 64, 0, "tcp", "")]
    assert script.called("unmount_segment") == [(["id"],)]


def test_the_segment_name_is_mooncakes_own() -> None:
    assert client(Script(get_hostname=["host:5"])).segment_name == "host:5"


# --- allocating, writing, committing ----------------------------------------------------------------------------------


def test_everything_is_hard_pinned_in_the_preferred_segment() -> None:
    script = Script(batch_put_session_start=[[0, 0]])
    connection = client(script)
    connection.allocate(["a", "b"], [8, 16], "host:5")
    ((keys, sizes, config),) = script.called("batch_put_session_start")
    assert (keys, sizes, config.with_hard_pin, config.preferred_segment) == (["a", "b"], [8, 16], True, "host:5")


@pytest.mark.parametrize("sizes", [[0], [-1], [8, 0]])
def test_an_allocation_of_nothing_never_reaches_mooncake(sizes: list[int]) -> None:
    script = Script()
    with pytest.raises(ValueError, match="need bytes"):
        client(script).allocate(["k"] * len(sizes), sizes, "host")
    assert not script.calls


def test_an_allocation_is_all_or_none() -> None:
    script = Script(batch_put_session_start=[[0, -200, 0]])
    with pytest.raises(StoreFull, match=r"24 bytes answered -200.*remove batches") as caught:
        client(script).allocate(["a", "b", "c"], [8, 8, 8], "host")
    assert caught.value.retryable
    assert script.called("batch_put_session_revoke") == [(["a", "c"],)]
    assert script.called("batch_remove") == [(["a", "c"], True)]


def test_an_allocation_that_failed_revokes_nothing_of_others() -> None:
    script = Script(batch_put_session_start=[[-705]])
    with pytest.raises(StoreError):
        client(script).allocate(["k"], [8], "host")
    assert not script.called("batch_remove")


def test_a_write_goes_where_it_should() -> None:
    script = Script(batch_put_from_multi_buffer_ranges=[[64]])
    client(script).write("k", 100, 4096, 64)
    assert script.calls == [("batch_put_from_multi_buffer_ranges", ["k"], [[4096]], [[64]], [[100]])]


@pytest.mark.parametrize("answer", [0, 7, 9])
def test_a_write_of_another_length_fails(answer: int) -> None:
    with pytest.raises(StoreError, match="8 bytes"):
        client(Script(batch_put_from_multi_buffer_ranges=[[answer]])).write("k", 0, 4096, 8)


def test_a_commit_fails_when_one_of_its_objects_is_forgotten() -> None:
    script = Script(batch_put_session_end=[[0, -704]])
    with pytest.raises(ObjectNotFound):
        client(script).commit(["a", "b"])
    assert script.calls == [("batch_put_session_end", ["a", "b"])]


def test_revoking_is_forced_and_never_fails() -> None:
    script = Script(batch_put_session_revoke=[[-900]], batch_remove=[[-900]])
    connection = client(script)
    connection.revoke(["a", "b"])
    connection.revoke([])
    assert script.calls == [("batch_put_session_revoke", ["a", "b"]), ("batch_remove", ["a", "b"], True)]
    connection.close()
    connection.revoke(["a"])


# --- where an object lies ---------------------------------------------------------------------------------------------


def test_locate_names_the_first_complete_copy_in_memory() -> None:
    copies = [descriptor("PROCESSING"), descriptor(memory=False), descriptor(address=5), descriptor(address=6)]
    script = Script(batch_get_replica_desc=[{"a": copies, "b": [descriptor("PROCESSING")]}], batch_is_exist=[[0, 0]])
    assert client(script).locate(["a", "b", "c"]) == [Location("host:1", 5, 128), None, None]
    assert script.called("batch_is_exist") == [(["b", "c"],)]


def test_what_is_found_is_not_asked_for_twice() -> None:
    script = Script(batch_get_replica_desc=[{"a": [descriptor()]}])
    assert client(script).locate(["a"]) == [Location("host:1", 4096, 128)]
    assert not script.called("batch_is_exist")


def test_a_master_that_does_not_answer_is_no_absent_object() -> None:
    """Mooncake describes nothing then, as it does of an object that does not exist."""
    script = Script(batch_get_replica_desc=[{}], batch_is_exist=[[-900]])
    for ask in (MooncakeClient.locate, MooncakeClient.exist):
        with pytest.raises(StoreUnavailable, match=r"check the master at 127\.0\.0\.1:1"):
            ask(client(script), ["a"])


@pytest.mark.parametrize("answers", [[[1]], [[-900], [1]]])
def test_a_master_that_answers_again_is_asked_again_where(answers: list[list[int]]) -> None:
    """As seen after a restart of the master: the first answer of an old connection is that nothing is there."""
    script = Script(batch_get_replica_desc=[{}, {"a": [descriptor()]}], batch_is_exist=answers)
    assert client(script).locate(["a"]) == [Location("host:1", 4096, 128)]


def test_an_object_that_lies_nowhere_is_not_called_absent() -> None:
    script = Script(batch_get_replica_desc=[{}], batch_is_exist=[[1]])
    with pytest.raises(StoreUnavailable, match="without a complete copy: 'a'"):
        client(script).locate(["a"])


def test_exist_tells_each_key() -> None:
    script = Script(batch_is_exist=[[1, 0, -704]])
    assert client(script).exist(["a", "b", "c"]) == [True, False, False]
    assert client(Script(batch_is_exist=[[]])).exist([]) == []


# --- reading ----------------------------------------------------------------------------------------------------------


def test_ranges_travel_together() -> None:
    script = Script(get_into_ranges=[[[[64]], [[8]]]])
    client(script).read(4096, [Range("a", 0, 0, 64), Range("b", 64, 16, 8)])
    assert script.calls == [
        ("get_into_ranges", [4096, 4096], [["a"], ["b"]], [[[0]], [[64]]], [[[0]], [[16]]], [[[64]], [[8]]])
    ]


def test_an_owner_that_refuses_the_connection_is_lost() -> None:
    script = Script(get_into_ranges=got(codes.INVALID_PARAMS))
    with pytest.raises(ObjectLost):
        client(script).read(1, ONE)
    assert len(script.called("get_into_ranges")) > 1


@pytest.mark.parametrize("answer", [0, 7, 9])
def test_a_read_of_another_length_is_an_integrity_error(answer: int) -> None:
    with pytest.raises(IntegrityError, match=f"{answer} of 8 bytes of object 'k' were read"):
        client(Script(get_into_ranges=got(answer))).read(1, ONE)


def test_a_read_of_several_names_the_one_that_failed() -> None:
    script = Script(get_into_ranges=[[[[8]], [[-704]]]])
    with pytest.raises(ObjectNotFound, match="'b'"):
        client(script).read(1, [Range("a", 0, 0, 8), Range("b", 8, 0, 8)])


def test_missing_and_lost_are_told_apart() -> None:
    with pytest.raises(ObjectNotFound):
        client(Script(get_into_ranges=got(-704))).read(1, ONE)
    for answers in (got(-800, -704), got(-800)):
        with pytest.raises(ObjectLost, match="owner of 'k'"):
            client(Script(get_into_ranges=answers)).read(1, ONE)


def test_a_read_may_be_given_less_time() -> None:
    script = Script(get_into_ranges=got(-900))
    with pytest.raises(StoreUnavailable):
        client(script, Limits()).read(1, ONE, seconds=0)
    assert len(script.calls) == 1


# --- removing ---------------------------------------------------------------------------------------------------------


def test_remove_is_forced_and_idempotent() -> None:
    script = Script(remove=[0, -704])
    connection = client(script)
    connection.remove("k")
    connection.remove("k")
    assert script.calls == [("remove", "k", True)] * 2


def test_remove_matching_is_forced_and_counts() -> None:
    script = Script(remove_by_regex=[-900, 5])
    assert client(script).remove_matching("^run/r/") == 5
    assert script.calls == [("remove_by_regex", "^run/r/", True)] * 2


# --- one at a time, never after close, never in a forked child -------------------------------------------------------

EVERY: list[Call] = [
    *(call for call, _ in ONCE.values()),
    *(call for call, _, _ in REPEATED.values()),
    lambda c: c.locate(["k"]),
    lambda c: c.unmount("id"),
]


def test_after_close_nothing_reaches_mooncake() -> None:
    script = Script()
    connection = client(script)
    connection.close()
    connection.close()
    assert script.closed == 1
    for call in EVERY:
        with pytest.raises(StoreClosed):
            call(connection)
    connection.unregister(1)
    assert not script.calls


class Reading(Script):
    """Runs `during` in each read."""

    def __init__(self, during: Callable[[], object]) -> None:
        super().__init__()
        self.during = during

    def get_into_ranges(self, *_: Any) -> Any:
        self.during()
        return got(8)[0]


def test_one_operation_at_a_time() -> None:
    running, most = 0, 0

    def during() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1

    connection = client(Reading(during))
    threads = [threading.Thread(target=connection.read, args=(1, ONE)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_what_goes_beside_does_not_wait_and_ends_with_the_connection() -> None:
    entered, leave = threading.Event(), threading.Event()
    script = Reading(lambda: (entered.set(), leave.wait(10)))
    connection = client(script)
    beside = connection.beside()
    reader = threading.Thread(target=connection.read, args=(1, ONE))
    reader.start()
    assert entered.wait(10)
    beside.remove("k")
    assert reader.is_alive()
    leave.set()
    reader.join()
    connection.close()
    with pytest.raises(StoreClosed):
        beside.remove("k")
    assert script.closed == 1


def test_close_waits_for_the_operation_in_flight() -> None:
    entered, leave, order = threading.Event(), threading.Event(), []

    def during() -> None:
        entered.set()
        leave.wait(10)
        order.append("read")

    class Closing(Reading):
        def close(self) -> int:
            order.append("close")
            return 0

    connection = client(Closing(during))
    reader = threading.Thread(target=connection.read, args=(1, ONE))
    reader.start()
    assert entered.wait(10)
    closer = threading.Thread(target=connection.close)
    closer.start()
    leave.set()
    reader.join()
    closer.join()
    assert order == ["read", "close"]


def test_a_signal_handler_may_close_in_the_midst_of_an_operation() -> None:
    opened: list[MooncakeClient] = []
    opened.append(client(Reading(lambda: opened[0].close())))  # in the same thread, as a handler would
    assert bounded(lambda: opened[0].read(1, ONE) or "returned", 5) == "returned"
    with pytest.raises(StoreClosed):
        opened[0].remove("k")


def test_the_end_of_the_interpreter_closes_for_every_thread() -> None:
    script = Script()
    connection = client(script)
    connection._closer()  # as weakref.finalize does then, however many threads run on
    assert script.closed == 1
    with pytest.raises(StoreClosed):
        connection.remove("k")
    assert not script.calls


def test_a_forked_child_is_refused() -> None:
    script = Script()
    connection = client(script)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child reports through the pipe and never returns into pytest
        try:
            connection.close()
            connection.unregister(1)
            for call in EVERY:
                with pytest.raises(StoreClosed, match="'spawn'"):
                    call(connection)
            with pytest.raises(StoreClosed):
                _ = connection.segment_name
            os.write(write_end, f"refused, {len(script.calls)} calls, closed {script.closed}".encode())
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__} {error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    report = os.read(read_end, 4096).decode()
    os.close(read_end)
    assert report == "refused, 0 calls, closed 0"
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
