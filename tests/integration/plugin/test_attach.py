"""Engines that run already, against a real SGLang server: what it says of itself is enough to take or to refuse it."""

import socket
from pathlib import Path

import pytest

from miles_plugin import cli
from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.attach import attach, attached_engines
from miles_plugin.engines.differences import Expected
from miles_plugin.engines.launch import EngineSpec, RunningEngine, start_engines
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint
from mooncake_store.errors import ConfigError
from tests.integration.plugin.conftest import HIDDEN, LAYERS

pytestmark = pytest.mark.integration


def address_of(server: RunningEngine) -> str:
    return server.engine.url.removeprefix("http://")


def refusal(addresses: list[str], expected: Expected) -> str:
    with pytest.raises(ConfigError) as caught:
        attach(addresses, expected)
    return str(caught.value)


def test_a_server_of_the_policy_is_taken(server: RunningEngine, checkpoint: Path) -> None:
    address = address_of(server)
    config = load_config(["--rollout-external", "--rollout-external-engine-addrs", address])
    assert attached_engines(config, checkpoint) == [(server.engine.url, 1)]
    (engine,) = attach([address], Expected(checkpoint, 1, device="cpu"))
    assert (engine.ranks, engine.architecture, engine.compared) == (1, "Qwen3ForCausalLM", True)
    assert engine.version == "0.5.23"
    assert server.engine.weight_version() == "default", "asking changes nothing"


@pytest.mark.parametrize(("hidden", "layers"), [(2 * HIDDEN, LAYERS), (HIDDEN, LAYERS + 1)])
def test_a_server_of_another_model_is_named(server: RunningEngine, hidden: int, layers: int, tmp_path: Path) -> None:
    save_checkpoint(build_model(hidden, layers, 0), build_tokenizer(), tmp_path)
    message = refusal([address_of(server)], Expected(tmp_path, 1))
    differing = f"hidden_size={HIDDEN}" if hidden != HIDDEN else f"num_hidden_layers={LAYERS}"
    assert differing in message
    assert f"hf_checkpoint={tmp_path}" in message


def test_a_server_that_cannot_do_what_is_asked_is_told_everything_at_once(
    server: RunningEngine, checkpoint: Path
) -> None:
    expected = Expected(checkpoint, 2, mode="p2p", routed_experts=True)
    message = refusal([address_of(server)], expected)
    for words in (
        "tp_size=1, expected 2",
        "enable_return_routed_experts=False, expected True",
        "remote_instance_weight_loader_start_seed_via_transfer_engine=False, expected True",
    ):
        assert words in message
    assert "expected 1:" not in message


@pytest.mark.slow
def test_a_server_of_two_ranks_that_may_be_written_to_is_taken(checkpoint: Path, tmp_path: Path) -> None:
    spec = EngineSpec(
        checkpoint, "127.0.0.1", gpus=(), seed=0, log=tmp_path / "sglang.log", cpu_ranks=2, p2p_protocol="tcp"
    )
    (server,) = start_engines([spec])
    try:
        (engine,) = attach([address_of(server)], Expected(checkpoint, 2, mode="p2p"))
        assert engine.ranks == 2
        assert "tp_size=2, expected 1" in refusal([address_of(server)], Expected(checkpoint, 1))
    finally:
        server.stop()


def test_the_wrong_ones_among_several_are_named(server: RunningEngine, checkpoint: Path) -> None:
    good = address_of(server)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        alias = good.replace("127.0.0.1", "localhost")
        first, *lines = refusal([good, "127.0.0.1:9", mute, alias], Expected(checkpoint, 1)).splitlines()
    assert "3 of 4 engines cannot be used" in first
    assert {line.split(": ")[0].strip() for line in lines} == {"127.0.0.1:9", mute, alias}
    (of_alias,) = [line for line in lines if alias in line]
    assert of_alias.endswith(f"is the same engine as {good}; name it once")


def test_a_dry_run_lists_the_engines(
    server: RunningEngine, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--hf-checkpoint", str(checkpoint), "--report", str(tmp_path / "report")]
    engines = ["--rollout-external", "--rollout-external-engine-addrs", address_of(server)]
    assert cli.main(["train", "--config", "configs/local.yaml", "--dry-run", *where, *engines]) == 0
    printed = capsys.readouterr().out
    assert f"{server.engine.url} (SGLang 0.5.23, Qwen3ForCausalLM, tensor-parallel size 1)" in " ".join(printed.split())
    assert "SGLang engine" not in printed
