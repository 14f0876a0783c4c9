"""BatchRef travels by pickle and JSON, and refuses formats it does not know."""

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from mooncake_store import BatchRef, IntegrityError
from mooncake_store.ref import CopyOf, provenance

COPIES = (CopyOf("holder/a/epoch/0", 4096), CopyOf("holder/b/epoch/7", 1000))
REF = BatchRef("mooncake", "run1", "run/run1/b/0", 3, 4096, "ab" * 16, 7, 9, 4, COPIES)


def test_round_trips() -> None:
    assert pickle.loads(pickle.dumps(REF)) == REF
    assert BatchRef.from_json(REF.to_json()) == REF
    assert len(pickle.dumps(REF)) < 1024
    for ref in (pickle.loads(pickle.dumps(REF)), BatchRef.from_json(REF.to_json())):
        assert type(ref.copies) is tuple
        assert [type(copy) for copy in ref.copies] == [CopyOf, CopyOf]
        assert hash(ref) == hash(REF)
    plain = dataclasses.replace(REF, copies=())
    assert BatchRef.from_json(plain.to_json()) == plain


def test_unknown_format_is_refused_with_both_numbers() -> None:
    record = json.loads(REF.to_json())
    with pytest.raises(IntegrityError, match=r"format 2.*format 1"):
        dataclasses.replace(REF, format=2)
    with pytest.raises(IntegrityError, match=r"format 2.*format 1"):
        BatchRef.from_json(json.dumps({**record, "format": 2, "field_of_the_future": 1}))
    state = REF.__reduce__()
    with pytest.raises(IntegrityError, match=r"format 3.*format 1"):
        state[0]({**state[1][0], "format": 3, "field_of_the_future": 1})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"format": 1}', '{"format": 1, "nonsense": 2}', "[" * 10**6, "9" * 10**5, "\ud800"],
)
def test_malformed_json_is_refused(text: str) -> None:
    with pytest.raises(IntegrityError):
        BatchRef.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nbytes": "abc"}, {"nbytes": -5}, {"nbytes": 0}, {"nbytes": 640.5}, {"key": 5}, {"digest": None},
        {"digest": "ab"}, {"num_rows": -1}, {"format": True}, {"handle": "x"}, {"rollout_id": "1"},
        {"weight_version_min": -1}, {"copies": None}, {"copies": {}}, {"copies": [["s"]]}, {"copies": [["s", 0]]},
        {"copies": [["s", -1]]}, {"copies": [["s", 1.5]]}, {"copies": [[5, 1]]}, {"copies": [["s", 1, 1]]},
        {"copies": ["s1"]}, {"nbytes": 10**30}, {"copies": [["s", 10**30]]},
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_or_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        BatchRef.from_json(json.dumps({**json.loads(REF.to_json()), **wrong}))


def test_a_ref_with_a_live_handle_has_no_json() -> None:
    ref = BatchRef("ray", "run1", "k", 1, 64, "00" * 16, handle=object())
    with pytest.raises(TypeError, match="through Ray"):
        ref.to_json()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({}, (None, None, None)),
        ({"weight_versions": [["7", "9"], ["10"]], "rollout_ids": [5, 4]}, (7, 10, 4)),
        ({"weight_versions": [["default"], []]}, (None, None, None)),
        ({"weight_versions": [["default", "3"], None]}, (3, 3, None)),
        ({"weight_versions": ["0", 2]}, (0, 2, None)),
        ({"rollout_ids": np.array([9, 8])}, (None, None, 8)),
        ({"rollout_ids": []}, (None, None, None)),
    ],
)
def test_provenance(batch: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert provenance(batch) == expected


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"weight_versions": np.array([7, 9])}, (7, 9, None)),
        ({"weight_versions": [[np.int64(7)], [np.str_("9")], "default"]}, (7, 9, None)),
        ({"weight_versions": [np.array([7, 8]), np.array(["9"])]}, (7, 9, None)),
        ({"weight_versions": ("7", ("8", None))}, (7, 8, None)),
        ({"weight_versions": "default"}, (None, None, None)),
        ({"weight_versions": "12"}, (12, 12, None)),
        ({"weight_versions": 12}, (12, 12, None)),
        ({"weight_versions": str(2**63 - 1)}, (2**63 - 1, 2**63 - 1, None)),
        ({"rollout_ids": [np.int32(3), 2]}, (None, None, 2)),
        ({"rollout_ids": [[4, 5], [3]]}, (None, None, 3)),
        ({"rollout_ids": [None, -1]}, (None, None, -1)),
        ({"rollout_ids": 7}, (None, None, 7)),
    ],
)
def test_provenance_from_other_types(batch: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    found = provenance(batch)
    assert found == expected
    assert all(type(value) in (int, type(None)) for value in found)  # they travel as JSON


def test_provenance_from_tensors() -> None:
    torch = pytest.importorskip("torch")
    batch = {"weight_versions": [torch.tensor([7]), torch.tensor([8, 9])], "rollout_ids": torch.tensor([5, 4])}
    assert provenance(batch) == (7, 9, 4)


@pytest.mark.parametrize(
    "version",
    ["v7", "-1", "7.0", "", " 7", "\N{FULLWIDTH DIGIT SEVEN}", "9" * 19, "9" * 5000, -1,
     2**63, True, 1.0, 1.5, np.float32(1),
     np.bool_(True), np.datetime64(5, "ns"), ["7"], {"v": 7}, b"7", object()],
)  # fmt: skip
def test_a_version_that_is_none_is_named(version: Any) -> None:
    for rows in ([["1"], [version]], [["1"], ["2", version]], [1, [1, version]], [1, [version, 1]]):
        with pytest.raises(TypeError, match=r"column 'weight_versions', row 1: .*decimal"):
            provenance({"weight_versions": rows})
    if not isinstance(version, list):
        with pytest.raises(TypeError, match=r"column 'weight_versions', row 1"):
            provenance({"weight_versions": ["1", version]})


@pytest.mark.parametrize("rollout_id", ["1", "default", 1.0, True, 2**63, np.float64(1), [[1]], {"id": 1}, b"1"])
def test_a_rollout_id_that_is_none_is_named(rollout_id: Any) -> None:
    with pytest.raises(TypeError, match=r"column 'rollout_ids', row 1: .*ints"):
        provenance({"rollout_ids": [1, rollout_id]})


@pytest.mark.parametrize("column", [np.array([[1.5], [2.5]]), {"a": 1}, 1.5])
def test_a_column_of_something_else_is_named(column: Any) -> None:
    for name in ("weight_versions", "rollout_ids"):
        with pytest.raises(TypeError, match=rf"column '{name}', row 0"):
            provenance({name: column})
