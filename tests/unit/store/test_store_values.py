"""The tables of values through the layout alone; the integration tests take them through the backends."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from mooncake_store import MissingDependency, ValueSpec, as_lists, batch_digest
from mooncake_store.decode import decode
from mooncake_store.encode import encode
from tests.unit.store.store_values import CASES, MISFITS, TOKENS, UNSUPPORTED, plain, same


def stored(batch: dict[str, Any], specs: dict[str, ValueSpec] | None = None) -> np.ndarray:
    encoded = encode(batch, specs)
    out = np.empty(encoded.nbytes, dtype=np.uint8)
    assert encoded.write_into(out) == encoded.digest
    out.flags.writeable = False
    return out


@pytest.mark.parametrize("name", CASES)
def test_everything_comes_back_equal(name: str) -> None:
    case = CASES[name]
    specs = {"x": case.spec} if case.spec else None
    data = stored({"tokens": TOKENS, "x": case.values}, specs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of tensors over read-only memory
        got = decode(data)
    assert same(got["x"], case.expected), got["x"]
    assert np.array_equal(stored(got, specs), data)
    assert plain(as_lists(got)["x"]) == plain(case.expected) or "nan" in repr(plain(case.expected))
    if case.lists is not None:
        assert as_lists(got)["x"] == case.lists


@pytest.mark.parametrize("name", CASES)
def test_what_was_read_lets_go_of_its_memory_at_once(name: str) -> None:
    """Without a collection: in the store the memory is a buffer that the next get waits for."""
    case = CASES[name]
    data = stored({"tokens": TOKENS, "x": case.values}, {"x": case.spec} if case.spec else None)
    gone = weakref.ref(data)
    gc.disable()
    try:
        got = decode(data.data)
        del data
        assert gone() is not None
        del got
        assert gone() is None
    finally:
        gc.enable()


def test_tensors_are_the_readers_own() -> None:
    """torch has no read-only tensors: writing one must not change what others read."""
    half = torch.ones(3, 4, dtype=torch.bfloat16)
    data = stored({"tokens": TOKENS, "dense": half, "rows": list(half), "tree": [{"a": half}, None, None]})
    for value in (lambda got: got["dense"], lambda got: got["rows"][1], lambda got: got["tree"][0]["a"]):
        value(decode(data)).zero_()
        assert torch.equal(value(decode(data)).flatten()[:4], half[0])


@pytest.mark.parametrize("rows", [[2, 0], slice(0, 2), slice(None, None, -1), []])
def test_rows_of_tensors(rows: Any) -> None:
    half = torch.arange(6).reshape(3, 2).bfloat16()
    got = decode(stored({"tokens": TOKENS, "dense": half, "rows": list(half)}), rows=rows)
    picked = list(range(3))[rows] if isinstance(rows, slice) else rows
    assert same(got["dense"], half[picked])
    assert same(got["rows"], [half[row] for row in picked])


def test_equal_bits_of_another_dtype_are_another_batch() -> None:
    half = torch.arange(3).bfloat16()
    others = [half, half.view(torch.int16), half.view(torch.uint16), half.view(torch.float16)]
    assert len({batch_digest({"tokens": TOKENS, "x": other}) for other in others}) == 4


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_values(name: str) -> None:
    bad = UNSUPPORTED[name]
    for row in (bad, {"deep": [bad]}, (1, bad), [bad]):
        with pytest.raises(TypeError, match=r"column 'x', row 1: "):
            encode({"tokens": TOKENS, "x": [{"fine": 1}, row, None]})
    with pytest.raises(TypeError, match=r"column 'x'"):
        encode({"tokens": TOKENS, "x": bad})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_values_alone(name: str) -> None:
    """A column of nothing else must not be taken for numbers either."""
    bad = UNSUPPORTED[name]
    if isinstance(bad, np.generic) and name in (
        "complex scalar",
        *[known for known in UNSUPPORTED if "64 scalar" in known],
    ):
        assert np.array_equal(decode(stored({"tokens": TOKENS, "x": [bad] * 3}))["x"], np.array([bad] * 3))
        return
    with pytest.raises(TypeError, match=r"column 'x', row 0: "):
        encode({"tokens": TOKENS, "x": [bad, bad, bad]})


@pytest.mark.parametrize("name", MISFITS)
def test_values_that_do_not_fit(name: str) -> None:
    values, spec, error, expected = MISFITS[name]
    with pytest.raises(error, match=rf"column 'x', row 1: .*{expected}"):
        encode({"tokens": TOKENS, "x": values}, {"x": spec} if spec else None)


@pytest.mark.parametrize("name", ["\ud800", 3, None, b"x"])
def test_column_names_are_text(name: Any) -> None:
    with pytest.raises(TypeError, match="column name"):
        encode({"tokens": TOKENS, name: [1, 2, 3]})


@pytest.mark.parametrize("batch", [None, [1], "text", 5])
def test_a_batch_is_a_dict(batch: Any) -> None:
    with pytest.raises(TypeError, match="a batch is a dict"):
        encode(batch)


def test_a_spec_is_a_value_spec() -> None:
    with pytest.raises(TypeError, match=r"value_spec of column 'x' is a str.*ValueSpec"):
        encode({"x": [1]}, {"x": "int32"})  # type: ignore[dict-item]


def test_a_dtype_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'int32' with codec 'msgpack_ragged'"):
        ValueSpec("msgpack_ragged", "int32")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # not installed
import numpy as np
from mooncake_store import MissingDependency
from mooncake_store.decode import decode
from mooncake_store.encode import encode

data = np.fromfile(sys.argv[1], dtype=np.uint8)
assert decode(data, fields=["y"])["y"].tolist() == [1, 2, 3]
for field in ("x", "tree"):
    try:
        decode(data, fields=[field])
    except MissingDependency as error:
        print(error)
"""


def test_without_torch_only_its_own_dtypes_are_missing(tmp_path: Any) -> None:
    half = torch.ones(3).bfloat16()
    stored({"tokens": TOKENS, "x": half, "y": [1, 2, 3], "tree": [{"a": half}] * 3}).tofile(tmp_path / "batch")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "batch")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("column 'x': bfloat16 numbers need torch")
    assert second.startswith("column 'tree': bfloat16 numbers need torch")


def test_a_torch_without_the_dtype_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = stored({"tokens": TOKENS, "x": torch.ones(3).to(torch.float8_e8m0fnu)})
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(MissingDependency, match=r"column 'x': torch .* has no float8_e8m0fnu"):
        decode(data)
