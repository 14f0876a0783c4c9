"""A mixture-of-experts policy: SGLang serves it and says how it routed, trainers learn it, updates reach it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.launch import EngineSpec, RunningEngine, start_engines
from miles_plugin.engines.routed_experts import decode, read_routing
from miles_plugin.weight_transfer.sources import full_parameters
from mooncake_store.process import free_ports
from tests.integration.plugin import test_trainer
from tests.integration.plugin.conftest import make_checkpoint
from tests.integration.plugin.test_sglang_cpu import GREEDY, PROMPTS, ROUNDING
from tests.weight_updates import Versions, broadcasting

pytestmark = pytest.mark.integration
EXPERTS = 8


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("moe"), seed=0, num_experts=EXPERTS)


@pytest.fixture(scope="module")
def moe_server(moe_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    log = tmp_path_factory.mktemp("sglang") / "sglang.log"
    (running,) = start_engines([EngineSpec(moe_checkpoint, "127.0.0.1", (), 0, log, return_routed_experts=True)])
    yield running
    running.stop()


def gaps(checkpoint: Path, prompts: list[list[int]], responses: list[dict[str, Any]]) -> tuple[float, float, float]:
    """How far the engine is from the Hugging Face model of `checkpoint` on the same tokens, in nats; the largest of

    - a greedy token's log-probability against the engine's,
    - and against the most likely token's,
    - the log-probability of a chosen expert below that of the least likely expert which that model would choose
      (0 when both choose the same set).

    The model replays the engine's choice of experts: where two experts tie, rounding (bfloat16) decides, and from
    there on another expert would compute another token. With the choice replayed every distance is rounding.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    largest = [0.0, 0.0, 0.0]
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = prompt + response["output_ids"]
        experts = decode(response["meta_info"], len(tokens), read_routing(checkpoint))
        assert experts.shape == (len(tokens) - 1, 2, 2)
        assert np.all(experts[..., 0] != experts[..., 1])
        logits, routing = replay(model, tokens[:-1], experts)
        every = torch.log_softmax(logits, -1)[len(prompt) - 1 :]
        chosen = every.gather(-1, torch.tensor(response["output_ids"])[:, None]).squeeze(-1)
        engine = torch.tensor([entry[0] for entry in response["meta_info"]["output_token_logprobs"]])
        distances = ((chosen - engine).abs(), every.max(-1).values - chosen, routing)
        largest = [max(so_far, each.max().item()) for so_far, each in zip(largest, distances, strict=True)]
    return largest[0], largest[1], largest[2]


@torch.no_grad()
def replay(model: Any, tokens: list[int], experts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [t, vocabulary] of the model with `experts` [t, layers, 2] chosen for it, and by how much the less
    likely of those experts is below the second of its own choice, log-probabilities, [layers, t].
    """
    below: list[torch.Tensor] = []

    def choose(_router: object, _arguments: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        chosen = torch.tensor(experts[:, len(below)], dtype=torch.int64)
        log_probs = output[0].log_softmax(-1)
        below.append(log_probs.topk(2).values[:, 1] - log_probs.gather(-1, chosen).min(-1).values)
        return output[0], log_probs.gather(-1, chosen).softmax(-1), chosen

    handles = [layer.mlp.gate.register_forward_hook(choose) for layer in model.model.layers]
    logits = model(torch.tensor([tokens])).logits[0]
    for handle in handles:
        handle.remove()
    return logits, torch.stack(below)


def test_the_engine_routes_and_generates_as_hugging_face_does(
    moe_server: RunningEngine, moe_checkpoint: Path, tmp_path: Path
) -> None:
    responses = moe_server.engine.generate(PROMPTS, GREEDY, return_routed_experts=True)
    assert max(gaps(moe_checkpoint, PROMPTS, responses)) < ROUNDING
    other = make_checkpoint(tmp_path, seed=1, num_experts=EXPERTS)
    assert min(gaps(other, PROMPTS, responses)) > 5 * ROUNDING, "the comparison tells models apart"


def test_experts_come_for_every_token_also_of_cached_prefixes_and_stopped_responses(
    moe_server: RunningEngine, moe_checkpoint: Path
) -> None:
    prompt = list(range(40, 80))
    (first,) = moe_server.engine.generate([prompt], GREEDY, return_routed_experts=True)
    longer = [prompt + first["output_ids"] + [50, 60, 70]]
    cached = moe_server.engine.generate(longer, GREEDY, return_routed_experts=True)
    assert cached[0]["meta_info"]["cached_tokens"] >= len(prompt)
    assert max(gaps(moe_checkpoint, longer, cached)) < ROUNDING
    until = {"max_new_tokens": 6, "temperature": 0.0, "stop_token_ids": [first["output_ids"][2]]}
    stopped = moe_server.engine.generate([prompt], until, return_routed_experts=True)
    assert stopped[0]["output_ids"] == first["output_ids"][:3]
    assert max(gaps(moe_checkpoint, [prompt], stopped)) < ROUNDING
    (unasked,) = moe_server.engine.generate([prompt], GREEDY)
    assert unasked["meta_info"].get("routed_experts") is None


def test_a_broadcast_update_replaces_every_expert_and_the_router(
    moe_server: RunningEngine, moe_checkpoint: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1, num_experts=EXPERTS)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    updater = broadcasting(Versions(first=1))
    try:
        for source in (other, moe_checkpoint):
            model = AutoModelForCausalLM.from_pretrained(source)
            update = updater.update(
                lambda model=model: full_parameters(model, torch.bfloat16), [EngineAddress(moe_server.engine.url)]
            )
            assert update.nbytes == sum(parameter.nbytes for parameter in model.parameters())
            responses = moe_server.engine.generate(PROMPTS, GREEDY, return_routed_experts=True)
            assert max(gaps(source, PROMPTS, responses)) < ROUNDING
    finally:
        updater.close()
        torch.distributed.destroy_process_group()


def test_two_sharded_ranks_learn_what_one_plain_process_does(moe_checkpoint: Path, tmp_path: Path) -> None:
    arguments = [*test_trainer.ARGUMENTS, "--micro-batch-size", "3"]
    (port,) = free_ports(1)
    mp.spawn(test_trainer.one_rank, args=(arguments, moe_checkpoint, port, 2, tmp_path), nprocs=2)
    norm, expected = test_trainer.plain_training(load_config(arguments), moe_checkpoint, rollouts=2)
    (metrics, first), (_, second) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    before = dict(AutoModelForCausalLM.from_pretrained(moe_checkpoint, dtype=torch.float32).named_parameters())
    for name, value in expected.items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], value, atol=2e-5), name
    for learned in ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        name = f"model.layers.0.{learned}"
        assert not torch.allclose(before[name], expected[name], atol=1e-4), name
