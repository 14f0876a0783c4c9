"""The rollout manager as a Ray actor: the same class, with its output in a file of its own."""

from pathlib import Path

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.fleet import Fleet
from miles_plugin.logs import redirect_output
from miles_plugin.rollout.manager import RolloutManager


class RolloutManagerActor(RolloutManager):
    """Made in two steps: what fails in an actor's constructor reaches the caller as text, in a method with its type."""

    def __init__(self, log: Path) -> None:
        redirect_output(log)
        self._fleet = Fleet()  # looked at, and stopped, also when the second step failed

    def gpus(self) -> list[int]:
        """CUDA device ids that Ray has given this process."""
        import ray

        return list(map(int, ray.get_gpu_ids()))

    def set_up(self, config: TrainConfig, master: str | None, run_id: str, run_dir: Path) -> None:
        """The constructor of RolloutManager, for all trainer ranks."""
        super().__init__(config, master, run_id, run_dir, config.world_size)
