"""What a rollout is asked for, under the names of miles."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutFnTrainInput:
    """One training rollout.

    rollout_id: counted from 0. weight_version: the current policy version when the rollout was asked for, pushed into
    the manager by whoever updates weights, so that nothing has to poll for it; None before the first update, which is
    not the version 0.
    """

    rollout_id: int
    weight_version: int | None = None

    @property
    def evaluation(self) -> bool:
        return False
