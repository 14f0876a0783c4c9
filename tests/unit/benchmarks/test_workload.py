"""The batch that is moved, and that no wrong one passes for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.transport.digests import differing, digests_of, make_usable
from benchmarks.transport.workload import (
    LAYERS,
    NUMBERS,
    RAGGED,
    ROUTED,
    TOP_K,
    VARIANTS,
    SharedNumbers,
    Workload,
    batch_of,
    mapped,
    samples_for,
    stamp,
)

WORKLOADS = {variant: Workload(variant, 6, 20, 90, seed=3) for variant in VARIANTS}


@pytest.fixture(params=VARIANTS)
def workload(request: pytest.FixtureRequest) -> Workload:
    if request.param == "torch":
        pytest.importorskip("torch")
    return WORKLOADS[request.param]


@pytest.fixture
def numbers(workload: Workload) -> Iterator[SharedNumbers]:
    with SharedNumbers(workload) as numbers:
        yield numbers


def test_every_process_makes_the_same_batch(workload: Workload, numbers: SharedNumbers) -> None:
    batches = [batch_of(workload, mapped(numbers.path)) for _ in range(2)]
    for batch in batches:
        make_usable(batch)
    assert not differing(digests_of(batches[0]), batches[1])
    assert len({len(batches[0][name]) for name in [*RAGGED, *NUMBERS, "prompt", "metadata"] if name in batches[0]}) == 1


def test_the_variants_are_the_same_numbers_in_other_forms(workload: Workload, numbers: SharedNumbers) -> None:
    batch, plain = (batch_of(load, mapped(numbers.path)) for load in (workload, workload.as_numpy()))
    kinds = {type(row).__name__ for name in RAGGED if name in batch for row in batch[name]}
    assert kinds == {{"torch": "Tensor", "lists": "list"}.get(workload.variant, "ndarray")}
    make_usable(batch)
    assert not differing(digests_of(plain), batch)
    shapes = workload.lengths().tolist()
    assert [row.shape for row in plain["tokens"]] == [(tokens,) for tokens, _ in shapes]
    assert [row.shape for row in plain["rollout_log_probs"]] == [(response,) for _, response in shapes]
    if workload.variant == "routed":
        assert [row.shape for row in plain[ROUTED]] == [(tokens - 1, LAYERS, TOP_K) for tokens, _ in shapes]


def test_the_size_is_that_of_the_values(workload: Workload, numbers: SharedNumbers) -> None:
    plain = batch_of(workload.as_numpy(), mapped(numbers.path))
    assert workload.number_bytes() == sum(row.nbytes for name in RAGGED if name in plain for row in plain[name])
    assert 0 < workload.nbytes - workload.number_bytes() < 1200 * workload.samples
    assert mapped(numbers.path).size >= workload.nbytes


def test_no_row_lies_behind_another(numbers: SharedNumbers, workload: Workload) -> None:
    rows = [row for name in RAGGED for row in batch_of(workload.as_numpy(), mapped(numbers.path)).get(name, ())]
    spans = sorted((row.ctypes.data, row.nbytes) for row in rows)
    assert all(start + size < after for (start, size), (after, _) in pairwise(spans))


def test_another_seed_is_another_batch() -> None:
    assert (Workload("numpy", 6, 20, 90, 3).lengths() != Workload("numpy", 6, 20, 90, 4).lengths()).any()


def test_a_batch_of_so_many_gib_has_about_that_size() -> None:
    for variant in ("numpy", "routed"):
        samples = samples_for(0.25, variant, 100, 400)
        assert Workload(variant, samples, 100, 400, 0).number_bytes() == pytest.approx(2**28, rel=0.15)


def test_a_stamp_stays_in_its_process_and_changes_every_row(workload: Workload, numbers: SharedNumbers) -> None:
    batch, untouched = (batch_of(workload, mapped(numbers.path)) for _ in range(2))
    stamp(batch, 8)
    before = {name: [np.array(list(row)) for row in batch[name]] for name in RAGGED if name in batch}
    stamp(batch, 9)
    for name, rows in before.items():
        assert all((np.array(list(new)) != old).any() for new, old in zip(batch[name], rows, strict=True)), name
    fresh = batch_of(workload, mapped(numbers.path))
    for each in (fresh, untouched):
        make_usable(each)
    assert not differing(digests_of(untouched), fresh)


def spoilt_value(batch: dict[str, Any], name: str) -> None:
    batch[name][-1] = batch[name][-1].copy()
    batch[name][-1].flat[-1] += 1


def wrong_dtype(batch: dict[str, Any], name: str) -> None:
    batch[name] = [row.astype(np.float64) for row in batch[name]]


def wrong_shape(batch: dict[str, Any], name: str) -> None:
    batch[name][0] = batch[name][0].reshape(1, *batch[name][0].shape)


def missing_row(batch: dict[str, Any], name: str) -> None:
    batch[name] = batch[name][:-1]


def swapped_rows(batch: dict[str, Any], name: str) -> None:
    batch[name] = [*batch[name][1:], batch[name][0]]


def missing_column(batch: dict[str, Any], name: str) -> None:
    del batch[name]


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("spoil", [spoilt_value, wrong_dtype, wrong_shape, missing_row, swapped_rows, missing_column])
def test_whatever_is_wrong_with_a_row_is_found(spoil: Callable[[dict[str, Any], str], None], name: str) -> None:
    workload = WORKLOADS["routed"]
    with SharedNumbers(workload) as numbers:
        batch = batch_of(workload, mapped(numbers.path))
    expected = digests_of(batch)
    spoil(batch, name)
    assert differing(expected, batch) == [name]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rewards", [0.5] * 6), ("truncated", [0.5] * 6), ("sample_indices", list(range(5))), ("prompt", ["x"] * 6),
        ("metadata", [{}] * 6), ("weight_versions", [["3"]] * 6), ("dynamic_global_batch_size", 7), ("more", [1] * 6),
    ],
)  # fmt: skip
def test_whatever_is_wrong_elsewhere_is_found(name: str, wrong: Any) -> None:
    workload = WORKLOADS["numpy"]
    with SharedNumbers(workload) as numbers:
        batch = batch_of(workload, mapped(numbers.path))
    expected = digests_of(batch)
    assert differing(expected, {**batch, name: wrong}) == [name]


def test_numbers_may_come_back_in_another_type() -> None:
    workload = WORKLOADS["numpy"]
    with SharedNumbers(workload) as numbers:
        batch = batch_of(workload, mapped(numbers.path))
    as_arrays = {
        name: np.array(batch[name], np.float32 if dtype == "<f8" else np.int32) for name, dtype in NUMBERS.items()
    }
    assert not differing(digests_of(batch), batch | as_arrays)
