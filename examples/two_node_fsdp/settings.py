"""The settings of a launch: where the nodes are, and the job that runs on them.

One YAML file holds both: `cluster:` is for the launch, `miles:` has flags of miles's train.py, and everything beside
them is the job's, under the names of `miles-mooncake train`. A variable wins over the file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from mooncake_store.errors import ConfigError

ROOT = Path(__file__).parents[2]
# Field of Settings -> the variable that wins over it.
VARIABLES = {
    "head_ip": "HEAD_IP",
    "worker_ip": "WORKER_IP",
    "protocol": "MOONCAKE_PROTOCOL",
    "device": "MOONCAKE_DEVICE",
    "model_path": "MODEL_PATH",
    "dataset_path": "DATASET_PATH",
    "trainer": "TRAINER",
    "miles_home": "MILES_HOME",
    "state_dir": "STATE_DIR",
}
_SECTIONS = ("cluster", "miles")
ROLES = ("head", "worker")
_PATHS = {"model_path", "dataset_path", "miles_home", "state_dir"}
PROTOCOLS, TRAINERS = ("tcp", "rdma"), ("repository", "miles")


@dataclass(frozen=True)
class Settings:
    """One launch.

    Attributes:
        head_ip, worker_ip: of the nodes, in the network that carries the data.
        protocol: "tcp" or "rdma".
        device: RDMA device of this node; names may differ between nodes.
        model_path: Hugging Face checkpoint directory, the same path on both nodes; None for a tiny policy.
        dataset_path: prompts, on the head; None for the job's task.
        trainer: "repository" for this project's, "miles" for the train.py of `miles_home`.
        miles_home: a miles checkout.
        state_dir: where the head and the worker note what they started, and log.
        segment_size, buffer_size: memory that each node lends and each process uses for transfers, as text.
        master_port, metrics_port, ray_port, dashboard_port: on the head.
        gpus: of each node, for Ray; None for those that Ray finds.
        job: what `miles-mooncake train` is told.
        miles: what miles's train.py is told, instead.
    """

    head_ip: str
    worker_ip: str
    protocol: str = "tcp"
    device: str = ""
    model_path: str | None = None
    dataset_path: str | None = None
    trainer: str = "repository"
    miles_home: str | None = None
    state_dir: str = "/tmp/miles-mooncake-two-nodes"
    segment_size: str = "2gb"
    buffer_size: str = "1gb"
    master_port: int = 50051
    metrics_port: int = 50052
    ray_port: int = 6379
    dashboard_port: int = 8265
    gpus: int | None = None
    job: Mapping[str, Any] = field(default_factory=dict)
    miles: Mapping[str, Any] = field(default_factory=dict)

    def ip_of(self, role: str) -> str:
        """The address of the node with this role, "head" or "worker"."""
        return self.head_ip if role == "head" else self.worker_ip

    @property
    def master_address(self) -> str:
        return f"{self.head_ip}:{self.master_port}"

    @property
    def ray_address(self) -> str:
        return f"{self.head_ip}:{self.ray_port}"

    @property
    def dashboard(self) -> str:
        """Of Ray's, on the head itself only: whoever reaches it can run anything."""
        return f"http://127.0.0.1:{self.dashboard_port}"


def load(path: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings.

    Args:
        path: the YAML file; None for the one of the protocol in configs/.

    Raises:
        ConfigError: no such file, an unknown or missing setting, or a value that is not allowed; with its source.
    """
    protocol = environ.get("MOONCAKE_PROTOCOL", "").strip() or "tcp"
    path = path or ROOT / "configs" / f"two_node_{_allowed('MOONCAKE_PROTOCOL', protocol, PROTOCOLS)}.yaml"
    try:
        content = yaml.safe_load(path.read_text()) or {}
        parts = [content, *(content.get(name, {}) for name in _SECTIONS)] if isinstance(content, dict) else [None]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"it is no mapping of names to values, with more under {' and '.join(_SECTIONS)}")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}; name a file like configs/two_node_tcp.yaml") from error
    given, miles = (dict(content.pop(name, {})) for name in _SECTIONS)
    known = {each.name for each in fields(Settings)} - {"job", "miles"}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"{path}: cluster has {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")
    sources = dict.fromkeys(given, f"{path}, cluster")
    for name, variable in VARIABLES.items():
        if environ.get(variable, "").strip():
            given[name], sources[name] = environ[variable].strip(), variable
    given = {name: value for name, value in given.items() if value not in (None, "")}
    for name in ("head_ip", "worker_ip"):
        if name not in given:
            raise ConfigError(f"{VARIABLES[name]} is not set: export it, or write {name} under `cluster` in {path}")
    _check_numbers(given, sources)
    for name, allowed in (("protocol", PROTOCOLS), ("trainer", TRAINERS)):
        if name in given:
            _allowed(f"{name} ({sources[name]})", given[name], allowed)
    for name in _PATHS & given.keys():  # the job runs in another directory
        given[name] = str(Path(given[name]).expanduser().absolute())
    return Settings(**given, job=content, miles=miles)


def _check_numbers(given: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    for each in fields(Settings):
        if each.name not in given:
            continue
        value, where = given[each.name], sources[each.name]
        if each.type in (int, int | None):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 65536:
                raise ConfigError(f"{each.name} = {value!r} ({where}); allowed: a whole number below 65536")
        elif not isinstance(value, str):
            raise ConfigError(f"{each.name} = {value!r} ({where}); allowed: text, in YAML in quotes")


def _allowed(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}; allowed: {', '.join(allowed)}")
    return value
