"""A group as columns: every field of every sample comes back equal, in type as well, and in memory of its own."""

from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from miles_plugin.fully_async.group_columns import from_columns, to_columns
from miles_plugin.fully_async.groups import Group
from miles_plugin.rollout.sample import Sample
from mooncake_store import ObjectStore
from mooncake_store.errors import IntegrityError
from tests.unit.plugin.fully_async_groups import Store, finished

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
integers = st.integers(-(2**63), 2**63 - 1)
numbers = st.floats(allow_nan=False)
atoms = st.one_of(st.none(), st.booleans(), integers, numbers, texts, st.binary(max_size=3))
anything = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=6,
)
experts = arrays.arrays(np.int32, st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 2)))
samples = st.builds(
    Sample,
    index=integers,
    group_index=integers,
    prompt=texts,
    label=anything,
    metadata=st.dictionaries(texts, anything, max_size=3),
    tokens=st.lists(integers, max_size=4),
    response=texts,
    response_length=integers,
    loss_mask=st.one_of(st.none(), st.lists(st.integers(0, 1), max_size=3)),
    rollout_log_probs=st.one_of(st.none(), st.lists(st.one_of(numbers, st.just(0)), max_size=3)),
    rollout_routed_experts=st.one_of(st.none(), experts),
    weight_versions=st.lists(st.sampled_from(["default", "0", "7"]), max_size=3),
    status=st.sampled_from(Sample.Status),
    reward=st.one_of(st.none(), numbers),
    advantage=numbers,
    remove_sample=st.booleans(),
)
groups = st.lists(st.one_of(samples, st.lists(samples, max_size=3)), max_size=4)


def told(value: Any) -> Any:
    """A value with the types of all that is in it, so that 1, 1.0 and True are told apart."""
    if isinstance(value, np.ndarray):
        return "array", value.dtype.name, value.shape, value.tolist()
    if isinstance(value, Sample):
        return "sample", [(field.name, told(getattr(value, field.name))) for field in fields(Sample)]
    if isinstance(value, list | tuple):
        return type(value).__name__, list(map(told, value))
    if isinstance(value, dict):
        return "dict", [(key, told(item)) for key, item in value.items()]
    return type(value).__name__, repr(value)


def through(group: Group, store: ObjectStore) -> Any:
    ref = store.put(*to_columns(group))
    with store.get(ref) as columns:
        restored = from_columns(columns)
    store.remove(ref)
    return restored


STORE = Store()


@given(groups)
def test_every_field_comes_back_equal(group: Group) -> None:
    assert told(through(group, STORE.inner)) == told(group)


def test_no_field_is_forgotten() -> None:
    """A field that is added to Sample has to get a value here that is not its default."""
    sample = Sample(
        index=3,
        group_index=1,
        prompt="q",
        label="x",
        metadata={"a": (1, 2.0)},
        tokens=[1, 2],
        response="é",
        response_length=1,
        loss_mask=[1],
        rollout_log_probs=[-0.1],
        rollout_routed_experts=np.ones((1, 1, 2), np.int32),
        weight_versions=["7"],
        status=Sample.Status.TRUNCATED,
        reward=0.5,
        advantage=-1.0,
        remove_sample=True,
    )
    for field in fields(Sample):
        assert told(getattr(sample, field.name)) != told(getattr(Sample(), field.name)), field.name
    assert told(through([sample], STORE.inner)) == told([sample])


def test_numbers_keep_their_precision_where_a_rollout_batch_would_round_them() -> None:
    group = finished(0, "7").group
    group[0].rollout_log_probs = [0.1, 1e-300, float("-inf")]  # type: ignore[union-attr]
    group[0].tokens = [2**40]  # type: ignore[union-attr]
    restored = through(group, STORE.inner)
    assert restored[0].rollout_log_probs == [0.1, 1e-300, float("-inf")]
    assert restored[0].tokens == [2**40]


def test_what_comes_back_does_not_look_into_the_store() -> None:
    group = finished(0, "7").group
    for sample in group:
        sample.rollout_routed_experts = np.arange(4, dtype=np.int32).reshape(2, 1, 2)  # type: ignore[union-attr]
        sample.metadata = {"deep": [np.arange(3.0), (np.arange(2),)]}  # type: ignore[union-attr]
    store = Store()
    ref = store.inner.put(*to_columns(group))
    with store.inner.get(ref) as columns:
        restored: Any = from_columns(columns)
    memory = store.carrier.objects[ref.key]
    found = [restored[0].rollout_routed_experts, restored[0].metadata["deep"][0], restored[0].metadata["deep"][1][0]]
    for array in found:
        assert not np.shares_memory(array, memory)
        array += 1  # and is the caller's to write to
    store.inner.remove(ref)


def test_arrays_that_are_not_alike_come_back_as_well() -> None:
    group = finished(0, "7").group
    shapes = [np.zeros((0, 2, 2), np.int32), np.ones((3, 1), np.float32)]
    for sample, array in zip(group, shapes, strict=True):
        sample.rollout_routed_experts = array  # type: ignore[union-attr,assignment]
    assert told(through(group, STORE.inner)) == told(list(group))


@pytest.mark.parametrize("odd", [{1, 2}, Fraction(1, 2), object(), 2**70, "\ud800"])
def test_what_cannot_be_stored_is_refused_and_not_changed(odd: Any) -> None:
    group = finished(0, "7").group
    group[0].label = odd  # type: ignore[union-attr]
    with pytest.raises((TypeError, OverflowError)):
        through(group, STORE.inner)


def test_samples_of_another_kind_are_refused() -> None:
    class Other(Sample):
        pass

    with pytest.raises(TypeError, match="Other has no columns"):
        to_columns([Other()])


@pytest.mark.parametrize("broken", ["missing", "status", "shape", "kinds", "more", "ragged"])
def test_what_is_no_group_is_told(broken: str) -> None:
    columns, _ = to_columns(finished(0, "7").group)
    if broken == "missing":
        del columns["sample/reward"]
    elif broken == "status":
        columns["sample/status"] = ["completed", "asleep"]
    elif broken == "shape":
        columns["shape"] = (-1,)
    elif broken == "kinds":
        columns["kinds"] = {}
    elif broken == "more":
        columns["shape"] = (-1, 2)
    else:
        columns["sample/index"] = [1]
    with pytest.raises(IntegrityError, match="not a group of samples"):
        from_columns(columns)
