"""Which published versions go, and which stay."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_plugin.weight_transfer.disk_delta.format import Index, pack_index, version_name
from miles_plugin.weight_transfer.disk_delta.prune import newest_version, prune, published_versions
from miles_plugin.weight_transfer.disk_delta.readers import read_reports
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage
from mooncake_store.errors import ConfigError

FILE_BYTES = 1000


def published(directory: Path, versions: Sequence[tuple[int, bool]]) -> DirectoryStorage:
    """A place with versions (number, whether it is full), each with a file of FILE_BYTES."""
    storage, base = DirectoryStorage(directory), 0
    for version, is_full in versions:
        draft = storage.draft(version_name(version))
        draft.write("model-00001-of-00001.safetensors", (bytes(FILE_BYTES),))
        draft.commit(
            pack_index(Index(version, None if is_full else base, None if is_full else "xor", "adler32", {}, {}, {}))
        )
        base = version
    return storage


def left(storage: DirectoryStorage) -> list[int]:
    return published_versions(storage.names())


# Full ones: 3, 6, 9.
NINE = [(version, version % 3 == 0) for version in range(1, 10)]


@pytest.mark.parametrize(
    ("keep", "readers", "most_behind", "first"),
    [
        (1, {}, 5, 9),
        (2, {}, 5, 6),
        (4, {}, 5, 6),
        (5, {}, 5, 3),
        (8, {}, 5, 1),
        (99, {}, 5, 1),
        (1, {"a": 9, "b": 9}, 5, 9),
        (1, {"a": 9, "b": 8}, 5, 9),  # it takes the full version 9 next
        (1, {"a": 9, "b": 7}, 5, 6),
        (1, {"a": 9, "b": 5}, 5, 6),
        (1, {"a": 9, "b": 4}, 5, 3),
        (1, {"a": 9, "b": 3}, 5, 9),  # six behind: left behind
        (1, {"a": 9, "b": 0}, 9, 1),
    ],
)
def test_what_the_slowest_reader_needs_stays(
    keep: int, readers: dict[str, int], most_behind: int, first: int, tmp_path: Path
) -> None:
    storage = published(tmp_path, NINE)
    pruned = prune(storage, keep, readers, most_behind)
    assert left(storage) == list(range(first, 10))
    assert pruned.versions == tuple(range(1, first))
    assert pruned.left_behind == tuple(sorted(name for name, has in readers.items() if has < first - 1))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [version_name(version) for version in left(storage)]
    assert prune(storage, keep, readers, most_behind).versions == ()


@pytest.mark.parametrize(
    ("versions", "first"), [(10, 1), (9, 1), (8, 3), (7, 3), (6, 6), (4, 6), (3, 9), (1, 9), (0, 9)]
)
def test_a_budget_takes_the_oldest_whoever_needs_them(versions: int, first: int, tmp_path: Path) -> None:
    """All but the newest full version, which every reader can start at."""
    storage = published(tmp_path, NINE)
    most_bytes = versions * (FILE_BYTES + 200)  # with the index, which is shorter
    pruned = prune(storage, 1, {"slow": 0}, 99, most_bytes)
    assert left(storage) == list(range(first, 10))
    assert pruned.nbytes <= most_bytes or first == 9
    assert pruned.left_behind == (() if first == 1 else ("slow",))


def test_without_a_full_version_nothing_goes(tmp_path: Path) -> None:
    storage = published(tmp_path, [(version, False) for version in range(1, 6)])
    assert prune(storage, 1, {}, 0, 0).versions == ()
    assert left(storage) == [1, 2, 3, 4, 5]


def test_an_empty_place_has_nothing_to_go(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    assert newest_version(storage) is None
    assert prune(storage, 1, {}, 0).versions == ()
    with pytest.raises(ConfigError, match="keep_versions=0"):
        prune(storage, 0, {}, 0)


def test_a_full_version_whose_index_is_damaged_is_none_to_start_at(tmp_path: Path) -> None:
    storage = published(tmp_path, NINE)
    (tmp_path / version_name(9) / "model.safetensors.index.json").write_text("{")
    prune(storage, 1, {}, 0)
    assert left(storage) == [6, 7, 8, 9]


def test_reports_that_are_none_do_not_count(tmp_path: Path) -> None:
    storage = DirectoryStorage(tmp_path)
    for name, content in {
        "a": json.dumps({"version": "000012", "at": 1.5}).encode(),
        "host-1.gpu-0": b'{"version": "000009"}',
        "half": b'{"version": "0000',
        "number": b'{"version": 9}',
        "words": b'{"version": "nine"}',
        "bytes": b"\xff\xfe",
    }.items():
        storage.replace(f"readers/{name}.json", content)
    assert {reader: report.version for reader, report in read_reports(storage).items()} == {"a": 12, "host-1.gpu-0": 9}


@given(
    full=st.lists(st.booleans(), min_size=1, max_size=12),
    gaps=st.lists(st.integers(1, 3), min_size=12, max_size=12),
    keep=st.integers(1, 12),
    readers=st.lists(st.integers(0, 30), max_size=3),
    most_behind=st.integers(0, 12),
    most=st.none() | st.integers(0, 15),
)
def test_what_is_left_is_complete(
    full: list[bool],
    gaps: list[int],
    keep: int,
    readers: list[int],
    most_behind: int,
    most: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """It begins with a full version or has all; without a budget those asked for, and all that a reader needs, stay."""
    numbers = [sum(gaps[: at + 1]) for at in range(len(full))]
    before = dict(zip(numbers, full, strict=True))
    storage = published(tmp_path_factory.mktemp("prune"), list(before.items()))
    names = {f"r{at}": has for at, has in enumerate(readers)}
    pruned = prune(storage, keep, names, most_behind, None if most is None else most * FILE_BYTES)
    after = left(storage)
    assert [*pruned.versions, *after] == numbers
    assert before[after[0]] or after == numbers
    if most is None:
        assert set(numbers[-keep:]) <= set(after)
        for has in readers:
            behind = [version for version in numbers if version > has]
            assert len(behind) > most_behind or set(behind) <= set(after)
