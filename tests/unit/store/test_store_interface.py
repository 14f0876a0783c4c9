"""ObjectStore over a backend in memory: the contract every backend inherits."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import numpy as np
import pytest

from mooncake_store import (
    BatchRef,
    ConfigError,
    IntegrityError,
    MissingDependency,
    ObjectNotFound,
    ObjectStore,
    StoreClosed,
    ValueSpec,
    backends,
    open_store,
)
from mooncake_store.backends import BackendOptions
from tests.unit.store.store_memory import BATCH, Memory


@pytest.fixture
def carrier() -> Memory:
    return Memory(BackendOptions("run1"))


@pytest.fixture
def store(carrier: Memory) -> Iterator[ObjectStore]:
    with ObjectStore("memory", "run1", carrier) as opened:
        yield opened


def test_put_and_get(store: ObjectStore) -> None:
    ref = store.put(BATCH)
    assert (ref.backend, ref.run_id, ref.num_rows, ref.rollout_id) == ("memory", "run1", 2, 8)
    assert (ref.weight_version_min, ref.weight_version_max) == (4, 6)
    with store.get(ref) as batch:
        assert list(batch) == list(BATCH)
        assert batch["tokens"][0].tolist() == [1, 2]
        batch.pop("round_number")  # the dict is the caller's own
    assert store.get(ref, as_lists=True).value == BATCH
    assert list(store.get(ref, fields=["rollout_ids"], rows=[1]).value["rollout_ids"]) == [8]


def test_no_view_can_be_made_writable(store: ObjectStore, carrier: Memory) -> None:
    batch = {**BATCH, "dense": np.ones((2, 3)), "tree": [{"a": np.ones(2)}, None]}
    ref = store.put(batch)
    carrier.objects[ref.key].flags.writeable = True  # what a backend's buffer is, once its owner says so
    got = store.get(ref).value
    for array in (*got["tokens"], got["rollout_ids"], got["dense"][0], got["tree"][0]["a"], got["dense"][:, 1:]):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_put_takes_specs(store: ObjectStore) -> None:
    ref = store.put({"x": [[1], [2]]}, {"x": ValueSpec("typed_ragged", "uint8")})
    assert store.get(ref).value["x"][0].dtype == np.uint8


def test_release(store: ObjectStore) -> None:
    result = store.get(store.put(BATCH))
    tokens = result.value["tokens"][0]
    result.release()
    result.release()
    with pytest.raises(StoreClosed, match="released"):
        _ = result.value
    with pytest.raises(StoreClosed), result:
        pass
    assert tokens.tolist() == [1, 2]


# --- what changed while it was held -----------------------------------------------------------------------------------


class Removed:
    """A check that passes a number of times, then says that the memory was given away."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def __call__(self) -> None:
        self.passes -= 1
        if self.passes < 0:
            raise IntegrityError("the memory was given to another batch")


def test_what_changed_while_it_was_decoded_is_not_returned(store: ObjectStore, carrier: Memory) -> None:
    ref = store.put(BATCH)
    carrier.check = Removed(0)
    released: list[int] = []
    with pytest.raises(IntegrityError, match="given to another"):
        store.get(ref, on_release=lambda: released.append(1))
    store.close()
    assert not released  # it was never held
    assert store.stats()["gets"] == 0


def test_what_changed_while_it_was_held_is_told_at_release(store: ObjectStore, carrier: Memory) -> None:
    ref = store.put(BATCH)
    carrier.check = Removed(1)
    with pytest.raises(IntegrityError, match="given to another"), store.get(ref):
        pass
    carrier.check = Removed(1)
    result = store.get(ref)
    with pytest.raises(IntegrityError):
        result.release()
    result.release()  # told once
    with pytest.raises(StoreClosed):
        _ = result.value


def test_what_is_not_kept_is_digested_at_release(store: ObjectStore, carrier: Memory) -> None:
    ref = store.put(BATCH)
    carrier.kept = False
    with store.get(ref) as batch:
        assert batch["tokens"][1].tolist() == [3]
    result = store.get(ref)
    payload = carrier.objects[ref.key]
    payload.flags.writeable = True
    payload[payload.size // 2 :] ^= 1  # and whatever says whose memory it is has not changed
    with pytest.raises(IntegrityError, match=rf"{ref.key}' was removed while it was read"):
        result.release()


@pytest.mark.parametrize("kept", [True, False])
def test_what_changed_under_an_array_that_was_kept_longer_is_logged(
    kept: bool, store: ObjectStore, carrier: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []
    ref = store.put(BATCH)
    result = store.get(ref, on_release=lambda: told.append(len(caplog.records)))
    array = result.value["tokens"][0]
    result.release()
    payload = carrier.objects[ref.key]
    payload.flags.writeable = True
    payload[payload.size // 2 :] ^= 1
    carrier.kept = kept
    assert not caplog.records
    del array
    store.close()
    assert told == [int(not kept)], "acknowledged before it was looked at"
    assert caplog.text.count("still in use when their batch's memory was given away") == int(not kept)


def test_nothing_is_acknowledged_while_it_is_looked_at(store: ObjectStore, carrier: Memory) -> None:
    """Whoever is told may give the memory away at once, and a look may take seconds where the master is away."""
    gone = threading.Event()
    told: list[bool] = []
    result = store.get(store.put(BATCH), on_release=gone.set)
    carrier.check = lambda: told.append(gone.wait(0.5))
    result.release()
    assert told == [False]
    assert gone.wait(10)


def test_what_was_confirmed_at_its_end_is_not_asked_for_again(store: ObjectStore, carrier: Memory) -> None:
    ref = store.put(BATCH)
    asked: list[int] = []
    carrier.check = lambda: asked.append(1)
    with store.get(ref):
        assert len(asked) == 1
    store.close()
    assert len(asked) == 2


def test_a_failed_check_does_not_hide_what_went_wrong_first(store: ObjectStore, carrier: Memory) -> None:
    ref = store.put(BATCH)
    carrier.check = Removed(1)
    result = store.get(ref)
    with pytest.raises(ZeroDivisionError), result:
        _ = 1 // 0
    result.release()
    with pytest.raises(StoreClosed):
        _ = result.value


@pytest.mark.parametrize(
    ("shared", "verify_shared", "found"),
    [(True, False, False), (True, True, True), (False, False, True), (False, True, True)],
)
def test_digests_of_bytes_that_did_not_move_are_checked_when_asked_for(
    store: ObjectStore, carrier: Memory, shared: bool, verify_shared: bool, found: bool
) -> None:
    ref = store.put(BATCH)
    changed = carrier.objects[ref.key].copy()
    changed[-64] ^= 1
    carrier.objects[ref.key] = changed
    carrier.shared, carrier.verify_shared = shared, verify_shared
    if found:
        with pytest.raises(IntegrityError, match="do not match their digest"):
            store.get(ref)
    else:
        store.get(ref).release()
    carrier.objects[ref.key] = carrier.objects[store.put({"tokens": [[1]]}).key]
    with pytest.raises(IntegrityError):  # another batch is found without them
        store.get(ref)


# --- when the last view is gone ---------------------------------------------------------------------------------------


def test_a_release_is_told_when_the_last_view_is_gone(store: ObjectStore) -> None:
    torch = pytest.importorskip("torch")
    ref = store.put({"x": np.arange(8, dtype=np.int64)})
    gone = threading.Event()
    with store.get(ref, on_release=gone.set) as batch:
        view = batch["x"][2:]
        copied = torch.from_numpy(batch["x"].copy())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says once per process that the array is not writable
            tensor = torch.from_numpy(view)
    del batch, view
    gc.collect()
    assert not gone.wait(0.05)
    assert tensor.tolist() == [2, 3, 4, 5, 6, 7]
    del tensor
    gc.collect()
    assert gone.wait(10)
    assert copied.tolist() == list(range(8))


def test_a_release_is_told_once_per_get(store: ObjectStore) -> None:
    ref, told = store.put(BATCH), []
    results = [store.get(ref, as_lists=bool(n % 2), on_release=lambda n=n: told.append(n)) for n in range(4)]
    for result in results:
        result.release()
    del results, result
    gc.collect()
    store.close()
    assert sorted(told) == [0, 1, 2, 3]


def test_remove_twice_then_get(store: ObjectStore) -> None:
    ref = store.put(BATCH)
    store.remove(ref)
    store.remove(ref)
    with pytest.raises(ObjectNotFound):
        store.get(ref)


def test_close_twice_then_use(store: ObjectStore) -> None:
    ref = store.put(BATCH)
    kept = store.get(ref).value["tokens"][0]
    store.close()
    store.close()
    for call in (
        lambda: store.put(BATCH),
        lambda: store.get(ref),
        lambda: store.remove(ref),
        lambda: store.prefetch(ref),
        lambda: asyncio.run(store.aput(BATCH)),
        lambda: asyncio.run(store.aget(ref)),
    ):
        with pytest.raises(StoreClosed):
            call()
    assert kept.tolist() == [1, 2]


def test_context_manager_closes(carrier: Memory) -> None:
    with ObjectStore("memory", "run1", carrier):
        pass
    assert carrier.closed


def test_nothing_is_stored_when_a_value_is_refused(store: ObjectStore, carrier: Memory) -> None:
    for bad in (
        {"tokens": [[1], [object()]]},
        {"tokens": [[1]], "weight_versions": [["v1"]]},
        {"tokens": [[1]], "rollout_ids": ["one"]},
    ):
        with pytest.raises(TypeError, match="row"):
            store.put(bad)
    assert not carrier.objects
    assert store.stats()["puts"] == 0


def test_changed_bytes_are_caught(store: ObjectStore, carrier: Memory) -> None:
    ref, other = store.put(BATCH), store.put({**BATCH, "round_number": 2})
    changed = carrier.objects[ref.key].copy()
    changed[-64] ^= 1  # the last buffer that holds anything starts there
    for data in (changed, carrier.objects[other.key], np.zeros(0, dtype=np.uint8), changed[:-1]):
        carrier.objects[ref.key] = data
        with pytest.raises(IntegrityError):
            store.get(ref)


def test_a_ref_of_another_backend_is_refused(store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match=r"'ray'.*'memory'"):
        store.get(BatchRef("ray", "run1", "k", 0, 64, ""))


def test_stats(store: ObjectStore) -> None:
    ref = store.put(BATCH)
    store.get(ref)
    store.get(ref)
    store.remove(ref)
    assert store.stats() == {
        "puts": 1,
        "gets": 2,
        "removes": 1,
        "bytes_put": ref.nbytes,
        "bytes_got": 2 * ref.nbytes,
    }


def test_a_forked_store_is_refused(store: ObjectStore, carrier: Memory) -> None:
    ref = store.put(BATCH)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store.close()
            for call in (store.get, store.prefetch, store.remove, lambda ref: asyncio.run(store.aget(ref))):
                with pytest.raises(StoreClosed):
                    call(ref)
            store.put(BATCH)
            os.write(write_end, b"no error")
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__} {error} {carrier.closed}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    report = os.read(read_end, 4096).decode()
    os.close(read_end)
    assert report.startswith("StoreClosed")
    assert "'spawn'" in report
    assert report.endswith(" 0")


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown backend 'redis': known backends are ray, mooncake"):
        open_store("redis")


@pytest.mark.parametrize("replica_num", [0, -1, True, 1.5, "2"])
def test_replica_num(replica_num: Any) -> None:
    with pytest.raises(ConfigError, match="replica_num"):
        open_store("mooncake", replica_num=replica_num)


@pytest.mark.parametrize("run_id", ["", "a/b", "-x", "x" * 200, "a b", 7, b"x"])
def test_run_id(run_id: Any) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        open_store("mooncake", run_id=run_id)


@pytest.mark.parametrize("backend", ["mooncake", "ray"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"init_kwargs": "a string"}, "init_kwargs = 'a string' is a str.*mapping"),
        ({"init_kwargs": [("protocol", "tcp")]}, "init_kwargs.*list.*mapping"),
        ({"init_kwargs": {1: 2}}, "init_kwargs has the key 1 of type int"),
        ({"init_kwargs": {"protocol": "tcp", None: 2}}, "init_kwargs has the key None"),
        ({"contribute_segment": "no"}, "contribute_segment = 'no'"),
        ({"contribute_segment": 1}, "contribute_segment = 1"),
    ],
)
def test_arguments_of_a_wrong_type(backend: str, arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        open_store(backend, **arguments)


@pytest.mark.parametrize("backend", [None, 5, ["ray"], b"ray"])
def test_a_backend_is_a_name(backend: Any) -> None:
    with pytest.raises(ConfigError, match=r"backend .* is a .*ray, mooncake"):
        open_store(backend)


def test_a_backend_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "no_such_module:open", backends.ENTRY_POINT_GROUP)
    monkeypatch.setattr(backends, "entry_points", lambda **wanted: EntryPoints([entry]).select(**wanted))
    with pytest.raises(MissingDependency, match=r"'broken' .*no_such_module:open"):
        open_store("broken")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("memory", f"{__name__}:Memory", backends.ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _: Memory)

    def entry_points(**wanted: Any) -> EntryPoints:
        return EntryPoints([entry]).select(**wanted)

    monkeypatch.setattr(backends, "entry_points", entry_points)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("local_rank", "asked", "contributes"),
    [
        (None, None, True),
        ("", None, True),
        ("0", None, True),
        ("3", None, False),
        ("3", True, True),
        ("0", False, False),
    ],
)
def test_a_third_party_backend(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, asked: bool | None, contributes: bool
) -> None:
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    store = open_store("memory", {"key": "value"}, replica_num=2, contribute_segment=asked)
    carrier = store._carrier
    assert isinstance(carrier, Memory)
    assert carrier.options == BackendOptions(store.run_id, {"key": "value"}, 2, asked)
    assert carrier.options.contributes == contributes
    assert store.get(store.put(BATCH), as_lists=True).value == BATCH
    with pytest.raises(ConfigError, match="ray, mooncake, memory"):
        open_store("absent")


@pytest.mark.usefixtures("registered")
def test_run_ids_are_fresh() -> None:
    assert open_store("memory").run_id != open_store("memory").run_id
    assert open_store("memory", run_id="mine").run_id == "mine"


@pytest.mark.parametrize("what", [None, "run/run1/b/0", {"key": "run/run1/b/0"}])
def test_what_is_no_ref_is_refused(store: ObjectStore, what: Any) -> None:
    for use in (store.get, store.remove, store.prefetch):
        with pytest.raises(TypeError, match="pass the BatchRef that put returned"):
            use(what)
