"""How long a run will still take."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from miles_plugin.report.record import Arm

_RECENT = 10


class Pace:
    """Measures steps as they end and extrapolates the recent ones to all that are left, of every arm.

    Args:
        config: the run's settings; `reward_control: both` means two arms.
        clock: seconds, monotonic.
    """

    def __init__(self, config: dict[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self.arms = 2 if config.get("reward_control") == "both" else 1
        self.arm = 1
        self.done = self.num_rollout = 0
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._last = clock()

    def arm_started(self, arm: Arm, num_rollout: int) -> None:
        self.arm = self.arms if arm.reward == "shuffled" else 1
        self.done, self.num_rollout = len(arm.steps), num_rollout
        self._last = self._clock()

    def step_finished(self) -> None:
        now = self._clock()
        self._durations.append(now - self._last)
        self._last = now
        self.done += 1

    def remaining(self) -> float | None:
        """Seconds; None before the first step has ended."""
        if not self._durations:
            return None
        steps = self.num_rollout - self.done + (self.arms - self.arm) * self.num_rollout
        return max(0, steps) * sum(self._durations) / len(self._durations)
