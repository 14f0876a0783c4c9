"""Two FSDP2 ranks learn exactly what one plain process learns from the same batch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from miles_plugin.arguments import TrainConfig
from miles_plugin.arguments_sources import load_config
from miles_plugin.rollout.batch import deal_groups, to_columns
from miles_plugin.training.grpo import PaddedBatch, clipped_policy_loss, next_token_log_probs
from miles_plugin.training.trainer import Trainer, pad
from mooncake_store.process import free_ports
from tests.unit.plugin.test_rollout import make_samples

pytestmark = pytest.mark.integration
ARGUMENTS = ["--num-steps-per-rollout", "2", "--lr", "1e-3", "--rollout-temperature", "0.8", "--clip-grad", "0.05"]


def shards(ranks: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    samples = make_samples(groups=8, size=4)
    for sample in samples:
        sample.tokens = rng.integers(2, 258, len(sample.tokens) + int(rng.integers(0, 9))).tolist()
        sample.rollout_log_probs = (-5 + rng.normal(0, 0.2, sample.response_length)).tolist()
        sample.advantage = float(rng.normal())
    return [to_columns(samples, 0, rows) for rows in deal_groups(samples, ranks)]


def plain_training(config: TrainConfig, checkpoint: Path, rollouts: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The same steps in one process, with neither sharding nor micro-batches: (last gradient norm, weights)."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), weight_decay=config.weight_decay
    )

    def log_probs_of(part: PaddedBatch) -> torch.Tensor:
        logits = model(part.tokens, attention_mask=part.attention_mask, use_cache=False).logits
        return next_token_log_probs(logits, part.tokens, config.rollout_temperature)

    for _ in range(rollouts):
        steps: list[list[tuple[PaddedBatch, torch.Tensor | float]]] = []
        for step in range(config.num_steps_per_rollout):
            steps.append([])
            for shard in shards(2):  # each rank takes its own half of its shard in each step
                half = len(shard["tokens"]) // config.num_steps_per_rollout
                part = pad(shard, range(step * half, (step + 1) * half), torch.device("cpu"))
                weights: torch.Tensor | float = 1.0
                if config.use_tis:
                    old = log_probs_of(part).detach()
                    weights = torch.minimum((old - part.sampled_log_probs).exp(), torch.tensor(config.tis_clip))
                    part = replace(part, old_log_probs=old)
                steps[-1].append((part, weights))
        for parts in steps:
            tokens = sum(part.response_mask.sum() for part, _ in parts)
            for part, weights in parts:
                log_probs = log_probs_of(part)
                loss, _ = clipped_policy_loss(log_probs, part, weights, config.eps_clip, config.eps_clip_high)
                (loss / tokens).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
    return norm.item(), {name: parameter.detach() for name, parameter in model.named_parameters()}


def one_rank(rank: int, arguments: list[str], checkpoint: Path, port: int, rollouts: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    trainer = Trainer(load_config(arguments), checkpoint, "cpu")
    metrics: Mapping[str, float] = {}
    for _ in range(rollouts):
        metrics = trainer.train(shards(2)[rank])
    weights = {name: parameter.full_tensor() for name, parameter in trainer.model.named_parameters()}
    torch.save((dict(metrics), weights), out / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("micro_batch_size", "more"), [(3, []), (64, ["--use-tis"]), (64, ["--use-tis", "--num-steps-per-rollout", "1"])]
)
def test_two_sharded_ranks_equal_one_plain_process(
    micro_batch_size: int, more: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    arguments = [*ARGUMENTS, *more, "--micro-batch-size", str(micro_batch_size)]
    (port,) = free_ports(1)
    mp.spawn(one_rank, args=(arguments, checkpoint, port, 3, tmp_path), nprocs=2)
    norm, expected = plain_training(load_config(arguments), checkpoint, rollouts=3)
    (first_metrics, first), (second_metrics, second) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert first_metrics == second_metrics
    assert first_metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert norm > 0.05, "the gradient must be large enough for its clipping to matter"
    assert first_metrics["clip_fraction"] < 1
    assert (first_metrics["clip_fraction"] == 0) == (len(more) > 1), (
        "the one step from the old policy is not yet a step"
    )
    assert set(first) == set(expected)
    before = dict(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).named_parameters())
    for name, value in expected.items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], value, atol=2e-5), name
    assert any(not torch.allclose(before[name], value, atol=1e-4) for name, value in expected.items())
