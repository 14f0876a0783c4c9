"""Stock SGLang on a CPU: it serves what Hugging Face computes, and takes new weights by broadcast."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.launch import EngineSpec, RunningEngine, start_engines
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.weight_transfer.sources import full_parameters
from tests.integration.plugin.conftest import make_checkpoint
from tests.weight_updates import Versions, broadcasting

pytestmark = pytest.mark.integration
PROMPTS = [[70 + i, 80, 90 + i, 100 + 3 * i] for i in range(8)]
GREEDY = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
ROUNDING = 0.15  # nats


def hugging_face_gap(checkpoint: Path, responses: list[dict[str, Any]]) -> tuple[float, float]:
    """Of the engine's greedy tokens, under the Hugging Face model of `checkpoint`: the largest distance of any
    log-probability from the engine's, and of any token from the most likely one. Both are rounding (bfloat16) when
    the engine serves that checkpoint, and several nats when it does not.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = torch.tensor(
        [prompt + response["output_ids"] for prompt, response in zip(PROMPTS, responses, strict=True)]
    )
    with torch.no_grad():
        every = torch.log_softmax(model(tokens).logits[:, 3:-1], -1)
    chosen = every.gather(-1, tokens[:, 4:, None]).squeeze(-1)
    engine = torch.tensor([[entry[0] for entry in r["meta_info"]["output_token_logprobs"]] for r in responses])
    return (chosen - engine).abs().max().item(), (every.max(-1).values - chosen).max().item()


def test_greedy_tokens_and_log_probs_are_those_of_hugging_face(
    server: RunningEngine, checkpoint: Path, tmp_path: Path
) -> None:
    responses = server.engine.generate(PROMPTS, GREEDY)
    assert max(hugging_face_gap(checkpoint, responses)) < ROUNDING
    assert min(hugging_face_gap(make_checkpoint(tmp_path, seed=1), responses)) > 10 * ROUNDING


def test_a_broadcast_update_serves_the_new_weights_under_the_new_version(
    server: RunningEngine, checkpoint: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    versions, url = Versions(first=7), server.engine.url
    updater = broadcasting(versions)
    try:
        for version, source in ((7, other), (8, checkpoint)):
            model = AutoModelForCausalLM.from_pretrained(source)
            update = updater.update(lambda model=model: full_parameters(model, torch.bfloat16), [EngineAddress(url)])
            assert update.nbytes == sum(parameter.nbytes for parameter in model.parameters())
            assert (update.version, update.confirmed, update.left) == (version, (url,), ())
            assert versions.events[-3:] == [
                ("allocate", version),
                ("announce", version),
                ("commit", version, (url,), ()),
            ]
            assert server.engine.weight_version() == str(version)
            responses = server.engine.generate(PROMPTS, GREEDY)
            assert max(hugging_face_gap(source, responses)) < ROUNDING
            for response in responses:
                assert [span["version"] for span in response["meta_info"]["weight_versions"]] == [str(version)]
    finally:
        updater.close()
        torch.distributed.destroy_process_group()


def test_wrong_requests_are_engine_errors(server: RunningEngine) -> None:
    with pytest.raises(EngineError, match="update_weights_from_distributed"):
        server.engine.receive_bucket(["x"], ["bfloat16"], [[1]], "no-such-group", 10)
    nobody = SGLangEngine("http://127.0.0.1:9")
    assert not nobody.ready()
    with pytest.raises(EngineError, match="no answer"):
        nobody.resume()


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="ended with status") as caught:
        start_engines([EngineSpec(tmp_path / "empty", "127.0.0.1", (), 0, tmp_path / "sglang.log")])
    assert str(tmp_path / "sglang.log") in str(caught.value)


def test_the_stand_ins_stay_in_their_own_processes() -> None:
    code = (
        "import importlib.util, miles_plugin.cli, miles_plugin.engines.launch, miles_plugin.rollout.manager, sys;"
        "assert not any('sglang_cpu' in name for name in sys.modules), 'stand-ins imported';"
        "assert importlib.util.find_spec('sgl_kernel') is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
