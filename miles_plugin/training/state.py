"""A trainer's state on disk: model, optimizer, scheduler and RNG, by torch.distributed.checkpoint.

Sharded: every rank writes and reads its part, and a checkpoint may be loaded by another number of ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


class StateError(RuntimeError):
    """A trainer's state could not be written or read; the message names the directory and the cause."""


def save_state(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """Write the state into `directory`, synced to the disk; collective. Raises StateError."""
    with _in_one_line(directory, "cannot be written; free space there, or save elsewhere"):
        save(_state(model, optimizer, scheduler), checkpoint_id=directory)


def load_state(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """Read back what `save_state` wrote, in place; collective.

    A rank that the saving job did not have keeps the RNG it was seeded with. Raises StateError.
    """
    state = _state(model, optimizer, scheduler)
    saved = FileSystemReader(directory).read_metadata().state_dict_metadata
    if not any(name.startswith(f"{_rng_key()}.") for name in saved):
        del state[_rng_key()]
    with _in_one_line(directory, "cannot be loaded; resume from an earlier checkpoint"):
        load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict({**state["scheduler"], "lr_lambdas": [None]})
    if _rng_key() in state:
        torch.set_rng_state(state[_rng_key()]["cpu"])
        if "cuda" in state[_rng_key()]:
            torch.cuda.set_rng_state(state[_rng_key()]["cuda"])


@contextmanager
def _in_one_line(directory: Path, advice: str) -> Iterator[None]:
    """torch reports a failure with the traceback of every rank; the first cause is what a reader needs."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise StateError(f"{directory}: {type(cause).__name__}: {str(cause).splitlines()[0]}; it {advice}") from error


def _rng_key() -> str:
    return f"rng_of_rank_{dist.get_rank()}"


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler
) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    # What a LambdaLR holds besides its numbers is the function, which the settings give again.
    numbers = {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"}
    return {"model": model_state, "optimizer": optimizer_state, "scheduler": numbers, _rng_key(): rng}
