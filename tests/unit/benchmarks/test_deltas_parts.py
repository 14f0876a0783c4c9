"""What `bench weights --deltas` makes of flags and measurements; that its weights and bound are what they say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks import markdown
from benchmarks.measurements import Measurement
from benchmarks.targets import Result
from benchmarks.weights import delta_plot, delta_report, delta_targets
from benchmarks.weights.delta_baseline import Baseline
from benchmarks.weights.delta_maker import Maker, move
from benchmarks.weights.delta_pair import Pair, same
from benchmarks.weights.delta_settings import ADAMW, CASES, FEW, MANY, DeltaSettings, resolve
from benchmarks.weights.delta_sides import Codec, Limits, Ours, Places, Sides
from benchmarks.weights.delta_turns import (
    APPLY,
    BASELINE,
    CODECS,
    ENCODE,
    FLUSH,
    HASH,
    LIMIT,
    MAPPED,
    MEMCPY,
    memory_of,
    process_of,
)
from benchmarks.weights.delta_whole import FIRST_COPY, MATERIALIZE, PUBLISH
from benchmarks.weights.entropy import Changes, entropy
from miles_plugin.bench_commands import BenchFailed, bench_parser
from mooncake_store import ConfigError
from mooncake_store.arrays import Bytes
from tests.unit.benchmarks.made import measured

ROOT = Path(__file__).parents[3]


def settings(*flags: str) -> DeltaSettings:
    return resolve(bench_parser().parse_args(["weights", "--deltas", *flags]))


# --- settings ---------------------------------------------------------------------------------------------------------


def test_flags_win_over_what_quick_brings() -> None:
    found, quick = settings(), settings("--quick")
    assert (found.nbytes, found.processes, found.repeats, found.warmup) == (1_200_000_000, 5, 3, 1)
    assert (quick.nbytes, quick.processes, quick.repeats, quick.warmup) == (20_000_000, 2, 1, 1)
    asked = settings("--quick", "--size", "5mb", "--repeats", "4", "--warmup", "2", "--output", "there")
    assert (asked.nbytes, asked.repeats, asked.warmup, asked.output) == (5 << 20, 4, 2, Path("there"))


def test_two_runs_can_be_compared_when_case_and_size_are_the_same() -> None:
    loads = [settings(*flags).load(case) for flags in ([], ["--quick"]) for case in CASES]
    assert all(load["what"] == "deltas" for load in loads)
    assert len({msgspec.json.encode(load) for load in loads}) == 6
    assert settings("--repeats", "9").load(FEW) == settings().load(FEW)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeats", "0"], "--repeats 0: allowed is a whole number of at least 1"),
        (["--warmup", "0"], "--warmup 0: allowed is a whole number of at least 1"),
        (["--size", "big"], "--size big: .*cannot be read"),
        (["--size", "99999gb"], "--size: such a model would take .* of memory, and there are"),
        (["--engines", "2"], "no engines in such a run, which --engines is of"),
        (["--tp", "1", "2"], "no engines in such a run, which --tp is of"),
        (["--ranks", "2"], "no engines in such a run, which --ranks is of"),
        (["--bucket", "1mb"], "no engines in such a run, which --bucket is of"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_what_is_allowed(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*flags)


# --- the bound --------------------------------------------------------------------------------------------------------


def test_entropy_is_what_it_is_by_hand() -> None:
    assert entropy([]) == entropy([7]) == entropy([7, 0]) == 0
    assert entropy([5, 5]) == 1
    assert entropy([1, 1, 1, 1]) == 2
    assert entropy([2, 1, 1]) == 1.5
    assert entropy([1, 3]) == pytest.approx(0.8112781)


def test_the_bound_is_where_and_by_how_much() -> None:
    # A quarter of 16 values: 16 * 0.8112781 bits. Differences 1, 1, -1, 300: 4 * 1.5 bits.
    old = np.full(16, 5, np.int16)
    new = old.copy()
    new[[0, 3, 7, 15]] += np.array([1, 1, -1, 300], np.int16)
    changes = Changes()
    changes.add(old[:8].view(np.uint8), new[:8].view(np.uint8), 2)
    changes.add(old[8:].view(np.uint8), new[8:].view(np.uint8), 2)
    assert (changes.values, changes.changed) == (16, 4)
    assert changes.differences == Counter({1: 2, -1: 1, 300: 1})
    assert changes.bound_bytes == pytest.approx((16 * 0.8112781 + 4 * 1.5) / 8)


def test_nothing_and_everything_the_same_way_take_no_bytes() -> None:
    old = np.arange(8, dtype=np.int32)
    for new in (old, old + 3):
        changes = Changes()
        changes.add(old.view(np.uint8), new.view(np.uint8), 4)
        assert changes.bound_bytes == 0
    assert Changes().bound_bytes == 0


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_differences_wrap_around_at_the_width_of_the_element(width: int) -> None:
    dtype = np.dtype(f"i{width}")
    most = np.iinfo(dtype).max
    old, new = np.array([most, 0], dtype), np.array([np.iinfo(dtype).min, -1], dtype)
    changes = Changes()
    changes.add(old.view(np.uint8), new.view(np.uint8), width)
    assert changes.differences == Counter({1: 1, -1: 1})


# --- the weights ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    directories = {case.name: tmp_path_factory.mktemp("pair") for case in CASES}
    return {case.name: Maker().make(case, 1, directories[case.name]) for case in CASES}


def test_cases_change_what_they_say(pairs: dict[str, Pair]) -> None:
    olds = {name: pair.old.read_bytes() for name, pair in pairs.items()}
    assert len(set(olds.values())) == 1
    for case in (FEW, MANY):
        pair = pairs[case.name]
        assert pair.changed / pair.values == pytest.approx(case.density, rel=0.05)
    adamw = pairs[ADAMW.name]
    assert 0.005 < adamw.changed / adamw.values < 0.1
    for pair in pairs.values():
        assert (len(pair.places), len(pair.checksums), pair.nbytes) == (310, 310, 2 * pair.values)
        assert 0 < pair.bound_bytes < pair.nbytes / 10


def test_a_move_is_one_step_of_the_bits_either_way() -> None:
    values = np.full(10_000, 7, np.uint16)
    move(values, 0.5, np.random.default_rng(0))
    assert set(values.tolist()) == {6, 7, 8}
    again = np.full(10_000, 7, np.uint16)
    move(again, 0.5, np.random.default_rng(0))
    assert np.array_equal(values, again)


# --- both sides -------------------------------------------------------------------------------------------------------


def sides(pair: Pair, directory: Path, make: object = Baseline) -> Sides:
    return Sides("x", make, pair, Places(directory / "mapped", directory / "payloads"), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CODECS)
def test_every_operation_of_every_codec_is_right(name: str, pairs: dict[str, Pair], tmp_path: Path) -> None:
    for number, pair in enumerate(pairs.values()):
        directory = tmp_path / str(number)
        directory.mkdir()
        one = sides(pair, directory, CODECS[name])
        made = one.encode()
        one.verify()
        assert made.wire
        assert pair.bound_bytes < made.wire
        one.save()
        other = sides(pair, directory, CODECS[name])
        other.load()
        for operation in (other.apply, other.apply_mapped, other.apply, other.encode):
            took = operation()
            other.verify()
            assert took.seconds > 0
            assert (took.flush is not None) is (operation == other.apply_mapped)
        assert other.encode().wire == made.wire
        other.apply_mapped()
        assert all(
            same(np.fromfile(directory / "mapped", np.uint8)[place], np.fromfile(pair.new, np.uint8)[place])
            for place in pair.places[::100]
        )
        one.close()
        other.close()


@pytest.mark.parametrize("operation", ["encode", "apply", "apply_mapped"])
def test_one_wrong_byte_is_found(operation: str, pairs: dict[str, Pair], tmp_path: Path) -> None:
    one = sides(pairs[FEW.name], tmp_path)
    one.encode()
    getattr(one, operation)()
    one.verify()
    place = one._pair.places[200]
    one._changed[place.stop - 1] ^= 1
    with pytest.raises(BenchFailed, match="x: tensor 200 is not what it should be, bit by bit"):
        one.verify()
    one._changed[place.stop - 1] ^= 1
    one.verify()
    one._checksums = ["0" * 32, *one._checksums[1:]]
    with pytest.raises(BenchFailed, match="x: tensor 0 has checksum 0000"):
        one.verify()
    one.close()


class Lying(Baseline):
    """Says the right checksum of something else."""

    def apply(self, payload: bytes | None, tensor: Bytes) -> str:
        checksum = super().apply(payload, tensor)
        tensor[-1] ^= 1
        return checksum


def test_the_right_checksum_of_wrong_bytes_is_not_believed(pairs: dict[str, Pair], tmp_path: Path) -> None:
    one = sides(pairs[FEW.name], tmp_path, Lying)
    one.encode()
    one.verify()
    one.apply()
    with pytest.raises(BenchFailed, match="is not what it should be"):
        one.verify()
    one.close()


def test_an_unchanged_tensor_has_no_payload_of_ours_and_its_checksum_all_the_same() -> None:
    tensor = np.arange(64, dtype=np.uint8)
    codecs: list[Codec] = [Ours("sparse"), Ours("xor"), Ours("overwrite"), Baseline()]
    for codec in codecs:
        payload, checksum = codec.encode(tensor.copy(), tensor)
        assert (payload is None) is isinstance(codec, Ours)
        assert codec.apply(payload, tensor) == checksum


def test_limits_touch_all_bytes(pairs: dict[str, Pair]) -> None:
    limits = Limits(pairs[FEW.name], 3)
    limits._copy[:] = 0
    assert limits.copy() > 0
    assert np.array_equal(limits._copy, limits._bytes)
    assert limits.hash() > 0
    limits.close()


def test_arrays_are_the_same_only_in_every_byte() -> None:
    one = np.zeros((4 << 20) + 1, np.uint8)
    other = one.copy()
    assert same(one, other)
    assert not same(one, other[:-1])
    other[-1] = 1
    assert not same(one, other)


# --- the numbers ------------------------------------------------------------------------------------------------------

NBYTES = 1_000_000_000


def run_of(wire: int = 102, memory: int = 30_000_000) -> list[Measurement]:
    """Sparse takes 1 s of everything, xor 4 s; the baseline 4 s in one process and 8 s in the other."""
    found: list[Measurement] = []
    peers = {"sparse": 1.0, "xor": 4.0, process_of(BASELINE, 0): 8.0, process_of(BASELINE, 1): 4.0}
    for case in CASES:
        for peer, seconds in peers.items():
            for operation in (ENCODE, APPLY, MAPPED, FLUSH):
                items = measured(peer, operation, [seconds, seconds, 9 * seconds], case.name, NBYTES)
                delta = {"values": 100_000_000, "changed": 1_000_000, "wire": wire * 10_000, "bound": 1_000_000}
                found += (
                    [msgspec.structs.replace(item, delta=delta) for item in items] if operation == ENCODE else items
                )
            for operation, extra in ((ENCODE, memory), (APPLY, 1)):
                (item,) = measured(peer, memory_of(operation), [0.0], case.name, NBYTES)
                found.append(msgspec.structs.replace(item, seconds=None, extra_bytes=extra))
        for limit in (MEMCPY, HASH):
            found += measured(limit, LIMIT, [0.5], case.name, NBYTES)
    for operation in (PUBLISH, MATERIALIZE, FIRST_COPY):
        found += measured("sparse", operation, [2.0], FEW.name, NBYTES)
    return found


def of(found: list[Result], variant: str, operation: str, what: str = "x the baseline") -> Result:
    (result,) = [each for each in found if (each.variant, each.operation, each.what) == (variant, operation, what)]
    return result


def test_every_target_is_there_and_the_fastest_process_of_the_baseline_counts() -> None:
    found = delta_targets.results(run_of())
    assert len(found) == 19
    assert {each.variant for each in found} == {case.name for case in CASES}
    encode = of(found, FEW.name, "sparse encode")
    assert (encode.wanted, encode.found.median, encode.met) == (3.0, 4.0, True)
    assert of(found, MANY.name, "sparse encode").wanted == 4.0
    assert of(found, FEW.name, "sparse apply, mapped").wanted == 2.0
    assert of(found, ADAMW.name, "xor apply").found.median == 1.0
    assert all(each.met for each in found)


@pytest.mark.parametrize(("wire", "few", "adamw"), [(103, True, True), (104, False, True), (106, False, False)])
def test_the_bound_is_nearly_reached_or_not(wire: int, few: bool, adamw: bool) -> None:
    found = delta_targets.results(run_of(wire=wire))
    assert of(found, FEW.name, "sparse", "wire, of the bound").met is few
    assert of(found, ADAMW.name, "sparse", "wire, of the bound").met is adamw


@pytest.mark.parametrize(("memory", "sparse", "xor"), [(32, True, True), (33, False, True), (65, False, False)])
def test_memory_is_the_most_of_both_ways(memory: int, sparse: bool, xor: bool) -> None:
    found = delta_targets.results(run_of(memory=memory * 1_000_000))
    assert of(found, FEW.name, "sparse", "extra memory at the peak, MB").met is sparse
    for case in CASES:
        assert of(found, case.name, "xor", "extra memory at the peak, MB").met is xor


def test_the_spread_is_that_of_the_peer() -> None:
    found = of(delta_targets.results(run_of()), FEW.name, "sparse apply").found
    assert found == pytest.approx((4.0, 4 / 5, 4.0))


def test_a_run_without_the_baseline_has_targets_of_size_only() -> None:
    run = [item for item in run_of() if not item.peer.startswith(BASELINE)]
    assert {each.what for each in delta_targets.results(run)} == {"wire, of the bound", "extra memory at the peak, MB"}


def test_the_tables_say_speed_size_and_memory() -> None:
    run = run_of()
    text = delta_report.text(run, delta_targets.results(run))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    sparse = next(cells for cells in lines if cells[0] == "sparse")
    assert sparse[1:4] == ["1000 (1000 to 5000)", "1.00", "4.00"]
    assert sparse[-3:] == ["1.02", "1.020", "30.0"]
    baseline = next(cells for cells in lines if cells[0] == f"{BASELINE} (best process)")
    assert baseline[1:4] == ["4000 (4000 to 20000)", "0.25", ""]
    assert "1 % of 100 million values changed" in text
    assert "memcpy 500 (500 to 500) ms, 2.00 GB/s; xxh3-128" in text
    assert ["sparse", *["2000 (2000 to 2000)", "0.50"] * 3] in lines
    assert "2 fresh processes of each" in text
    assert "19 of 19 met" in text


def test_the_picture_is_drawn_of_whatever_was_measured(tmp_path: Path) -> None:
    for number, run in enumerate((run_of(), measured("sparse", ENCODE, [1.0], FEW.name, NBYTES))):
        directory = tmp_path / str(number)
        directory.mkdir()
        paths = delta_plot.draw(run, directory)
        assert [path.name for path in paths] == ["deltas.png", "deltas.svg"]
        assert paths[0].read_bytes().startswith(b"\x89PNG")


def test_lines_of_before_there_were_deltas_can_be_read() -> None:
    (item,) = measured("ours", "put", [1.0])
    line = msgspec.json.decode(msgspec.json.encode(item))
    del line["delta"]
    assert msgspec.convert(line, Measurement) == item


def test_the_document_has_a_place_for_the_table() -> None:
    markdown.check_document(ROOT / "docs/weight-transfer.md", "deltas")
