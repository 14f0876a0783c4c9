"""What a batch may hold comes back equal from each backend; all else is refused, by name, and stores nothing."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from mooncake_store import MasterProcess, ObjectStore, ValueSpec, batch_digest
from tests.integration.store.store_services import batches
from tests.unit.store.store_values import CASES, MISFITS, TOKENS, UNSUPPORTED, plain, same

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", CASES)
def test_everything_comes_back_equal(store: ObjectStore, name: str) -> None:
    case = CASES[name]
    specs = {"x": case.spec} if case.spec else None
    ref = store.put({"tokens": TOKENS, "x": case.values}, specs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of tensors over read-only memory
        with store.get(ref) as got:
            assert same(got["x"], case.expected)
            assert batch_digest(got, specs) == ref.digest
        rows = store.get(ref, rows=[2, 0]).value
        lists = store.get(ref, as_lists=True).value
    assert same(rows["x"], picked(case.expected, [2, 0]))
    assert lists["tokens"] == TOKENS
    assert repr(plain(lists["x"])) == repr(plain(case.expected))
    store.remove(ref)


def picked(column: Any, rows: list[int]) -> Any:
    """What rows of a column are; a value for the whole batch is never cut."""
    if isinstance(column, list) and len(column) == len(TOKENS):
        return [column[row] for row in rows]
    per_row = hasattr(column, "dtype") and column.ndim and len(column) == len(TOKENS)
    return column[rows] if per_row else column


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"tokens": []},
        {"tokens": [], "rewards": [], "prompt": [], "metadata": []},
        {"tokens": np.zeros((0, 4), dtype=np.int32), "x": np.zeros((0, 3, 2))},
        {"tokens": [[]]},
        {"tokens": [[], []], "x": [np.zeros(0), np.zeros(0)]},
    ],
    ids=repr,
)
def test_empty_batches(store: ObjectStore, batch: dict[str, Any]) -> None:
    ref = store.put(batch)
    with store.get(ref) as got:
        assert list(got) == list(batch)
        assert {name: plain(value) for name, value in got.items()} == {
            name: plain(value) for name, value in batch.items()
        }
        assert batch_digest(got) == ref.digest
    store.remove(ref)


def test_a_stored_batch_is_among_the_keys(stores: dict[str, ObjectStore], master: MasterProcess) -> None:
    ref = stores["mooncake"].put({"tokens": TOKENS})
    assert f"{ref.key}/0.0" in batches(master)
    stores["mooncake"].remove(ref)
    assert not [key for key in batches(master) if key.startswith(ref.key)]


REFUSED: dict[str, tuple[dict[str, Any], ValueSpec | None, type[Exception]]] = {
    **{name: ({"x": [None, value, None]}, None, TypeError) for name, value in UNSUPPORTED.items()},
    **{f"{name} inside": ({"x": [None, {"a": (value,)}, {}]}, None, TypeError) for name, value in UNSUPPORTED.items()},
    **{name: ({"x": values}, spec, error) for name, (values, spec, error, _) in MISFITS.items()},
    "weight version": ({"x": [1, 2, 3], "weight_versions": [["1"], ["v2"], []]}, None, TypeError),
    "rollout id": ({"x": [1, 2, 3], "rollout_ids": [1, "2", 3]}, None, TypeError),
}


def _done(store: ObjectStore) -> dict[str, int]:
    """What it was asked to do; its heartbeats move bytes all the time."""
    return {name: count for name, count in store.stats().items() if not name.startswith("bytes_")} | {
        "bytes_put": store.stats()["bytes_put"]
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_value_is_named_and_nothing_is_stored(store: ObjectStore, master: MasterProcess, name: str) -> None:
    batch, spec, error = REFUSED[name]
    stats, stored = _done(store), batches(master)
    with pytest.raises(error, match=r"column '(x|weight_versions|rollout_ids)', row 1: "):
        store.put({"tokens": TOKENS, **batch}, {"x": spec} if spec else None)
    assert _done(store) == stats
    assert batches(master) == stored
