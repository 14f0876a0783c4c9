"""A checkpoint follows what an independent publisher writes, bit for bit; what is broken is got around, or said."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_plugin.weight_transfer.disk_delta import codec, slots
from miles_plugin.weight_transfer.disk_delta.codec import Encoder
from miles_plugin.weight_transfer.disk_delta.lineage import Chain, Plan, Source, plan
from miles_plugin.weight_transfer.disk_delta.local_checkpoint import Checkpoint
from miles_plugin.weight_transfer.disk_delta.materialize import FOLD, Materializer
from miles_plugin.weight_transfer.disk_delta.slots import BASE, LocalBusy, LocalUnavailable
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage, PublicationUnavailable
from mooncake_store.errors import ConfigError, IntegrityError, ObjectNotFound
from tests.delta_publisher import (
    INDEX,
    WIDTHS,
    Tensor,
    changed,
    random_tensors,
    read_checkpoint,
    read_safetensors,
    write_checkpoint,
    write_safetensors,
)
from tests.unit.plugin.delta_readers import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def version_file(world: World, version: int, number: int = 0) -> Path:
    return sorted(world.publisher.directory(version).glob("*.safetensors"))[number]


def sparse(old: bytes, new: bytes, width: int) -> bytes:
    payload, _ = Encoder("sparse", "xxh3-128").encode(
        np.frombuffer(bytearray(old), np.uint8), np.frombuffer(new, np.uint8), width
    )
    assert payload is not None
    return payload


@pytest.mark.parametrize("encoding", ["xor", "overwrite", "sparse"])
def test_every_version_arrives_bit_for_bit_and_the_slots_take_turns(tmp_path: Path, encoding: str) -> None:
    world = World(tmp_path, encoding)
    world.publisher.encode = sparse if encoding == "sparse" else None
    reader = world.reader()
    paths = []
    for version in range(1, 6):
        world.publish(version)
        done = reader.bring_to()
        assert (done.version, world.seen(), done.notes) == (version, version, [])
        assert done.path.resolve() == (world.local / "current").resolve()
        assert json.loads((world.local / "state.json").read_text())["version"] == f"{version:06d}"
        assert done.bytes_read > 0
        paths.append(done.path.name)
    assert paths == ["a", "b", "a", "b", "a"]
    assert world.reader().exposed() == (5, world.local / "a")


def test_nothing_published_is_the_base_and_asking_again_changes_nothing(world: World) -> None:
    assert world.reader().bring_to().version == 0
    assert world.seen() == 0
    before = {path: path.stat().st_mtime_ns for path in world.local.rglob("*") if path.name != "lock"}
    done = world.reader().bring_to(0)
    assert (done.version, done.path.name) == (0, "a")
    assert before == {path: path.stat().st_mtime_ns for path in world.local.rglob("*") if path.name != "lock"}
    world.publish(1)
    world.reader().bring_to()
    assert world.seen() == 1


def test_a_version_in_which_nothing_changed_arrives(world: World) -> None:
    world.publish(1)
    world.publisher.delta(2, world.publisher.versions[1])
    assert world.reader().bring_to().version == 2
    assert world.seen() == 2


def test_a_published_version_0_is_not_the_base_also_for_a_reader_that_came_before_it(world: World) -> None:
    """The trainer started from other weights than readers have."""
    world.reader().bring_to()
    world.publisher.full(0, changed(world.publisher.versions[0], 1, 0.5))
    assert world.reader().bring_to().version == 0
    assert world.seen() == 0
    world.publish(1)
    assert world.reader().bring_to().notes == []
    assert world.seen() == 1


def test_a_late_reader_folds_the_deltas_and_a_new_one_too(world: World) -> None:
    reader = world.reader()
    world.publish(1)
    reader.bring_to()
    world.publish(*range(2, 12))
    assert reader.bring_to().notes == []
    assert world.seen() == 11
    shutil.rmtree(world.local)
    assert world.reader().bring_to().notes == []
    assert world.seen() == 11


@pytest.mark.parametrize("start", ["new", "old"])
def test_a_reader_that_is_far_behind_has_few_deltas_in_memory(
    world: World, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(1)
    if start == "old":
        world.reader().bring_to()
    last = 3 * FOLD + 2
    world.publish(*range(2, last + 1))
    in_memory: list[int] = []
    load = Chain.load

    def noted(chain: Chain, plan: Plan) -> None:
        load(chain, plan)
        in_memory.append(sum(bool(step.files) for step in chain._steps))

    monkeypatch.setattr(Chain, "load", noted)
    reads: list[str] = []

    class Noted(DirectoryStorage):
        def read(self, name: str) -> bytes:
            reads.append(name)
            return super().read(name)

    done = Materializer(Noted(world.source), world.local, world.base).bring_to()
    assert (done.version, done.notes, world.seen()) == (last, [], last)
    assert 1 <= max(in_memory) <= FOLD
    assert len(in_memory) == 4
    assert {name for name in reads if reads.count(name) > 1 and "v000001" not in name} == set()


@pytest.mark.parametrize("way", ["reread", "slot", "full", "none"])
def test_a_reader_that_is_far_behind_gets_around_a_damaged_delta(world: World, way: str) -> None:
    world.publish(1)
    world.reader().bring_to()
    world.publish(*range(2, 6), density=1.0, share=1.0)
    if way == "slot":
        world.reader().bring_to()  # it is the other slot, which holds 1, that will be changed
    elif way == "full":
        world.anchor(6)
    world.publish(*range(max(world.publisher.versions) + 1, 2 * FOLD + 4), density=1.0, share=1.0)
    damaged = version_file(world, 4)
    content = damaged.read_bytes()
    flip_bit(damaged, -9)
    storage = DirectoryStorage(world.source)
    if way == "reread":

        class Mended(DirectoryStorage):
            def read(self, name: str) -> bytes:
                found = super().read(name)
                if name.endswith(f"{damaged.parent.name}/{damaged.name}"):
                    damaged.write_bytes(content)
                return found

        storage = Mended(world.source)
    reader = Materializer(storage, world.local, world.base)
    if way == "none":
        with pytest.raises(IntegrityError, match=r"its checksum is .*no full version"):
            reader.bring_to()
        assert world.seen() == 1
    else:
        assert reader.bring_to().version == 2 * FOLD + 3
        assert world.seen() == 2 * FOLD + 3


def test_back_and_forth(world: World) -> None:
    world.publish(1, 2)
    world.anchor(3)
    world.publish(4, 5)
    reader = world.reader()
    for version in (5, 3, 4, 1, 0, 2, 0, 5):
        assert reader.bring_to(version).version == version
        assert world.seen() == version


def test_of_the_reader_it_was_before_what_was_read_is_refreshed_first(world: World) -> None:
    world.publish(1, 2)
    heard: list[int] = []
    Materializer(DirectoryStorage(world.source), world.local, world.base, pre_read=heard.append).bring_to(2)
    assert heard == [2, 1, 0]


def test_versions_are_linked_by_their_base_and_not_by_their_numbers(world: World) -> None:
    """Numbers that were allocated and given up are missing; 4 was published, and no later one is based on it."""
    reader = world.reader()
    world.publish(2, 4)
    reader.bring_to(2)
    reader.bring_to(4)
    world.publisher.delta(7, changed(world.publisher.versions[2], 7, 0.1), base=2)
    done = reader.bring_to(7)
    assert (world.seen(), done.notes) == (7, [])
    world.publish(8)
    reader.bring_to(8)  # its slot holds 4
    assert world.seen() == 8


def test_a_gap_is_bridged_by_the_other_slot_by_a_full_version_or_said(world: World) -> None:
    reader = world.reader()
    for version in range(1, 4):
        world.publish(version)
        reader.bring_to()
    world.publish(4)
    shutil.rmtree(world.publisher.directory(3))  # the slot to be changed holds 2, the other one 3
    reader.bring_to()
    assert world.seen() == 4
    world.publish(5, 6, 7)
    (world.publisher.directory(6) / INDEX).unlink()  # as in a version that is being written, or deleted
    with pytest.raises(IntegrityError, match=r"version 7 .* weight_v000006.*publish a full one"):
        reader.bring_to()
    assert world.seen() == 4
    world.anchor(8)
    world.publish(9)
    assert reader.bring_to().version == 9
    assert world.seen() == 9


def test_a_version_that_is_not_there_is_named(world: World) -> None:
    world.publish(1)
    with pytest.raises(ObjectNotFound, match=r"version 5 .*weight_v000005"):
        world.reader().bring_to(5)
    assert world.seen() is None


@pytest.mark.parametrize("damage", ["bit", "cut", "header", "missing", "zeros"])
def test_a_damaged_delta_falls_back_to_a_full_version_or_is_said(world: World, damage: str) -> None:
    reader = world.reader()
    world.publish(1)
    reader.bring_to()
    world.publish(2, density=1.0, share=1.0)
    path = version_file(world, 2)
    content = path.read_bytes()
    changes = {
        "cut": content[:-1], "header": content[:8] + b"[" + content[9:], "zeros": content[:-200] + bytes(200),
        "bit": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "missing": b"",
    }  # fmt: skip
    path.write_bytes(changes[damage])
    if damage == "missing":
        path.unlink()
    with pytest.raises(IntegrityError, match=r"version 2 .*from version 1|version 2 .*from the base"):
        reader.bring_to()
    assert world.seen() == 1
    with pytest.raises(IntegrityError):
        world.reader().bring_to()
    world.anchor(3)
    world.publish(4)
    assert reader.bring_to().version == 4
    assert world.seen() == 4


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("another version", "version=1; allowed: that of its directory"),
        ("another tensor", "in only one of the file and its index"),
        ("a payload of two dimensions", r"payload of .* is U8 \[1, \d+\]; allowed: U8, 1-D"),
        ("no checksum", "checksum of .* is None, by its index "),
        ("another checksum", f"checksum of .* is '{'0' * 32}', by its index "),
        ("a full version of another shape", "its index says otherwise"),
        ("latest", "latest says 'newest'"),
    ],
)
def test_a_version_that_contradicts_itself_is_not_believed(world: World, lie: str, said: str) -> None:
    world.publish(1, share=1.0)
    directory, path = world.publisher.directory(1), version_file(world, 1)
    tensors = read_safetensors(path)
    name, tensor = next(iter(tensors.items()))
    checksums = dict.fromkeys(tensors, "0" * 32)
    if lie == "another version":
        shutil.copytree(directory, world.publisher.directory(2))
        world.publisher.latest(2)
    elif lie == "another tensor":
        write_safetensors(path, {**tensors, "other": tensor}, {**checksums, "other": "0" * 32})
    elif lie == "a payload of two dimensions":
        write_safetensors(path, {**tensors, name: tensor._replace(shape=(1, *tensor.shape))}, checksums)
    elif lie == "no checksum":
        write_safetensors(path, tensors)
    elif lie == "another checksum":
        write_safetensors(path, tensors, checksums)
    elif lie == "latest":
        (world.source / "latest").write_text("newest\n")
    else:
        shutil.rmtree(directory)
        world.anchor(1)
        tensors = read_safetensors(path)
        tensors["embed.weight"] = tensors["embed.weight"]._replace(shape=(48, 64))
        write_safetensors(path, tensors)
    with pytest.raises(IntegrityError, match=said):
        world.reader().bring_to()
    assert world.seen() is None


def test_tensors_that_overlap_are_not_changed_in_place(world: World) -> None:
    world.publish(1)
    path = sorted(world.base.glob("*.safetensors"))[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = next(name for name, each in header.items() if each["data_offsets"][0] >= 132)
    header["second"] = {"dtype": "U8", "shape": [1], "data_offsets": [header[name]["data_offsets"][0]] * 2}
    header["second"]["data_offsets"][1] += 1
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(IntegrityError, match="begins within another one"):
        world.reader().bring_to()


def test_a_delta_between_that_is_damaged_is_bridged_by_a_newer_full_version(world: World) -> None:
    world.publish(1, 2)
    world.anchor(3)
    world.publish(4)
    flip_bit(version_file(world, 2), -9)
    assert world.reader().bring_to().version == 4
    assert world.seen() == 4


def test_when_the_newest_delta_of_a_slot_fails_another_way_is_taken_and_noted(world: World) -> None:
    """From 3, an anchor, both ways lead to 5: by the deltas that a slot lacks, one of which is damaged in between."""
    reader = world.reader()
    world.publish(1, 2)
    world.anchor(3)
    reader.bring_to(3)
    world.publish(4, density=1.0, share=1.0)
    reader.bring_to(4)
    world.publish(5, density=1.0, share=1.0)
    flip_bit(version_file(world, 4), -9)
    done = reader.bring_to(5)  # the slot holds 3 and needs 4; the other one holds 4
    assert world.seen() == 5
    assert len(done.notes) == 1
    assert "1 tensors did not come to version 5" in done.notes[0]


@pytest.mark.parametrize("half", ["cut", "zeros"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_that_was_half_visible_is_read_once_more(world: World, version: int, half: str) -> None:
    """Its tensors may have been half changed by then: in the first slot, in one that was just copied, in an old one."""
    for before in range(1, version):
        world.publish(before, share=1.0)
        world.reader().bring_to()
    world.publish(version, density=1.0, share=1.0)
    reads: list[str] = []

    class Halves(DirectoryStorage):
        def read(self, name: str) -> bytes:
            content = super().read(name)
            reads.append(name)
            if f"v{version:06d}" not in name or (half == "zeros" and INDEX in name) or reads.count(name) > 1:
                return content
            return content[: len(content) // 2] if half == "cut" else content[:-3000] + bytes(3000)

    heard: list[int] = []
    reader = Materializer(Halves(world.source), world.local, world.base, pre_read=heard.append)
    done = reader.bring_to(version)
    assert (done.version, world.seen()) == (version, version)
    again = {name.rpartition("/")[2] for name in reads if f"v{version:06d}" in name and reads.count(name) == 2}
    assert again >= {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert heard.count(version) == 2 + (half == "cut")  # its index was cut, too
    assert len(done.notes) == 1


def test_a_full_version_that_was_half_visible_is_read_once_more(world: World) -> None:
    world.anchor(1)
    reads: list[str] = []

    class Zeros(DirectoryStorage):
        def read(self, name: str) -> bytes:
            content = super().read(name)
            reads.append(name)
            return content[:-500] + bytes(500) if ".safetensors" in name and reads.count(name) == 1 else content

    assert Materializer(Zeros(world.source), world.local, world.base).bring_to().version == 1
    assert world.seen() == 1


@pytest.mark.parametrize("slot", ["other", "current"])
def test_a_slot_that_lost_a_bit_is_mended(world: World, slot: str) -> None:
    """Of a touched tensor it shows when the slot is changed; of what engines see, when it is asked for."""
    reader = world.reader()
    for version in (1, 2, 3):
        world.publish(version, share=1.0)
        reader.bring_to()
    world.publish(4, share=1.0)
    current = world.local / os.readlink(world.local / "current")
    other = world.local / ("a" if current.name == "b" else "b")
    damaged = current if slot == "current" else other
    flip_bit(sorted(damaged.glob("*.safetensors"))[0], -3)
    assert len(reader.verify()) == (slot == "current")
    if slot == "current":
        done = reader.bring_to(3)
        assert done.version == 3
        assert world.seen() == 3
        assert reader.verify() == []
    done = reader.bring_to(4)
    assert world.seen() == 4
    assert any("checksum" in note for note in done.notes) == (slot == "other")
    world.publish(5, share=1.0)
    reader.bring_to()
    assert world.seen() == 5


def test_when_both_slots_are_damaged_the_base_helps(world: World) -> None:
    reader = world.reader()
    for version in (1, 2):
        world.publish(version, share=1.0)
        reader.bring_to()
    world.publish(3, share=1.0)
    for name in ("a", "b"):
        flip_bit(sorted((world.local / name).glob("*.safetensors"))[0], -3)
    done = reader.bring_to()
    assert world.seen() == 3
    assert done.version == 3


@pytest.mark.parametrize(
    "loss", ["a", "b", "a.json", "b.json", "current", "state.json", "torn.json", "cut", "gone", "shape"]
)
def test_what_was_deleted_from_the_local_directory_is_made_again(world: World, loss: str) -> None:
    reader = world.reader()
    for version in (1, 2):
        world.publish(version)
        reader.bring_to()
    world.publish(3)
    weights = sorted((world.local / "a").glob("*.safetensors"))[0]
    if loss == "torn.json":
        (world.local / "a.json").write_text('{"version": 1')
    elif loss == "shape":
        tensors = read_safetensors(weights)
        tensors["embed.weight"] = tensors["embed.weight"]._replace(shape=(48, 64))
        write_safetensors(weights, tensors)
    elif loss == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif loss == "gone":
        weights.unlink()
    elif (world.local / loss).is_dir() and loss != "current":
        shutil.rmtree(world.local / loss)
    else:
        (world.local / loss).unlink()
    done = reader.bring_to()
    assert (done.version, world.seen()) == (3, 3)
    assert any("slot a" in note for note in done.notes) == (loss in ("cut", "gone", "shape"))
    world.publish(4, 5)
    for version in (4, 5):
        reader.bring_to(version)
        assert world.seen() == version


@pytest.mark.parametrize("loss", ["cut", "gone", "all"])
@pytest.mark.parametrize("version", [0, 2])
def test_what_was_deleted_of_what_engines_see_is_made_again(world: World, loss: str, version: int) -> None:
    for each in range(version):
        world.publish(each + 1)
        world.reader().bring_to()
    path = world.reader().bring_to().path
    weights = sorted(path.glob("*.safetensors"))[0]
    if loss == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif loss == "gone":
        weights.unlink()
    else:
        shutil.rmtree(path)
    reader = world.reader()
    if loss != "all":
        assert reader.verify() == sorted(world.publisher.versions[0])
    assert reader.bring_to().version == version
    assert world.seen() == version
    assert reader.verify() == []
    if loss != "all":
        weights.unlink(missing_ok=True)  # of the slot that is changed next
    world.publish(version + 1)
    reader.bring_to()
    assert world.seen() == version + 1


def test_another_base_and_another_run_are_refused(world: World, tmp_path: Path) -> None:
    world.publish(1, 2)
    world.reader().bring_to()
    other = World(tmp_path / "other")  # the same base
    other.publisher.delta(1, changed(other.publisher.versions[0], 99, 0.1))
    other.publisher.delta(2, changed(other.publisher.versions[0], 98, 0.1))
    other.local = world.local
    with pytest.raises(ConfigError, match=rf"version 2 of another run.*remove {re.escape(str(world.local))}"):
        other.reader().bring_to()
    write_checkpoint(other.base, changed(other.publisher.versions[0], 5, 0.5))
    with pytest.raises(ConfigError, match=rf"fingerprint.*remove {re.escape(str(world.local))}"):
        other.reader().bring_to()
    assert world.seen() == 2


def test_a_slot_of_another_run_that_no_engine_reads_is_refused_too(world: World, tmp_path: Path) -> None:
    world.publish(1, 2)
    for version in (1, 2):
        world.reader().bring_to(version)
    other = World(tmp_path / "other")
    other.publisher.delta(1, changed(other.publisher.versions[0], 99, 0.1))
    other.local = world.local
    with pytest.raises(ConfigError, match="version 1 of another run"):
        other.reader().bring_to()
    assert world.seen() == 2


@pytest.mark.parametrize("difference", ["dtype", "shape", "name"])
@pytest.mark.parametrize("kind", ["delta", "full"])
def test_another_model_is_refused_before_anything_is_made(world: World, difference: str, kind: str) -> None:
    tensors = dict(world.publisher.versions[0])
    norm = tensors.pop("norm.weight")
    changes = {
        "dtype": ("norm.weight", "I32", (33,)),
        "shape": ("norm.weight", "F32", (3, 11)),
        "name": ("x", "F32", (33,)),
    }
    name, dtype, shape = changes[difference]
    world.publisher.versions[0] = {**tensors, name: norm}
    tensors[name] = Tensor(dtype, shape, norm.data[:-1] + b"\1")
    if kind == "delta":
        world.publisher.delta(1, tensors)
    else:
        world.publisher.full(1, tensors)
    with pytest.raises(ConfigError, match=rf"tensor {re.escape(name)} is {dtype}"):
        world.reader().bring_to()
    assert not (world.local / "a").exists()


@pytest.mark.parametrize("anchored", [True, False])
def test_a_tensor_that_never_changed_is_the_trainer_s_too(world: World, anchored: bool) -> None:
    """A reader's base may have lost a bit, or be another one, where no delta says anything."""
    changing = "norm.weight"
    for number in (1, 2):
        before = world.publisher.versions[number - 1]
        world.publisher.delta(number, {**before, changing: changed(before, number, 1.0)[changing]})
    path = next(path for path in sorted(world.base.glob("*.safetensors")) if changing not in read_safetensors(path))
    flip_bit(path, -3)
    if anchored:
        world.publisher.full(3, world.publisher.versions[2])
        assert world.reader().bring_to().version == 3
        assert dict(world.publisher.versions[3]) == read_checkpoint(world.local / "current")
    else:
        with pytest.raises(IntegrityError, match=r"from the base checkpoint: its checksum is .*that it started from"):
            world.reader().bring_to()
        assert world.seen() is None


@pytest.mark.parametrize("published", [0, 1, 2])
def test_what_a_copy_got_wrong_is_mended(world: World, published: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the base, or of the other slot; also of what no delta changes."""
    copy = slots._copy

    def wrong(source: Path, target: Path) -> None:
        copy(source, target)
        if target.suffix == ".safetensors":
            flip_bit(target, -3)

    for version in range(1, published + 1):
        before = world.publisher.versions[version - 1]
        world.publisher.delta(version, {**before, "steps": changed(before, version, 1.0)["steps"]})
        if version < published:
            world.reader().bring_to()
    monkeypatch.setattr(slots, "_copy", wrong)
    assert world.reader().bring_to().version == published
    assert world.seen() == published
    assert world.reader().verify() == []


def test_tensors_that_the_trainer_does_not_train_stay(world: World) -> None:
    base = dict(world.publisher.versions[0])
    kept = {name: base.pop(name) for name in ("head.weight", "steps")}
    first, second = changed(base, 1, 0.1, 1.0), changed(base, 2, 0.1, 1.0)
    world.publisher.full(1, first)
    world.publisher.delta(2, second)
    world.publisher.versions |= {1: first | kept, 2: second | kept}
    for version in (1, 2):
        world.reader().bring_to(version)
        assert world.seen() == version


def test_a_trainer_that_changes_its_checksum_and_encoding_is_followed(world: World) -> None:
    reader = world.reader()
    for version, (encoding, kind) in enumerate(
        [("xor", "xxh3-128"), ("overwrite", "adler32"), ("xor", "xxh3-128"), ("xor", "adler32")], start=1
    ):
        world.publisher.encoding, world.publisher.kind = encoding, kind
        world.publish(version, share=0.5)
        assert reader.bring_to().notes == []
        assert world.seen() == version


def test_two_at_once_take_turns_and_who_waits_too_long_is_told_for_whom(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(1)
    inside, leave = threading.Event(), threading.Event()
    make = slots.Slots.make

    def slow(*arguments: object) -> None:
        inside.set()
        assert leave.wait(20)
        make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(slots.Slots, "make", slow)
    first = threading.Thread(target=world.reader().bring_to)
    first.start()
    try:
        assert inside.wait(20)
        with pytest.raises(LocalBusy, match=rf"changed by process {os.getpid()} on .*0\.1 seconds"):
            world.reader(wait_seconds=0.1).bring_to()
        waiting: list[int] = []
        second = threading.Thread(target=lambda: waiting.append(world.reader().bring_to().version))
        second.start()
    finally:
        leave.set()
        first.join()
    second.join()
    assert (waiting, world.seen()) == ([1], 1)
    assert not (world.local / "b").exists()


def test_everything_is_on_the_disk_before_it_is_promised(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure would show, and a killed process does not: in which order things reach the disk."""
    for version in (1, 2):
        world.publish(version)
        world.reader().bring_to()
    world.publish(3, share=1.0)
    events: list[str] = []

    def noted(owner: type, method: str) -> None:
        real = getattr(owner, method)

        def call(*arguments: object) -> object:
            result = real(*arguments)
            events.append(f"{method} {arguments[1].name}" if isinstance(arguments[1], Path) else method)
            return result

        monkeypatch.setattr(owner, method, call)

    for owner, method in (
        (slots.Slots, "begin"), (codec.Decoder, "apply"), (Checkpoint, "flush"), (slots.Slots, "complete"),
        (slots.Slots, "expose"),
    ):  # fmt: skip
        noted(owner, method)
    assert world.reader(threads=1).bring_to().path.name == "a"
    applies = events.count("apply")
    flushes = [f"flush model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert applies > 3
    assert events == ["begin", *["apply"] * applies, *flushes, "complete", "expose"]


@pytest.mark.parametrize("already", [0, 2])
def test_what_a_slot_holds_is_on_the_disk_before_its_name_is(
    world: World, already: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(1, already + 1):
        world.publish(version)
        world.reader().bring_to()
    world.publish(already + 1, density=1.0, share=1.0)
    events: list[str] = []
    fsync, replace, flush = os.fsync, os.replace, Checkpoint.flush

    def spied_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(world.local)}")

    def spied_replace(old: Path, new: Path) -> None:
        replace(old, new)
        events.append(f"name {Path(new).relative_to(world.local)}")

    def spied_flush(slot: Checkpoint, file: Path) -> None:
        flush(slot, file)
        events.append("flush")

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_replace)
    monkeypatch.setattr(Checkpoint, "flush", spied_flush)
    world.reader(threads=1).bring_to()
    record = ["sync a.json.partial", "name a.json", "sync ."]
    exposed = ["name current", "sync .", "sync state.json.partial", "name state.json", "sync ."]
    if not already:  # the copy of the base
        copied = sorted(f"sync a/{path.name}" for path in world.base.iterdir())
        assert [events[0], *sorted(events[1 : 1 + len(copied)])] == ["sync .", *copied]
        events = events[1 + len(copied) :]
        record = ["sync a", "sync .", *record]
    assert events == [*record, "flush", "flush", *record[-3:], *exposed]


def test_what_a_killed_reader_changed_reaches_the_disk_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes next finds it done, and has changed nothing itself."""
    for version in (1, 2):
        world.publish(version)
        world.reader().bring_to()
    world.publish(3, density=1.0, share=1.0)

    def kill(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "flush", kill)
        with pytest.raises(KeyboardInterrupt):
            world.reader().bring_to()
    assert world.seen() == 2
    flushed: list[str] = []
    monkeypatch.setattr(Checkpoint, "flush", lambda _, file: flushed.append(file.name))
    world.reader(threads=1).bring_to()
    assert sorted(flushed) == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert world.seen() == 3


def test_engines_that_load_while_the_next_version_is_made_read_a_whole_one(world: World) -> None:
    world.publish(*range(1, 13))
    world.reader().bring_to(1)
    stop, failures, loads = threading.Event(), list[BaseException](), [0]
    loaded = threading.Condition()

    def engine() -> None:
        while not stop.is_set():
            try:
                world.seen()
            except BaseException as error:
                failures.append(error)
            with loaded:
                loads[0] += 1
                loaded.notify_all()

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        for version in range(2, 13):
            world.reader().bring_to(version)
            with loaded:  # every engine has loaded a version before the second next is asked for
                before = loads[0]
                assert loaded.wait_for(lambda before=before: loads[0] > before + 1, 20)
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert world.seen() == 12


def test_a_source_that_fails_half_way_changes_nothing_that_engines_see(world: World) -> None:
    world.publish(1)
    world.reader().bring_to()
    world.publish(2, 3)
    for survives in range(20):
        left = iter(range(survives))

        class Failing(DirectoryStorage):
            def read(self, name: str, left: Iterator[int] = left) -> bytes:
                if next(left, None) is None:
                    raise PublicationUnavailable(f"{name}: Stale file handle")
                return super().read(name)

        try:
            Materializer(Failing(world.source), world.local, world.base).bring_to()
            break
        except PublicationUnavailable:
            assert world.seen() == 1
    assert survives > 6
    assert world.seen() == 3


def test_readers_tell_how_far_they_are(world: World) -> None:
    reader = world.reader()
    with pytest.raises(ConfigError, match="no version"):
        reader.report("host-1")
    world.publish(1, 2)
    reader.bring_to()
    reader.report("host-1")
    assert json.loads((world.source / "readers" / "host-1.json").read_text())["version"] == "000002"
    with pytest.raises(ConfigError, match=r"reader_id='\.\./x'"):
        reader.report("../x")


def test_a_base_that_cannot_be_is_refused(world: World, tmp_path: Path) -> None:
    storage = DirectoryStorage(world.source)
    for local in (world.base, world.base / "local"):
        with pytest.raises(ConfigError, match="local="):
            Materializer(storage, local, world.base)
    world.local.write_text("a file")
    with pytest.raises(LocalUnavailable, match=r"local: File exists; .*permissions"):
        Materializer(storage, world.local, world.base).bring_to()
    world.local.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        Materializer(storage, world.local, tmp_path / "nowhere").bring_to()
    assert not world.local.exists()


def test_only_what_a_checkpoint_needs_is_copied(world: World) -> None:
    write_checkpoint(world.base / "original", {})
    for name in ("pytorch_model.bin", ".git/config", "consolidated.safetensors", "code/model.py", "tokenizer.json"):
        (world.base / name).parent.mkdir(exist_ok=True)
        (world.base / name).write_text("x")
    found = world.reader().bring_to().path
    copied = {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()}
    weights = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert copied >= weights | {"config.json", "tokenizer.json", "code/model.py", INDEX}
    assert not {name for name in copied if name.endswith((".bin", ".safetensors")) or ".git" in name} - weights


def test_no_room_for_a_copy_is_said_before_anything_is_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(1)
    world.reader().bring_to()
    world.publish(2)
    real = os.statvfs(world.local)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 1, *real[5:])))
    with pytest.raises(LocalUnavailable, match=r"a copy of the checkpoint takes \d+ bytes, \d+ are free") as caught:
        world.reader().bring_to()
    assert caught.value.retryable
    assert not (world.local / "b").exists()
    assert world.seen() == 1


def test_where_a_change_takes_room_it_must_be_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that finds no block to write to kills the process."""
    world.publish(1)
    world.reader().bring_to()
    real = os.statvfs(world.local)
    for kind, free, refused in (("btrfs", 1, True), ("btrfs", 1 << 20, False), ("ext4", 1, False)):
        version = max(world.publisher.versions) + 1
        world.publish(version)
        with monkeypatch.context() as patch:
            patch.setattr(slots, "_file_system", lambda _, kind=kind: kind)
            patch.setattr(slots.Slots, "_check_room", lambda *_: None)
            patch.setattr(os, "statvfs", lambda _, free=free: os.statvfs_result((*real[:4], free, *real[5:])))
            if refused:
                with pytest.raises(LocalUnavailable, match=r"changing \d+ bytes on btrfs, .*\d+ are; make room"):
                    world.reader().bring_to()
                assert world.seen() == 1
            else:
                world.reader().bring_to()
                assert world.seen() == version


def test_file_systems_are_told_by_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    inner = tmp_path / "with space" / "inner"
    inner.mkdir(parents=True)
    at = str(inner.parent).replace(" ", "\\040")
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/root rw",
        f"2 1 8:2 / {at} rw shared:1 - xfs x rw",
        f"3 1 8:3 / {at} rw - btrfs x rw",
    ]
    mounts.write_text("\n".join(lines))
    assert slots._file_system(inner, mounts) == "btrfs"
    assert slots._file_system(tmp_path, mounts) == "ext4"
    assert slots._file_system(tmp_path, tmp_path / "none") == ""


def test_plan(world: World) -> None:
    world.publish(1, 2)
    world.anchor(3)
    world.publish(4, 5)
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in world.publisher.versions[0].items()}
    source = Source(DirectoryStorage(world.source))

    def found(at: int, target: int) -> tuple[int | None, list[int]]:
        way, notes = plan(source, at, target, layout)
        assert notes == []
        return way.start, [step.version for step in way.steps]

    assert found(4, 5) == (4, [5])
    assert found(3, 5) == (3, [4, 5])
    assert found(2, 5) == (None, [3, 4, 5])
    assert found(9, 5) == (None, [3, 4, 5])
    assert found(5, 5) == (5, [])
    assert found(BASE, 2) == (BASE, [1, 2])
    assert found(7, 2) == (BASE, [1, 2])
    shutil.rmtree(world.publisher.directory(1))
    with pytest.raises(IntegrityError, match=r"from version 7 .*no weight_v000001"):
        found(7, 2)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[str, str, tuple[int, ...]]], list[tuple[str, float, float, int]]]:
    dimensions = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    shapes = draw(st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), dimensions), min_size=1, max_size=5))
    densities = st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0])
    step = st.tuples(st.sampled_from(["xor", "overwrite", "sparse", "full"]), densities, densities, st.integers(1, 3))
    return [(f"t{i}", *each) for i, each in enumerate(shapes)], draw(st.lists(step, min_size=1, max_size=7))


@settings(max_examples=40)
@given(history=histories(), stops=st.sets(st.integers(0, 6)), gaps=st.sets(st.integers(0, 6), max_size=2))
def test_any_history_arrives_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    history: tuple[list[tuple[str, str, tuple[int, ...]]], list[tuple[str, float, float, int]]],
    stops: set[int],
    gaps: set[int],
) -> None:
    """Any dtypes and shapes, any changes, anchors anywhere, numbers left out; a reader that comes by now and then, and
    versions that are deleted behind its back: it has the version, or says that it cannot, when that is so."""
    shapes, steps = history
    world = World(tmp_path_factory.mktemp("world"), base=random_tensors(1, shapes))
    try:
        reader, version, had, deleted = world.reader(), 0, {0}, set[int]()
        order = [0]
        for number, (kind, density, share, hop) in enumerate(steps):
            version += hop
            if kind == "full":
                world.publisher.full(version, world.next(version, density, share))
            else:
                world.publisher.encoding, world.publisher.encode = kind, sparse if kind == "sparse" else None
                world.publisher.delta(version, world.next(version, density, share))
            order.append(version)
            full = [at for at in order if kind_of(world, at) == "full" and at not in deleted]
            if number in stops or (version == order[-1] and number == len(steps) - 1):
                reachable = way_exists(order, deleted, had, full)
                if reachable:
                    assert reader.bring_to().version == version
                    had = {*sorted(had - {0})[-1:], version, 0}
                    assert world.seen() is not None
                    assert dict(world.publisher.versions[world.seen() or 0]) == dict(world.publisher.versions[version])
                else:
                    with pytest.raises(IntegrityError):
                        reader.bring_to()
            if number in gaps:
                shutil.rmtree(world.publisher.directory(version))
                deleted.add(version)
    finally:
        shutil.rmtree(world.root)


def kind_of(world: World, version: int) -> str:
    path = world.publisher.directory(version) / INDEX
    return "full" if path.is_file() and "base_version" not in json.loads(path.read_text())["metadata"] else "delta"


def way_exists(order: list[int], deleted: set[int], had: set[int], full: list[int]) -> bool:
    """From the newest version back: is there one that the reader has, or that is full, before a deleted one?"""
    for version in reversed(order):
        if version in had:
            return True
        if version in deleted:
            return False
        if version in full:
            return True
    return False
