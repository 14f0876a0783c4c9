"""What must be the same on several hosts: the checkpoint that all start from, and the directory that all save in.

A checkpoint of one's own lies on every host under one path, or on a file system that they share. The tiny policy, which
the job has made itself, is sent to those that do not have it.
"""

import os
import shutil
import uuid
from pathlib import Path

from miles_plugin.arguments import TrainConfig
from miles_plugin.joined_cluster import JoinedCluster
from miles_plugin.plan import missing_files
from mooncake_store.errors import ConfigError


def share(cluster: JoinedCluster, config: TrainConfig, checkpoint: Path) -> None:
    """Bring every node the checkpoint; raises ConfigError, with the host, where that, or `--save`, is not there."""
    missing = cluster.on_each_node(missing_files, checkpoint)
    lacking = [host for host, files in missing.items() if files]
    if lacking and config.hf_checkpoint is not None:
        raise ConfigError(
            f"hf_checkpoint={checkpoint} on {', '.join(lacking)}: no {' and no '.join(missing[lacking[0]])} there; put "
            f"it there under the same path, or on a file system that all nodes share"
        )
    if lacking:
        files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        cluster.on_each_node(_write, checkpoint, files)
    if config.save is not None:
        _check_shared(cluster, config.save)


def _check_shared(cluster: JoinedCluster, save: Path) -> None:
    mark = save.resolve() / f".shared-{uuid.uuid4().hex}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        lacking = [host for host, has in cluster.on_each_node(_has, mark).items() if not has]
    finally:
        mark.unlink()
    if lacking:
        raise ConfigError(
            f"save={save} is another directory on {', '.join(lacking)}: every rank saves its part; name a directory on "
            f"a file system that all nodes share"
        )


def _has(path: Path) -> bool:
    return path.exists()


def _write(checkpoint: Path, files: dict[str, bytes]) -> None:
    if not missing_files(checkpoint):
        return
    shutil.rmtree(checkpoint, ignore_errors=True)
    partial = checkpoint.with_name(f"{checkpoint.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (partial / name).write_bytes(content)
    partial.rename(checkpoint)
