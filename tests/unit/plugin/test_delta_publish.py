"""Published weights: a reader that knows only the format rebuilds every version, bit for bit."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from miles_plugin.weight_transfer.disk_delta.codec import CHECKSUMS, ENCODINGS, Encoder
from miles_plugin.weight_transfer.disk_delta.publish import Publisher
from miles_plugin.weight_transfer.disk_delta.split import WeightsChanged
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage
from mooncake_store.errors import ConfigError, IntegrityError
from tests.delta_reader import Model, from_directory, rebuild
from tests.unit.plugin.delta_training import Ranks, Weights, held, make_base, some_weights, step

INDEX = "model.safetensors.index.json"


class Trained:
    """A base, weights that began as it, and a place to publish in."""

    def __init__(self, directory: Path) -> None:
        self.weights: Weights = some_weights()
        self.base = make_base(directory / "base", self.weights, files=2)
        self.source = directory / "source"
        self._opened: list[Ranks] = []

    def ranks(self, size: int = 1, encoding: str = "xor", anchor_every: int = 0, **more: object) -> Ranks:
        storages = [DirectoryStorage(self.source) for _ in range(size)]
        self._opened.append(Ranks(storages, self.base, encoding, anchor_every=anchor_every, **more))
        return self._opened[-1]

    def read(self, version: int) -> Model:
        return rebuild(from_directory(self.source), self.base, version)

    def index(self, version: int) -> dict[str, dict[str, object]]:
        written: dict[str, dict[str, object]] = json.loads((self.source / f"weight_v{version:06d}" / INDEX).read_text())
        return written

    def entries(self) -> list[str]:
        return sorted(path.name for path in self.source.iterdir())

    def close(self) -> None:
        for ranks in self._opened:
            ranks.close()


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    made = Trained(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_every_version_is_rebuilt_bit_for_bit(trained: Trained, size: int, encoding: str, checksum: str) -> None:
    if checksum == "blake3":
        pytest.importorskip("blake3")
    ranks = trained.ranks(size, encoding, checksum=checksum, anchor_every=4)
    assert not ranks.publish(0, trained.weights).is_published
    assert trained.entries() == []
    expected = {}
    for version in range(1, 8):
        step(trained.weights, version)
        published = ranks.publish(version, trained.weights)
        assert published.base == (None if version == 4 else version - 1)
        expected[version] = held(trained.weights)
    for version, model in expected.items():
        assert trained.read(version) == model
    assert (trained.source / "latest").read_text() == "000007\n"
    assert trained.entries() == ["latest", *(f"weight_v{version:06d}" for version in range(1, 8))]


def test_a_full_version_is_a_checkpoint_that_others_load(trained: Trained) -> None:
    step(trained.weights, 1)
    trained.ranks(2, file_bytes=300).publish(5, trained.weights)
    directory = trained.source / "weight_v000005"
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert held({name: loaded[name] for name in trained.weights}) == held(trained.weights)
    assert {f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))} == {
        file.name for file in files
    }
    assert {path.name for path in directory.iterdir()} == {
        *(file.name for file in files), "config.json", "tokenizer.json", INDEX
    }  # fmt: skip


def test_a_trainer_that_did_not_start_from_the_base_publishes_all(trained: Trained) -> None:
    """Whichever rank finds it out, and whatever differs."""
    trained.weights["model.steps"][3] += 1
    ranks = trained.ranks(3)
    published = ranks.publish(0, trained.weights)
    assert published.is_published
    assert published.base is None
    assert trained.read(0) == held(trained.weights)
    step(trained.weights, 1)
    assert ranks.publish(1, trained.weights).base == 0
    assert trained.read(1) == held(trained.weights)


@pytest.mark.parametrize("change", ["dtype", "shape", "another name"])
def test_the_same_bits_of_another_layout_are_another_checkpoint(trained: Trained, change: str) -> None:
    mask = trained.weights.pop("model.mask")
    name = "model.other" if change == "another name" else "model.mask"
    trained.weights[name] = {"dtype": mask.view(torch.int8), "shape": mask.reshape(3, 11)}.get(change, mask)
    assert trained.ranks(2).publish(3, trained.weights).base is None


def test_what_only_the_base_has_stays_and_is_in_full_versions(trained: Trained) -> None:
    sent = {name: tensor for name, tensor in trained.weights.items() if name not in ("model.steps", "model.empty")}
    ranks = trained.ranks(2, anchor_every=2)
    assert not ranks.publish(0, sent).is_published
    for version in (1, 2, 3):
        step(sent, version)
        ranks.publish(version, sent)
        assert trained.read(version) == held({**trained.weights, **sent})
    assert "base_version" not in trained.index(2)["metadata"]


def test_a_version_in_which_nothing_changed_has_no_file(trained: Trained) -> None:
    ranks = trained.ranks(2)
    ranks.publish(0, trained.weights)
    step(trained.weights, 1)
    ranks.publish(1, trained.weights)
    published = ranks.publish(2, trained.weights)
    assert (published.is_published, published.changed, published.nbytes) == (True, 0, 0)
    assert [path.name for path in (trained.source / "weight_v000002").iterdir()] == [INDEX]
    assert trained.index(2)["weight_map"] == {}
    assert trained.index(2)["checksums"] == trained.index(1)["checksums"]
    assert trained.read(2) == held(trained.weights)


def test_only_what_changed_is_in_a_delta(trained: Trained) -> None:
    ranks = trained.ranks(3)
    ranks.publish(0, trained.weights)
    trained.weights["model.norm.weight"][2] = float("nan")
    published = ranks.publish(1, trained.weights)
    assert (published.changed, published.tensors) == (1, len(trained.weights))
    assert list(trained.index(1)["weight_map"]) == ["model.norm.weight"]
    assert len(list((trained.source / "weight_v000001").iterdir())) == 2


def test_a_version_that_no_engine_took_is_a_base_all_the_same(trained: Trained) -> None:
    ranks = trained.ranks()
    ranks.publish(0, trained.weights)
    for version in (1, 4, 9):  # numbers of updates that came to nothing are holes
        step(trained.weights, version)
        ranks.publish(version, trained.weights)
        ranks.publishers[0].abandon(version)  # too late: it was published
    assert trained.index(9)["metadata"]["base_version"] == "000004"
    assert trained.read(9) == held(trained.weights)


@pytest.mark.parametrize("when", ["the source raises", "a rank encodes no more", "rank 0 does not finish"])
@pytest.mark.parametrize("told", [True, False])
def test_after_an_update_that_failed_the_next_version_is_full(trained: Trained, when: str, told: bool) -> None:
    """Whether or not it was abandoned."""
    ranks = trained.ranks(2)
    ranks.publish(0, trained.weights)
    step(trained.weights, 1)
    ranks.publish(1, trained.weights)
    step(trained.weights, 2)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(trained.weights.items())[:-1]
        raise RuntimeError("a rank ended")

    first, second = ranks.publishers
    if when == "the source raises":
        for each in ranks.publishers:
            with pytest.raises(RuntimeError, match="a rank ended"):
                each.encode(2, broken())
    else:
        second.encode(2, trained.weights.items())
        if when == "rank 0 does not finish":
            first.encode(2, trained.weights.items())
    if told:
        first.abandon(2)
    assert [name for name in trained.entries() if not name.startswith(".") or told] == ["latest", "weight_v000001"]
    step(trained.weights, 3)
    assert ranks.publish(3, trained.weights).base is None
    step(trained.weights, 4)
    assert ranks.publish(4, trained.weights).base == 3
    assert trained.read(4) == held(trained.weights)


@pytest.mark.parametrize("file_bytes", [1 << 20, 300])
def test_a_full_version_after_a_delta_leaves_nothing_of_it(trained: Trained, file_bytes: int) -> None:
    """Each rank wrote a delta before rank 0 asked for all; files of either kind may have the same name."""
    ranks = trained.ranks(3, file_bytes=file_bytes)
    ranks.publish(0, trained.weights)
    step(trained.weights, 1, density=1.0)
    for each in ranks.publishers:
        each.encode(1, trained.weights.items())
    shares = [each.full(1) for each in ranks.publishers]
    ranks.publishers[0].finish(1, shares)
    assert trained.read(1) == held(trained.weights)
    listed = {*trained.index(1)["weight_map"].values()}
    assert {path.name for path in (trained.source / "weight_v000001").glob("*.safetensors")} == listed


def test_a_source_that_fails_is_taken_to_its_end(trained: Trained) -> None:
    """Other ranks gather with this one, and would wait for it."""
    taken: list[str] = []

    def tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            taken.append(name)
            yield name, tensor

    publisher = trained.ranks().publishers[0]
    with pytest.raises(IntegrityError, match="slash"):
        publisher.encode(0, tensors({"../etc/passwd": torch.zeros(3), **trained.weights}))
    assert len(taken) == 1 + len(trained.weights)
    elsewhere = Publisher(DirectoryStorage(trained.source), 0, 1, "xor", "xxh3-128", trained.source, 0)
    taken.clear()
    with pytest.raises(ConfigError, match=r"no safetensors file there"):
        elsewhere.encode(0, tensors(trained.weights))
    elsewhere.close()
    assert len(taken) == len(trained.weights)
    assert trained.entries() == []


@pytest.mark.parametrize("name", ["a/b", "..", "a..b", "a\\b", "", "__metadata__", "a\x00b", "a\nb"])
def test_names_that_could_be_paths_are_refused(trained: Trained, name: str) -> None:
    with pytest.raises(IntegrityError, match="a tensor named"):
        trained.ranks().publish(0, {**trained.weights, name: torch.zeros(2)})


def test_a_dtype_that_files_do_not_know_is_refused(trained: Trained) -> None:
    with pytest.raises(WeightsChanged, match=r"model.wave is torch.complex128"):
        trained.ranks().publish(0, {**trained.weights, "model.wave": torch.zeros(2, dtype=torch.complex128)})


@pytest.mark.parametrize("change", ["missing", "more", "dtype", "shape", "twice"])
@pytest.mark.parametrize("anchor", [True, False])
def test_other_weights_than_before_are_refused(trained: Trained, change: str, anchor: bool) -> None:
    ranks = trained.ranks(2, anchor_every=int(anchor))
    ranks.publish(1, trained.weights)
    weights = list(trained.weights.items())
    changed = {
        "missing": weights[1:],
        "more": [*weights, ("model.more", torch.zeros(1))],
        "dtype": [(name, tensor.float() if name == "model.steps" else tensor) for name, tensor in weights],
        "shape": [(name, tensor.reshape(-1)) for name, tensor in weights],
        "twice": [*weights, weights[0]],
    }[change]
    with pytest.raises(WeightsChanged, match=r"weight model\."):
        ranks.publish(2, changed)
    step(trained.weights, 3)
    assert ranks.publish(3, trained.weights).base is None
    assert trained.read(3) == held(trained.weights)


def test_ranks_that_send_different_weights_are_found_out(trained: Trained) -> None:
    ranks = trained.ranks(2)
    weights = list(trained.weights.items())
    for publisher, sent in zip(ranks.publishers, (weights, weights[::-1]), strict=True):
        publisher.encode(1, sent)
    with pytest.raises(WeightsChanged, match="trainer rank 1"):
        ranks.publishers[0].finish(1, [publisher.full(1) for publisher in ranks.publishers])


def test_the_order_of_weights_may_change(trained: Trained) -> None:
    ranks = trained.ranks(3)
    ranks.publish(0, trained.weights)
    step(trained.weights, 1)
    assert ranks.publish(1, list(trained.weights.items())[::-1]).base == 0
    assert trained.read(1) == held(trained.weights)


@pytest.mark.parametrize("equal_to_base", [True, False])
def test_a_resumed_run_begins_with_a_full_version(trained: Trained, equal_to_base: bool) -> None:
    first = trained.ranks(2)
    first.publish(0, trained.weights)
    kept = {name: tensor.clone() for name, tensor in trained.weights.items()}
    step(trained.weights, 1)
    first.publish(1, trained.weights)
    weights = kept if equal_to_base else trained.weights
    for version in (0, 1):
        with pytest.raises(ConfigError, match=f"version {version} cannot be published where there is version 1"):
            trained.ranks(2).publish(version, weights)
    assert trained.ranks(2).publish(2, weights).base is None
    assert trained.read(2) == held(weights)


def test_steps_out_of_turn_are_refused(trained: Trained) -> None:
    publisher = trained.ranks().publishers[0]
    with pytest.raises(ValueError, match=r"full\(1\): this rank holds version None"):
        publisher.full(1)
    step(trained.weights, 1)
    share = publisher.encode(1, trained.weights.items())
    for version, shares in ((1, [share]), (2, [share]), (1, [])):
        with pytest.raises(ValueError, match="take the missing steps first"):
            publisher.finish(version, shares)


@pytest.mark.parametrize(
    ("setting", "value"), [("encoding", "gzip"), ("checksum", "md5"), ("anchor_every", -1), ("threads", 0)]
)
def test_settings_are_checked(trained: Trained, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{setting}={value!r}"):
        trained.ranks(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_thread_that_fails_fails_the_update_and_no_later_one(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    ranks, calls = trained.ranks(1), itertools.count()
    ranks.publish(0, trained.weights)
    step(trained.weights, 1)
    original = Encoder.encode

    def failing(encoder: Encoder, *args: Any) -> Any:
        result = original(encoder, *args)
        if next(calls) == at:
            raise MemoryError("no room")
        return result

    monkeypatch.setattr(Encoder, "encode", failing)
    with pytest.raises(MemoryError, match="no room"):
        ranks.publish(1, trained.weights)
    assert trained.entries() == []
    assert ranks.publish(2, trained.weights).base is None
    step(trained.weights, 3)
    ranks.publish(3, trained.weights)
    assert trained.read(3) == held(trained.weights)


def test_old_versions_go(trained: Trained) -> None:
    ranks = trained.ranks(2, anchor_every=3)
    for version in range(6):
        ranks.publish(version, trained.weights)
        step(trained.weights, version)
    assert ranks.publishers[0].prune(1, {"slow": 2}, 2).versions == (1, 2)
    assert trained.entries() == ["latest", "weight_v000003", "weight_v000004", "weight_v000005"]
