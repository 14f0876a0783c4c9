"""What a stand-in engine is told to do wrong, and the calls it got."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

# Until a stop has reached all threads: none may answer before.
_STOP_SECONDS = 0.2
# Longer than any test; a hung request ends with its server.
_HANG_SECONDS = 3600.0
_DRIP_SECONDS = 0.1
_MOST_CALLS = 100_000
# Only these have a middle.
LOADS = ("/update_weights_from_distributed", "/update_weights_from_disk")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to do wrong.

    path: of the requests it is for. after: it begins with this call, counted from 1 since the fault was posted.
    times: how many calls in a row meet it.
    do: delay: sleep, then go on. status: answer with `status`. drop: close the connection without an answer.
        hang: the same, but only after `seconds`. drip: answer with a byte every `seconds`, without an end. die:
        SIGKILL. stop: SIGSTOP, until someone sends SIGCONT.
    seconds: of delay, hang and drip.
    when: before or after the request took effect; during: halfway through loading the weights that it brings.
    """

    path: str
    do: Literal["delay", "status", "drop", "hang", "drip", "die", "stop"]
    after: int = 1
    times: int = 1
    seconds: float | None = None
    status: int = 500
    when: Literal["before", "during", "after"] = "before"

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"path={self.path!r} must begin with /")
        if self.after < 1 or self.times < 1:
            raise ValueError(f"after={self.after} and times={self.times} count calls from 1")
        if self.do == "delay" and self.seconds is None:
            raise ValueError("do='delay' needs seconds")
        if self.when == "during" and self.path not in LOADS:
            raise ValueError(f"when='during' is for {' and '.join(LOADS)}, not {self.path}")
        if not 400 <= self.status <= 599:
            raise ValueError(f"status={self.status} must be an error, 400 to 599")


class FaultStatus(Exception):
    """Answer with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class FaultDrop(Exception):
    """Close the connection without an answer."""


class FaultDrip(Exception):
    """Answer with a byte every so many seconds, without an end."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Faults:
    """The faults that were posted, and how many calls each has seen. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: list[tuple[Fault, list[int]]] = []

    def post(self, fault: Fault) -> None:
        with self._lock:
            self._posted.append((fault, [0]))

    def clear(self) -> None:
        with self._lock:
            self._posted.clear()

    def described(self) -> list[dict[str, Any]]:
        """Every fault with the number of calls that it saw, and met."""
        with self._lock:
            return [
                {**msgspec.structs.asdict(fault), "seen": seen, "met": max(0, min(seen - fault.after + 1, fault.times))}
                for fault, (seen,) in self._posted
            ]

    def meet(self, path: str) -> list[Fault]:
        """Count a call; the faults that it meets, oldest first."""
        due = []
        with self._lock:
            for fault, seen in self._posted:
                if fault.path == path:
                    seen[0] += 1
                    if fault.after <= seen[0] < fault.after + fault.times:
                        due.append(fault)
        return due


def strike(fault: Fault) -> None:
    """Do it.

    Raises:
        FaultStatus, FaultDrop, FaultDrip: how the request is to be answered.
    """
    match fault.do:
        case "delay":
            time.sleep(fault.seconds or 0.0)
        case "status":
            raise FaultStatus(fault.status)
        case "drop":
            raise FaultDrop
        case "hang":
            time.sleep(_HANG_SECONDS if fault.seconds is None else fault.seconds)
            raise FaultDrop
        case "drip":
            raise FaultDrip(_DRIP_SECONDS if fault.seconds is None else fault.seconds)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(_STOP_SECONDS)


def striker(due: list[Fault], when: str) -> Callable[[], None]:
    """A function that strikes with the faults for one moment of a call."""

    def strike_all() -> None:
        for fault in due:
            if fault.when == when:
                strike(fault)

    return strike_all


@dataclass
class Call:
    """One request. began, ended: seconds since the epoch. status: None while it runs, and when it got no answer."""

    method: str
    path: str
    body: Any
    began: float = field(default_factory=time.time)
    ended: float | None = None
    status: int | None = None

    def end(self) -> None:
        self.ended = time.time()


class Calls:
    """The last requests that a server got, in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[Call] = deque(maxlen=_MOST_CALLS)

    def begin(self, method: str, path: str, body: Any) -> Call:
        call = Call(method, path, without_bulk(body))
        with self._lock:
            self._calls.append(call)
        return call

    def described(self) -> list[dict[str, Any]]:
        with self._lock:
            return [asdict(call) for call in self._calls]


def without_bulk(body: Any, longest: int = 8) -> Any:
    """A body with every list of more than `longest` elements replaced by {"length": n}, and texts cut."""
    if isinstance(body, Mapping):
        return {key: without_bulk(value, longest) for key, value in body.items()}
    if isinstance(body, list):
        return [without_bulk(value, longest) for value in body] if len(body) <= longest else {"length": len(body)}
    return body[:200] if isinstance(body, str) else body
