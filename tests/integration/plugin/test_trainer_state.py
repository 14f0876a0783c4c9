"""Training that was saved and goes on is bit for bit the training that never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles_plugin.arguments_sources import load_config
from miles_plugin.training.trainer import Trainer, learning_rate_factor
from mooncake_store.process import free_ports
from tests.integration.plugin.test_trainer import shards

pytestmark = pytest.mark.integration
ARGUMENTS = [
    "--num-steps-per-rollout", "2", "--lr", "1e-3", "--lr-warmup-iters", "3", "--lr-decay-style", "linear",
    "--weight-decay", "0.1", "--num-rollout", "4", "--micro-batch-size", "5",
]  # fmt: skip


CHANGED = ["--lr", "2e-3", "--adam-beta2", "0.9", "--weight-decay", "0"]


def one_rank(
    rank: int, ranks: int, checkpoint: Path, port: int, load: Path | None, todo: range, out: Path, more: list[str]
) -> None:
    """Train on rollouts `todo`, saving after the second; write what came of it to out/rank<n>.pt."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    trainer = Trainer(load_config([*ARGUMENTS, *more]), checkpoint, "cpu")
    if load is not None:
        trainer.load(load)
    (group,) = trainer._optimizer.param_groups
    settings = group["lr"], group["betas"], group["weight_decay"]
    metrics = {}
    for rollout_id in todo:
        torch.rand(1)  # something that depends on the RNG between the steps
        metrics[rollout_id] = trainer.train(shards(ranks, seed=rollout_id)[rank])
        if rollout_id == 1:
            trainer.save(out / "state")
    weights = {name: parameter.full_tensor() for name, parameter in trainer.model.named_parameters()}
    torch.save(
        {"metrics": metrics, "weights": weights, "random": torch.rand(4), "settings": settings}, out / f"rank{rank}.pt"
    )
    dist.destroy_process_group()


def train(
    ranks: int, checkpoint: Path, load: Path | None, todo: range, out: Path, more: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    out.mkdir()
    (port,) = free_ports(1)
    mp.spawn(one_rank, args=(ranks, checkpoint, port, load, todo, out, list(more)), nprocs=ranks)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(ranks)]


def test_a_resumed_trainer_is_bit_identical_also_on_another_number_of_ranks(checkpoint: Path, tmp_path: Path) -> None:
    straight = train(2, checkpoint, None, range(4), tmp_path / "straight")
    saved = tmp_path / "straight" / "state"
    resumed = train(2, checkpoint, saved, range(2, 4), tmp_path / "resumed")
    for before, after in zip(straight, resumed, strict=True):
        assert {number: before["metrics"][number] for number in (2, 3)} == after["metrics"]
        assert torch.equal(before["random"], after["random"]), "the RNG goes on too"
        for name, value in before["weights"].items():
            assert torch.equal(value, after["weights"][name]), name

    # Settings that may change between runs count from then on, and what was saved of them does not.
    changed = train(2, checkpoint, saved, range(2, 3), tmp_path / "changed", tuple(CHANGED))
    factor = learning_rate_factor(load_config([*ARGUMENTS, *CHANGED]), 4)
    assert changed[0]["settings"] == (2e-3 * factor, (0.9, 0.9), 0.0)
    assert resumed[0]["settings"] == (1e-3 * factor, (0.9, 0.95), 0.1)

    # One rank: the same weights and moments; sums are taken in another order, so equal only nearly.
    (alone,) = train(1, checkpoint, saved, range(2, 4), tmp_path / "alone")
    for name, value in straight[0]["weights"].items():
        assert torch.allclose(value, alone["weights"][name], atol=1e-4), name
