"""Where an object's bytes go while it is written: into mapped memory, or through a window over the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from mooncake_store import frame
from mooncake_store.arrays import Bytes
from mooncake_store.frame import Frame
from mooncake_store.rows import STEP_BYTES
from mooncake_store.worker import Worker

WINDOW_BYTES = 8 << 20  # what travels together; more is no faster (measured)
# The first window: nothing travels while it is filled. Those after it are longer by this factor, which is about how
# much faster memory is than TCP, so that the next is full when one has arrived.
FIRST_BYTES, GROWTH = 1 << 20, 4


class _InParts:
    """A sink of an object that is stored in parts; a step that crosses into the next part goes through a scratch.

    Args:
        check: called before each step; what it raises ends the writing. It returns how long, by time.monotonic(), its
            answer holds.
    """

    def __init__(self, parts: Sequence[Frame], check: Callable[[], float]) -> None:
        self.helper: Worker | None = None
        self.in_place, self.until = False, math.inf
        self._parts, self._check = parts, check
        self._part_bytes = parts[0].part_bytes
        self._crossing: tuple[int, Bytes] | None = None

    def reserve(self, position: int, nbytes: int) -> Bytes:
        self._settle()
        until = self._check()
        if self.in_place:
            self.until = until
        if not nbytes:  # also behind the last part
            return np.empty(0, dtype=np.uint8)
        part, offset = divmod(position, self._part_bytes)
        if offset + nbytes <= self._part_bytes:
            return self._within(part, offset, nbytes)
        self._crossing = position, np.empty(nbytes, dtype=np.uint8)
        return self._crossing[1]

    def finish(self) -> None:
        self._settle()

    def _settle(self) -> None:
        if self._crossing is None:
            return
        position, step = self._crossing
        self._crossing = None
        taken = 0
        while taken < step.size:
            part, offset = divmod(position + taken, self._part_bytes)
            nbytes = min(self._part_bytes - offset, step.size - taken)
            self._within(part, offset, nbytes)[:] = step[taken : taken + nbytes]
            taken += nbytes

    def _within(self, part: int, offset: int, nbytes: int) -> Bytes:
        """Memory for payload of one part."""
        raise NotImplementedError


class InPlace(_InParts):
    """A sink that is mapped memory.

    Args:
        targets: uint8, memory of each part with room for its frame in front, which is not written.
        helper: fills a part of it.
    """

    def __init__(
        self, parts: Sequence[Frame], check: Callable[[], float], targets: Sequence[Bytes], helper: Worker
    ) -> None:
        super().__init__(parts, check)
        self.in_place = True
        self._targets = targets
        if len(parts) == 1:  # where no step crosses into another part
            self.helper = helper

    def _within(self, part: int, offset: int, nbytes: int) -> Bytes:
        return self._targets[part][frame.NBYTES + offset : frame.NBYTES + offset + nbytes]


class Windows(_InParts):
    """A sink that sends what fills one half of a buffer while the other half is filled.

    Args:
        buffer: uint8, as long as `window_buffer` says. One that holds the whole of an only part is sent at once.
        send: called with a part's number, an offset in the part, and what belongs there, frames included.
        sender: sends all but the last.
    """

    def __init__(
        self,
        parts: Sequence[Frame],
        check: Callable[[], float],
        buffer: Bytes,
        send: Callable[[int, int, Bytes], None],
        sender: Worker,
    ) -> None:
        super().__init__(parts, check)
        self._is_whole = len(parts) == 1 and buffer.size >= frame.NBYTES + self._part_bytes
        half = buffer.size if self._is_whole else buffer.size // 2
        self._halves = [buffer[:half], buffer[half : 2 * half]]
        self._room = half if self._is_whole else min(half, FIRST_BYTES)
        self._send, self._sender = send, sender
        self._sending: Future[None] | None = None
        self._part, self._start, self._end = -1, 0, 0  # of what the first half holds: bytes of a part, frame included

    def finish(self) -> None:
        super().finish()
        self.wait()
        self._send(self._part, self._start, self._halves[0][: self._end - self._start])

    def wait(self) -> None:
        """Let what is being sent be sent, or raise why it cannot: the buffer may not be given back before."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _within(self, part: int, offset: int, nbytes: int) -> Bytes:
        at = frame.NBYTES + offset
        follows = self._is_whole or at == self._end
        if part != self._part or not follows or at + nbytes - self._start > self._room:
            self._flush()
            self._part, self._start, self._end = part, at, at
            if self._is_whole or not offset:  # what begins a part begins with its frame
                self._halves[0][: frame.NBYTES] = np.frombuffer(self._parts[part].pack(), dtype=np.uint8)
                self._start = 0
        self._end = max(self._end, at + nbytes)
        return self._halves[0][at - self._start : at - self._start + nbytes]

    def _flush(self) -> None:
        if self._part >= 0:
            self.wait()
            filled = self._halves[0][: self._end - self._start]
            self._sending = self._sender.submit(self._send, self._part, self._start, filled)
            self._halves.reverse()
            self._room = min(GROWTH * self._room, self._halves[0].size)


def window_buffer(parts: Sequence[Frame], most: int) -> int:
    """Bytes of a buffer for `Windows` of which `most` may be used; more where that is too little."""
    whole = frame.NBYTES + parts[0].part_bytes
    if len(parts) == 1 and whole <= min(WINDOW_BYTES, most):
        return whole
    return max(2 * (STEP_BYTES + frame.NBYTES), min(2 * WINDOW_BYTES, most))
