"""Readers that are killed, or run out of room: engines see a whole version all the time, the next reader goes on."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_plugin.weight_transfer.disk_delta.slots import LocalUnavailable
from tests.delta_publisher import random_tensors
from tests.unit.plugin.delta_processes import LARGE
from tests.unit.plugin.delta_readers import ROOT, World
from tests.unit.plugin.version_writers import directory_in_memory


def run_process(command: str, *arguments: object) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.plugin.delta_processes", command, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=290, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture
def memory() -> Iterator[Path]:
    directory = directory_in_memory()
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("moment", ["first", "second", "deltas", "full", "mended", "branch", "remade", "late"])
def test_a_kill_at_any_effect_exposes_nothing_torn(moment: str, memory: Path) -> None:
    """Before and after every line that writes, renames, links, removes or syncs, and half way through every tensor."""
    assert run_process("crash", moment, memory) > 50


def test_kills_at_random_moments_expose_nothing_torn(tmp_path: Path) -> None:
    assert run_process("kill", tmp_path, 30, 1) == 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_many_kills_at_random_moments_expose_nothing_torn(tmp_path: Path, seed: int) -> None:
    assert run_process("kill", tmp_path, 200, seed) == 200


def test_processes_that_bring_one_directory_forward_take_turns(tmp_path: Path) -> None:
    assert run_process("together", tmp_path, 4) == 4


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """A tensor of 80 MB; the payloads, some 2 MB each, are among what is counted."""
    assert run_process("memory", tmp_path) < 40 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for one copy of the large base, and not for two."""
    where = tmp_path / "disk"
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", where], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)


def test_a_disk_that_fills_up_leaves_what_engines_see(small_disk: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "world", base=random_tensors(0, LARGE))
    world.publish(1)
    world.local = small_disk / "local"
    world.reader().bring_to()
    world.publish(2)
    with pytest.raises(LocalUnavailable, match=r"takes \d+ bytes, \d+ are free.*make room"):
        world.reader().bring_to()
    assert world.seen() == 1
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert world.reader().bring_to().version == 2
    assert world.seen() == 2


@pytest.mark.parametrize("already", [0, 1, 2])
def test_a_write_that_fails_leaves_what_engines_see(already: int, tmp_path: Path) -> None:
    """By a limit on the size of files, which fails a write as a full disk does."""
    world = World(tmp_path, base=random_tensors(0, LARGE))
    for version in range(1, already + 1):
        world.publish(version)
        world.reader().bring_to()
    world.publish(already + 1)
    # Less than the weights; with two slots, which take no new file that large, less than their records.
    limit = 100_000 if already < 2 else 100
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(LocalUnavailable, match=r"File too large; the weights in .* are as before; make room"):
            world.reader().bring_to()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert world.seen() == (already or None)
    assert not list(world.local.glob("*/**/*.partial"))
    assert world.reader().bring_to().version == already + 1
    assert world.seen() == already + 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.local.mkdir(mode=0o500)
    with pytest.raises(LocalUnavailable, match=r"local.*Permission denied.*permissions"):
        world.reader().bring_to()
