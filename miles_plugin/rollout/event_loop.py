"""An event loop in a thread of its own: what runs there goes on while nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines, in one loop for as long as it lives: what functions of the user's keep is bound to it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do it and wait; cancelled when the wait is interrupted."""
        doing = self.start(work)
        try:
            return doing.result()
        except BaseException:
            doing.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Do it meanwhile. Raises RuntimeError when this was closed."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the event loop was closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs, let it end, and end the thread; idempotent."""
        if self._loop.is_closed():
            return
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
