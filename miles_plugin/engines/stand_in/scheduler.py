"""When a stand-in engine makes which token: as SGLang's scheduler does, with time in place of a model."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from miles_plugin.engines.stand_in.spans import Spans
from miles_plugin.engines.stand_in.weights import State

# Tokens that are due within this time of each other are made at once: a bound on wake-ups, whatever the load.
_STEP_SECONDS = 0.01


@dataclass(frozen=True)
class Latency:
    """Seconds until the first token, again after a retraction, and between two tokens."""

    prefill: float = 0.0
    token: float = 0.0


@dataclass(eq=False)
class Request:
    """One response in the making.

    made: its tokens so far. due: when the next is made, on the monotonic clock. versions, weights: under what they were
    made. retractions: how often it lost its cache. aborting: it ends with its next token. ended_at: on that clock.
    """

    wanted: int
    made: int = 0
    due: float = 0.0
    versions: Spans[str] = field(default_factory=Spans)
    weights: Spans[State] = field(default_factory=Spans)
    retractions: int = 0
    aborting: bool = False
    ended: Literal["length", "aborted", "aborted waiting"] | None = None
    ended_at: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)


class Scheduler:
    """Makes tokens for every running request, unless paused or while something exclusive goes on.

    Args:
        latency: of tokens. version: of the weights before any is stamped.
        weights: says what they are; called at every step.
    """

    def __init__(self, latency: Latency, version: str, weights: Callable[[], State]) -> None:
        self._latency, self._weights = latency, weights
        self.version = version
        self._changed = threading.Condition(threading.RLock())
        self._running: list[Request] = []
        self._waiting: list[Request] = []  # retracted; those that arrive during a pause wait before they get here
        self._paused_at: float | None = None
        threading.Thread(target=self._run, name="scheduler", daemon=True).start()

    def submit(self, request: Request) -> None:
        """Begin to make tokens; `request.done` is set when there are enough, or it was aborted."""
        with self._changed:
            request.due = time.monotonic() + self._latency.prefill
            (self._running if self._paused_at is None else self._waiting).append(request)
            self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """What goes on inside is done between two steps; time stands still for the requests."""
        with self._changed:
            began = time.monotonic()
            if self._paused_at is None:
                self._step(began)
            try:
                yield
            finally:
                if self._paused_at is None:
                    self._shift(time.monotonic() - began)
                self._changed.notify_all()

    def pause(self, mode: Literal["in_place", "retract"]) -> None:
        """Make no more tokens. in_place: requests stay as they are; retract: they lose what was computed for them."""
        with self._changed:
            now = time.monotonic()
            if self._paused_at is None:
                self._step(now)
                self._paused_at = now
            if mode == "retract":
                for request in self._running:
                    request.retractions += 1
                self._waiting += self._running
                self._running = []

    def resume(self) -> None:
        """Go on; idempotent."""
        with self._changed:
            if self._paused_at is None:
                return
            now = time.monotonic()
            self._shift(now - self._paused_at)
            self._paused_at = None
            for request in self._waiting:
                request.due = now + self._latency.prefill
            self._running += self._waiting
            self._waiting = []
            self._changed.notify_all()

    def abort_all(self) -> None:
        """Waiting requests end at once, running ones with their next token: of a paused engine, when it resumes."""
        with self._changed:
            for request in self._waiting:
                _end(request, "aborted waiting")
            self._waiting = []
            for request in self._running:
                request.aborting = True

    def stamp(self, version: str) -> None:
        """Name the weights. Tokens made so far keep the name they were made under."""
        with self.exclusive():
            if version != self.version:
                for request in (*self._running, *self._waiting):
                    request.versions.extend(self.version, request.made)
                self.version = version

    def is_idle(self) -> bool:
        """Whether nothing is computed for any request; those that wait while paused have nothing."""
        with self._changed:
            return not self._running and (self._paused_at is not None or not self._waiting)

    def wait_until_idle(self, timeout: float) -> bool:
        """Whether every request has ended within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running and not self._waiting, timeout)

    def wait_until_running(self, timeout: float) -> bool:
        """Whether tokens are made, or would be, within so many seconds."""
        if not self._changed.acquire(timeout=timeout):
            return False
        try:
            return self._changed.wait_for(lambda: self._paused_at is None, timeout)
        finally:
            self._changed.release()

    def _run(self) -> None:
        with self._changed:
            while True:
                wait = None
                if self._paused_at is None and self._running:
                    now = time.monotonic()
                    self._step(now)
                    wait = self._seconds_to_next(now)
                self._changed.wait(wait)

    def _seconds_to_next(self, now: float) -> float | None:
        """Until the next token is due, or a step from now if that is later and no request ends before."""
        if not self._running:
            return None
        token = self._latency.token
        soonest = min(request.due for request in self._running)
        end = min(request.due + (request.wanted - request.made - 1) * token for request in self._running)
        return max(0.0, min(end, max(soonest, now + _STEP_SECONDS)) - now)

    def _step(self, now: float) -> None:
        """Make every token that is due."""
        due = [request for request in self._running if request.due <= now]
        if not due:
            return
        state = self._weights()
        token = self._latency.token
        for request in due:
            left = request.wanted - request.made
            count = left if token == 0.0 else min(left, 1 + int((now - request.due) / token))
            if request.aborting:
                count = min(left, 1)
            request.made += count
            request.due += count * token
            request.weights.extend(state, request.made)
            if request.aborting or request.made == request.wanted:
                request.versions.extend(self.version, request.made)
                _end(request, "aborted" if request.aborting else "length")
        self._running = [request for request in self._running if request.ended is None]
        if not self._running:
            self._changed.notify_all()

    def _shift(self, seconds: float) -> None:
        for request in self._running:
            request.due += seconds


def _end(request: Request, how: Literal["length", "aborted", "aborted waiting"]) -> None:
    request.ended, request.ended_at = how, time.monotonic()
    request.done.set()
