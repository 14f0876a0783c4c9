"""What a job's settings say of disk-delta: where versions are published and kept, and by which hooks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.checkpoint import VERSIONS, Resume, check_writable
from miles_plugin.rollout.custom import arguments
from miles_plugin.rollout.functions import CustomFunctionError, describe, load_function
from miles_plugin.version import newest_version as numbers_used
from miles_plugin.weight_transfer.disk_delta.base import BaseCheckpoint
from miles_plugin.weight_transfer.disk_delta.format import version_name
from miles_plugin.weight_transfer.disk_delta.hashes import hash_maker
from miles_plugin.weight_transfer.disk_delta.hosts import EngineHosts
from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
from miles_plugin.weight_transfer.disk_delta.prune import newest_version
from miles_plugin.weight_transfer.disk_delta.publish import Publisher
from miles_plugin.weight_transfer.disk_delta.split import DTYPES
from miles_plugin.weight_transfer.disk_delta.storage import check_publishable, open_storage
from mooncake_store.errors import ConfigError

WROTE, READS = ("args", "version_dir", "engines"), ("args", "version_dir")
_WROTE_SETTING = "custom_update_weight_post_write_path"
_READS_SETTING = "custom_update_weight_pre_read_path"


def published_in(config: TrainConfig, run_dir: Path) -> str:
    """Where versions are published: a directory, or an object store's URL."""
    return config.update_weight_disk_dir or str(run_dir / "weights")


def encoding_of(config: TrainConfig) -> str:
    """The encoding of deltas. Whoever has a hook for what was written has readers of their own, which know xor."""
    if config.update_weight_delta_encoding != "auto":
        return config.update_weight_delta_encoding
    return "xor" if config.custom_update_weight_post_write_path else "sparse"


def open_publisher(config: TrainConfig, run_dir: Path, base: Path, rank: int, size: int) -> Publisher:
    """A trainer rank's side; rank 0's comes first. Raises ConfigError, PublicationUnavailable."""
    return Publisher(
        open_storage(published_in(config, run_dir)),
        rank,
        size,
        encoding_of(config),
        config.update_weight_delta_checksum,
        base,
        config.update_weight_anchor_interval,
    )


def open_hosts(config: TrainConfig, run_dir: Path, base: Path) -> EngineHosts:
    """The engines' hosts, this one's checkpoint already what engines start from."""
    storage = open_storage(published_in(config, run_dir))
    local = config.update_weight_local_checkpoint_dir or run_dir / "checkpoint"
    materializer = Materializer(storage, local, base, pre_read=_pre_read(config, run_dir, base))
    materializer.bring_to()
    return EngineHosts(storage, materializer)


def post_write(config: TrainConfig, run_dir: Path, base: Path) -> Callable[[str, Sequence[str]], None] | None:
    """The hook for a version that was published, told its directory's name and the engines' URLs; None without one."""
    if config.custom_update_weight_post_write_path is None:
        return None
    path, settings = config.custom_update_weight_post_write_path, Namespace(**arguments(config, base))
    call, place = _hook(_WROTE_SETTING, path, WROTE, settings), published_in(config, run_dir)
    return lambda version, engines: call(f"{place}/{version}", list(engines))


def check_settings(config: TrainConfig, resume: Resume | None = None) -> None:
    """Raise ConfigError for what a job cannot start with, PublicationUnavailable for a place that does not answer."""
    if config.ray_address is not None and config.update_weight_disk_dir is None:
        raise ConfigError(
            f"update_weight_transfer_mode=disk-delta with ray_address={config.ray_address}: hosts need a place that "
            "all of them reach; name a shared directory or an object store (--update-weight-disk-dir)"
        )
    if config.hf_checkpoint is not None and not any(config.hf_checkpoint.glob("*.safetensors")):
        raise ConfigError(
            f"hf_checkpoint={config.hf_checkpoint}: no *.safetensors there, of which disk-delta makes the engines' own "
            "checkpoint; save it as safetensors, or use --update-weight-transfer-mode broadcast"
        )
    if config.hf_checkpoint is not None:
        _check_numbers(config.hf_checkpoint)
    for setting, parameters in ((_WROTE_SETTING, WROTE), (_READS_SETTING, READS)):
        if (path := getattr(config, setting)) is not None:
            load_function(setting, path, parameters)
    hash_maker(config.update_weight_delta_checksum)
    if config.ray_address is None and config.update_weight_local_checkpoint_dir is not None:
        check_writable("update_weight_local_checkpoint_dir", config.update_weight_local_checkpoint_dir)
    if config.update_weight_disk_dir is not None:
        _check_place(config, config.update_weight_disk_dir, resume)


def _check_numbers(checkpoint: Path) -> None:
    """Deltas are of what trainers send: a checkpoint in another dtype cannot be brought to that."""
    from miles_plugin.training.policy import WEIGHT_DTYPE

    wanted = DTYPES[WEIGHT_DTYPE]
    found = sorted({dtype for dtype, _ in BaseCheckpoint(checkpoint).layout.values()})
    if wanted not in found:
        raise ConfigError(
            f"hf_checkpoint={checkpoint}: its weights are {' and '.join(found)}, the trainers send {wanted}, and "
            f"disk-delta changes them in place; save it as {wanted}, or use --update-weight-transfer-mode broadcast"
        )


def _check_place(config: TrainConfig, place: str, resume: Resume | None) -> None:
    if place.startswith("memory:"):
        raise ConfigError(f"update_weight_disk_dir={place}: each process has its own; name a directory or s3://, gs://")
    if "://" not in place:
        check_writable("update_weight_disk_dir", Path(place))
        if not Path(place).is_dir():
            return
    storage = open_storage(place)
    if "://" in place:
        check_publishable(storage)
    newest = newest_version(storage)
    used = max(
        -1 if resume is None else resume.newest_version(),
        -1 if config.save is None else numbers_used(config.save / VERSIONS),
    )
    if newest is not None and newest > used:
        raise ConfigError(
            f"update_weight_disk_dir={place} holds version {newest} of an earlier run, this one would begin with "
            f"{used + 1}; name an empty place, or go on from that run (--load, or --save of it)"
        )


def _pre_read(config: TrainConfig, run_dir: Path, base: Path) -> Callable[[int], None] | None:
    if config.custom_update_weight_pre_read_path is None:
        return None
    settings, place = Namespace(**arguments(config, base)), published_in(config, run_dir)
    return version_hook(_READS_SETTING, config.custom_update_weight_pre_read_path, READS, settings, place)


def version_hook(
    setting: str, path: str, parameters: tuple[str, ...], settings: Namespace, place: str
) -> Callable[[int], None]:
    """A user's function that is told the place of a version; raises as `load_function`, and CustomFunctionError."""
    call = _hook(setting, path, parameters, settings)
    return lambda version: call(f"{place}/{version_name(version)}")


def _hook(setting: str, path: str, parameters: tuple[str, ...], settings: Namespace) -> Callable[..., None]:
    function = load_function(setting, path, parameters)

    def call(*given: Any) -> None:
        try:
            function(settings, *given)
        except Exception as error:
            raise CustomFunctionError(f"{setting}={path}, version {given[0]}: {describe(error, function)}") from error

    return call
