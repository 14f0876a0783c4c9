"""The guarded Mooncake client. Nothing else in this package calls into Mooncake.

Mooncake kills the process when it is called after close, hangs after a fork, and answers success to several mistakes
(all measured on 0.3.13.post1). This client turns each of those into a typed error: one operation at a time, an open
flag and a process id checked before every call, and answers that mean several things told apart by a second question.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mooncake_store import codes
from mooncake_store.addresses import unreachable
from mooncake_store.bounded import attempts, bounded
from mooncake_store.config import P2P_METADATA, MooncakeConfig
from mooncake_store.errors import (
    IntegrityError,
    ObjectLost,
    ObjectNotFound,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from mooncake_store.master import probe_master
from mooncake_store.traffic import Traffic
from mooncake_store.wheel import load_mooncake

# Read by Mooncake when it is imported or set up. Set only where the user has not: they bound how long a wrong or dead
# master holds a caller (one attempt instead of 90 s of them), and keep informational chatter off stderr.
ENVIRONMENT = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_LOG_LEVEL": "ERROR",
}

PROBE_AGAIN_SECONDS = 0.5
_LOCAL = ("register_buffer", "unregister_buffer")  # operations that ask no master

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
    """

    probe: float = 3.0
    setup: float = 10.0
    put: float = 30.0
    get: float = 20.0
    remove: float = 10.0


@dataclass(frozen=True, slots=True)
class Location:
    """Where a copy of an object lies.

    Attributes:
        endpoint: the owner's transport endpoint, "host:port".
        address: in the owner's memory.
        nbytes: of the object.
    """

    endpoint: str
    address: int
    nbytes: int


class Range(NamedTuple):
    """Part of an object to read: `nbytes` from `start` of `key`, to the destination's offset `to`; all in bytes."""

    key: str
    to: int
    start: int
    nbytes: int


class _Gate:
    """Lets operations into Mooncake, and none after close, which would end the process.

    One at a time in each lane: each polls a core while it waits, and four in parallel reach half the bandwidth of one
    (measured). Batches have one lane and heartbeats another, since an owner that is stopped holds a transfer up for
    half a minute. The locks are reentrant: a signal handler may close the store in the midst of its thread's operation.
    """

    def __init__(self) -> None:
        self.lanes = (threading.RLock(), threading.RLock())
        self.closed = False


class MooncakeClient:
    """One connection to a Mooncake master. Build it with `connect`."""

    def __init__(self, native: Any, replicate_config: Callable[[], Any], master: str, limits: Limits) -> None:
        self._native = native
        self._replicate_config = replicate_config
        self._master = master
        self._limits = limits
        self._gate = _Gate()
        self._lane = 0
        self._beside: MooncakeClient | None = None
        self._unanswered = False
        self._traffic = Traffic()
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=_let_child_end(weakref.ref(self)))
        # Also at the end of the interpreter, during which threads that use this client may run on.
        self._closer = weakref.finalize(self, _close_native, native, self._gate, self._pid)

    @classmethod
    def connect(cls, config: MooncakeConfig, limits: Limits | None = None) -> MooncakeClient:
        """Connect to the master; no memory is lent.

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
            "global_segment_size": 0,
            "local_buffer_size": _SCRATCH_BYTES,
            "protocol": config.protocol,
            "rdma_devices": config.device_name,
            "master_server_addr": config.master_server_address,
        }
        code = bounded(lambda: int(native.setup(settings)), limits.setup, "mooncake setup")
        if code is None or code != codes.OK:
            answer = f"no answer in {limits.setup:g} s" if code is None else f"setup answered {code}"
            raise StoreUnavailable(
                f"what listens at {config.master_server_address!r} does not serve as a Mooncake master ({answer}); "
                f"check master_server_address (from {config.settings['master_server_address'].source}), local_hostname "
                f"{config.local_hostname!r}, metadata_server {config.metadata_server!r} and the master's log",
                code=code,
            )
        return cls(native, module.ReplicateConfig, config.master_server_address, limits)

    def beside(self) -> MooncakeClient:
        """The same connection for operations that do not wait for those of this client, nor these for them."""
        other = copy.copy(self)
        other._lane, other._beside = 1, self  # which keeps the connection open, as long as the other is there
        return other

    def traffic(self) -> dict[str, int]:
        """Bytes that this connection moved so far, records included: bytes_sent and bytes_received."""
        return self._traffic.counters()

    @property
    def segment_name(self) -> str:
        """The name under which memory mounted by this client is preferred in `allocate`."""
        self._check_usable()
        return str(self._native.get_hostname())

    def mount(self, path: str, nbytes: int, protocol: str) -> str:
        """Lend the file at `path`, mapped by Mooncake; return the id that `unmount` takes.

        Raises:
            StoreUnavailable, StoreError: Mooncake or the master refuses.
        """
        answer = self._call("mount_segment", path, nbytes, 0, protocol, "")
        if answer["ret"] != codes.OK:
            raise codes.error_for(answer["ret"], "mount", f"{nbytes} bytes of {path}")
        return str(answer["segment_ids"][0])

    def mount_private(self, nbytes: int, protocol: str) -> str:
        """Lend memory that Mooncake allocates and no other process can map; return the id that `unmount` takes.

        Raises:
            StoreUnavailable, StoreError: Mooncake or the master refuses.
        """
        answer = self._call("allocate_and_mount_segment", nbytes, protocol, "")
        if answer["ret"] != codes.OK:
            raise codes.error_for(answer["ret"], "mount", f"{nbytes} bytes")
        return str(answer["segment_ids"][0])

    def unmount(self, segment_id: str) -> None:
        """Stop lending; a segment that the master no longer knows is not an error.

        Raises:
            StoreUnavailable: the master does not answer. Mooncake goes on lending it to the next one (measured on
                0.3.13.post1): ask again.
        """
        code = self._call("unmount_segment", [segment_id])
        if code in codes.UNANSWERED:
            raise codes.error_for(code, "unmount", repr(segment_id), self._next_step(code))

    def allocate(self, keys: Sequence[str], nbytes: Sequence[int], segment: str) -> None:
        """Reserve an object of `nbytes` under each key, hard-pinned, in `segment` if it has room, else elsewhere.

        All or none. The keys must never have been used: Mooncake answers success to a put on a key that an interrupted
        put has blocked, and stores nothing (measured on 0.3.13.post1). Until `commit` the objects cannot be seen.

        Raises:
            StoreFull: no hole is large enough.
            StoreUnavailable: the master does not answer.
        """
        if min(nbytes) <= 0:
            raise ValueError(f"objects need bytes, not {min(nbytes)}")
        answers = self._start(keys, nbytes, segment)
        code = min(answers)
        if code != codes.OK:
            self.revoke([key for key, answer in zip(keys, answers, strict=True) if answer == codes.OK])
            raise codes.error_for(code, "allocation", f"{sum(nbytes)} bytes", self._next_step(code))

    def _start(self, keys: Sequence[str], nbytes: Sequence[int], segment: str) -> list[int]:
        for again in (True, False):
            arguments = list(keys), list(nbytes), self._pinned(segment)
            answers: list[int] = self._call("batch_put_session_start", *arguments)
            # A put that a master which went away could neither end nor take back is still open in this process, and
            # answers so for ever. That takes a key used again, which those of records are.
            if codes.INVALID_PARAMS not in answers or not again:
                break
            mine = [
                key for key, answer in zip(keys, answers, strict=True) if answer in (codes.OK, codes.INVALID_PARAMS)
            ]
            self._call("batch_put_session_revoke", mine)
        return answers

    def write(self, key: str, start: int, address: int, nbytes: int) -> None:
        """Send registered memory into an allocated object, to byte `start` of it.

        Raises:
            StoreUnavailable: its owner does not answer.
        """
        code = self._call("batch_put_from_multi_buffer_ranges", [key], [[address]], [[nbytes]], [[start]])[0]
        if code != nbytes:
            raise codes.error_for(min(code, -1), "write", repr(key), f"{nbytes} bytes; {self._next_step(code)}")
        self._traffic.sent(nbytes)

    def commit(self, keys: Sequence[str]) -> None:
        """Make allocated objects visible; StoreError when the master has forgotten one."""
        code = min(self._call("batch_put_session_end", list(keys)))
        if code != codes.OK:
            raise codes.error_for(code, "commit", repr(keys[0]), self._next_step(code))

    def revoke(self, keys: Sequence[str]) -> None:
        """Give allocations back, committed or not. Best effort: what stays goes with the run's keys.

        A master that does not answer has forgotten them anyway, or will when it finds them unfinished.
        """
        if keys:
            with contextlib.suppress(StoreError):
                self._call("batch_put_session_revoke", list(keys))
                self._call("batch_remove", list(keys), True)

    def locate(self, keys: Sequence[str]) -> list[Location | None]:
        """Where each object's first complete copy lies, None for an object that does not exist.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        for attempt in attempts(self._limits.remove):
            described = self._call("batch_get_replica_desc", list(keys))
            found = [_location(described.get(key, ())) for key in keys]
            # A master that does not answer describes nothing, too; it may be back for the second question.
            missing = [key for key, location in zip(keys, found, strict=True) if location is None]
            if not missing or not any(self.exist(missing)):
                return found
            if attempt.is_last():
                raise StoreUnavailable(f"objects exist without a complete copy: {missing[0]!r}")
        raise AssertionError("unreachable: the last attempt returns or raises")

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Whether each object is committed; StoreUnavailable when the master does not answer."""
        # Once more after a failure: the first call to a master that was restarted always fails, and at once.
        for again in (True, False):
            answers: list[int] = self._call("batch_is_exist", list(keys))
            code = min(answers, default=codes.OK)
            if code >= 0 or code == codes.NOT_FOUND:
                break
            if not again or not codes.outcome_of(code).retryable:
                raise codes.error_for(code, "lookup", f"{len(keys)} keys", self._next_step(code))
        return [answer == 1 for answer in answers]

    def read(self, address: int, ranges: Sequence[Range], seconds: float | None = None) -> None:
        """Copy ranges of objects to registered memory that starts at `address`; they travel together.

        The ranges must lie within the objects: see `locate`.

        Args:
            seconds: for a failing owner or master to answer again, instead of Limits.get.

        Raises:
            ObjectNotFound: the store has no such object.
            ObjectLost: its owner stopped answering and did not come back.
            IntegrityError: fewer bytes came than were asked for.
            StoreUnavailable: the master does not answer.
        """
        keys = [wanted.key for wanted in ranges]
        to, start, sizes = ([[[r.to]] for r in ranges], [[[r.start]] for r in ranges], [[[r.nbytes]] for r in ranges])
        owner_failed = False
        for attempt in attempts(self._limits.get if seconds is None else seconds):
            answers = self._call("get_into_ranges", [address] * len(keys), [[key] for key in keys], to, start, sizes)
            flat = [answer[0][0] for answer in answers]
            failed = [i for i, answer in enumerate(flat) if answer != ranges[i].nbytes]
            if not failed:
                self._traffic.received(sum(flat))
                return
            key, code = keys[failed[0]], flat[failed[0]]
            if code >= 0:
                raise IntegrityError(f"{code} of {ranges[failed[0]].nbytes} bytes of object {key!r} were read")
            # An owner whose connection was refused answers like a range beyond the object (measured).
            owner_away = code in (codes.TRANSFER_FAILED, codes.INVALID_PARAMS)
            owner_failed |= owner_away
            if owner_failed and (code == codes.NOT_FOUND or attempt.is_last()):
                raise ObjectLost(f"the owner of {key!r} stopped answering and its bytes are gone", code=code)
            if not (owner_away or codes.outcome_of(code).retryable) or attempt.is_last():
                raise codes.error_for(code, "get", repr(key), self._next_step(code))

    def remove(self, key: str, seconds: float | None = None) -> None:
        """Free the object `key`, whatever leases readers hold on it; an object that is already gone is not an error.

        Args:
            seconds: for the master to answer again, instead of Limits.remove.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        self._until_answered("remove", repr(key), lambda: int(self._call("remove", key, True)), seconds)

    def remove_matching(self, pattern: str) -> int:
        """Free every object whose key matches a regular expression; return how many.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        return self._until_answered("remove", repr(pattern), lambda: int(self._call("remove_by_regex", pattern, True)))

    def register(self, address: int, nbytes: int) -> None:
        """Make memory usable by put and get_into; StoreError when Mooncake refuses."""
        code = self._call("register_buffer", address, nbytes)
        if code != codes.OK:
            raise codes.error_for(code, "registration", f"{nbytes} bytes at {address:#x}")

    def unregister(self, address: int) -> None:
        """Forget registered memory. Does nothing when the client is closed: closing forgot it."""
        if os.getpid() == self._pid:
            with contextlib.suppress(StoreClosed):
                self._call("unregister_buffer", address)

    def close(self) -> None:
        """Disconnect and unmount; idempotent, and harmless in a forked child. Waits for an operation in flight."""
        if os.getpid() == self._pid:
            self._closer()

    def _call(self, operation: str, *arguments: Any) -> Any:
        self._check_usable()
        with self._gate.lanes[self._lane]:
            if self._gate.closed:
                raise StoreClosed(f"the connection to {self._master} is closed; open a new store")
            if operation in _LOCAL:
                return getattr(self._native, operation)(*arguments)
            self._probe_again()
            result = getattr(self._native, operation)(*arguments)
            self._unanswered = _is_unanswered(result)
            return result

    def _probe_again(self) -> None:
        """After a call that the master did not answer: look for the master, which is quick, before another call.

        A call to a master that is gone takes 4.3 seconds, whatever the settings (measured on 0.3.13.post1).
        """
        if self._unanswered:
            reasons = unreachable(self._master, PROBE_AGAIN_SECONDS)
            if reasons is not None:
                raise StoreUnavailable(
                    f"the master at {self._master} does not answer ({reasons}); restart it, or check the network",
                    code=codes.RPC_FAILED,
                )

    def _check_usable(self) -> None:
        # Before the lock, which a fork may have copied in its locked state.
        if os.getpid() != self._pid:
            raise StoreClosed(
                f"this store was opened by process {self._pid} and forked into {os.getpid()}, where Mooncake cannot "
                f"work; start the process with 'spawn' and open a store in it"
            )

    def _pinned(self, segment: str) -> Any:
        config = self._replicate_config()
        config.with_hard_pin = True  # anything less is evicted unread when memory runs short
        config.preferred_segment = segment
        return config

    def _until_answered(
        self, operation: str, subject: str, call: Callable[[], int], seconds: float | None = None
    ) -> int:
        """Repeat what changes nothing more when it is repeated, for `seconds` (None: Limits.remove).

        An absent object is an answer.
        """
        for attempt in attempts(self._limits.remove if seconds is None else seconds):
            try:
                code = call()
            except StoreUnavailable:
                if attempt.is_last():
                    raise
                continue
            if code >= 0 or code == codes.NOT_FOUND:
                return code
            if not codes.outcome_of(code).retryable or attempt.is_last():
                raise codes.error_for(code, operation, subject, self._next_step(code))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _next_step(self, code: int) -> str:
        error = codes.outcome_of(code).error
        if error is StoreFull:
            return "remove batches that were read, or lend a larger segment (global_segment_size)"
        if error is StoreUnavailable:
            return f"check the master at {self._master} and the processes that contribute segments"
        if error is ObjectNotFound:
            return "it was removed, or its owner's memory is gone"
        return "this is not expected: report it with the master's log"


def _is_unanswered(result: object) -> bool:
    codes_of = result if isinstance(result, list) else [result]
    return any(code in codes.UNANSWERED for code in codes_of if isinstance(code, int))


def _location(descriptors: Iterable[Any]) -> Location | None:
    for descriptor in descriptors:
        if descriptor.is_memory_replica() and descriptor.status.name == "COMPLETE":
            buffer = descriptor.get_memory_descriptor().buffer_descriptor
            return Location(buffer.transport_endpoint, buffer.buffer_address, buffer.size)
    return None


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


def _close_native(native: Any, gate: _Gate, pid: int) -> None:
    if os.getpid() == pid:
        with gate.lanes[0], gate.lanes[1]:
            gate.closed = True
            native.close()
