"""What Arrow gets of a batch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from mooncake_store import MissingDependency, ObjectStore
from mooncake_store.backends import BackendOptions
from tests.unit.store.store_memory import Memory

arrow = pytest.importorskip("pyarrow")

BATCH: dict[str, Any] = {
    "tokens": [[1, 2, 3], [], [4]],
    "experts": [np.arange(4 * n).reshape(n, 2, 2) for n in (2, 0, 1)],
    "rewards": [1.0, 0.5, 0.0],
    "matrix": np.arange(6, dtype=np.int16).reshape(3, 2),
    "prompt": ["a", "b", "a"],
    "metadata": [{"id": 1, "tags": ["x"]}, {"id": 2, "tags": []}, {"id": 3, "tags": None}],
    "dynamic_global_batch_size": 3,
}


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore("memory", "run1", Memory(BackendOptions("run1")))


def test_columns_are_what_they_were(store: ObjectStore) -> None:
    result = store.get(store.put(BATCH))
    table = result.to_arrow()
    assert table.to_pydict() == {
        **{name: BATCH[name] for name in ("tokens", "rewards", "prompt", "metadata")},
        "experts": [row.tolist() for row in BATCH["experts"]],
        "matrix": BATCH["matrix"].tolist(),
    }
    assert table.schema.field("tokens").type == arrow.large_list(arrow.int32())
    assert table.schema.metadata == {b"dynamic_global_batch_size": b"3"}
    result.release()
    assert table.column("tokens").to_pylist() == BATCH["tokens"]  # its own memory


def test_some_rows(store: ObjectStore) -> None:
    table = store.get(store.put(BATCH), fields=["tokens", "prompt"], rows=[2, 0]).to_arrow()
    assert table.to_pydict() == {"tokens": [[4], [1, 2, 3]], "prompt": ["a", "a"]}


def test_what_arrow_cannot_hold_is_named(store: ObjectStore) -> None:
    result = store.get(store.put({"rewards": [1.0, 2.0], "mixed": [{"a": 1}, "text"]}))
    with pytest.raises(TypeError, match="column 'mixed' cannot be an Arrow column"):
        result.to_arrow()


def test_without_pyarrow(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    result = store.get(store.put(BATCH))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match="pip install pyarrow"):
        result.to_arrow()
