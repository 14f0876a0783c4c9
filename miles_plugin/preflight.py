"""What is checked before the job starts anything: settings against each other, the machine, and the master."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles_plugin.arguments import FullyAsyncArguments, TrainConfig
from miles_plugin.checkpoint import check_save, check_writable, find
from miles_plugin.cluster import NodeSpec
from miles_plugin.engines.attach import AttachedEngine, attach, check_loopback, expected_engines
from miles_plugin.engines.routed_experts import check_routed_experts
from miles_plugin.fully_async.buffer import BufferSettings
from miles_plugin.fully_async.custom_buffer import load_buffer_class
from miles_plugin.fully_async.settings import concurrent_samples
from miles_plugin.joined_cluster import find_nodes
from miles_plugin.object_store import open_rollout_store
from miles_plugin.plan import PENDING_MASTER, Plan, check_memory, missing_files
from miles_plugin.report.observers import check_tracking
from miles_plugin.rollout.check import check_data
from mooncake_store.client import Limits, probe_metadata
from mooncake_store.config import MASTER_VARIABLE, MISTAKEN_MASTER_VARIABLE, fit_to_host, resolve
from mooncake_store.errors import ConfigError
from mooncake_store.master import find_master
from mooncake_store.wheel import load_mooncake


def check(config: TrainConfig) -> Plan:
    """Raise ConfigError or StoreUnavailable for what cannot work, within seconds; return what will be started.

    Raises AlreadyDone when `--load` leaves nothing to do.
    """
    _check_layout(config)
    _check_external(config)
    _check_sizes(config)
    _check_learning_rate(config)
    _check_fully_async(config)
    _check_checkpoint(config)
    check_save(config)
    resume = find(config)
    check_report(config)
    own_master = _check_store(config)
    _check_packages(config)
    check_tracking(config)
    _check_cache(config)
    _check_ranks(config)
    _check_layout_is_known(config)
    if config.update_weight_transfer_mode == "disk-delta":
        from miles_plugin.weight_transfer.disk_delta.opened import check_settings

        check_settings(config, resume)
    check_data(config, resume.progress.manager if resume else None)
    check_routed_experts(config)
    if config.ray_address is not None:
        if own_master:
            raise ConfigError(
                f"ray_address={config.ray_address}: a job on several hosts needs a master that they all reach; start "
                f"mooncake_master and name it (master_server_address, or {MASTER_VARIABLE})"
            )
        ranks = [config.actor_num_gpus_per_node] * config.actor_num_nodes
        rollout_node, trainer_nodes = find_nodes(
            config.ray_address, ranks, _engine_gpus(config), config.pin_rollout_manager_to_head
        )
        return Plan(own_master, rollout_node, trainer_nodes, resume, _attach(config, rollout_node, trainer_nodes))
    gpus = _visible_gpus()
    needed = config.world_size + _engine_gpus(config)
    if gpus and len(gpus) < needed:
        raise ConfigError(
            f"actor_num_nodes={config.actor_num_nodes} x actor_num_gpus_per_node={config.actor_num_gpus_per_node}"
            f"{'' if config.rollout_external else f' + rollout_num_gpus={config.rollout_num_gpus}'}: {needed} GPUs are "
            f"needed, this machine shows {len(gpus)}; "
            "lower one, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    per_node = config.actor_num_gpus_per_node
    trainer_nodes = [
        NodeSpec(cpus=per_node, gpus=gpus[node * per_node : (node + 1) * per_node])
        for node in range(config.actor_num_nodes)
    ]
    rollout_node = NodeSpec(cpus=1, gpus=gpus[config.world_size : needed])
    plan = Plan(own_master, rollout_node, trainer_nodes, resume, _attach(config, rollout_node, trainer_nodes))
    check_memory(config, plan)
    return plan


def _check_fully_async(config: TrainConfig) -> None:
    if not config.fully_async:
        for name, field in FullyAsyncArguments.model_fields.items():
            if (value := getattr(config, name)) != field.default:
                raise ConfigError(f"{name}={value} without fully_async: add --fully-async, or leave it out")
        return
    if config.pause_generation_mode == "abort":
        raise ConfigError(
            "pause_generation_mode=abort with fully_async: every update would throw away all that is in flight; "
            "allowed are retract and in_place"
        )
    if concurrent_samples(config) < config.n_samples_per_prompt:
        raise ConfigError(
            f"async_max_concurrent_samples={config.async_max_concurrent_samples} is less than a group of "
            f"n_samples_per_prompt={config.n_samples_per_prompt}; allowed is at least that"
        )
    BufferSettings.of(config)
    if config.custom_async_data_buffer_path is not None:
        load_buffer_class(config.custom_async_data_buffer_path)


def check_report(config: TrainConfig) -> None:
    """Refuse a `--report` directory that holds another run's report, or that cannot be written (ConfigError)."""
    directory = (config.report or Path("runs") / (config.run_id or "new")).absolute()
    check_writable("report", directory)
    if (directory / "report.json").exists():
        raise ConfigError(f"report={directory} holds the report of another run; name another directory or remove it")


def _check_layout(config: TrainConfig) -> None:
    if config.colocate:
        raise ConfigError(
            "colocate=True: trainers and engines on the same GPUs take turns in memory, while update_weight_transfer_"
            f"mode={config.update_weight_transfer_mode}, like every mode of this package, sends to engines that keep "
            "theirs; leave --colocate out and give the engines GPUs of their own (--rollout-num-gpus)"
        )


def _engine_gpus(config: TrainConfig) -> int:
    """GPUs that the engines which the job starts need."""
    return 0 if config.rollout_external else config.rollout_num_gpus


def _check_external(config: TrainConfig) -> None:
    addresses = config.rollout_external_engine_addrs
    if not config.rollout_external:
        if addresses is not None:
            raise ConfigError(
                f"rollout_external_engine_addrs={','.join(addresses)} is set without rollout_external; add "
                "--rollout-external to use these engines, or leave the addresses out to start engines"
            )
        return
    if addresses is None:
        raise ConfigError(
            "rollout_external=True: no engine is named; add --rollout-external-engine-addrs host:port ..., or leave "
            "--rollout-external out to start engines"
        )
    if config.hf_checkpoint is None:
        raise ConfigError(
            "rollout_external=True: engines that run already cannot serve the tiny policy, which the job has yet to "
            "make; name the checkpoint that they serve (--hf-checkpoint), or leave --rollout-external out"
        )
    ranks = len(addresses) * config.rollout_num_gpus_per_engine
    if config.rollout_num_gpus != ranks:
        raise ConfigError(
            f"rollout_num_gpus={config.rollout_num_gpus}: rollout_external_engine_addrs={','.join(addresses)} with "
            f"rollout_num_gpus_per_engine={config.rollout_num_gpus_per_engine} make {ranks}; leave rollout_num_gpus out"
        )


def _attach(
    config: TrainConfig, rollout_node: NodeSpec, trainer_nodes: Sequence[NodeSpec]
) -> tuple[AttachedEngine, ...]:
    """The engines that run already, reached from here and found fit; none when the job starts its own."""
    if not config.rollout_external:
        return ()
    addresses, checkpoint = config.rollout_external_engine_addrs or [], config.hf_checkpoint
    assert checkpoint is not None, "_check_external comes first"
    expected = expected_engines(config, checkpoint, "cuda" if trainer_nodes[0].gpus else "cpu")
    engines = attach(addresses, expected)
    check_loopback(addresses, {rollout_node.host, *(node.host for node in trainer_nodes)})
    return tuple(engines)


def _check_store(config: TrainConfig) -> bool:
    """Whether the job must start a master of its own; a given one is joined and left again."""
    if config.object_store_backend != "mooncake":
        if config.mooncake_replica_num > 1:
            raise ConfigError(
                f"mooncake_replica_num={config.mooncake_replica_num}: object_store_backend="
                f"{config.object_store_backend} keeps one copy; set object_store_backend to mooncake, or leave it out"
            )
        return False
    kwargs = config.mooncake_store_init_kwargs
    named = kwargs.get("master_server_address") is not None or os.environ.get(MASTER_VARIABLE, "").strip()
    own_master = not named
    # Whoever set the variable that nobody reads meant a master; resolving without an address says so.
    pending = own_master and not os.environ.get(MISTAKEN_MASTER_VARIABLE)
    resolved = resolve({**kwargs, "master_server_address": PENDING_MASTER} if pending else kwargs, os.environ)
    fit_to_host(resolved, contributes=True)
    if own_master:
        _check_own_segment(config, resolved.global_segment_size)
        load_mooncake()
        find_master()
        probe_metadata(resolved, Limits().probe)
    else:
        # What accepts a connection may still be no master; joining shows it, and lends no memory.
        open_rollout_store(config, None, "preflight", contribute_segment=False).close()
    return own_master


def _check_own_segment(config: TrainConfig, segment_bytes: int) -> None:
    """With a master of its own, the job's only memory is that of the segment holder which it starts."""
    if segment_bytes == 0:
        raise ConfigError(
            "global_segment_size=0: the job's segment holder lends the store all its memory; set e.g. 256mb"
        )
    if config.mooncake_replica_num > 1:
        raise ConfigError(
            f"mooncake_replica_num={config.mooncake_replica_num}: this job starts one segment holder, and copies "
            "are with distinct ones; for more, name a master (master_server_address) that other holders serve "
            "(`miles-mooncake holder`)"
        )


def _check_sizes(config: TrainConfig) -> None:
    ranks = config.world_size
    if config.rollout_batch_size % (ranks * config.num_steps_per_rollout):
        raise ConfigError(
            f"rollout_batch_size={config.rollout_batch_size} must be a multiple of trainer ranks x "
            f"num_steps_per_rollout = {ranks} x {config.num_steps_per_rollout}, so that every rank and step gets "
            "equally many prompts"
        )
    if config.rollout_num_gpus % config.rollout_num_gpus_per_engine:
        raise ConfigError(
            f"rollout_num_gpus={config.rollout_num_gpus} must be a multiple of "
            f"rollout_num_gpus_per_engine={config.rollout_num_gpus_per_engine}"
        )


def _check_learning_rate(config: TrainConfig) -> None:
    if config.min_lr > config.lr:
        raise ConfigError(
            f"min_lr={config.min_lr} is more than lr={config.lr}: the learning rate decays from lr to min_lr; lower "
            "min_lr or raise lr"
        )


def _check_checkpoint(config: TrainConfig) -> None:
    if config.tiny_num_experts == 1:
        raise ConfigError("tiny_num_experts=1: each token goes to two experts; set 0 (dense), or 2 and more")
    if config.hf_checkpoint is not None and (missing := missing_files(config.hf_checkpoint)):
        raise ConfigError(
            f"hf_checkpoint={config.hf_checkpoint}: no {' and no '.join(missing)} there; give a complete local Hugging "
            "Face checkpoint directory"
        )


def _check_cache(config: TrainConfig) -> None:
    from miles_plugin.training.warm_start import check_cache

    check_cache(config)


def _check_ranks(config: TrainConfig) -> None:
    """An engine whose model cannot be shared out to its ranks ends while it starts, with an assertion in its log."""
    from miles_plugin.weight_transfer.dimensions import Uneven
    from miles_plugin.weight_transfer.layout import check_ranks

    ranks = config.rollout_num_gpus_per_engine
    model = _model(config)
    if model is None:
        return
    policy = config.hf_checkpoint or (
        f"the tiny policy (tiny_hidden_size={config.tiny_hidden_size}, tiny_num_experts={config.tiny_num_experts})"
    )
    try:
        check_ranks(model, ranks)
    except Uneven as error:
        raise ConfigError(f"rollout_num_gpus_per_engine={ranks} with {policy}: {error}") from error


def _model(config: TrainConfig) -> Any:
    """The policy's config; None where it cannot be read, which `check_data` says better."""
    from transformers import AutoConfig

    from miles_plugin.training.tiny_policy import build_config

    if config.hf_checkpoint is None:
        return build_config(config.tiny_hidden_size, config.tiny_num_layers, config.tiny_num_experts)
    try:
        return AutoConfig.from_pretrained(config.hf_checkpoint)
    except (OSError, ValueError):
        return None


def _check_layout_is_known(config: TrainConfig) -> None:
    """p2p writes into the engines' memory, checksums are of it; of the tiny policy the place there is known."""
    mode = config.update_weight_transfer_mode
    needed_by = "update_weight_transfer_mode=p2p" if mode == "p2p" else "check_weight_update_equal=True"
    if config.hf_checkpoint is None or not (mode == "p2p" or config.check_weight_update_equal):
        return
    from miles_plugin.training.policy import WEIGHT_DTYPE
    from miles_plugin.weight_transfer.layout import Layout

    model = _model(config)
    if model is None:
        return
    try:
        Layout(model, config.rollout_num_gpus_per_engine, WEIGHT_DTYPE)
    except ConfigError as error:
        raise ConfigError(f"{needed_by} with hf_checkpoint={config.hf_checkpoint}: {error}") from error


def _check_packages(config: TrainConfig) -> None:
    missing = [name for name in ("ray", "reasoning_gym", "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"training needs {', '.join(missing)}: pip install miles-mooncake[train]")
    if find_spec("sglang") is None and not config.rollout_external:
        raise ConfigError(
            "rollout needs sglang: pip install miles-mooncake[sglang] on a machine with a GPU; without one, "
            "`make demo` installs what a CPU needs"
        )


def _visible_gpus() -> list[int]:
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
