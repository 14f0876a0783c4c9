"""The object store that the flags ask for, opened the same way by the rollout manager and by every trainer rank."""

import os
from pathlib import Path
from typing import Any

from miles_plugin.arguments import ObjectStoreArguments
from mooncake_store import ObjectStore, open_store
from mooncake_store.client import MooncakeClient
from mooncake_store.config import MooncakeConfig, fit_to_host, resolve
from mooncake_store.holder import RunningHolder, start_holder
from mooncake_store.owners import Owners
from mooncake_store.records import Records


def open_rollout_store(
    config: ObjectStoreArguments,
    master: str | None,
    run_id: str,
    contribute_segment: bool | None = None,
    log_dir: Path | None = None,
) -> ObjectStore:
    """Join the run's object store.

    `mooncake_store_init_kwargs` says nothing to the ray backend, so a configuration may keep it while it runs on Ray.

    Args:
        config: the job's settings.
        master: address of the master that the job started; None when the settings or the environment name one.
        run_id: names the run's objects.
        contribute_segment: whether this process sees to it that its node has a segment holder; None means that local
            rank 0 does.
        log_dir: directory of the log of a segment holder that is started here.

    Raises:
        ConfigError, StoreUnavailable: as `open_store` does.
    """
    if config.object_store_backend != "mooncake":
        return open_store(config.object_store_backend, run_id=run_id)
    return open_store(
        "mooncake",
        init_kwargs=_init_kwargs(config, master),
        replica_num=config.mooncake_replica_num,
        contribute_segment=contribute_segment,
        run_id=run_id,
        log_dir=log_dir,
    )


def start_segment_holder(config: ObjectStoreArguments, master: str | None, log: Path) -> RunningHolder | None:
    """Start the segment holder of this node; None when one serves it already, or the settings lend no memory.

    Args:
        config: the job's settings.
        master: address of the master that the job started, which nobody serves yet; None as in `open_rollout_store`.
        log: gets what the holder prints.

    Raises:
        ConfigError, StoreUnavailable: as `open_store` does.
    """
    if config.object_store_backend != "mooncake":
        return None
    settings = fit_to_host(resolve(_init_kwargs(config, master), os.environ), contributes=True)
    if settings.global_segment_size == 0:
        return None
    if master is None and _is_served(settings):
        return None
    return start_holder(settings, log)


def _is_served(settings: MooncakeConfig) -> bool:
    client = MooncakeClient.connect(settings)
    try:
        return bool(Owners(client, Records(client)).here())
    finally:
        client.close()


def _init_kwargs(config: ObjectStoreArguments, master: str | None) -> dict[str, Any]:
    given = {} if master is None else {"master_server_address": master}
    return {**config.mooncake_store_init_kwargs, **given}
