"""The supervised phase: stops where it is told to, is cached, and fails cleanly."""

from pathlib import Path

import pytest

from miles_plugin.arguments import TrainConfig
from miles_plugin.arguments_sources import load_config
from miles_plugin.training import warm_start
from miles_plugin.training.warm_start import WarmStartError, warm_started_checkpoint
from mooncake_store.errors import ConfigError

pytestmark = pytest.mark.integration
EASY = [
    "--task", "basic_arithmetic", "--held-out-size", "16", "--tiny-hidden-size", "32", "--tiny-num-layers", "1",
    "--task-kwargs", '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"], '
    '"allow_parentheses": false, "allow_negation": false}',
    "--warm-start-accuracy", "0.05", "--warm-start-batch-size", "64", "--rollout-max-response-len", "4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_validation_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "_VALIDATION_SIZE", 32)  # one-digit sums have few distinct questions


def config(cache: Path, *more: str) -> TrainConfig:
    return load_config([*EASY, "--cache-dir", str(cache), *more])


def test_it_stops_at_the_accuracy_and_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    made = warm_started_checkpoint(config(tmp_path), said.append)
    assert (made / "model.safetensors").exists()
    assert (made / "tokenizer.json").exists()
    assert "accuracy" in said[-1]

    def refuse(*_arguments: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(warm_start, "_train", refuse)
    assert warm_started_checkpoint(config(tmp_path), said.append) == made
    assert "cached" in said[-1]
    assert warm_started_checkpoint(config(tmp_path, "--lr", "0.5"), said.append) == made, "RL settings do not matter"
    for different in (
        ["--seed", "1"],
        ["--rollout-max-response-len", "5"],
        ["--warm-start-accuracy", "0.06"],
        ["--tiny-num-layers", "2"],
    ):
        with pytest.raises(AssertionError, match="trained again"):
            warm_started_checkpoint(config(tmp_path, *different), said.append)


def test_a_damaged_cache_is_replaced(tmp_path: Path) -> None:
    made = warm_started_checkpoint(config(tmp_path), lambda _line: None)
    weights = (made / "model.safetensors").read_bytes()
    for damage in ("{", None):
        (made / "model.safetensors").unlink()
        if damage is None:
            (made / "warm_start.json").unlink()
        else:
            (made / "warm_start.json").write_text(damage)
        assert warm_started_checkpoint(config(tmp_path), lambda _line: None) == made
        assert (made / "model.safetensors").read_bytes() == weights, "seeded"


def test_a_cache_that_cannot_be_written_is_named_before_any_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cache_dir="):
        warm_started_checkpoint(config(tmp_path / "file"), lambda _line: None)


def test_an_accuracy_out_of_reach_is_an_error_and_caches_nothing(tmp_path: Path) -> None:
    out_of_reach = config(tmp_path, "--warm-start-accuracy", "0.99", "--warm-start-max-steps", "20")
    with pytest.raises(WarmStartError, match="warm_start_max_steps=20"):
        warm_started_checkpoint(out_of_reach, lambda _line: None)
    assert not list(tmp_path.rglob("*.safetensors"))
