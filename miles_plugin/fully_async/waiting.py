"""Tasks that wait in a line, first come first served, in O(1) each, whatever is cancelled."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Place:
    """A task's place in a `Line`."""

    def __init__(self, line: "Line") -> None:
        self._line = line
        self._woken: asyncio.Future[None] | None = None

    async def reached(self) -> None:
        """Wait until this is the first place and there is something for it, or the line was closed.

        What there is is taken in the same step of the loop that this returns in: nobody else has been given it.
        """
        while not self._line.may_go(self):
            self._woken = asyncio.get_running_loop().create_future()
            self._line.count_waiting(+1)
            try:
                await self._woken
            finally:
                self._line.count_waiting(-1)
                self._woken = None

    def wake(self) -> None:
        """Have it look again."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


class Line:
    """Places in the order in which they were taken. Nobody is handed anything: the first one is woken, and takes.

    So a task that is cancelled, also one that was woken already, has nothing that could be lost; it leaves, and the
    next one is woken.

    Args:
        is_open: whether there is something for the first one; `wake` must be called when that becomes so.
        clock: in seconds, monotonic.
    """

    def __init__(self, is_open: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_open, self._clock = is_open, clock
        # Ordered, since of a plain dict the first key is searched for among those that have left.
        self._places: OrderedDict[Place, None] = OrderedDict()
        self._closed = False
        self._waiting, self._since, self._waited = 0, clock(), 0.0

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place at the end, kept until the block is left."""
        place = Place(self)
        self._places[place] = None
        try:
            yield place
        finally:
            del self._places[place]
            self.wake()

    def may_go(self, place: Place) -> bool:
        """Whether `place` need not wait."""
        return self._closed or (place is next(iter(self._places)) and self._is_open())

    def wake(self) -> None:
        """Wake the first one, if there is something for it."""
        if self._places and self._is_open():
            next(iter(self._places)).wake()

    def close(self) -> None:
        """Nobody waits any more, now or later; idempotent."""
        self._closed = True
        for place in self._places:
            place.wake()

    def count_waiting(self, change: int) -> None:
        """So many more tasks wait from now on."""
        now = self._clock()
        self._waited += self._waiting * (now - self._since)
        self._since = now
        self._waiting += change

    def take_waited(self) -> float:
        """Seconds that tasks have waited since this was asked last, summed over them; those that wait still count."""
        self.count_waiting(0)
        waited, self._waited = self._waited, 0.0
        return waited
