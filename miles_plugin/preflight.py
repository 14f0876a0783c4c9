"""What is checked before the job starts anything: settings against each other, the machine, and the master."""

import os
from dataclasses import dataclass
from importlib.util import find_spec

from miles_plugin.arguments import TrainConfig
from miles_plugin.cluster import NodeSpec
from miles_plugin.object_store import open_rollout_store
from miles_plugin.rollout.check import check_data
from mooncake_store.client import load_mooncake
from mooncake_store.config import resolve
from mooncake_store.errors import ConfigError
from mooncake_store.master import find_master

# Stands for the address of a master that the job will start, while the other settings are checked.
_PENDING_MASTER = "127.0.0.1:1"


@dataclass(frozen=True)
class Plan:
    """own_master: the job starts a mooncake_master. The nodes' GPUs are empty on a machine without any."""

    own_master: bool
    rollout_node: NodeSpec
    trainer_node: NodeSpec


def check(config: TrainConfig) -> Plan:
    """Raise ConfigError or StoreUnavailable for what cannot work, within seconds; return what will be started."""
    own_master = _check_store(config)
    _check_sizes(config)
    _check_checkpoint(config)
    _check_packages()
    check_data(config)
    gpus = _visible_gpus()
    needed = config.actor_num_gpus_per_node + config.rollout_num_gpus
    if gpus and len(gpus) < needed:
        raise ConfigError(
            f"actor_num_gpus_per_node={config.actor_num_gpus_per_node} + rollout_num_gpus={config.rollout_num_gpus}: "
            f"{needed} GPUs are needed, this machine shows {len(gpus)}; lower one, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if not gpus and config.rollout_num_gpus_per_engine > 1:
        raise ConfigError("rollout_num_gpus_per_engine: without GPUs an engine has one rank; set it to 1")
    trainer_gpus, rollout_gpus = gpus[: config.actor_num_gpus_per_node], gpus[config.actor_num_gpus_per_node : needed]
    return Plan(
        own_master=own_master,
        rollout_node=NodeSpec(cpus=1, gpus=rollout_gpus),
        trainer_node=NodeSpec(cpus=config.actor_num_gpus_per_node, gpus=trainer_gpus),
    )


def _check_store(config: TrainConfig) -> bool:
    """Whether the job must start a master of its own; a given one is joined and left again."""
    if config.object_store_backend != "mooncake":
        return False
    kwargs = config.mooncake_store_init_kwargs
    own_master = not kwargs.get("master_server_address") and not os.environ.get("MOONCAKE_MASTER")
    if own_master:
        resolved = resolve({**kwargs, "master_server_address": _PENDING_MASTER}, os.environ)
        _check_own_segment(config, resolved.global_segment_size)
        load_mooncake()
        find_master()
    else:
        # What accepts a connection may still be no master; joining shows it, and lends no memory.
        open_rollout_store(config, None, "preflight", contribute_segment=False).close()
    return own_master


def _check_own_segment(config: TrainConfig, segment_bytes: int) -> None:
    """With a master of its own, the job's only memory is what local rank 0 of the trainers contributes."""
    if segment_bytes == 0:
        raise ConfigError("global_segment_size=0: the trainers lend the store all its memory; set e.g. 256mb")
    if config.mooncake_replica_num > 1:
        raise ConfigError(
            f"mooncake_replica_num={config.mooncake_replica_num}: a local job has one segment, so 1 is allowed; for "
            "more, name a master (master_server_address) that other segments have joined"
        )


def _check_sizes(config: TrainConfig) -> None:
    ranks = config.actor_num_gpus_per_node
    if config.rollout_batch_size % (ranks * config.num_steps_per_rollout):
        raise ConfigError(
            f"rollout_batch_size={config.rollout_batch_size} must be a multiple of actor_num_gpus_per_node x "
            f"num_steps_per_rollout = {ranks} x {config.num_steps_per_rollout}, so that every rank and step gets "
            "equally many prompts"
        )
    if config.rollout_num_gpus % config.rollout_num_gpus_per_engine:
        raise ConfigError(
            f"rollout_num_gpus={config.rollout_num_gpus} must be a multiple of "
            f"rollout_num_gpus_per_engine={config.rollout_num_gpus_per_engine}"
        )


def _check_checkpoint(config: TrainConfig) -> None:
    path = config.hf_checkpoint
    if path is not None and not (path / "config.json").is_file():
        raise ConfigError(f"hf_checkpoint={path}: no config.json there; give a local Hugging Face checkpoint directory")


def _check_packages() -> None:
    missing = [name for name in ("ray", "reasoning_gym", "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"training needs {', '.join(missing)}: pip install miles-mooncake[train]")
    if find_spec("sglang") is None:
        raise ConfigError(
            "rollout needs sglang: pip install miles-mooncake[sglang] on a machine with a GPU; without one, "
            "`make demo` installs what a CPU needs"
        )


def _visible_gpus() -> list[int]:
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
