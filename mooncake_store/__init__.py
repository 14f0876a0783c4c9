"""Moves rollout batches between processes and hosts: numpy in, numpy views out.

Importing this package needs numpy, xxhash and msgspec only; a backend's packages are imported when it is opened.
"""

from mooncake_store.columns import BATCH_LEVEL, DEFAULT_SPECS, ValueSpec
from mooncake_store.config import MooncakeConfig, parse_size
from mooncake_store.decode import as_lists
from mooncake_store.encode import batch_digest
from mooncake_store.errors import (
    ConfigError,
    IntegrityError,
    MissingDependency,
    ObjectLost,
    ObjectNotFound,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from mooncake_store.master import MasterProcess, probe_master
from mooncake_store.ref import BatchRef
from mooncake_store.store import GetResult, ObjectStore, open_store

__all__ = [
    "BATCH_LEVEL",
    "DEFAULT_SPECS",
    "BatchRef",
    "ConfigError",
    "GetResult",
    "IntegrityError",
    "MasterProcess",
    "MissingDependency",
    "MooncakeConfig",
    "ObjectLost",
    "ObjectNotFound",
    "ObjectStore",
    "StoreClosed",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "ValueSpec",
    "as_lists",
    "batch_digest",
    "open_store",
    "parse_size",
    "probe_master",
]
