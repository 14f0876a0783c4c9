"""Publishing models of any shape, from tensors that lie anywhere, in bounded memory."""

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS, Encoder
from miles_plugin.weight_transfer.disk_delta.publish import Publisher
from miles_plugin.weight_transfer.disk_delta.split import Split
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage
from tests.delta_reader import from_directory, rebuild
from tests.unit.plugin.delta_training import DTYPES, Ranks, held, make_base, step


@pytest.mark.parametrize("tensor", [torch.randn(6, 4).t(), torch.randn(10)[::2], torch.randn(3, requires_grad=True)])
def test_tensors_may_lie_in_memory_as_they_like(tmp_path: Path, tensor: torch.Tensor) -> None:
    plain = {"w": tensor.detach().clone(memory_format=torch.contiguous_format)}
    base = make_base(tmp_path / "base", plain)
    ranks = Ranks([DirectoryStorage(tmp_path / "source")], base)
    assert not ranks.publish(0, {"w": tensor}).is_published
    tensor.detach()[..., 0] += 1
    ranks.publish(1, {"w": tensor})
    ranks.close()
    read = rebuild(from_directory(tmp_path / "source"), base, 1)
    assert read == held({"w": tensor.detach().clone(memory_format=torch.contiguous_format)})


@pytest.mark.parametrize("waiting_bytes", [0, 3000, 10_000])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_what_waits_to_be_encoded_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting_bytes: int, threads: int
) -> None:
    """However slow the threads are: what waits, and the tensor that the source has just made."""
    nbytes, count, lock = 1000, 40, threading.RLock()
    alive = most = 0

    def freed() -> None:
        nonlocal alive
        with lock:
            alive -= nbytes

    def made(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for number in range(count):
            array = np.full(nbytes, version, dtype=np.uint8)
            with lock:
                alive += nbytes
                most = max(most, alive)
            weakref.finalize(array, freed)
            tensor = torch.from_numpy(array)
            del array
            yield f"w{number:02d}", tensor
            del tensor

    original = Encoder.encode

    def slow(*args: Any) -> Any:
        time.sleep(0.005)
        return original(*args)

    monkeypatch.setattr(Encoder, "encode", slow)
    base = make_base(
        tmp_path / "base", {f"w{number:02d}": torch.zeros(nbytes, dtype=torch.uint8) for number in range(count)}
    )
    publisher = Publisher(
        DirectoryStorage(tmp_path / "source"), 0, 1, "xor", "xxh3-128", base, 0, threads, waiting_bytes=waiting_bytes
    )
    publisher.encode(0, made(0))
    most = 0
    share = publisher.encode(1, made(1))
    publisher.close()
    assert len(share.files) == count
    # Also the one before it, which the loop that takes them still names.
    assert most <= max(waiting_bytes, nbytes) + 2 * nbytes


NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1, max_size=12).filter(
    lambda name: ".." not in name and name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=3)
KINDS = st.sampled_from(list(DTYPES))


@settings(max_examples=60)
@given(
    layout=st.dictionaries(NAMES, st.tuples(KINDS, SHAPES), min_size=1, max_size=6),
    size=st.integers(1, 3),
    encoding=st.sampled_from(ENCODINGS),
    anchor_every=st.integers(0, 3),
    densities=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    from_base=st.booleans(),
)
def test_any_model_is_rebuilt(
    tmp_path_factory: pytest.TempPathFactory,
    layout: dict[str, tuple[torch.dtype, list[int]]],
    size: int,
    encoding: str,
    anchor_every: int,
    densities: list[float],
    from_base: bool,
) -> None:
    directory = tmp_path_factory.mktemp("any")
    weights = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in layout.items()}
    step(weights, 1, 1.0)
    base = make_base(directory / "base", weights)
    if not from_base:
        step(weights, 2, 1.0)
    ranks = Ranks([DirectoryStorage(directory / "source")] * size, base, encoding, anchor_every=anchor_every)
    try:
        ranks.publish(0, weights)
        assert rebuild(from_directory(directory / "source"), base, 0) == held(weights)
        for version, density in enumerate(densities, 1):
            step(weights, version, density)
            ranks.publish(version, weights)
            assert rebuild(from_directory(directory / "source"), base, version) == held(weights)
    finally:
        ranks.close()


@given(sizes=st.lists(st.integers(0, 50), max_size=40), ranks=st.integers(1, 5), most=st.integers(1, 120))
def test_shares_differ_by_one_tensor_at_most_and_files_hold_each_once(sizes: list[int], ranks: int, most: int) -> None:
    split = Split(ranks)
    for number, size in enumerate(sizes):
        split.add(f"w{number}", ("U8", (size,)))
    loads = [sum(sizes[int(n[1:])] for n, owner in split.owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    files = split.files(most)
    assert sorted(name for _, names in files for name in names) == sorted(split.owners)
    for rank, names in files:
        assert {split.owners[name] for name in names} == {rank}
        assert len(names) == 1 or sum(sizes[int(name[1:])] for name in names) <= most
