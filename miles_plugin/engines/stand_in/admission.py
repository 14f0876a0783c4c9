"""Who may enter when: requests for responses beside each other, weight updates alone, nobody through a pause."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# No test waits so long; SGLang would wait for ever.
_SECONDS = 1800.0


class Admission:
    """The two locks of SGLang's front end: its pause, and its model-update lock, which a request holds to its end."""

    def __init__(self) -> None:
        self._pause = threading.Condition(threading.Lock())
        self._paused = False
        self._model = threading.Condition(threading.Lock())
        self._requests = 0
        self._updates = 0  # under way or waiting

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request for responses: held back while paused, and by an update."""
        with self._pause:
            _wait(self._pause.wait_for(lambda: not self._paused, _SECONDS))
        with self._model:
            _wait(self._model.wait_for(lambda: not self._updates, _SECONDS))
            self._requests += 1
        try:
            yield
        finally:
            with self._model:
                self._requests -= 1
                self._model.notify_all()

    @contextmanager
    def update(self, hold_pause: bool = True) -> Iterator[None]:
        """A weight update: at once while paused, and nobody may end the pause; otherwise alone, after all requests.

        Args:
            hold_pause: False lets others pause and continue meanwhile, as an update from disk does.
        """
        with self._pause:
            paused = self._paused
            if paused and hold_pause:
                yield
                return
        if paused:
            yield
            return
        with self._model:
            self._updates += 1
            try:
                _wait(self._model.wait_for(lambda: not self._requests, _SECONDS))
                yield
            finally:
                self._updates -= 1
                self._model.notify_all()

    @contextmanager
    def pausing(self, paused: bool) -> Iterator[None]:
        """Begin or end a pause; what is inside is done before anyone notices."""
        with self._pause:
            self._paused = paused
            yield
            self._pause.notify_all()

    def wait_until_empty(self) -> None:
        """Until no request for responses is left."""
        with self._model:
            _wait(self._model.wait_for(lambda: not self._requests, _SECONDS))


def _wait(succeeded: bool) -> None:
    if not succeeded:
        raise TimeoutError(f"waited {_SECONDS:.0f} s for a pause, an update or requests to end")
