"""Threads that work on tensors while the next ones are gathered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait


class Workers:
    """Threads, and the bound on what waits for them.

    Args:
        threads: how many.
        most_bytes: of tensors that are held at a time, unless one alone is larger.
    """

    def __init__(self, threads: int, most_bytes: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk-delta")
        self._most_jobs, self._most_bytes = 2 * threads, most_bytes
        self._running: dict[Future[None], int] = {}
        self._failure: BaseException | None = None

    def make_room(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be held. Raises what a job raised."""
        while self._running and (
            len(self._running) >= self._most_jobs or sum(self._running.values()) + nbytes > self._most_bytes
        ):
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            self._forget(done)
        if self._failure is not None:
            raise self._failure

    def submit(self, nbytes: int, job: Callable[[], None]) -> None:
        """Start a job, which holds `nbytes` until it ends; call `make_room` first."""
        self._running[self._pool.submit(_run, [job])] = nbytes

    def finish(self) -> None:
        """Wait for all jobs. Raises what the first that failed raised; afterwards all is as if new."""
        self._forget(set(self._running))
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the threads; idempotent."""
        self._pool.shutdown()

    def _forget(self, done: set[Future[None]]) -> None:
        for job in done:
            del self._running[job]
            error = job.exception()  # waits for it
            self._failure = self._failure or error


def _run(jobs: list[Callable[[], None]]) -> None:
    jobs.pop()()  # what it holds is free before others hear that it has ended
