"""What a job would start: `--dry-run`. Processes by node, memory, ports, and where each store setting came from.

The memory of a process is an estimate: what its parts took on two CPU cores with a tiny policy (proportional set size,
Ray 2.60, SGLang 0.5.23, torch 2.13), plus what the settings and the checkpoint's size add.
"""

import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.checkpoint import Resume, changes
from miles_plugin.cluster import LOOPBACK, OBJECT_STORE_BYTES, ROLLOUT_NODE, NodeSpec, trainer_node
from miles_plugin.engines.attach import AttachedEngine
from mooncake_store.config import MooncakeConfig, resolve
from mooncake_store.errors import ConfigError
from mooncake_store.memory import memory_limit

_MB = 1024**2
# Measured, in MB. An engine is three processes, and one more for each rank after the first; a node is a raylet with
# its agents, the first one also the GCS.
_DRIVER, _MASTER, _HOLDER, _HEAD, _NODE, _MANAGER, _RANK, _ENGINE = 600, 50, 70, 450, 150, 450, 550, 1550
_ENGINE_RANK = 500
# float32 weights, gradients and two moments, for each byte of a bfloat16 checkpoint.
_TRAINED_PER_CHECKPOINT_BYTE = 8
_TINY_CHECKPOINT_BYTES = 2 * _MB
# Of a tokenizer the file that has its tokens. Without any of them transformers makes one that knows none.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
# Stands for the address of a master that the job will start, while the other settings are resolved.
PENDING_MASTER = "127.0.0.1:1"


@dataclass(frozen=True)
class Plan:
    """What a job will start, as `preflight.check` found it possible.

    own_master: the job starts a mooncake_master. resume: the checkpoint it goes on from. The nodes' GPUs are empty on
    a machine without any. engines: those that run already; empty when the job starts its own.
    """

    own_master: bool
    rollout_node: NodeSpec
    trainer_nodes: list[NodeSpec]
    resume: Resume | None
    engines: tuple[AttachedEngine, ...] = ()


@dataclass(frozen=True)
class PlannedProcess:
    """One kind of process on one node.

    memory: bytes of all `count` of them together, about. ports: what each listens on.
    """

    node: str
    process: str
    count: int
    memory: int
    ports: str


def processes(config: TrainConfig, plan: Plan) -> list[PlannedProcess]:
    """Everything the job would start, the driver included."""
    # On GPUs the weights, gradients and moments are in the GPUs' own memory.
    weights = 0 if plan.trainer_nodes[0].gpus else _checkpoint_bytes(config.hf_checkpoint)
    planned = [PlannedProcess("driver", "miles-mooncake train", 1, _DRIVER * _MB, "")]
    if config.object_store_backend == "mooncake":
        segment = _store(config, plan).global_segment_size
        if plan.own_master:
            planned.append(PlannedProcess("driver", "mooncake_master", 1, _MASTER * _MB, "RPC, metrics"))
        if segment:
            planned.append(PlannedProcess("driver", "segment holder", 1, _HOLDER * _MB + segment, "Mooncake"))
    starts_ray = config.ray_address is None
    if starts_ray:
        planned.append(
            PlannedProcess(ROLLOUT_NODE, "Ray head", 1, _HEAD * _MB + OBJECT_STORE_BYTES, "GCS, raylet, agents")
        )
    planned.append(PlannedProcess(ROLLOUT_NODE, "rollout manager", 1, _MANAGER * _MB, "Ray"))
    if not plan.engines:
        ranks = config.rollout_num_gpus_per_engine
        engines = config.rollout_num_gpus // ranks
        memory = engines * ((_ENGINE + (ranks - 1) * _ENGINE_RANK) * _MB + weights)
        planned.append(PlannedProcess(ROLLOUT_NODE, "SGLang engine", engines, memory, "HTTP, internal"))
    ranks = config.actor_num_gpus_per_node
    trained = _TRAINED_PER_CHECKPOINT_BYTE * weights // config.world_size
    is_p2p, is_delta = (config.update_weight_transfer_mode == mode for mode in ("p2p", "disk-delta"))
    # What weights are sent from: two pieces of memory, of the one rank that broadcasts, or of each; a rank that
    # publishes has its share as it was, and what changed, in the host's memory.
    sent_from = 2 * min(config.update_weight_buffer_size, weights)
    if is_delta:
        sent_from = 2 * _checkpoint_bytes(config.hf_checkpoint) // config.world_size
    for index in range(config.actor_num_nodes):
        node = trainer_node(index)
        if starts_ray:
            planned.append(PlannedProcess(node, "Ray node", 1, _NODE * _MB + OBJECT_STORE_BYTES, "raylet, agents"))
        rank_bytes = ranks * (_RANK * _MB + trained)
        rank_bytes += sent_from * (ranks if is_p2p or is_delta else index == 0)
        planned.append(PlannedProcess(node, "trainer rank", ranks, rank_bytes, "Ray, gloo or NCCL, Mooncake"))
    return planned


def weight_files(checkpoint: Path) -> list[Path]:
    """The files of weights in a Hugging Face checkpoint directory; the older form counts where there is no other."""
    return [*checkpoint.glob("*.safetensors")] or [*checkpoint.glob("pytorch_model*.bin")]


def missing_files(checkpoint: Path) -> list[str]:
    """What a Hugging Face checkpoint directory lacks of configuration, weights and tokenizer."""
    parts = {
        "config.json": (checkpoint / "config.json").is_file(),
        "weights (*.safetensors or pytorch_model*.bin)": bool(weight_files(checkpoint)),
        f"tokenizer ({', '.join(_VOCABULARIES)})": any(any(checkpoint.glob(name)) for name in _VOCABULARIES),
    }
    return [part for part, there in parts.items() if not there]


def check_memory(config: TrainConfig, plan: Plan) -> None:
    """Raise ConfigError when the job as a whole needs more memory than this machine or its cgroup has."""
    planned, limit = processes(config, plan), memory_limit()
    total = sum(item.memory for item in planned)
    if total > limit.nbytes:
        largest = max(planned, key=lambda item: item.memory)
        raise ConfigError(
            f"the job needs about {_gb(total)} of memory, allowed: {_gb(limit.nbytes)} ({limit.source}); most of it, "
            f"{_gb(largest.memory)}, is for {largest.count} x {largest.process}: lower rollout_num_gpus, "
            "actor_num_nodes, actor_num_gpus_per_node or global_segment_size"
        )


def describe(config: TrainConfig, plan: Plan, origins: Mapping[str, str] | None = None) -> str:
    """The plan as text for a terminal, or as one JSON object with `--log-format json`.

    origins: of the settings, as `load_config_and_origins` returns them.
    """
    planned = processes(config, plan)
    facts = _facts(config, plan)
    if plan.resume is not None and (changed := changes(plan.resume, config, origins or {})):
        facts[f"changed since {plan.resume.directory.name}"] = ", ".join(changed)
    store = _store_settings(config, plan)
    if config.log_format == "json":
        return json.dumps(
            {"event": "plan", **facts, "object_store_settings": store, "processes": [asdict(item) for item in planned]}
        )
    return _text(facts, store, planned)


def _tiny_policy(config: TrainConfig) -> str:
    from miles_plugin.training.warm_start import is_cached

    made = "made before, in cache_dir" if is_cached(config) else "to be made and warm-started first, minutes"
    return f"tiny Qwen3, {made}"


def _facts(config: TrainConfig, plan: Plan) -> dict[str, Any]:
    gpus = sum(len(node.gpus) for node in [plan.rollout_node, *plan.trainer_nodes])
    directory = config.report or Path("runs") / (config.run_id or "<run id>")
    total = sum(item.memory for item in processes(config, plan))
    limit = memory_limit()
    return {
        "rollouts": f"{config.num_rollout} of {config.rollout_batch_size} prompts x {config.n_samples_per_prompt} "
        f"samples, {config.num_steps_per_rollout} optimizer steps each; reward_control {config.reward_control}",
        "policy": str(config.hf_checkpoint or _tiny_policy(config)),
        "engines": [str(engine) for engine in plan.engines] or "started by the job",
        "weight update": config.update_weight_transfer_mode,
        "report": str(directory.absolute()),
        "resume": str(plan.resume.directory) if plan.resume else "no, from the beginning",
        "save": f"{config.save}, every {config.save_interval} rollouts" if config.save else "nothing",
        "devices": f"{gpus} GPUs" if gpus else f"CPU ({os.cpu_count()} cores)",
        "addresses": _addresses(config, plan),
        "memory": f"about {_gb(total)} of {_gb(limit.nbytes)} ({limit.source})",
    }


def _addresses(config: TrainConfig, plan: Plan) -> str:
    if config.ray_address is None:
        return f"{LOOPBACK}, free ports chosen at the start; Ray on 127.0.0.2"
    trainers = ", ".join(node.host for node in plan.trainer_nodes)
    return f"rollout on {plan.rollout_node.host}, trainers on {trainers}; Ray at {config.ray_address}, which stays"


def _store(config: TrainConfig, plan: Plan) -> MooncakeConfig:
    pending = {"master_server_address": PENDING_MASTER} if plan.own_master else {}
    return resolve({**config.mooncake_store_init_kwargs, **pending}, os.environ)


def _store_settings(config: TrainConfig, plan: Plan) -> dict[str, dict[str, Any]]:
    """By setting: its value and where it came from; empty with the ray backend."""
    if config.object_store_backend != "mooncake":
        return {}
    resolved = _store(config, plan)
    settings = {
        name: {"value": getattr(resolved, name), "source": setting.source}
        for name, setting in resolved.settings.items()
    }
    if plan.own_master:
        settings["master_server_address"] = {"value": f"{LOOPBACK}:<free port>", "source": "started by the job"}
    return settings


def _text(facts: dict[str, Any], store: dict[str, dict[str, Any]], planned: Iterable[PlannedProcess]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("node", "left"),
        ("process", "left"),
        ("count", "right"),
        ("memory", "right"),
        ("ports", "left"),
    ):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for item in planned:
        table.add_row(item.node, item.process, str(item.count), _gb(item.memory), item.ports)
    about = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        about.add_row(name, "\n".join(value) if isinstance(value, list) else str(value))
    settings = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("Mooncake setting", "value", "from"):
        settings.add_column(title)
    for name, setting in store.items():
        settings.add_row(name, str(setting["value"]), setting["source"])
    console = Console(file=io.StringIO(), width=120, highlight=False, color_system=None)
    console.print("dry run: everything was checked, nothing was started\n")
    for part in (about, table, *([settings] if store else [])):
        console.print(part)
        console.print()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _checkpoint_bytes(path: Path | None) -> int:
    if path is None:
        return _TINY_CHECKPOINT_BYTES
    return sum(file.stat().st_size for file in weight_files(path))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1024**3:.1f} GB"
