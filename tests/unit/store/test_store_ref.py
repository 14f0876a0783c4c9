"""BatchRef travels by pickle and JSON, and refuses formats it does not know."""

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from mooncake_store import BatchRef, IntegrityError
from mooncake_store.ref import provenance

REF = BatchRef("mooncake", "run1", "run/run1/b/0", 3, 4096, "ab" * 16, 7, 9, 4)


def test_round_trips() -> None:
    assert pickle.loads(pickle.dumps(REF)) == REF
    assert BatchRef.from_json(REF.to_json()) == REF
    assert len(pickle.dumps(REF)) < 1024


def test_unknown_format_is_refused_with_both_numbers() -> None:
    record = json.loads(REF.to_json())
    with pytest.raises(IntegrityError, match=r"format 2.*format 1"):
        dataclasses.replace(REF, format=2)
    with pytest.raises(IntegrityError, match=r"format 2.*format 1"):
        BatchRef.from_json(json.dumps({**record, "format": 2, "field_of_the_future": 1}))
    state = REF.__reduce__()
    with pytest.raises(IntegrityError, match=r"format 3.*format 1"):
        state[0]({**state[1][0], "format": 3, "field_of_the_future": 1})


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1}', '{"format": 1, "nonsense": 2}'])
def test_malformed_json_is_refused(text: str) -> None:
    with pytest.raises(IntegrityError):
        BatchRef.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nbytes": "abc"}, {"nbytes": -5}, {"nbytes": 0}, {"nbytes": 640.5}, {"key": 5}, {"digest": None},
        {"digest": "ab"}, {"num_rows": -1}, {"format": True}, {"handle": "x"}, {"rollout_id": "1"},
        {"weight_version_min": -1},
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


@pytest.mark.parametrize("version", ["v7", "-1", "7.0", True, 1.5])
def test_a_version_that_is_not_decimal_is_named(version: Any) -> None:
    with pytest.raises(TypeError, match=r"'weight_versions', row 1"):
        provenance({"weight_versions": [["1"], [version]]})
