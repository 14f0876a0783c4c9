"""Trainer ranks in processes of their own: steps that all take together, and copies of weights that are compared."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402

from miles_plugin.training.tiny_policy import build_model  # noqa: E402
from miles_plugin.weight_transfer.ranks import RankFailed, Ranks  # noqa: E402
from miles_plugin.weight_transfer.sources import (  # noqa: E402
    CopiesDiffer,
    check_replicas,
    full_parameters,
    named_weights,
)
from mooncake_store.process import free_ports  # noqa: E402

pytestmark = pytest.mark.integration
# Within which ranks that wait for one that has ended or hangs give up.
PATIENCE = timedelta(seconds=10)


def one_rank(
    rank: int, size: int, port: int, timeout: timedelta, job: Callable[[int], dict[str, Any]], out: Path
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timeout)
    torch.save(job(rank), out / f"{rank}.pt")
    # Not destroyed: a rank of the group may have ended, and the others would wait for it.
    os._exit(0)


def on_ranks(
    size: int, job: Callable[[int], dict[str, Any]], out: Path, timeout: timedelta = timedelta(seconds=60)
) -> list[dict[str, Any] | None]:
    """What `job` returned on each rank; None of one that was killed."""
    (port,) = free_ports(1)
    context = mp.start_processes(one_rank, (size, port, timeout, job, out), size, join=False, start_method="spawn")
    try:
        for process in context.processes:
            process.join(120)
        assert {process.exitcode for process in context.processes} <= {0, -signal.SIGKILL}, "a rank failed or hangs"
    finally:
        for process in context.processes:
            process.kill()
    paths = [out / f"{rank}.pt" for rank in range(size)]
    return [torch.load(path) if path.exists() else None for path in paths]


def reason_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# Ranks that take steps


def take_steps(rank: int) -> dict[str, Any]:
    def fail(*ranks: int) -> int:
        if rank in ranks:
            raise ValueError(f"not on rank {rank}")
        return rank

    ranks = Ranks(dist.new_group(backend="gloo"))
    steps = {"add": lambda one, two: (rank, one + two), "fail": fail}
    seen: dict[str, Any] = {"size": ranks.size, "rank": ranks.rank}
    if rank > 0:
        for _ in range(2):  # as in two updates
            ranks.follow(steps)
        return seen
    seen["added"] = ranks.take(steps, "add", 2, 3)
    seen["follower"] = reason_of(lambda: ranks.take(steps, "fail", 2))
    seen["both"] = reason_of(lambda: ranks.take(steps, "fail", 1, 2))
    for name, failing in (("leader", (0,)), ("all", (0, 1, 2))):
        with pytest.raises(ValueError, match="not on rank 0"):
            ranks.take(steps, "fail", *failing)
        seen[name] = ranks.take(steps, "fail")
    ranks.dismiss()
    seen["again"] = ranks.take(steps, "add", [1], [2])
    ranks.dismiss()
    return seen


def test_all_ranks_take_the_steps_that_the_first_one_says(tmp_path: Path) -> None:
    first, *others = on_ranks(3, take_steps, tmp_path)
    assert first is not None
    assert others == [{"size": 3, "rank": 1}, {"size": 3, "rank": 2}], "dismissed, none of them raised"
    assert first["added"] == [(0, 5), (1, 5), (2, 5)]
    assert first["again"] == [(0, [1, 2]), (1, [1, 2]), (2, [1, 2])]
    assert first["follower"] == f"{RankFailed.__name__}: trainer rank 2, step fail: ValueError('not on rank 2')"
    assert "trainer rank 1, step fail" in first["both"]
    assert first["leader"] == first["all"] == [0, 1, 2], "who follows goes on, whoever failed"


def lose_a_rank(rank: int) -> dict[str, Any]:
    def end(how: str) -> int:
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while rank == 1 and not all((Path(os.environ["OUT"]) / f"{other}.pt").exists() for other in (0, 2)):
            time.sleep(0.1)  # hangs, as far as the others can tell
        return rank

    ranks = Ranks(dist.new_group(backend="gloo", timeout=PATIENCE))
    dist.barrier()  # rank 0 has the store by which the others meet, and is soon gone
    if rank > 0:
        return {"ended": reason_of(lambda: ranks.follow({"end": end}))}
    return {"ended": reason_of(lambda: ranks.take({"end": end}, "end", os.environ["LOST"]))}


@pytest.mark.parametrize("how", ["killed", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_ends_the_step_for_the_others(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOST", how)
    monkeypatch.setenv("OUT", str(tmp_path))
    first, lost, other = on_ranks(3, lose_a_rank, tmp_path)
    assert first is not None
    assert other is not None
    assert "Error: " in first["ended"]
    assert "Error: " in other["ended"]
    assert RankFailed.__name__ not in first["ended"], "it did not say that it failed"
    assert (lost is None) == (how == "killed")


# Copies of weights


def compare_copies(rank: int) -> dict[str, Any]:
    """Why each of some tensors is refused; the ranks in `odd` hold something else."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))

    def local(*odd: int, shape: tuple[int, ...] = (4, 2)) -> Any:
        tensor = torch.arange(8, dtype=torch.bfloat16).reshape(shape)
        return tensor + 1 if rank in odd else tensor

    def spread(mesh: Any, placements: list[Any], *odd: int) -> Any:
        return DTensor.from_local(local(*odd), mesh, placements, run_check=False)

    def nan(payload: int) -> Any:
        return torch.tensor([payload], dtype=torch.int32).view(torch.float32)

    cases: dict[str, Callable[[], Any]] = {
        "plain": local,
        "plain differs": lambda: local(1),
        "transposed": lambda: local(shape=(2, 4)).t(),
        "transposed differs": lambda: local(2, shape=(2, 4)).t(),
        "nan": lambda: nan(0x7FC00001),
        "nan differs": lambda: nan(0x7FC00001 + rank // 3),
        "replicated": lambda: spread(line, [Replicate()]),
        "replicated differs": lambda: spread(line, [Replicate()], 3),
        "sharded": lambda: spread(line, [Shard(0)], 1, 2),
        "hybrid": lambda: spread(square, [Replicate(), Shard(0)]),
        "hybrid, shards differ": lambda: spread(square, [Replicate(), Shard(0)], 1, 3),
        "hybrid differs": lambda: spread(square, [Replicate(), Shard(0)], 3),
        "twice": lambda: spread(square, [Replicate(), Replicate()]),
        "twice differs": lambda: spread(square, [Replicate(), Replicate()], 2),
        "twice, rows differ": lambda: spread(square, [Replicate(), Replicate()], 1, 3),
    }
    seen: dict[str, Any] = {}
    for name, make in cases.items():
        tensor = make()
        seen[name] = reason_of(lambda name=name, tensor=tensor: check_replicas(name, tensor))
    whole = dict(named_weights([("w", spread(square, [Replicate(), Shard(0)], 1, 3))], torch.float32))["w"]
    seen["gathered"] = whole.tolist()
    return seen


def send_copies(rank: int) -> dict[str, Any]:
    """What becomes of each source of weights of which rank 1 holds another copy, in its midst."""
    model = build_model(64, 2, seed=0)
    name = "model.layers.1.post_attention_layernorm.weight"

    def taken(source: Iterable[tuple[str, Any]]) -> str:
        names = []
        return reason_of(lambda: names.extend(name for name, _ in source)) + f" after {len(names)}"

    seen = {"alike": taken(full_parameters(model, torch.bfloat16))}
    with torch.no_grad():
        model.get_parameter(name).add_(rank == 1)
    seen["model"] = taken(full_parameters(model, torch.bfloat16))
    seen["state dict"] = taken(named_weights(model.state_dict(), torch.bfloat16))
    seen["any trainer"] = taken(named_weights(iter(model.state_dict().items()), torch.bfloat16))
    return seen


def test_weights_of_which_ranks_hold_other_copies_are_not_sent(tmp_path: Path) -> None:
    first, second = on_ranks(2, send_copies, tmp_path)
    assert first == second
    assert first is not None
    assert first.pop("alike").startswith("none after ")
    for source, reason in first.items():
        assert reason.startswith(
            f"{CopiesDiffer.__name__}: weight model.layers.1.post_attention_layernorm.weight [64] is replicated"
        ), source


def test_copies_that_differ_are_refused_on_every_rank_and_none_hangs(tmp_path: Path) -> None:
    results = on_ranks(4, compare_copies, tmp_path)
    (gathered,) = {str(seen.pop("gathered")) for seen in results if seen is not None}
    rows = torch.arange(8.0).reshape(4, 2)
    assert gathered == str(torch.cat([rows, rows + 1]).tolist())
    first = results[0]
    assert first is not None
    assert results == [first] * 4
    refused = {name: reason for name, reason in first.items() if reason != "none"}
    assert set(refused) == {name for name in first if name.endswith("differs")} | {"twice, rows differ"}
    for name, reason in refused.items():
        assert reason.startswith(f"{CopiesDiffer.__name__}: weight {name} [")
