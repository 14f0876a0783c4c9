"""The guarded Mooncake client. Nothing else in this package calls into Mooncake.

Mooncake kills the process when it is called after close, hangs after a fork, and answers success to several mistakes
(all measured on 0.3.13.post1). This client turns each of those into a typed error: one operation at a time, an open
flag and a process id checked before every call, fresh keys, and every put confirmed from its replica descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mooncake_store import codes
from mooncake_store.addresses import unreachable
from mooncake_store.bounded import bounded
from mooncake_store.config import P2P_METADATA, MooncakeConfig
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
from mooncake_store.master import probe_master

EXTRAS = {
    "cpu": "mooncake-transfer-engine-non-cuda",
    "cuda": "mooncake-transfer-engine",
    "cuda13": "mooncake-transfer-engine-cuda13",
}
# 0.3.10 zeroed the ends of rows on TCP between nodes.
KNOWN_BAD_VERSIONS = ("0.3.10",)

# Read by Mooncake when it is imported or set up. Set only where the user has not: they bound how long a wrong or dead
# master holds a caller (one attempt instead of 90 s of them), and keep informational chatter off stderr.
ENVIRONMENT = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_LOG_LEVEL": "ERROR",
}

# Mooncake's own scratch buffer; it is not used, since every transfer goes through buffers registered here.
_SCRATCH_BYTES = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a call may take before it becomes an error, in seconds.

    Attributes:
        probe: for the master to accept a connection.
        setup: for Mooncake's setup after that.
        put: for room to appear in a full store, or a failing master or owner to answer again.
        get: for a failing owner or master to answer again. Longer than the master's client_ttl (10 s), after which a
            dead owner's objects are forgotten.
        remove: for the master to answer again.
        first_pause, longest_pause: between attempts; doubled from the one up to the other.
    """

    probe: float = 3.0
    setup: float = 10.0
    put: float = 30.0
    get: float = 20.0
    remove: float = 10.0
    first_pause: float = 0.02
    longest_pause: float = 1.0


def load_mooncake() -> Any:
    """Import and return `mooncake.store`.

    Raises:
        MissingDependency: the package or a system library is missing; names what brings it.
        ConfigError: a version known to corrupt data is installed.
    """
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise _missing(error) from error
    for distribution in EXTRAS.values():
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.split(".post")[0] in KNOWN_BAD_VERSIONS:
            raise ConfigError(f"{distribution} {version} is known to corrupt batches; install 0.3.13 or later")
    return module


def _missing(error: ImportError) -> MissingDependency:
    extras = ", ".join(f"{extra} ({distribution})" for extra, distribution in EXTRAS.items())
    if "libibverbs" in str(error):
        return MissingDependency(
            f"mooncake cannot be imported: {error}. It needs a system library even for TCP: "
            f"apt-get install libibverbs1 (Debian, Ubuntu) or dnf install libibverbs (Fedora, RHEL)"
        )
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "mooncake":
        return MissingDependency(
            f"backend 'mooncake' needs mooncake: pip install miles-mooncake[EXTRA], EXTRA one of {extras}"
        )
    return MissingDependency(
        f"mooncake is installed but cannot be imported: {error}. CUDA builds need the driver's library; exactly one "
        f"build may be installed, by one extra of miles-mooncake: {extras}"
    )


class MooncakeClient:
    """One connection to a Mooncake master. Build it with `connect`."""

    def __init__(self, native: Any, replicate_config: Callable[[], Any], master: str, limits: Limits) -> None:
        self._native = native
        self._replicate_config = replicate_config
        self._master = master
        self._limits = limits
        # Each operation polls a core while it waits: four in parallel reach half the bandwidth of one (measured).
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=_let_child_end(weakref.ref(self)))
        self._closer = weakref.finalize(self, _close_native, native, self._pid)

    @classmethod
    def connect(cls, config: MooncakeConfig, segment_bytes: int, limits: Limits | None = None) -> MooncakeClient:
        """Connect to the master and lend it `segment_bytes` of memory (0 lends none).

        Raises:
            StoreUnavailable: no master, or no metadata server, answers there; nothing was imported, allocated or
                mounted before the probe.
            MissingDependency, ConfigError: see `load_mooncake`.
        """
        limits = limits or Limits()
        probe_master(config.master_server_address, limits.probe, config.settings["master_server_address"].source)
        probe_metadata(config, limits.probe)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        module = load_mooncake()
        native = module.MooncakeDistributedStore()
        settings = {
            "local_hostname": config.local_hostname,
            "metadata_server": config.metadata_server,
            "global_segment_size": segment_bytes,
            "local_buffer_size": _SCRATCH_BYTES,
            "protocol": config.protocol,
            "rdma_devices": config.device_name,
            "master_server_addr": config.master_server_address,
        }
        code = bounded(lambda: int(native.setup(settings)), limits.setup, "mooncake setup")
        if code == codes.INVALID_PARAMS and segment_bytes:
            raise config.settings["global_segment_size"].complain(
                f"Mooncake could not lend {segment_bytes} bytes of memory; allowed: what this host has free"
            )
        if code is None or code != codes.OK:
            answer = f"no answer in {limits.setup:g} s" if code is None else f"setup answered {code}"
            raise StoreUnavailable(
                f"what listens at {config.master_server_address!r} does not serve as a Mooncake master ({answer}); "
                f"check master_server_address (from {config.settings['master_server_address'].source}), local_hostname "
                f"{config.local_hostname!r}, metadata_server {config.metadata_server!r} and the master's log",
                code=code,
            )
        return cls(native, module.ReplicateConfig, config.master_server_address, limits)

    def put(self, key_prefix: str, address: int, nbytes: int, replica_num: int = 1) -> str:
        """Store `nbytes` at the registered `address` under a fresh key, hard-pinned; return "<key_prefix>/<uuid>".

        A full store is waited for, up to Limits.put. Each attempt uses its own key: Mooncake answers success to a put
        on a key that an interrupted put has blocked, and stores nothing (measured on 0.3.13.post1).

        Raises:
            StoreFull: no room within Limits.put.
            StoreUnavailable: the master or an owner does not answer, or fewer than replica_num owners took the object.
        """
        if nbytes <= 0 or not address:
            raise ValueError(f"a put needs bytes: {nbytes} bytes at address {address:#x}")
        started = time.monotonic()
        for last in self._attempts(self._limits.put):
            key = f"{key_prefix}/{uuid.uuid4().hex}"
            config = self._replicate_config()
            config.with_hard_pin = True  # anything less is evicted unread when memory runs short
            config.replica_num = replica_num
            code = self._call("put_from", key, address, nbytes, config)
            if code == codes.OK:
                self._confirm(key, nbytes, replica_num)
                return key
            if code not in (codes.NO_SPACE, codes.RPC_FAILED):
                self._discard(key)  # it may hold part of the object
            if last or not codes.outcome_of(code).retryable:
                waited = f"after {time.monotonic() - started:.1f} s"
                hint = f"{nbytes} bytes, {waited}; {self._next_step(code)}"
                raise codes.error_for(code, "put", repr(key), hint)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def get_into(self, key: str, address: int, nbytes: int) -> None:
        """Read the object `key`, exactly `nbytes` long, to the registered `address`.

        Raises:
            ObjectNotFound: the store has no such object.
            ObjectLost: its owner stopped answering and did not come back.
            IntegrityError: the object has another length.
            StoreUnavailable: the master does not answer.
        """
        owner_failed = False
        for last in self._attempts(self._limits.get):
            code = self._call("get_into", key, address, nbytes)
            if code == nbytes:
                return
            if code >= 0 or code == codes.INVALID_PARAMS:  # the object is longer than the buffer
                raise IntegrityError(f"object {key!r} does not have the {nbytes} bytes its ref says (get: {code})")
            owner_failed |= code == codes.TRANSFER_FAILED
            if owner_failed and (last or code == codes.NOT_FOUND):
                raise ObjectLost(f"the owner of {key!r} stopped answering and its {nbytes} bytes are gone", code=code)
            if last or not codes.outcome_of(code).retryable:
                raise codes.error_for(code, "get", repr(key), self._next_step(code))

    def remove(self, key: str) -> None:
        """Free the object `key`, whatever leases readers hold on it; an object that is already gone is not an error.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        for last in self._attempts(self._limits.remove):
            code = self._call("remove", key, True)
            if code in (codes.OK, codes.NOT_FOUND):
                return
            if last or not codes.outcome_of(code).retryable:
                raise codes.error_for(code, "remove", repr(key), self._next_step(code))

    def register(self, address: int, nbytes: int) -> None:
        """Make memory usable by put and get_into; StoreError when Mooncake refuses."""
        code = self._call("register_buffer", address, nbytes)
        if code != codes.OK:
            raise codes.error_for(code, "registration", f"{nbytes} bytes at {address:#x}")

    def unregister(self, address: int) -> None:
        """Forget registered memory. Does nothing when the client is closed: closing forgot it."""
        if not self._closed and os.getpid() == self._pid:
            self._call("unregister_buffer", address)

    def close(self) -> None:
        """Disconnect and unmount; idempotent, and harmless in a forked child. Waits for an operation in flight."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            self._closer()

    def _call(self, operation: str, *arguments: Any) -> int:
        # Before the lock, which a fork may have copied in its locked state.
        if os.getpid() != self._pid:
            raise StoreClosed(
                f"this store was opened by process {self._pid} and forked into {os.getpid()}, where Mooncake cannot "
                f"work; start the process with 'spawn' and open a store in it"
            )
        with self._lock:
            if self._closed:
                raise StoreClosed(f"the connection to {self._master} is closed; open a new store")
            result: int = getattr(self._native, operation)(*arguments)
            return result

    def _confirm(self, key: str, nbytes: int, replica_num: int) -> None:
        """Check that an acknowledged put left `replica_num` complete copies; Mooncake treats the number as a wish."""
        descriptors = self._describe(key)
        sizes = [
            descriptor.get_memory_descriptor().buffer_descriptor.size
            for descriptor in descriptors
            if descriptor.is_memory_replica() and descriptor.status.name == "COMPLETE"
        ]
        if sizes.count(nbytes) >= replica_num:
            return
        self._discard(key)
        raise StoreUnavailable(
            f"{sizes.count(nbytes)} of {replica_num} replicas of {key!r} were stored; each needs an owner of its own "
            f"with {nbytes} bytes free: start more processes that contribute a segment, or lower replica_num"
        )

    def _describe(self, key: str) -> list[Any]:
        descriptors: Any = self._call("get_replica_desc", key)
        return list(descriptors or ())

    def _discard(self, key: str) -> None:
        """Best effort: what stays behind goes with the run's keys, and the error being raised matters more."""
        with contextlib.suppress(StoreError):
            self._call("remove", key, True)

    def _attempts(self, seconds: float) -> Iterator[bool]:
        """Yield False before each attempt, pausing longer each time, and True before the last one."""
        deadline = time.monotonic() + seconds
        pause = self._limits.first_pause
        while time.monotonic() + pause < deadline:
            yield False
            time.sleep(pause)
            pause = min(2 * pause, self._limits.longest_pause)
        yield True

    def _next_step(self, code: int) -> str:
        error = codes.outcome_of(code).error
        if error is StoreFull:
            return "remove batches that were read, contribute a larger segment, or put smaller batches"
        if error is StoreUnavailable:
            return f"check the master at {self._master} and the processes that contribute segments"
        if error is ObjectNotFound:
            return "it was removed, or its owner's memory is gone"
        return "this is not expected: report it with the master's log"


def probe_metadata(config: MooncakeConfig, seconds: float) -> None:
    """Raise StoreUnavailable if the settings name a metadata server and none accepts a connection in `seconds`."""
    if config.metadata_server != P2P_METADATA:
        reasons = unreachable(config.metadata_server, seconds)
        if reasons is not None:
            complaint = config.settings["metadata_server"].complain(f"no metadata server answers there ({reasons})")
            raise StoreUnavailable(f"{complaint}; start it, or use {P2P_METADATA!r}, which needs none")


def _let_child_end(client: weakref.ref[MooncakeClient]) -> Callable[[], None]:
    """Make a forked child end with its own exit status instead of SIGSEGV (measured on mooncake 0.3.13.post1).

    Both destroying the native client and running Mooncake's exit handlers crash in a child, which has none of the
    threads they stop. So the child keeps the client for good and skips those handlers; Python's own have run by then.
    """

    def in_child() -> None:
        alive = client()
        if alive is not None:
            libc = ctypes.CDLL(None)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(alive._native))
            libc.on_exit(libc._exit, None)

    return in_child


def _close_native(native: Any, pid: int) -> None:
    if os.getpid() == pid:
        native.close()
