"""The shipped two-turn example and the batched path on a real engine: tokens, probabilities and masks agree."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_plugin.arguments import TrainConfig
from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.fleet import Fleet
from miles_plugin.engines.launch import RunningEngine
from miles_plugin.rollout.batch import to_columns
from miles_plugin.rollout.generate import Sampler
from miles_plugin.rollout.sample import Sample
from miles_plugin.rollout.task import Task
from miles_plugin.training.trainer import pad
from mooncake_store.errors import ConfigError

pytestmark = pytest.mark.integration
EXAMPLE = ["--config", "examples/two_turn_tool/config.yaml", "--held-out-size", "8"]
BATCHED = ["--task", "chain_sum", "--held-out-size", "8", "--rollout-max-response-len", "5"]
# Log-probabilities of a bfloat16 engine and a float32 model differ by rounding.
ROUNDING = 0.1


@pytest.fixture(params=[EXAMPLE, BATCHED], ids=["two turns", "batched"])
def config(request: pytest.FixtureRequest) -> TrainConfig:
    return load_config(request.param)


@pytest.fixture
def task(config: TrainConfig) -> Task:
    return Task(config.task, config.task_kwargs, config.held_out_size, config.seed)


@pytest.fixture
def sampler(config: TrainConfig, task: Task, server: RunningEngine, checkpoint: Path) -> Iterator[Sampler]:
    made = Sampler(config, task, checkpoint, Fleet([server]))
    yield made
    made.close()


def test_what_comes_back_is_what_the_policy_computed(
    sampler: Sampler, config: TrainConfig, task: Task, checkpoint: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    samples = sampler.sample(list(islice(task.rollout(), 8)), 3, 4, temperature=1.0)
    assert [(sample.index, sample.group_index) for sample in samples] == [(12 + i, 3 + i // 4) for i in range(32)]
    called = 0
    for sample in samples:
        assert sample.rollout_log_probs is not None
        assert sample.reward is not None
        assert sample.weight_versions == ["default"]
        prompt = tokenizer.encode(sample.prompt, add_special_tokens=False)
        assert sample.tokens[: len(prompt)] == prompt
        assert len(sample.tokens) == len(prompt) + sample.response_length
        mask = sample.effective_loss_mask
        called += 0 in mask
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens[len(prompt) :])[:, None])[:, 0]
        for on, got, reference in zip(mask, sample.rollout_log_probs, expected.tolist(), strict=True):
            assert abs(got - reference) < ROUNDING if on else got == 0.0
    assert (called > 0) == (config.custom_generate_function_path is not None)
    columns = to_columns(samples, 0)
    padded = pad(columns, range(len(samples)), torch.device("cpu"))
    assert padded.response_mask.sum(-1).int().tolist() == columns["rollout_mask_sums"]
    for row, sample in enumerate(samples):
        chosen = padded.tokens[row, 1:][padded.response_mask[row].bool()].tolist()
        response = sample.tokens[-sample.response_length :]
        assert chosen == [token for token, on in zip(response, sample.effective_loss_mask, strict=True) if on]


def test_greedy_evaluation_repeats_itself(sampler: Sampler, task: Task) -> None:
    first, second = (sampler.sample(task.held_out, 0, 1, temperature=0.0, evaluation=True) for _ in range(2))
    assert [sample.tokens for sample in first] == [sample.tokens for sample in second]
    assert all(sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) for sample in first)


def test_a_prompt_longer_than_the_context_is_named(sampler: Sampler, task: Task) -> None:
    too_long = replace(task.held_out[0], prompt="Calculate 1 + " * 1000, origin="prompts.jsonl, line 7")
    with pytest.raises(ConfigError, match=r"^prompts\.jsonl, line 7: a prompt of 14000 tokens .* context of 1024 "):
        sampler.sample([task.held_out[1], too_long], 0, 1, temperature=1.0)
