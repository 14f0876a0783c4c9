"""The published format: what is written is read back, and nothing else is taken."""

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.torch import save_file

from miles_plugin.weight_transfer.disk_delta.base import BaseCheckpoint
from miles_plugin.weight_transfer.disk_delta.codec import CHECKSUMS, ENCODINGS
from miles_plugin.weight_transfer.disk_delta.format import (
    WIDTHS,
    Index,
    pack_index,
    parse_version_name,
    parse_version_text,
    read_index,
    version_name,
    version_text,
)
from miles_plugin.weight_transfer.disk_delta.split import DTYPES
from miles_plugin.weight_transfer.disk_delta.tensor_file import alignment_order, pack_header, read_header
from mooncake_store.errors import ConfigError, IntegrityError

FILE = "model-00001-of-00001.safetensors"
HEX = {"xxh3-128": "0f" * 16, "blake3": "0f" * 32, "adler32": "0f" * 4}
NAMES = st.text("abcdefghijkl_0123456789é", min_size=1, max_size=8).map(lambda text: f"model.{text}")
LAYOUTS = st.dictionaries(
    NAMES, st.tuples(st.sampled_from(sorted(WIDTHS)), st.lists(st.integers(0, 1000), max_size=4).map(tuple)), max_size=6
)


def full(**changes: Any) -> dict[str, Any]:
    return {
        "metadata": {"version": "000003", "checksum_format": "xxh3-128", "total_size": 8},
        "weight_map": {"a": FILE},
        "layout": {"a": ["BF16", [2, 2]]},
        "checksums": {"a": HEX["xxh3-128"]},
        **changes,
    }


def delta(**changes: Any) -> dict[str, Any]:
    metadata = {
        "version": "000003", "base_version": "000001", "delta_encoding": "xor", "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }  # fmt: skip
    metadata = {key: changes.pop(key, value) for key, value in metadata.items()}
    return {
        "metadata": metadata, "weight_map": {"a": FILE}, "layout": {"a": ["BF16", [2, 2]]},
        "checksums": {"a": HEX["xxh3-128"]}, **changes,
    }  # fmt: skip


def read(index: Any) -> Index:
    return read_index(json.dumps(index).encode(), "SOURCE/index")


@given(
    layout=LAYOUTS,
    version=st.integers(1, 10**9),
    behind=st.none() | st.integers(1, 10**9),
    encoding=st.sampled_from(ENCODINGS),
    checksum=st.sampled_from(CHECKSUMS),
)
def test_an_index_is_read_back(
    layout: dict[str, tuple[str, tuple[int, ...]]], version: int, behind: int | None, encoding: str, checksum: str
) -> None:
    files, checksums = dict.fromkeys(layout, FILE), dict.fromkeys(layout, HEX[checksum])
    if behind is None:
        index = Index(version, None, None, checksum, files, layout, checksums)
    else:
        changed = dict(list(files.items())[::2])
        index = Index(version, max(0, version - behind), encoding, checksum, changed, layout, checksums)
    assert read_index(pack_index(index), "here") == index


def test_others_read_what_they_know() -> None:
    checksums = {"a": HEX["blake3"]}
    index = json.loads(pack_index(Index(12, 7, "xor", "blake3", {"a": FILE}, {"a": ("F32", ())}, checksums)))
    assert index == {
        "metadata": {
            "version": "000012", "base_version": "000007", "delta_encoding": "xor", "compression_format": "zstd",
            "checksum_format": "blake3",
        },
        "weight_map": {"a": FILE},
        "layout": {"a": ["F32", []]},
        "checksums": checksums,
    }  # fmt: skip
    index = json.loads(pack_index(Index(12, None, None, "blake3", {"a": FILE}, {"a": ("F32", (2,))}, checksums)))
    assert index["metadata"] == {"version": "000012", "checksum_format": "blake3", "total_size": 8}
    assert index["checksums"] == {"a": HEX["blake3"]}


def test_what_is_not_known_is_left_out() -> None:
    assert read(full(metadata={**full()["metadata"], "by": "a later one"}, more=1)) == read(full())


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (full(metadata={"version": "000003"}), "checksum_format"),
        (full(metadata={"version": "3", "checksum_format": "blake3"}), "version='3'"),
        (full(metadata={"version": "0000003", "checksum_format": "blake3"}), "version='0000003'"),
        (full(metadata={"version": 3, "checksum_format": "blake3"}), "version"),
        (full(metadata={"version": "000003", "checksum_format": "md5"}), "checksum_format='md5'; allowed: xxh3-128"),
        (full(metadata={**full()["metadata"], "delta_encoding": "xor"}), "delta_encoding='xor'"),
        (full(weight_map={"a": "../" + FILE}), "weight_map of a"),
        (full(weight_map={"a": "/etc/passwd"}), "weight_map of a"),
        (full(weight_map={"a": "sub/" + FILE}), "weight_map of a"),
        (full(weight_map={"a": "a..safetensors"}), "weight_map of a"),
        (full(weight_map={"a": ".hidden.safetensors"}), "weight_map of a"),
        (full(weight_map={"a": "model.bin"}), "weight_map of a"),
        (full(weight_map={"a": FILE + "\n"}), "weight_map of a"),
        (full(weight_map={}), "without the file of a"),
        *(
            (made(checksums=checksums), said)
            for made in (full, delta)
            for checksums, said in (
                ({}, "a is in only one of layout and checksums"),
                ({"a": HEX["xxh3-128"], "b": HEX["xxh3-128"]}, "b is in only one of layout and checksums"),
                ({"a": HEX["blake3"]}, "checksum of a"),
                ({"a": "X" * 32}, "checksum of a"),
            )
        ),
        (full(layout={}), "weight_map names a, layout does not"),
        (full(layout={"a": ["BF17", [2, 2]]}), "dtype 'BF17'"),
        (full(layout={"a": ["F4", [2, 2]]}), "dtype 'F4'"),
        (full(layout={"a": ["BF16", [-1, 2]]}), "shape"),
        (full(layout={"a": ["BF16", [1 << 40, 1 << 40]]}), "shape"),
        (full(layout={"a": ["BF16", [1 << 40, 0, 1 << 40]]}), "shape"),
        (full(layout={"a": ["BF16", [2.0]]}), "layout"),
        (full(layout={"a": ["BF16"]}), "layout"),
        *((full(layout={n: ["U8", []]}, weight_map={n: FILE}), "a tensor named") for n in ("../a", "a/b", "", "a\\b")),
        (delta(base_version="000003"), "base_version='000003'; allowed: less than version 000003"),
        (delta(base_version="000004"), "base_version"),
        (delta(base_version="x"), "base_version='x'"),
        (delta(base_version=None), "delta_encoding='xor'; allowed: none"),
        (delta(delta_encoding="bsdiff"), "delta_encoding='bsdiff'; allowed: xor, overwrite, sparse"),
        (delta(delta_encoding=None), "delta_encoding=None"),
        (delta(compression_format="lz4"), "compression_format='lz4'; allowed: zstd"),
        (delta(compression_format=None), "compression_format=None"),
        (delta(weight_map={"b": FILE}), "weight_map names b, layout does not"),
        ({"metadata": {"total_size": 8}, "weight_map": {"a": FILE}}, "no index of a published version"),
        ([], "no index of a published version"),
    ],
)
def test_what_cannot_be_is_refused_with_its_source(index: Any, said: str) -> None:
    with pytest.raises(IntegrityError, match="SOURCE/index: ") as raised:
        read(index)
    assert said in str(raised.value)


def test_what_would_be_refused_is_not_written() -> None:
    with pytest.raises(IntegrityError, match="index of weight_v000003: base_version"):
        pack_index(Index(3, 3, "xor", "blake3", {}, {}, {}))


@given(st.binary(max_size=60) | st.integers(0, 200).map(lambda n: pack_index(read(delta()))[:n]))
def test_other_bytes_are_no_index(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="no index of a published version"):
        read_index(data, "here")


def test_an_index_that_is_deeper_than_the_stack_is_none() -> None:
    with pytest.raises(IntegrityError):
        read_index(b'{"metadata":' + b"[" * 1_000_000, "here")


@pytest.mark.parametrize("version", [0, 7, 999_999, 1_000_000, 10**12])
def test_versions_have_six_digits_or_more(version: int) -> None:
    assert parse_version_text(version_text(version)) == version
    assert parse_version_name(version_name(version)) == version
    assert version_name(12) == "weight_v000012"


@pytest.mark.parametrize("text", ["", "12", "0000012", "-00012", "00001a", "٠٠٠٠١٢", "000012\n", "1" * 19, " 000012"])
def test_other_names_are_no_versions(text: str) -> None:
    assert parse_version_text(text) is None
    assert parse_version_name(f"weight_v{text}") is None
    assert parse_version_name("000012") is None


def test_every_dtype_has_its_width() -> None:
    assert {DTYPES[dtype]: dtype.itemsize for dtype in DTYPES} == dict(WIDTHS)


@given(layout=LAYOUTS)
def test_the_safetensors_package_reads_what_is_written(
    layout: dict[str, tuple[str, tuple[int, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    kinds = {"U8": "u1", "I16": "<i2", "F32": "<f4", "I64": "<i8"}
    small = {
        name: (dtype if dtype in kinds else "I16", tuple(size % 5 for size in shape))
        for name, (dtype, shape) in layout.items()
    }
    values = {name: np.ones(shape, dtype=kinds[dtype]) for name, (dtype, shape) in small.items()}
    order = alignment_order(small)
    header = pack_header([(name, small[name]) for name in order], {"format": "pt"} if layout else {})
    path = tmp_path_factory.mktemp("file") / "f.safetensors"
    path.write_bytes(header + b"".join(values[name].tobytes() for name in order))
    loaded = load_file(path)
    assert loaded.keys() == values.keys()
    assert all(
        np.array_equal(loaded[name], values[name]) and loaded[name].dtype == values[name].dtype for name in values
    )
    found = read_header(memoryview(path.read_bytes()), "f")
    assert {name: place.layout for name, place in found.tensors.items()} == small
    assert all(place.start % WIDTHS[place.layout[0]] == 0 for place in found.tensors.values())


def entry(**changes: Any) -> bytes:
    text = json.dumps({"a": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4], **changes}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"1234567", struct.pack("<Q", 9) + b"{}", struct.pack("<Q", 1 << 62) + b"{}", entry()[:-1],
        entry(data_offsets=[0, 6]), entry(data_offsets=[2, 6]), entry(data_offsets=[4, 0]), entry(data_offsets=[-4, 0]),
        entry(shape=[3]), entry(shape=[-2]), entry(dtype="I3"), entry(dtype=1), struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xfe",
    ],
)  # fmt: skip
def test_a_damaged_tensor_file_is_refused(data: bytes) -> None:
    assert read_header(memoryview(entry()), "f").tensors["a"].end == len(entry())
    with pytest.raises(IntegrityError, match="f: "):
        read_header(memoryview(data), "f")


@given(st.binary(max_size=80), st.booleans())
def test_any_bytes_are_a_tensor_file_or_refused(data: bytes, framed: bool) -> None:
    with contextlib.suppress(IntegrityError):
        read_header(memoryview(struct.pack("<Q", len(data)) + data if framed else data), "f")


def save(directory: Path) -> None:
    save_file({"a": torch.arange(4.0), "b": torch.ones(2)}, directory / FILE)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda base: (base / FILE).unlink(), ConfigError, "no safetensors file there"),
        (lambda base: (base / FILE).write_bytes(b""), IntegrityError, FILE),
        (lambda base: (base / FILE).write_bytes((base / FILE).read_bytes()[:-1]), IntegrityError, FILE),
        (
            lambda base: (base / "model.safetensors.index.json").write_text("{}"),
            ConfigError,
            "no index of a checkpoint",
        ),
        (
            lambda base: (base / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone.safetensors"}}'
            ),
            ConfigError,
            "gone.safetensors cannot be read",
        ),
    ],
)
def test_a_base_that_is_none_is_refused(
    spoil: Callable[[Path], object], error: type[Exception], said: str, tmp_path: Path
) -> None:
    save(tmp_path)
    assert BaseCheckpoint(tmp_path).layout == {"a": ("F32", (4,)), "b": ("F32", (2,))}
    spoil(tmp_path)
    with pytest.raises(error, match=said):
        BaseCheckpoint(tmp_path)


def test_what_belongs_to_a_checkpoint_and_is_no_weights(tmp_path: Path) -> None:
    save(tmp_path)
    for name in ("config.json", "tokenizer.model", "chat_template.jinja", "merges.txt"):
        (tmp_path / name).touch()
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", ".gitattributes", "x.gguf", "tf_model.h5"):
        (tmp_path / name).touch()
    (tmp_path / "onnx").mkdir()
    found = [path.name for path in BaseCheckpoint(tmp_path).companions()]
    assert found == ["chat_template.jinja", "config.json", "merges.txt", "tokenizer.model"]
