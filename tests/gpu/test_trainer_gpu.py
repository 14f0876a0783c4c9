"""The trainer on one GPU: it learns what a CPU learns, the same every time, and goes on from what it saved.

Run `python -m pytest tests/gpu` on a machine with an NVIDIA GPU; without one these are skipped. Neither SGLang, Ray nor
Mooncake is needed.
"""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.training.policy import WEIGHT_DTYPE  # noqa: E402
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402
from miles_plugin.training.trainer import Trainer  # noqa: E402
from miles_plugin.weight_transfer.sources import buckets, full_parameters  # noqa: E402
from mooncake_store.process import free_ports  # noqa: E402
from tests.integration.plugin.test_trainer import shards  # noqa: E402

pytestmark = pytest.mark.gpu
ARGUMENTS = ["--num-steps-per-rollout", "2", "--lr", "1e-3", "--num-rollout", "4", "--micro-batch-size", "5"]
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
BUCKET_BYTES = 64 << 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(build_model(64, 2, seed=0), build_tokenizer(), directory)
    return directory


def one_rank(_rank: int, device: str, checkpoint: Path, port: int, load: Path | None, todo: range, out: Path) -> None:
    """Train on rollouts `todo`, saving after the second; write what came of it to out/result.pt."""
    dist.init_process_group(BACKENDS[device], init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    trainer = Trainer(load_config(ARGUMENTS), checkpoint, device)
    if load is not None:
        trainer.load(load)
    metrics = {}
    for rollout_id in todo:
        torch.rand(1, device=device)  # something that depends on the RNG between the steps
        metrics[rollout_id] = trainer.train(shards(1, seed=rollout_id)[0])
        if rollout_id == 1:
            trainer.save(out / "state")
    sent = [
        (name, tensor.cpu())
        for bucket in buckets(full_parameters(trainer.model, WEIGHT_DTYPE), BUCKET_BYTES)
        for name, tensor in bucket
    ]
    weights = {name: parameter.full_tensor().cpu() for name, parameter in trainer.model.named_parameters()}
    random = torch.rand(4, device=device).cpu()
    torch.save({"metrics": metrics, "weights": weights, "random": random, "sent": sent}, out / "result.pt")
    dist.destroy_process_group()


def train(device: str, checkpoint: Path, load: Path | None, todo: range, out: Path) -> dict[str, Any]:
    out.mkdir()
    (port,) = free_ports(1)
    mp.spawn(one_rank, args=(device, checkpoint, port, load, todo, out), nprocs=1)
    result: dict[str, Any] = torch.load(out / "result.pt")
    return result


def assert_same(one: dict[str, Any], other: dict[str, Any], rollouts: range) -> None:
    assert [one["metrics"][number] for number in rollouts] == [other["metrics"][number] for number in rollouts]
    assert torch.equal(one["random"], other["random"])
    for name, value in one["weights"].items():
        assert torch.equal(value, other["weights"][name]), name


def test_training_on_a_gpu_is_bit_identical_also_after_a_resume(checkpoint: Path, tmp_path: Path) -> None:
    straight = train("cuda", checkpoint, None, range(4), tmp_path / "straight")
    assert_same(straight, train("cuda", checkpoint, None, range(4), tmp_path / "again"), range(4))
    resumed = train("cuda", checkpoint, tmp_path / "straight" / "state", range(2, 4), tmp_path / "resumed")
    assert_same(straight, resumed, range(2, 4))


def test_a_gpu_learns_what_a_cpu_learns(checkpoint: Path, tmp_path: Path) -> None:
    """Up to bfloat16, in which a GPU computes: each weight moved the same way, by about as much."""
    on_gpu = train("cuda", checkpoint, None, range(4), tmp_path / "gpu")
    on_cpu = train("cpu", checkpoint, None, range(4), tmp_path / "cpu")
    before = dict(build_model(64, 2, seed=0).named_parameters())
    moved = {
        where: torch.cat([(value - before[name].detach()).flatten() for name, value in result["weights"].items()])
        for where, result in (("gpu", on_gpu), ("cpu", on_cpu))
    }
    similarity = torch.cosine_similarity(moved["gpu"], moved["cpu"], dim=0).item()
    length = (moved["gpu"].norm() / moved["cpu"].norm()).item()
    assert moved["cpu"].norm() > 0
    assert similarity > 0.9
    assert 0.9 < length < 1.1
    for number, metrics in on_cpu["metrics"].items():
        assert on_gpu["metrics"][number]["loss"] == pytest.approx(metrics["loss"], rel=0.05, abs=0.02)


def test_what_is_sent_to_engines_is_the_weights_in_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    result = train("cuda", checkpoint, None, range(1), tmp_path / "out")
    sent = dict(result["sent"])
    assert len(sent) == len(result["sent"]), "no name is sent twice"
    assert set(sent) == set(result["weights"])
    for name, value in result["weights"].items():
        assert torch.equal(sent[name], value.to(WEIGHT_DTYPE)), name
