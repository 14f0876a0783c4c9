"""What `bench weights` makes of flags and measurements, and that its weights are what they should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")

from benchmarks.measurements import Measurement
from benchmarks.weights import model, report
from benchmarks.weights.command import _round
from benchmarks.weights.settings import Case, Settings, resolve
from benchmarks.weights.trainer import BROADCAST, P2P
from benchmarks.weights.turns import PROVEN, RAW_BROADCAST, RAW_WRITES
from miles_plugin.bench_commands import bench_parser
from miles_plugin.weight_transfer.layout import Layout
from mooncake_store import ConfigError
from tests.unit.benchmarks.made import measured

CASE = "1 engine"
LOAD = {"bucket": 512 << 20}


def settings(*flags: str) -> Settings:
    return resolve(bench_parser().parse_args(["weights", *flags]))


def test_a_run_without_flags_is_one_engine_as_the_job_would_update_it() -> None:
    found = settings()
    assert found.cases == (Case(1, 1, 1),)
    assert (found.nbytes, found.bucket_bytes, found.workers) == (1_200_000_000, 512 << 20, 4)
    assert found.load(found.cases[0])["what"] == "full"


def test_of_several_numbers_every_combination_is_measured() -> None:
    names = [case.name for case in settings("--engines", "1", "2", "--tp", "2", "--ranks", "1", "2").cases]
    assert names == [
        "1 engine, tp 2", "1 engine, tp 2, 2 trainer ranks", "2 engines, tp 2", "2 engines, tp 2, 2 trainer ranks",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engines", "0"], "--engines 0: allowed is a whole number of at least 1"),
        (["--ranks", "1", "-1"], "--ranks -1: allowed is a whole number of at least 1"),
        (["--tp", "3"], "--tp 3: allowed are 1, 2, 4, 8"),
        (["--repeats", "0"], "--repeats 0: allowed is a whole number of at least 1"),
        (["--warmup", "-1"], "--warmup -1: allowed is a whole number of at least 0"),
        (["--size", "big"], "--size big: .*cannot be read"),
        (["--bucket", "0"], "--bucket 0: allowed is at least one byte"),
        (["--size", "99999gb", "--engines", "2"], "--size: 2 engines would take .* of memory, and there are"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_what_is_allowed(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*flags)


# --- the model --------------------------------------------------------------------------------------------------------


def test_the_default_model_is_a_qwen3_of_about_the_size_asked_for() -> None:
    config = model.config_of(1_200_000_000)
    assert model.size_of(config) == pytest.approx(1_200_000_000, rel=0.02)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (1024, 128, 148 * 1024)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_model_of_any_size_can_be_shared_out(tp: int) -> None:
    for nbytes in (1, 20_000_000):
        assert Layout(model.config_of(nbytes), tp, model.DTYPE).parameters


def test_no_byte_stays_the_same_from_turn_to_turn_and_all_ranks_agree() -> None:
    one, other = (model.Weights(model.config_of(1)) for _ in range(2))
    seen = []
    for _ in range(5):
        one.change()
        other.change()
        tensors = [tensor.view(-1).view(model.torch.uint8).numpy().copy() for _, tensor in one()]
        assert all(
            np.array_equal(mine, tensor.view(-1).view(model.torch.uint8).numpy())
            for mine, (_, tensor) in zip(tensors, other(), strict=True)
        )
        seen.append(np.concatenate(tensors))
    assert len(seen[0]) == one.nbytes == model.size_of(model.config_of(1))
    for first in range(len(seen)):
        for second in range(first):
            assert not np.any(seen[first] == seen[second])


# --- the numbers ------------------------------------------------------------------------------------------------------


def run_of(p2p: float, raw: tuple[float, float]) -> list[Measurement]:
    """Three rounds, in the last of which everything takes twice as long."""

    def times(peer: str, operation: str, seconds: float) -> list[Measurement]:
        return measured(peer, operation, [seconds, seconds, 2 * seconds], CASE, 1_000_000_000, LOAD)

    found = []
    for mode, seconds in ((BROADCAST, 2.0), (P2P, p2p)):
        for name, proof in ((mode, 0.0), (PROVEN[mode], 0.25)):
            for phase in report.PHASES:
                value = {"transfer": seconds, "converge": seconds + 0.1, "verify": proof}.get(phase, 0.01)
                found += times(name, phase, value)
    for name, seconds in zip([RAW_BROADCAST, *RAW_WRITES.values()], [0.5, *raw], strict=True):
        found += times(name, "transfer", seconds)
    return found


@pytest.mark.parametrize(
    ("p2p", "raw", "of_raw", "met"), [(1.0, (2.0, 0.95), 0.95, True), (1.0, (0.8, 0.95), 0.8, False)]
)
def test_p2p_is_compared_with_the_faster_raw_write_round_by_round(
    p2p: float, raw: tuple[float, float], of_raw: float, met: bool
) -> None:
    (result,) = report.results(run_of(p2p, raw))
    assert (result.variant, result.met) == (CASE, met)
    assert result.found == pytest.approx((of_raw, of_raw, of_raw))


def test_the_tables_say_speed_limit_and_proof() -> None:
    found = run_of(1.0, (0.8, 0.95))
    text = report.text(found, report.results(found))
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in text.splitlines() if line.startswith("| ")}
    first = text[: text.index("| phases")]
    (p2p,) = [line for line in first.splitlines() if line.startswith("| p2p ")]
    cells = [cell.strip() for cell in p2p.split("|")[2:-1]]
    assert cells[0].startswith("1100 (")
    assert cells[2] == "1.00"
    assert cells[3].startswith("0.800 (")
    assert cells[4].startswith("250 (")
    assert "raw write, one entry" in rows
    assert "p2p, proven" not in first
    assert [cell.strip() for cell in rows["phases, ms"]] == list(report.PHASES)
    assert "0 of 1 met" in text


def test_a_run_without_limits_has_no_target() -> None:
    found = [item for item in run_of(1.0, (1.0, 1.0)) if not item.peer.startswith("raw")]
    assert report.results(found) == []
    assert "Target" not in report.text(found, [])


# --- a round ----------------------------------------------------------------------------------------------------------


def test_another_one_begins_each_round_and_warm_ups_are_not_recorded() -> None:
    taken: list[str] = []
    added: list[dict[str, Any]] = []

    def turn(name: str) -> dict[str, float]:
        taken.append(name)
        return {"transfer": 1.0}

    class Running:
        nbytes = 5
        turns = {name: lambda name=name: turn(name) for name in "abc"}  # noqa: RUF012

    class Recorder:
        add = staticmethod(lambda **item: added.append(item))

    run = replace(settings(), warmup=1)
    for number in (-1, 0, 1):
        _round(Running(), run, run.cases[0], number, Recorder())  # type: ignore[arg-type]
    assert "".join(taken) == "cab" + "abc" + "bca"
    assert [(item["peer"], item["round"], item["bytes"]) for item in added][:2] == [("a", 0, 5), ("b", 0, 5)]
    assert len(added) == 6
