"""What is particular to Ray: its refs travel inside ours, its losses become typed, and it has to be running."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from mooncake_store import BatchRef, ConfigError, ObjectLost, ObjectNotFound, StoreFull, StoreUnavailable, open_store

pytestmark = pytest.mark.integration

BATCH = {"tokens": [list(range(50_000)), [1]], "prompt": ["a", "b"]}


@pytest.fixture
def remote(local_ray: Any) -> Any:
    def read(ref: BatchRef) -> Any:
        with open_store("ray") as store:
            return store.get(ref, as_lists=True).value

    class Writer:
        def put(self) -> BatchRef:
            return open_store("ray").put(BATCH)

    return local_ray.remote(read), local_ray.remote(Writer)


def test_a_ref_travels_through_ray_and_keeps_its_batch(local_ray: Any, remote: Any) -> None:
    read, writer = remote
    with open_store("ray") as store:
        assert local_ray.get(read.remote(store.put(BATCH)), timeout=60) == BATCH
        actor = writer.remote()
        ref = local_ray.get(actor.put.remote(), timeout=60)
        assert store.get(ref, as_lists=True).value == BATCH


def test_a_removed_ref_is_gone_also_where_it_is_sent_later(local_ray: Any, remote: Any) -> None:
    read, _ = remote
    with open_store("ray") as store:
        ref = store.put(BATCH)
        store.remove(ref)
        with pytest.raises(ObjectNotFound):
            store.get(ref)
        with pytest.raises(ObjectNotFound):
            local_ray.get(read.remote(ref), timeout=60)


def test_the_death_of_the_owner_is_never_a_hang_or_a_wrong_value(local_ray: Any, remote: Any) -> None:
    _, writer = remote
    with open_store("ray") as store:
        actor = writer.remote()
        ref = local_ray.get(actor.put.remote(), timeout=60)
        local_ray.kill(actor)
        for _ in range(20):  # until Ray has noticed, the bytes may still be there
            try:
                assert store.get(ref, as_lists=True).value == BATCH
            except ObjectLost:
                break
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("OwnerDiedError", ObjectLost),
        ("ObjectLostError", ObjectLost),
        ("ObjectFetchTimedOutError", ObjectLost),
        ("ObjectFreedError", ObjectNotFound),
        ("GetTimeoutError", StoreUnavailable),
        ("RaySystemError", StoreUnavailable),
    ],
)
def test_errors_of_ray_are_typed(
    local_ray: Any, monkeypatch: pytest.MonkeyPatch, name: str, expected: type[Exception]
) -> None:
    kind = getattr(local_ray.exceptions, name)
    # Ray's constructors differ from error to error; how they are handled must not.
    error = type(name, (kind,), {"__init__": Exception.__init__, "__str__": Exception.__str__})("details")
    with open_store("ray") as store:
        ref = store.put(BATCH)
        monkeypatch.setattr(local_ray, "get", raising(error))
        with pytest.raises(expected, match=ref.key):
            store.get(ref)


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_a_full_object_store_is_typed(local_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store("ray") as store:
        monkeypatch.setattr(local_ray, "put", raising(local_ray.exceptions.ObjectStoreFullError("no room")))
        with pytest.raises(StoreFull, match="no room"):
            store.put(BATCH)


@pytest.mark.usefixtures("local_ray")
def test_a_ref_has_no_json() -> None:
    with open_store("ray") as store, pytest.raises(TypeError, match="through Ray"):
        store.put(BATCH).to_json()


@pytest.mark.usefixtures("local_ray")
def test_settings_of_mooncake_are_refused() -> None:
    with pytest.raises(ConfigError, match="master_server_address"):
        open_store("ray", {"master_server_address": "h:1"})
    with pytest.raises(ConfigError, match="replica_num 2"):
        open_store("ray", replica_num=2)


def test_ray_has_to_be_initialised() -> None:
    code = "import mooncake_store; mooncake_store.open_store('ray')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "ray.init()" in done.stderr
