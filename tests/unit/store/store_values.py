"""One table of what a batch may hold and what comes back, and one of what is refused; for every backend.

A case is one column `x` of a batch of three samples.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mooncake_store import ValueSpec

ROWS = 3
TOKENS = [[1, 2], [], [3]]


@dataclass(frozen=True)
class Case:
    """`values` go in, `expected` comes back: the same types, dtypes, shapes and bits. `lists`: under as_lists=True."""

    values: Any
    expected: Any
    spec: ValueSpec | None = None
    lists: Any = None


def same(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape and bits."""
    if isinstance(a, torch.Tensor):
        kind = {1: torch.uint8, 2: torch.int16}[a.itemsize]  # the dtypes that come back as tensors
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


def plain(value: Any) -> Any:
    """Without arrays: what as_lists and tolist agree on, at any depth."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def _kept(values: Any) -> Case:
    return Case(values, values)


def _mapped(array: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, dtype=array.dtype, mode="w+", shape=array.shape)
    mapped[:] = array
    return mapped


NAN_PAYLOAD = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
NUMBERS = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
IMAGE = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
MESSAGES = [
    {"role": "system", "content": "Be brief. \N{SNOWMAN}"},
    {"role": "user", "content": [{"type": "text", "text": "2+2?"}, {"type": "image", "image": IMAGE}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_0", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "4"},
]
METADATA = {"id": 7, "nested": {"deep": [1, (2.5, None, [b"\x00\xff"])], 3: "int key"}, "ok": True, "none": None}
NUMPY_DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "datetime64[ns]", "datetime64[D]", "timedelta64[25us]",
]  # fmt: skip
TORCH_DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip
TORCH_ONLY = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


def _python_lists() -> Iterator[tuple[str, Case]]:
    yield "ints", Case([1, -2, 2**62], np.array([1, -2, 2**62]))
    yield "the ends of int64", Case([-(2**63), 0, 2**63 - 1], np.array([-(2**63), 0, 2**63 - 1]))
    yield "floats", Case([0.5, -0.0, 1e300], np.array([0.5, -0.0, 1e300]))
    yield "nan and inf", Case([NAN_PAYLOAD, float("inf"), -float("inf")], np.array([NAN_PAYLOAD, np.inf, -np.inf]))
    yield "bools", Case([True, False, True], np.array([True, False, True]))
    yield "ints and floats", _kept([1, 0.5, 2])
    yield "bools and ints", _kept([True, 1, 0])
    yield "numbers and None", _kept([1.5, None, -0.0])
    yield "all None", _kept([None, None, None])
    yield "ragged ints", Case([[1, 2], [], [3]], [np.array([1, 2]), np.array([], dtype=int), np.array([3])])
    yield "ragged floats", Case([[NAN_PAYLOAD], [], [-0.0]], [np.array([NAN_PAYLOAD]), np.array([]), np.array([-0.0])])
    yield "ragged bools", Case([[True], [False] * 3, []], [np.array([True]), np.zeros(3, bool), np.zeros(0, bool)])
    for empty in range(3):
        rows = [[] if row == empty else [row, row] for row in range(3)]
        yield f"row {empty} empty", Case(rows, [np.array(row, dtype=np.int64) for row in rows])
    yield "all rows empty", _kept([[], [], []])
    yield "rows and None", _kept([[1, 2], None, []])
    yield "None inside rows", _kept([[1, None], [], [None]])
    yield "nested lists", _kept([[[1], [2, 3]], [], [[]]])
    yield "tuples", _kept([(1, 2), (), (3, "x")])
    yield "one value for the batch", _kept(2**64 - 1)
    yield "a list of another length", _kept([2, 2, 2, 2])
    yield "a tuple for the batch", _kept((1, 2, 3))


def _numpy() -> Iterator[tuple[str, Case]]:
    for name in NUMPY_DTYPES:
        array = np.arange(24).reshape(3, 2, 4).astype("int64" if name[0] in "dt" else name).astype(name)
        yield f"numpy {name}", _kept(array)
        yield f"numpy {name} rows", _kept([array[0], array[1, :, :1], array[2, :0]])
        yield f"numpy {name} inside", _kept([{"a": array[0]}, {"a": array[1, :0]}, None])
        yield f"numpy {name} big-endian", Case(array.astype(array.dtype.newbyteorder(">")), array)
        if name != "bool":
            yield f"numpy {name} scalars", Case(list(array[:, 0, 1]), array[:, 0, 1])
    for ndim in range(5):
        rows = [np.full((row + 1,) * ndim, row, dtype=np.int16) for row in range(3)]
        yield f"rows of rank {ndim}", _kept(rows)
        yield f"an array of rank {ndim + 1}", _kept(np.zeros((3,) + (2,) * ndim))
    yield "rank 0 for the batch", _kept(np.array(3.5))
    yield "no columns", _kept(np.zeros((3, 0, 2)))
    yield "Fortran order", Case(np.asfortranarray(NUMBERS), NUMBERS)
    yield "Fortran order inside", Case([{"a": np.asfortranarray(NUMBERS)}] * 3, [{"a": NUMBERS}] * 3)
    yield "negative strides", Case(NUMBERS[::-1, :, ::-2], NUMBERS[::-1, :, ::-2].copy())
    yield "rows with strides", Case([row[:, ::2] for row in NUMBERS], [row[:, ::2].copy() for row in NUMBERS])
    yield "broadcast", Case(np.broadcast_to(np.int32(7), (3, 4)), np.full((3, 4), 7, dtype=np.int32))
    yield "memory-mapped", Case(_mapped(NUMBERS), NUMBERS)
    yield "memory-mapped rows", Case(list(_mapped(NUMBERS)), list(NUMBERS))
    yield "read-only", _kept(np.frombuffer(b"abc", dtype=np.uint8))
    payloads = np.array([0x7FA0_0001, 0xFFC0_1234, 0x8000_0000], dtype=np.uint32).view(np.float32)
    yield "nan payloads", _kept(payloads)
    yield "nan payloads, big-endian", Case(payloads.astype(">f4"), payloads)
    yield "not a time", _kept(np.array(["NaT", 1, -1], dtype="datetime64[ns]"))
    yield "an array of text", Case(np.array(["a", "\N{SNOWMAN}", ""]), ["a", "\N{SNOWMAN}", ""])
    yield "an array of bytes", Case(np.array([b"a", b"\xff", b""]), [b"a", b"\xff", b""])
    yield "an array of new text", Case(np.array(["a", "b", "c"], dtype=np.dtypes.StringDType()), ["a", "b", "c"])
    yield "an array of objects", Case(np.array([None, "x", {"k": 1}], dtype=object), [None, "x", {"k": 1}])
    objects = np.array([[None, 1], ["x", 2], [3, 4]], dtype=object)
    yield "an array of objects of rank 2", Case(objects, objects.tolist())
    yield "numpy scalars of several dtypes", Case([np.int8(1), np.int64(2), 3], np.array([1, 2, 3]))
    yield "numpy scalars inside", Case([{"a": np.float32(0.5)}] * 3, [{"a": 0.5}] * 3)
    yield "numpy text", Case([np.str_("a"), np.str_("b"), np.str_("")], ["a", "b", ""])


def _torch() -> Iterator[tuple[str, Case]]:
    base = torch.arange(24).reshape(3, 2, 4)
    for name in TORCH_DTYPES:
        tensor = base.to(getattr(torch, name))
        array = np.arange(24).reshape(3, 2, 4).astype(name)
        yield f"torch {name}", Case(tensor, array)
        yield (
            f"torch {name} rows",
            Case([tensor[0], tensor[1, :, :1], tensor[2, :0]], [array[0], array[1, :, :1], array[2, :0]]),
        )
        yield f"torch {name} transposed", Case(tensor.permute(0, 2, 1), array.transpose(0, 2, 1).copy())
    for name in TORCH_ONLY:
        tensor = (base + 1).to(getattr(torch, name))
        yield f"torch {name}", Case(tensor, tensor, lists=tensor.float().tolist())
        rows = [tensor[0], tensor[1, :, :1], tensor[2, :0]]
        yield f"torch {name} rows", Case(rows, rows, lists=[row.float().tolist() for row in rows])
        yield f"torch {name} strided", Case(tensor.permute(0, 2, 1)[:, ::2], tensor.permute(0, 2, 1)[:, ::2].clone())
        yield f"torch {name} of rank 0", _kept([tensor[0, 0, 0], tensor[1, 1, 1], tensor[2, 1, 3]])
        yield (
            f"torch {name} inside",
            Case(
                [{"a": tensor.mT[0]}, None, {"a": tensor[1, :0]}],
                [{"a": tensor.mT[0].clone()}, None, {"a": tensor[1, :0]}],
            ),
        )
        yield (
            f"torch {name} with an empty list",
            Case([tensor[0, 0], [], tensor[1, 1]], [tensor[0, 0], tensor[0, 0, :0], tensor[1, 1]]),
        )
    bits = torch.tensor([0x7F81, 0x7FC1, -0x8000], dtype=torch.int16).view(torch.bfloat16)  # NaN payloads, -0.0
    yield "torch bfloat16 nan payloads", _kept(bits)
    yield "a parameter", Case(torch.nn.Parameter(torch.ones(3, 2)), np.ones((3, 2), dtype=np.float32))
    conjugate = torch.tensor([1j, 2j, 3j]).conj()
    yield "a lazily conjugated tensor", Case(conjugate, np.array([1j, 2j, 3j], dtype=np.complex64).conj())
    yield "torch scalars", Case([torch.tensor(1), torch.tensor(2), torch.tensor(3)], [np.array(n) for n in (1, 2, 3)])


def _others() -> Iterator[tuple[str, Case]]:
    yield "text", _kept(["", "plain", "\N{SNOWMAN}\N{PILE OF POO} e\N{COMBINING ACUTE ACCENT} \x00\u200d"])
    yield "very long text", _kept(["\N{SNOWMAN}" * 300_000, "x" * (1 << 20), ""])
    yield "bytes", _kept([b"", b"\x00\xff", bytes(range(256))])
    yield "text for the batch", _kept("\N{SNOWMAN}")
    yield "chat messages", _kept([MESSAGES, MESSAGES[:2], []])
    yield "metadata", _kept([METADATA, {}, {"list": [METADATA]}])
    yield "metadata for the batch", _kept(METADATA)
    yield "weight versions", _kept([["7", "8"], ["default"], []])
    yield "the ends of the integers inside", _kept([{"n": 2**64 - 1}, {"n": -(2**63)}, {"n": 0}])
    yield "floats inside", _kept([{"x": NAN_PAYLOAD}, {"x": -0.0}, {"x": float("inf")}])
    deep: Any = None
    for _ in range(30):
        deep = {"k": ([deep],)}
    yield "deep nesting", _kept([deep, None, deep])
    pixels, grid = torch.arange(12.0).reshape(3, 4), torch.tensor([[1, 3, 4]])
    yield (
        "multimodal",
        Case(
            [{"pixel_values": pixels, "grid": grid}, None, {"pixel_values": pixels[:0], "grid": grid[:0]}],
            [
                {"pixel_values": pixels.numpy(), "grid": grid.numpy()},
                None,
                {"pixel_values": pixels[:0].numpy(), "grid": grid[:0].numpy()},
            ],
        ),
    )
    half = [{"pixel_values": pixels.bfloat16()}, None, {"pixel_values": pixels[:1].bfloat16()}]
    yield "multimodal in bfloat16", _kept(half)
    yield "multimodal for the batch", _kept({"pixel_values": NUMBERS, "tags": ["a", None]})


def _specs() -> Iterator[tuple[str, Case]]:
    def spec(codec: str, dtype: Any = None) -> ValueSpec:
        return ValueSpec(codec, dtype)

    rows = [[1, 2], [], [3]]
    rectangle = [[1, 2], [3, 4], [5, 6]]
    for dtype in ("int32", "uint8", "uint64", "float16", "float32", "complex64"):
        typed = [np.array(row, dtype=dtype) for row in rows]
        yield f"typed_ragged {dtype}", Case(rows, typed, spec("typed_ragged", dtype))
        yield (
            f"typed_ragged {dtype} of arrays",
            Case([np.array(row, int) for row in rows], typed, spec("typed_ragged", dtype)),
        )
        yield f"ndarray {dtype}", Case(rectangle, np.array(rectangle, dtype=dtype), spec("ndarray", dtype))
        yield f"auto {dtype}", Case([1, 2, 3], np.array([1, 2, 3], dtype=dtype), spec("auto", dtype))
        yield f"auto {dtype} of rows", Case(rows, typed, spec("auto", dtype))
    yield "typed_ragged", Case(rows, [np.array(row, dtype=np.int64) for row in rows], spec("typed_ragged"))
    yield "typed_ragged of an array", Case(NUMBERS, NUMBERS, spec("typed_ragged"))
    yield (
        "typed_ragged bool",
        Case([[True], [], [False]], [np.array(r, bool) for r in ([1], [], [0])], spec("typed_ragged", "bool")),
    )
    nested = [[[1, 2], [3, 4]], [], [[5, 6]]]
    yield (
        "typed_ragged of rank 2",
        Case(nested, [np.array(row, np.int32).reshape(-1, 2) for row in nested], spec("typed_ragged", "int32")),
    )
    yield (
        "typed_ragged of mixed numbers",
        Case(
            [[1, 2.5], [True], []], [np.array([1, 2.5]), np.array([1.0]), np.array([])], spec("typed_ragged", "float64")
        ),
    )
    yield (
        "auto of mixed numbers",
        Case([1, 2.5, True], np.array([1, 2.5, 1], dtype=np.float32), spec("auto", "float32")),
    )
    yield "uint64 beyond int64", Case([2**64 - 1, 0, 1], np.array([2**64 - 1, 0, 1], np.uint64), spec("auto", "uint64"))
    yield (
        "uint64 rows beyond int64",
        Case(
            [[2**64 - 1], [], [1]],
            [np.array(row, np.uint64) for row in ([2**64 - 1], [], [1])],
            spec("typed_ragged", np.uint64),
        ),
    )
    yield "ndarray", Case(rectangle, np.array(rectangle), spec("ndarray"))
    yield "ndarray of arrays", Case(list(NUMBERS), NUMBERS, spec("ndarray"))
    yield "ndarray of numbers", Case([1.5, 2.5, 3.5], np.array([1.5, 2.5, 3.5]), spec("ndarray"))
    yield "ndarray of complex numbers", Case([1j, 2j, 0j], np.array([1j, 2j, 0j]), spec("ndarray"))
    for codec in ("msgpack_ragged", "ragged_tensor_dict"):
        for values in (rows, [1, 2, 3], MESSAGES[:3], [METADATA] * 3, [{"a": NUMBERS}, None, {"a": NUMBERS[:0]}]):
            yield f"{codec} {str(values)[:12]!r}", Case(values, values, spec(codec))
    yield (
        "ragged_tensor_dict float16",
        Case(
            [{"a": NUMBERS}, None, {"a": NUMBERS[:0]}],
            [{"a": NUMBERS.astype(np.float16)}, None, {"a": NUMBERS[:0].astype(np.float16)}],
            spec("ragged_tensor_dict", "float16"),
        ),
    )
    yield "ragged_tensor_dict for the batch", Case({"a": NUMBERS}, {"a": NUMBERS}, spec("ragged_tensor_dict"))
    half = torch.tensor([[0.5, 1.0], [1.5, 2.0], [2.5, 300.0]], dtype=torch.bfloat16)
    floats = half.float().numpy()
    yield "float32 of bfloat16", Case(half, floats, spec("ndarray", "float32"))
    yield "float32 rows of bfloat16", Case(list(half), list(floats), spec("typed_ragged", torch.float32))
    yield "bfloat16 of floats", Case(half.tolist(), list(half), spec("typed_ragged", torch.bfloat16))
    yield "bfloat16 of numbers", Case([0.5, 1, 3.0], torch.tensor([0.5, 1, 3]).bfloat16(), spec("auto", "bfloat16"))
    yield "bfloat16 inside", Case([{"a": floats}] * 3, [{"a": half}] * 3, spec("ragged_tensor_dict", "bfloat16"))
    rounded = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.nan], dtype=np.float32)  # ties go to even
    yield "bfloat16 rounds", Case(rounded, torch.tensor([1, 1 + 2**-6, np.nan]).bfloat16(), spec("auto", "bfloat16"))
    times = np.array([1, 2, 3], dtype="datetime64[ns]")
    yield "datetime64 scalars", Case(list(times), times, spec("auto", "datetime64[ns]"))


def _table(*parts: Iterator[tuple[str, Case]]) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for part in parts:
        for name, case in part:
            assert name not in cases, name
            cases[name] = case
    return cases


CASES = _table(_python_lists(), _numpy(), _torch(), _others(), _specs())


class Opaque:
    pass


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: int


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append({"again": (loop,)})
    return loop


def _too_deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    return deep


def _quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():  # torch calls both deprecated or experimental
        warnings.simplefilter("ignore")
        return make()


# Refused wherever they stand: as a row, inside a row, and as one value for the batch.
UNSUPPORTED: dict[str, Any] = {
    "set": {1, 2},
    "object": Opaque(),
    "function": print,
    "generator": (n for n in range(3)),
    "iterator": iter([1]),
    "range": range(3),
    "complex number": 1j,
    "decimal": decimal.Decimal("0.1"),
    "datetime": datetime.datetime(2026, 1, 1),
    "date": datetime.date(2026, 1, 1),
    "enum": Colour.RED,
    "named tuple": Pair(1, 2),
    "ordered dict": collections.OrderedDict(a=1),
    "bytearray": bytearray(b"x"),
    "memoryview": memoryview(b"x"),
    "tuple as key": {(1, 2): 3},
    "float as key": {1.5: 3},
    "bool as key": {True: 3},
    "None as key": {None: 3},
    "bytes as key": {b"k": 3},
    "lone surrogate": "\ud800",
    "lone surrogate as key": {"\udfff": 1},
    "contains itself": _loop(),
    "nested too deep": _too_deep(),
    "longdouble": np.zeros(2, np.longdouble),
    "complex longdouble": np.zeros(2, np.clongdouble),
    "longdouble scalar": np.longdouble(1),
    "complex scalar": np.complex64(1),
    "datetime64 scalar": np.datetime64("2026-01-01", "D"),
    "datetime64 scalar in ns": np.datetime64(5, "ns"),
    "timedelta64 scalar in ns": np.timedelta64(5, "ns"),
    "void scalar": np.void(b"xy"),
    "structured array": np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
    "void array": np.zeros(2, dtype="V3"),
    "masked array": np.ma.masked_array([1, 2], [True, False]),
    "array of unsupported objects": np.array([1, Opaque()], dtype=object),
    "tensor on meta": torch.zeros(2, device="meta"),
    "sparse tensor": torch.eye(2).to_sparse(),
    "sparse bfloat16 tensor": torch.eye(2).bfloat16().to_sparse(),
    "quantised tensor": _quietly(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    "complex32 tensor": _quietly(lambda: torch.ones(2).to(torch.complex32)),
    "torch size": torch.Size([1, 2]),
    "torch dtype": torch.float32,
}
_FLOATS = ValueSpec("typed_ragged", "float32")
# (column, spec, error, what it says), row 1 being the bad one
MISFITS: dict[str, tuple[Any, ValueSpec | None, type[Exception], str]] = {
    "int beyond int64": ([0, 2**63, 0], None, OverflowError, "int64"),
    "int beyond int64 in a row": ([[0], [1, 2**63], []], None, OverflowError, "element 1"),
    "int beyond uint64 inside": ([{}, {"n": 2**64}, {}], None, OverflowError, "2\\*\\*64"),
    "int below int64 inside": ([{}, {"n": -(2**63) - 1}, {}], None, OverflowError, "2\\*\\*63"),
    "overflow of a scalar": ([0, 300, 0], ValueSpec("auto", "uint8"), OverflowError, "uint8"),
    "overflow of an array": (np.array([0, 300, 0]), ValueSpec("ndarray", "uint8"), OverflowError, "uint8"),
    "overflow of a row": ([[0], [300], []], ValueSpec("typed_ragged", "uint8"), OverflowError, "element 0"),
    "negative for unsigned": ([0, -1, 0], ValueSpec("auto", "uint64"), OverflowError, "uint64"),
    "float32 overflow": ([0.0, 1e39, 0.0], ValueSpec("auto", "float32"), OverflowError, "float32"),
    "float32 overflow of an array": (np.array([0, 1e39, 0]), ValueSpec("auto", "float32"), OverflowError, "float32"),
    "bfloat16 overflow": ([0.0, 1e39, 0.0], ValueSpec("auto", "bfloat16"), OverflowError, "bfloat16"),
    "bfloat16 overflow by rounding": (
        np.array([0, 3.4e38, 0], np.float32), ValueSpec("auto", "bfloat16"), OverflowError, "bfloat16"),
    "complex64 overflow": (np.array([0, 1e39j, 0]), ValueSpec("auto", "complex64"), OverflowError, "complex64"),
    "float for int": ([1, 1.5, 1], ValueSpec("auto", "int32"), TypeError, "float"),
    "int for bool": ([True, 1, True], ValueSpec("auto", "bool"), TypeError, "int"),
    "complex for float": ([[1.0], [np.complex64(1 + 2j)], []], _FLOATS, TypeError, "complex64"),
    "time for float": ([[1.0], [np.timedelta64(4, "ns")], []], _FLOATS, TypeError, "timedelta64"),
    "decimal for float": ([[1.0], [decimal.Decimal(1)], []], _FLOATS, TypeError, "Decimal"),
    "float for float8": (
        [torch.ones(1).to(torch.float8_e5m2), [2.0], []],
        ValueSpec("typed_ragged", "float8_e5m2"), TypeError, "float8_e5m2"),
    "another unit of time": (
        [np.array([1], "M8[ns]"), np.array([1], "M8[s]"), np.array([1], "M8[ns]")],
        ValueSpec("typed_ragged", "datetime64[ns]"), TypeError, "datetime64"),
    "text for numbers": ([[1], ["a"], []], ValueSpec("typed_ragged", "int32"), TypeError, "str"),
    "None for a row": ([[1], None, []], ValueSpec("typed_ragged", "int32"), TypeError, "NoneType"),
    "ragged for a rectangle": ([[1, 2], [[3], 4], [5, 6]], ValueSpec("ndarray"), TypeError, "unequal"),
    "float array for an int column inside": (
        [{"a": np.ones(1, int)}, {"a": np.ones(1)}, None],
        ValueSpec("ragged_tensor_dict", "int32"), TypeError, "int32"),
}  # fmt: skip
