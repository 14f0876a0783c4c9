"""The object store that the flags ask for, opened the same way by the rollout manager and by every trainer rank."""

from collections.abc import Mapping
from typing import Any

from miles_plugin.arguments import ObjectStoreArguments
from mooncake_store import ObjectStore, open_store


def open_rollout_store(
    config: ObjectStoreArguments, master: str | None, run_id: str, contribute_segment: bool | None = None
) -> ObjectStore:
    """Join the run's object store.

    `mooncake_store_init_kwargs` says nothing to the ray backend, so a configuration may keep it while it runs on Ray.

    Args:
        config: the job's settings.
        master: address of the master that the job started; None when the settings or the environment name one.
        run_id: names the run's objects.
        contribute_segment: whether this process lends memory; None means local rank 0 does.

    Raises:
        ConfigError, StoreUnavailable: as `open_store` does.
    """
    if config.object_store_backend != "mooncake":
        return open_store(config.object_store_backend, run_id=run_id)
    init_kwargs: Mapping[str, Any] = config.mooncake_store_init_kwargs
    if master is not None:
        init_kwargs = {**init_kwargs, "master_server_address": master}
    return open_store(
        "mooncake",
        init_kwargs=init_kwargs,
        replica_num=config.mooncake_replica_num,
        contribute_segment=contribute_segment,
        run_id=run_id,
    )
