"""Every setting of the main job: one class per group of flags, see `arguments_sources.py` for their sources.

The names are miles's (radixark/miles, August 2026) wherever miles has the setting. A setting
`rollout_batch_size` is `--rollout-batch-size` as a flag, `MILES_MOONCAKE_ROLLOUT_BATCH_SIZE` in the environment and
`rollout_batch_size:` in YAML. A setting that holds a mapping is JSON on the command line and in the environment, and
merges key by key.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mooncake_store.config import parse_size

ENV_PREFIX = "MILES_MOONCAKE_"


def _not_empty(path: Any) -> Any:
    if path == "":
        raise ValueError("the path is empty, perhaps an unset variable of the shell")
    return path


def _place(place: Any) -> Any:
    """A directory means the same to all processes of a job; a URL stays as it is."""
    path = place.removeprefix("file://") if isinstance(place, str) else place
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


def _separated(addresses: Any) -> Any:
    return [each for each in re.split(r"[\s,]+", addresses) if each] if isinstance(addresses, str) else addresses


Location = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(Path.expanduser)]
Bytes = Annotated[int, BeforeValidator(parse_size)]
# One or more values after a flag; in the environment, and in YAML where it is no list, spaces or commas part them.
Addresses = Annotated[list[str] | None, NoDecode, BeforeValidator(_separated)]


class ObjectStoreArguments(BaseModel):
    """object store: what carries the rollout batches"""

    object_store_backend: Literal["ray", "mooncake"] = Field(
        "ray", description="carrier of rollout batches between the rollout manager and the trainers"
    )
    mooncake_store_init_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="JSON: master_server_address, protocol (tcp or rdma), device_name, global_segment_size, ... "
        "Without a master address the job starts a mooncake_master of its own",
    )
    mooncake_replica_num: int = Field(
        1, ge=1, description="copies of every batch, each with a segment holder of its own (mooncake only)"
    )


class LayoutArguments(BaseModel):
    """layout: processes; without GPUs these count CPU ranks and CPU engines"""

    actor_num_nodes: int = Field(1, ge=1, description="trainer nodes; on one machine each is a Ray node of its own")
    actor_num_gpus_per_node: int = Field(2, ge=1, description="trainer ranks (FSDP data parallel) of one node")
    rollout_num_gpus: int = Field(
        1,
        ge=1,
        description="GPUs of all rollout engines together; with --rollout-external the default is what those have",
    )
    rollout_num_gpus_per_engine: int = Field(1, ge=1, description="tensor-parallel size of one engine")
    rollout_external: bool = Field(
        False, description="use SGLang servers that run already; the job checks and updates them, and never ends them"
    )
    rollout_external_engine_addrs: Addresses = Field(
        None, min_length=1, description="those servers, each as host:port (IPv6: [address]:port)"
    )
    ray_address: str | None = Field(
        None,
        min_length=1,
        description="a Ray cluster that is there already, as HOST:PORT or auto: its nodes offer the resources "
        "rollout_node and trainer_node_0, ...; default: a local one that ends with the job",
    )
    pin_rollout_manager_to_head: bool = Field(
        False,
        description="the rollout manager runs on Ray's head node, whose address is stable in many clusters; engines "
        "that the job starts are where it is, so that node has to offer rollout_node",
    )
    colocate: bool = Field(False, description="trainers and engines on the same GPUs: not supported, and refused")

    @property
    def world_size(self) -> int:
        """Trainer ranks of all nodes together."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node


class PolicyArguments(BaseModel):
    """policy: the model that is trained, and the supervised phase that makes a tiny one ready for RL"""

    hf_checkpoint: Location | None = Field(
        None, description="Hugging Face checkpoint directory; without one a tiny Qwen3 is made and warm-started"
    )
    tiny_hidden_size: int = Field(128, ge=16, description="width of the tiny policy")
    tiny_num_layers: int = Field(3, ge=1, description="layers of the tiny policy")
    tiny_num_experts: int = Field(
        0, ge=0, description="experts per layer of the tiny policy (Qwen3-MoE, two per token); 0: a dense Qwen3"
    )
    warm_start_accuracy: float = Field(
        0.4, gt=0, lt=1, description="the supervised phase stops at this greedy accuracy on its own validation items"
    )
    warm_start_max_steps: int = Field(
        4000, ge=1, description="the job fails when the supervised phase has not reached that after so many steps"
    )
    warm_start_batch_size: int = Field(128, ge=1, description="items per supervised step")
    warm_start_lr: float = Field(2e-3, gt=0, description="peak learning rate of the supervised phase")
    cache_dir: Location = Field(Path("~/.cache/miles-mooncake"), description="keeps warm-started policies between runs")


class DataArguments(BaseModel):
    """data: prompts from files; without --prompt-data they come from --task"""

    prompt_data: Location | None = Field(
        None,
        description="training prompts: JSONL or parquet, one item per line or row; a directory means all its files",
    )
    input_key: str = Field("input", description="column with the prompt: text, or a list of chat messages")
    label_key: str | None = Field(None, description="column with the reference answer, given to the reward function")
    metadata_key: str = Field("metadata", description="column with a mapping that travels with each sample")
    apply_chat_template: bool = Field(False, description="turn messages into text with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="JSON: arguments of the chat template, e.g. enable_thinking"
    )
    rollout_shuffle: bool = Field(False, description="a new seeded order of the prompts in every epoch")
    eval_prompt_data: Location | None = Field(
        None, description="held-out prompts; without it the first --held-out-size items are kept out of training"
    )


class RewardArguments(BaseModel):
    """reward: what a response is worth; without either, the task's own verifier"""

    rm_type: Literal["math"] | None = Field(
        None, description="math: 1 when the final answer (\\boxed{} or the last number) equals the label"
    )
    custom_rm_path: str | None = Field(
        None, description="your reward function as package.module.function: (args, sample) -> float, may be async"
    )


class TaskArguments(BaseModel):
    """task: procedural items and their verifier, from reasoning-gym"""

    task: str = Field("spell_backward", description="name of a reasoning-gym dataset")
    task_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="JSON: settings of that dataset, e.g. its difficulty"
    )
    held_out_size: int = Field(
        256, ge=1, le=16384, description="fixed items, never trained on, that measure accuracy; also of --prompt-data"
    )
    reward_control: Literal["none", "shuffled", "both"] = Field(
        "none",
        description="shuffled: permute rewards across each rollout, so that they carry no information (accuracy must "
        "not rise); both: the real reward, then the control from the same checkpoint, in one report",
    )

    @property
    def arms(self) -> tuple[str, ...]:
        """What the report calls the trainings of one job, in order."""
        return {"none": ("real",), "shuffled": ("shuffled",), "both": ("real", "shuffled")}[self.reward_control]


class RolloutArguments(BaseModel):
    """rollout: how samples are generated"""

    num_rollout: int = Field(40, ge=1, description="rollouts, each followed by training and a weight update")
    rollout_batch_size: int = Field(32, ge=1, description="prompts per rollout")
    n_samples_per_prompt: int = Field(8, ge=2, description="samples per prompt: one GRPO group")
    rollout_temperature: float = Field(1.0, gt=0, description="sampling temperature")
    rollout_max_response_len: int = Field(16, ge=1, description="tokens per response at most")
    custom_generate_function_path: str | None = Field(
        None,
        description="your generation of one sample as package.module.function: async (args, sample, sampling_params) "
        "-> sample; for several turns, tools, ...",
    )
    return_routed_experts: bool = Field(
        False, description="column rollout_routed_experts: the experts that the engine routed each token to (MoE)"
    )
    eval_interval: int = Field(1, ge=1, description="held-out accuracy is measured every so many rollouts")


class FullyAsyncArguments(BaseModel):
    """fully asynchronous: samples are generated beside training, and groups wait in a buffer"""

    fully_async: bool = Field(False, description="generate beside training, without end, instead of between its steps")
    max_weight_staleness: int | None = Field(
        None,
        ge=0,
        description="versions that the oldest part of a group may lie behind the current one; what is beyond is not "
        "trained on; default: no bound",
    )
    async_data_buffer_capacity_factor: float = Field(
        2.0, gt=0, description="rollout batches of finished groups that may wait; then no new ones are submitted"
    )
    async_max_concurrent_samples: int | None = Field(
        None, ge=1, description="samples in flight at most; default: those of a rollout batch"
    )
    async_unused_samples_handler: Literal["retry", "drop"] = Field(
        "retry",
        description="groups that are not trained on, aborted ones and those beyond --max-weight-staleness: retry "
        "generates their prompts again, drop does not",
    )
    custom_async_data_buffer_path: str | None = Field(
        None,
        description="your buffer of finished groups as package.module.Class, with put, get and get_metrics as in "
        "miles; it decides what is trained on",
    )
    rollout_submission_granularity: Literal["sample", "group"] = Field(
        "sample", description="the next group is submitted when as many samples have finished, or when a group has"
    )


class TrainingArguments(BaseModel):
    """training: GRPO with AdamW"""

    num_steps_per_rollout: int = Field(1, ge=1, description="optimizer steps per rollout")
    micro_batch_size: int = Field(64, ge=1, description="samples per forward pass on one rank")
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate that a linear decay ends at")
    lr_decay_style: Literal["constant", "linear"] = Field(
        "constant", description="after the warm-up: constant, or linear down to --min-lr at the end of the run"
    )
    lr_warmup_iters: int = Field(0, ge=0, description="optimizer steps over which the learning rate rises to --lr")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta 2")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    clip_grad: float = Field(1.0, gt=0, description="largest global gradient norm")
    eps_clip: float = Field(0.2, gt=0, description="policy ratio clip, lower side")
    eps_clip_high: float = Field(0.28, gt=0, description="policy ratio clip, upper side")
    use_tis: bool = Field(
        False,
        description="for samples of older policies: clip the ratio to the policy as it was before it learns from them "
        "instead of to the one that sampled them, and weigh each token by the ratio of these two (truncated importance "
        "sampling, as in miles); costs a forward pass, unless a rollout is learned from in one step",
    )
    tis_clip: float = Field(2.0, gt=0, description="the greatest such weight (--use-tis only)")
    seed: int = Field(
        0, ge=0, lt=2**31, description="seeds the items, their order, the model and the engines' sampling"
    )


class WeightUpdateArguments(BaseModel):
    """weight update: how new weights reach the engines"""

    update_weight_transfer_mode: Literal["broadcast", "p2p", "disk-delta"] = Field(
        "broadcast",
        description="broadcast: over one process group of trainer rank 0 and all engine ranks (gloo or NCCL); p2p: "
        "every trainer rank writes into the engines' memory by Mooncake's Transfer Engine (TCP or RDMA); disk-delta: "
        "what changed is published in a directory or object store, from which each engine's host keeps a checkpoint",
    )
    update_weight_buffer_size: Bytes = Field(
        512 * 1024**2,
        ge=1,
        description="bytes per bucket of weights, of which two are in memory; also as text, e.g. 512mb",
    )
    p2p_transfer_num_workers: int = Field(4, ge=1, description="threads of one trainer rank that write (p2p only)")
    p2p_transfer_timeout: float = Field(30.0, gt=0, description="seconds that one write may take (p2p only)")
    update_weight_disk_dir: Annotated[str | None, BeforeValidator(_not_empty), AfterValidator(_place)] = Field(
        None,
        description="directory that all hosts share, or URL of an object store (s3://, gs://, az://), where versions "
        "are published; default: weights/ in the report, where all is on one machine (disk-delta only)",
    )
    update_weight_local_checkpoint_dir: Location | None = Field(
        None,
        description="directory on the engines' host for the checkpoint that they load, twice its size; default: "
        "checkpoint/ in the report (disk-delta only)",
    )
    update_weight_delta_encoding: Literal["auto", "xor", "overwrite", "sparse"] = Field(
        "auto",
        description="of what changed. sparse is the smallest and quickest; SGLang's forks with /pull_weights read xor "
        "and overwrite. auto: xor with --custom-update-weight-post-write-path, sparse without (disk-delta only)",
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = Field(
        "xxh3-128", description="of every tensor, checked before an engine may load it (disk-delta only)"
    )
    update_weight_anchor_interval: int = Field(
        50, ge=1, description="versions from one that is published whole to the next (disk-delta only)"
    )
    update_weight_disk_budget: Bytes | None = Field(
        None,
        description="bytes that published versions may take; older ones are removed, though a host still needs them, "
        "which then takes a whole one; also as text, e.g. 200gb (disk-delta only)",
    )
    custom_update_weight_post_write_path: str | None = Field(
        None,
        description="module.function(args, version_dir, engines), called when a version is published and before "
        "engines get it, e.g. to copy it elsewhere (disk-delta only)",
    )
    custom_update_weight_pre_read_path: str | None = Field(
        None,
        description="module.function(args, version_dir), called on an engine's host before a version is read, e.g. to "
        "refresh what a network file system shows (disk-delta only)",
    )
    check_weight_update_equal: bool = Field(
        False, description="after every update the engines prove, by checksums, that they hold the trainer's weights"
    )
    update_weights_interval: int = Field(1, ge=1, description="rollouts between weight updates")
    pause_generation_mode: Literal["abort", "retract", "in_place"] = Field(
        "retract",
        description="requests in flight during a weight update (--fully-async has some): abort ends them, retract puts "
        "them back into the engine's queue, in_place freezes them with all that the old weights had computed",
    )


class CheckpointArguments(BaseModel):
    """checkpoint: save the trainer's state, and go on from it"""

    save: Location | None = Field(None, description="directory that gets checkpoints; without one nothing is saved")
    save_interval: int = Field(10, ge=1, description="rollouts between checkpoints; the last rollout is always saved")
    load: Location | None = Field(
        None,
        description="directory of checkpoints to resume from, the newest one; when it is also --save and still empty, "
        "the job starts from the beginning",
    )
    takeover: bool = Field(
        False,
        description="take --save over from a job that still runs, or that cannot be told to have ended: it can "
        "update and save no more",
    )


class TrackingArguments(BaseModel):
    """tracking: what the job shows and records while it runs, beside its report"""

    log_format: Literal["text", "json"] = Field(
        "text", description="text: live progress on a terminal, plain lines elsewhere; json: one object per line"
    )
    use_tensorboard: bool = Field(False, description="metrics for TensorBoard (needs the extra `tensorboard`)")
    tb_project_name: Location | None = Field(
        None, description="directory of TensorBoard's logs; default: tensorboard/ in the report"
    )
    use_wandb: bool = Field(False, description="metrics for Weights & Biases (needs the extra `wandb`)")
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        "offline", description="offline sends nothing; `wandb sync` does that later (miles: online)"
    )
    wandb_project: str | None = Field(None, description="W&B project")
    wandb_group: str | None = Field(None, description="W&B group")
    wandb_dir: Location | None = Field(None, description="directory of W&B's files; default: the report's")


class RunArguments(BaseModel):
    """run: identity and output"""

    run_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="name of the run; default: date and time"
    )
    report: Location | None = Field(
        None, description="directory of the report, which must not hold another one; default: runs/<run id>"
    )
    dry_run: bool = Field(False, description="check everything, print what would be started, and stop")


GROUPS: tuple[type[BaseModel], ...] = (
    ObjectStoreArguments, LayoutArguments, PolicyArguments, DataArguments, TaskArguments, RewardArguments,
    RolloutArguments, FullyAsyncArguments, TrainingArguments, WeightUpdateArguments, CheckpointArguments,
    TrackingArguments, RunArguments,
)  # fmt: skip


class TrainConfig(
    BaseSettings, ObjectStoreArguments, LayoutArguments, PolicyArguments, DataArguments, TaskArguments, RewardArguments,
    RolloutArguments, FullyAsyncArguments, TrainingArguments, WeightUpdateArguments, CheckpointArguments,
    TrackingArguments, RunArguments,
):  # fmt: skip
    """The resolved settings of one job, flat like miles's own `args`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        cli_kebab_case=True,
        cli_implicit_flags=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _only_numbers_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's `true` would count as 1."""
        is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
        annotation = cls.model_fields[info.field_name or ""].annotation
        options = get_args(annotation) if type(None) in get_args(annotation) else (annotation,)
        if value is None and type(None) in options:
            return value
        if not is_number and any(number in options for number in (int, float, Bytes)):
            raise ValueError(f"allowed: a number, not a {type(value).__name__}")
        return value

    def to_yaml(self) -> str:
        """YAML that `--config` reads back to the same settings."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
