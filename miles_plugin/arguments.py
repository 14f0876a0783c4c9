"""Every setting of the main job: one class per group of flags, merged flag > environment > YAML > default.

The names are miles's (radixark/miles, August 2026) wherever miles has the setting. A setting
`rollout_batch_size` is `--rollout-batch-size` as a flag, `MILES_MOONCAKE_ROLLOUT_BATCH_SIZE` in the environment and
`rollout_batch_size:` in YAML. A setting that holds a mapping is JSON on the command line and in the environment, and
merges key by key.
"""

import argparse
import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from mooncake_store.config import parse_size
from mooncake_store.errors import ConfigError

ENV_PREFIX = "MILES_MOONCAKE_"

Directory = Annotated[Path, AfterValidator(Path.expanduser)]
Bytes = Annotated[int, BeforeValidator(parse_size)]
# How --help shows the type of a flag's value.
_METAVARS = {"dict[str,Any]": "JSON", "{Path,null}": "DIR", "Path": "DIR", "{str,null}": "NAME", "str": "NAME",
             "int": "N", "float": "X"}  # fmt: skip


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
    mooncake_replica_num: int = Field(1, ge=1, description="copies of every batch, on distinct segments")


class LayoutArguments(BaseModel):
    """layout: processes; without GPUs these count CPU ranks and CPU engines"""

    actor_num_gpus_per_node: int = Field(2, ge=1, description="trainer ranks (FSDP data parallel)")
    rollout_num_gpus: int = Field(1, ge=1, description="GPUs of all rollout engines together")
    rollout_num_gpus_per_engine: int = Field(1, ge=1, description="tensor-parallel size of one engine")


class PolicyArguments(BaseModel):
    """policy: the model that is trained, and the supervised phase that makes a tiny one ready for RL"""

    hf_checkpoint: Directory | None = Field(
        None, description="Hugging Face checkpoint directory; without one a tiny Qwen3 is made and warm-started"
    )
    tiny_hidden_size: int = Field(128, ge=16, description="width of the tiny policy")
    tiny_num_layers: int = Field(3, ge=1, description="layers of the tiny policy")
    warm_start_accuracy: float = Field(
        0.4, gt=0, lt=1, description="the supervised phase stops at this greedy accuracy on its own validation items"
    )
    warm_start_max_steps: int = Field(4000, ge=1, description="the supervised phase fails after so many steps")
    warm_start_batch_size: int = Field(128, ge=1, description="items per supervised step")
    warm_start_lr: float = Field(2e-3, gt=0, description="peak learning rate of the supervised phase")
    cache_dir: Directory = Field(
        Path("~/.cache/miles-mooncake"), description="keeps warm-started policies between runs"
    )


class TaskArguments(BaseModel):
    """task: procedural items and their verifier, from reasoning-gym"""

    task: str = Field("spell_backward", description="name of a reasoning-gym dataset")
    task_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="JSON: settings of that dataset, e.g. its difficulty"
    )
    held_out_size: int = Field(256, ge=1, le=16384, description="fixed items, never trained on, that measure accuracy")
    reward_control: Literal["none", "shuffled", "both"] = Field(
        "none",
        description="shuffled: permute rewards across each rollout, so that they carry no information (accuracy must "
        "not rise); both: the real reward, then the control from the same checkpoint, in one report",
    )


class RolloutArguments(BaseModel):
    """rollout: how samples are generated"""

    num_rollout: int = Field(40, ge=1, description="rollouts, each followed by training and a weight update")
    rollout_batch_size: int = Field(32, ge=1, description="prompts per rollout")
    n_samples_per_prompt: int = Field(8, ge=2, description="samples per prompt: one GRPO group")
    rollout_temperature: float = Field(1.0, gt=0, description="sampling temperature")
    rollout_max_response_len: int = Field(16, ge=1, description="tokens per response at most")
    eval_interval: int = Field(1, ge=1, description="held-out accuracy is measured every so many rollouts")


class TrainingArguments(BaseModel):
    """training: GRPO with AdamW"""

    num_steps_per_rollout: int = Field(1, ge=1, description="optimizer steps per rollout")
    micro_batch_size: int = Field(64, ge=1, description="samples per forward pass on one rank")
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate that a linear decay ends at")
    lr_decay_style: Literal["constant", "linear"] = Field("constant", description="course after the warm-up")
    lr_warmup_iters: int = Field(0, ge=0, description="optimizer steps over which the learning rate rises to --lr")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta 2")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    clip_grad: float = Field(1.0, gt=0, description="largest global gradient norm")
    eps_clip: float = Field(0.2, gt=0, description="policy ratio clip, lower side")
    eps_clip_high: float = Field(0.28, gt=0, description="policy ratio clip, upper side")
    seed: int = Field(
        0, ge=0, lt=2**31, description="seeds the items, their order, the model and the engines' sampling"
    )


class WeightUpdateArguments(BaseModel):
    """weight update: how new weights reach the engines"""

    update_weight_transfer_mode: Literal["broadcast"] = Field("broadcast", description="transfer of new weights")
    update_weight_buffer_size: Bytes = Field(
        512 * 1024**2, ge=1, description="bytes per bucket of weights; also as text, e.g. 512mb"
    )
    update_weights_interval: int = Field(1, ge=1, description="rollouts between weight updates")
    pause_generation_mode: Literal["abort", "retract", "in_place"] = Field(
        "retract", description="what happens to requests in flight during a weight update"
    )


class RunArguments(BaseModel):
    """run: identity and output"""

    run_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="name of the run; default: date and time"
    )
    report: Directory | None = Field(None, description="directory of the report; default: runs/<run id>")


GROUPS: tuple[type[BaseModel], ...] = (
    ObjectStoreArguments, LayoutArguments, PolicyArguments, TaskArguments, RolloutArguments, TrainingArguments,
    WeightUpdateArguments, RunArguments,
)  # fmt: skip


class TrainConfig(
    BaseSettings, ObjectStoreArguments, LayoutArguments, PolicyArguments, TaskArguments, RolloutArguments,
    TrainingArguments, WeightUpdateArguments, RunArguments,
):  # fmt: skip
    """The resolved settings of one job, flat like miles's own `args`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, cli_kebab_case=True, cli_implicit_flags=True
    )

    def to_yaml(self) -> str:
        """YAML that `--config` reads back to the same settings."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, and names the nearest flag."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
            flags = [flag for action in self._actions for flag in action.option_strings]
            message = f"unknown flag {unknown}{_nearest(unknown, flags)}; see {self.prog} --help"
        raise ConfigError(message)


def load_config(argv: Sequence[str], prog: str = "miles-mooncake train") -> TrainConfig:
    """Resolve the settings of a job from `argv` (flags, `--config FILE`), the environment and the defaults.

    Raises:
        ConfigError: an unknown key or flag (with the nearest known one), or a value of the wrong type or out of
            range; the message names the setting, the value and where it came from.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--SETTING VALUE ...]",
        description="Run the main job: rollout, training and weight updates, until --num-rollout rollouts are done.",
        epilog=f"Every setting can also stand in FILE, under the same name with underscores, or in the environment as "
        f"{ENV_PREFIX}<NAME>. A flag wins over the environment, that over FILE, that over the default.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings, named like the flags")
    groups = {}
    for group in GROUPS:
        section = parser.add_argument_group(*(group.__doc__ or "").split(": ", 1))
        groups.update(dict.fromkeys(group.model_fields, section))
    _check_json(argv, os.environ)
    _check_environment(os.environ)
    cli: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        TrainConfig,
        cli_parse_args=False,
        root_parser=parser,
        add_argument_method=lambda _parser, *names, **options: _add_flag(groups, *names, **options),
        parse_args_method=lambda root, args: root.parse_args(args),
    )
    parsed = parser.parse_args(list(argv))
    config_path: Path | None = parsed.config
    from_yaml = _read_yaml(config_path) if config_path else {}
    del parsed.config
    cli(parsed_args=parsed)
    return _merge(cli, from_yaml, str(config_path))


def _check_json(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse JSON that does not parse, with the place; the settings library only says that it does not."""
    for name, field in TrainConfig.model_fields.items():
        if field.annotation != dict[str, Any]:
            continue
        flag, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
        given = [(flag, value) for option, value in pairwise([*argv, ""]) if option == flag]
        given += [(flag, option.partition("=")[2]) for option in argv if option.startswith(f"{flag}=")]
        given += [(variable, environment[variable])] if variable in environment else []
        for origin, text in given:
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{origin}: not JSON at character {error.pos}: {error.msg}: {text!r}") from None
            if not isinstance(value, dict):
                raise ConfigError(f"{origin}={text!r}: expected a JSON object, found {type(value).__name__}")


def _check_environment(environment: Iterable[str]) -> None:
    known = [f"{ENV_PREFIX}{name.upper()}" for name in TrainConfig.model_fields]
    for name in environment:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"unknown variable {name} in the environment{_nearest(name, known)}")


def _add_flag(groups: dict[str, Any], *names: str, **options: Any) -> argparse.Action:
    dest = names[-1].removeprefix("--").replace("-", "_").removeprefix("no_")
    options["help"] = options["help"].replace("default factory: dict", "default: {}")
    options["metavar"] = _METAVARS.get(options.get("metavar", ""), options.get("metavar"))
    action: argparse.Action = groups[dest].add_argument(*names, **options)
    return action


def _merge(cli: PydanticBaseSettingsSource, from_yaml: dict[str, Any], yaml_name: str) -> TrainConfig:
    sources: dict[str, PydanticBaseSettingsSource] = {}

    class Resolved(TrainConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            yaml_settings = InitSettingsSource(settings_cls, from_yaml)
            sources.update({"the command line": cli, "the environment": env_settings, yaml_name: yaml_settings})
            return tuple(sources.values())

    try:
        resolved = Resolved()
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, sources) for item in error.errors())) from None
    return TrainConfig.model_construct(**dict(resolved))


def _explain(error: Any, sources: dict[str, PydanticBaseSettingsSource]) -> str:
    name = str(error["loc"][0])
    origin = next((label for label, source in sources.items() if name in source()), "the defaults")
    if error["type"] == "extra_forbidden":
        return f"unknown setting {name!r} in {origin}{_nearest(name, TrainConfig.model_fields)}"
    path = ".".join(map(str, error["loc"]))
    return f"{path}={error['input']!r} from {origin}: {error['msg']}"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror}; give the path of a YAML file, e.g. configs/local.yaml"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected a mapping of settings, found {type(content).__name__}")
    for name in content:
        if not isinstance(name, str):
            raise ConfigError(f"--config {path}: the key {name!r} is a {type(name).__name__}; settings have names")
    return content
