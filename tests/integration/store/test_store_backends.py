"""Both backends carry the same batch to the same value: one matrix, real services."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_plugin.fully_async.books import Recovered
from miles_plugin.fully_async.buffer import BufferSettings, DataBuffer
from miles_plugin.fully_async.groups import PromptGroup
from miles_plugin.fully_async.journal import Journal
from miles_plugin.fully_async.journal_records import Learned
from miles_plugin.fully_async.rollouts import open_journal
from miles_plugin.fully_async.spill import Spill
from mooncake_store import (
    IntegrityError,
    MasterProcess,
    ObjectNotFound,
    ObjectStore,
    StoreClosed,
    ValueSpec,
    as_lists,
    batch_digest,
    open_store,
)
from tests.integration.store.store_services import PATIENT, batches, store_with
from tests.unit.plugin.fully_async_groups import finished, metric, number

pytestmark = pytest.mark.integration


def rollout(rows: int = 5, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 9, rows)
    return {
        "partition": list(range(rows)),
        "tokens": [random.integers(0, 1000, n).tolist() for n in lengths],
        "loss_masks": [[1] * int(n) for n in lengths],
        "rollout_log_probs": [random.random(n).astype(np.float32) for n in lengths],
        "rollout_routed_experts": [random.integers(0, 8, (n - 1, 3, 2), dtype=np.int32) for n in lengths],
        "rewards": random.random(rows).tolist(),
        "truncated": [False] * rows,
        "prompt": [f"prompt {row} \N{SNOWMAN}" for row in range(rows)],
        "metadata": [{"id": row, "tags": ["a", None], "pair": (1, "x")} for row in range(rows)],
        "weight_versions": [["3", "4"], ["default"], [], ["5"], ["4"]][:rows],
        "multimodal_train_inputs": [{"pixels": np.ones((2, row), dtype=np.float16)} for row in range(rows)],
        "rollout_ids": [9] * rows,
        "num_microbatches": [2] * rows,
        "dynamic_global_batch_size": 128,
    }


VALUES: dict[str, Any] = {
    "rollout": rollout(),
    "lists": {"a": [1, 2], "b": [1.5, 2.5], "c": [True, False], "d": [[1], []], "e": [[0.5], [1.0, 2.0]]},
    "mixed": {"a": [1, None], "b": ["x", 2.0], "c": [{"k": [b"v"]}, (1, 2)]},
    "arrays": {
        "a": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "b": np.arange(3, dtype=">f8"),
        "c": [np.zeros((2, 0))] * 3,
    },
    "scalars": {"a": 1, "b": None, "c": "text", "d": 1.5, "e": [1, 2, 3]},
    "empty": {},
    "no rows": {"tokens": [], "rewards": []},
    "large": {"tokens": [np.arange(300_000)], "x": np.ones((1, 1000, 1000), dtype=np.float32)},
}


@pytest.mark.parametrize("name", VALUES)
def test_both_backends_return_the_same(stores: dict[str, ObjectStore], name: str) -> None:
    batch = VALUES[name]
    digests = set()
    for store in stores.values():
        ref = store.put(batch)
        with store.get(ref) as got:
            assert list(got) == list(batch)
            assert batch_digest(got) == ref.digest
        lists = store.get(ref, as_lists=True).value
        digests |= {ref.digest, batch_digest(batch)}
        assert plain(lists) == plain(batch)
        store.remove(ref)
    assert len(digests) == 1


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in as_lists(value).items()}
    return value


def test_fields_rows_and_specs(store: ObjectStore) -> None:
    batch = rollout()
    ref = store.put(batch, {"rewards": ValueSpec("auto", "float32")})
    got = store.get(ref, fields=["rewards", "num_microbatches", "tokens"], rows=[4, 0]).value
    assert got["rewards"].dtype == np.float32
    assert got["rewards"].tolist() == np.array(batch["rewards"], dtype=np.float32)[[4, 0]].tolist()
    assert [row.tolist() for row in got["tokens"]] == [batch["tokens"][4], batch["tokens"][0]]
    assert got["num_microbatches"] == [2] * 5
    assert (ref.weight_version_min, ref.weight_version_max, ref.rollout_id, ref.num_rows) == (3, 5, 9, 5)


def test_arrays_are_read_only_and_outlive_the_result(store: ObjectStore) -> None:
    refs = [store.put(rollout(seed=seed)) for seed in range(8)]
    kept = store.get(refs[0]).value["tokens"]
    with pytest.raises(ValueError, match="read-only"):
        kept[0][0] = 1
    got = store.get(refs[0]).value
    for array in (*kept, got["rewards"], *(row["pixels"] for row in got["multimodal_train_inputs"])):
        for view in (array, array[:1], array.base):
            with pytest.raises(ValueError, match="WRITEABLE"):  # the memory is lent: nobody may make it writable
                view.flags.writeable = True
    for ref in refs[1:]:  # would overwrite the buffer, had it been lent again
        with store.get(ref):
            pass
    assert [row.tolist() for row in kept] == rollout(seed=0)["tokens"]


def test_remove_twice_then_get(store: ObjectStore) -> None:
    ref = store.put(rollout())
    held = store.get(ref)  # a reader's lease does not hinder removal
    store.remove(ref)
    store.remove(ref)
    with pytest.raises(ObjectNotFound):
        store.get(ref)
    assert held.value["tokens"][0].tolist() == rollout()["tokens"][0]


def test_a_ref_with_another_digest_is_refused(store: ObjectStore) -> None:
    ref, other = store.put(rollout(seed=1)), store.put(rollout(seed=2))
    with pytest.raises(IntegrityError):
        store.get(dataclasses.replace(ref, digest=other.digest))
    with pytest.raises(IntegrityError):
        store.get(dataclasses.replace(ref, key=other.key, nbytes=ref.nbytes - 64, handle=other.handle))


@pytest.mark.usefixtures("local_ray")
def test_use_after_close() -> None:
    store = open_store("ray")
    ref = store.put(rollout())
    kept = store.get(ref).value["rewards"]
    store.close()
    store.close()
    for call in (lambda: store.put({}), lambda: store.get(ref), lambda: store.remove(ref)):
        with pytest.raises(StoreClosed):
            call()
    assert kept.tolist() == rollout()["rewards"]


class Groups:
    """A buffer of finished groups; the first lies on the heap, the others in a store."""

    def __init__(self, store: ObjectStore, journal: Journal | None = None, found: Recovered | None = None) -> None:
        self.again: list[PromptGroup] = []
        self.buffer = DataBuffer(
            BufferSettings(8), self.again.append, run_id="this", queue=Spill(store, 1), journal=journal
        )
        self.buffer.restore([] if found is None else found.waiting)

    async def put(self, *numbers: int) -> None:
        for each in numbers:
            await self.buffer.put(finished(each, "5", "6"))
        while metric(self.buffer.get_metrics(), "spilled_groups") < len(numbers) - 1:
            await asyncio.sleep(0.001)


def test_groups_that_wait_in_a_store_come_back_equal_and_leave_nothing_there(store: ObjectStore) -> None:
    before = store.stats()

    async def body() -> None:
        it = Groups(store)
        await it.put(0, 1, 2, 3)
        for each in range(3):
            assert await it.buffer.get() == finished(each, "5", "6")
        await it.put(4, 5)
        await it.buffer.clear()
        assert not it.again

    asyncio.run(asyncio.wait_for(body(), 120))
    after = store.stats()
    assert after["puts"] - before["puts"] == after["removes"] - before["removes"] > 2


def test_a_run_that_goes_on_takes_up_groups_in_a_store_that_lives(
    master: MasterProcess, stores: dict[str, ObjectStore], tmp_path: Path
) -> None:
    """It opens the store anew, as another process would, and knows what the file says."""
    path = tmp_path / "journal"

    async def is_killed() -> None:
        with store_with(master.address, "first", PATIENT) as store:
            first = Groups(store, Journal(path))
            await first.put(0, 1, 2, 3, 4)
            await first.buffer.flush()
            first.buffer.close()

    async def goes_on() -> None:
        with store_with(master.address, "second", PATIENT) as store:
            journal, found = open_journal(path, Learned(5, [0, 1, 2, 4], 6), "this", store)
            second = Groups(store, journal, found)
            assert [number(await second.buffer.get()) for _ in range(3)] == [1, 2, 4]
            await second.buffer.clear()
            assert not second.again

    asyncio.run(asyncio.wait_for(is_killed(), 120))
    assert len(batches(master, "first")) == 4
    asyncio.run(asyncio.wait_for(goes_on(), 120))
    assert not batches(master, "first"), "the one that was learned from was removed as well"
