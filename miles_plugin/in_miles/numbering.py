"""miles's policy versions as numbers that never fall.

Each trainer of miles counts its own updates from 1. Under independent data parallelism another one may take over, whose
count is lower, though its weights are the next ones. By the bare numbers, what lies in the buffer would look fresher
than what engines make from then on.
"""

from miles_plugin.fully_async.staleness import number_of


class Numbering:
    """What is added to miles's numbers; more with each step back. All in one event loop."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._added = self._steps_back = 0

    def current(self, version: int | None) -> int | None:
        """The number of the version that miles names as the current one; None for none.

        A lower one than before is the one after it: miles updates once between two versions that it names.
        """
        if version is None:
            return None
        if self._last is not None and version < self._last:
            self._added += self._last + 1 - version
            self._steps_back += 1
        self._last = version
        return version + self._added

    def number_of(self, version: object) -> int | None:
        """The number of a version that a sample names, by the count that is the current one now."""
        number = number_of(version)
        return None if number is None else number + self._added

    def take_steps_back(self) -> int:
        """How often a lower version was named since this was asked last."""
        steps, self._steps_back = self._steps_back, 0
        return steps
