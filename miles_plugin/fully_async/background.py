"""Work that goes on beside the buffer, in its loop: a task while there is some, nothing while there is none."""

import asyncio
from collections.abc import Awaitable, Callable


class Background:
    """Calls `step` until it returns False.

    Args:
        step: one piece of work; whether there may be more. It must look for work last thing before it returns False.
        failed: told what it raised. It is called no more then.
    """

    def __init__(self, step: Callable[[], Awaitable[bool]], failed: Callable[[BaseException], None]) -> None:
        self._step, self._failed = step, failed
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def kick(self) -> None:
        """There may be work. Called in the loop."""
        if not self._closed and not self.is_busy():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def is_busy(self) -> bool:
        """Whether it works."""
        return self._task is not None and not self._task.done()

    async def idle(self) -> None:
        """Wait until it does not."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def close(self) -> None:
        """Cancel what runs; idempotent. May be called without a loop, when its loop has ended."""
        self._closed = True
        if self._task is not None and not self._task.get_loop().is_closed():
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while await self._step():
                pass
        except Exception as error:
            self._closed = True
            self._failed(error)
