"""The job's loop with its rollout manager, and trainers that only take their time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.fully_async.engine import MAX_TOKENS
from benchmarks.fully_async.settings import SYNCHRONOUS, Settings
from benchmarks.fully_async.turn import Step
from miles_plugin.arguments import TrainConfig
from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.fleet import EngineAddress, Left
from miles_plugin.object_store import open_rollout_store
from miles_plugin.rollout.manager import Rollout, RolloutManager
from miles_plugin.weight_transfer.ranks import Ranks
from miles_plugin.weight_transfer.sources import NamedTensor
from miles_plugin.weight_transfer.transfer import Sent, Updater, WeightUpdate

STORE = {
    "protocol": "tcp",
    "local_hostname": "127.0.0.1",
    "global_segment_size": "256mb",
    "local_buffer_size": "64mb",
}
_TRAINER = "the trainer"
_STRIDE = 10_000  # between the seeds of two rounds, since an item's is the one before plus one


def config_of(settings: Settings, mode: str, number: int, engine: str) -> TrainConfig:
    """The job's settings of a turn. number: of the round; each has prompts of its own, and all of its turns the same.

    Args:
        engine: host:port.
    """
    flags = ["--rollout-external", "--rollout-external-engine-addrs", engine, "--actor-num-gpus-per-node", "1"]
    flags += ["--object-store-backend", "mooncake", "--mooncake-store-init-kwargs", json.dumps(STORE)]
    flags += ["--rollout-batch-size", str(settings.rollout_batch_size), "--held-out-size", "1"]
    flags += ["--n-samples-per-prompt", str(settings.n_samples_per_prompt)]
    flags += ["--rollout-max-response-len", str(MAX_TOKENS), "--seed", str(settings.seed + _STRIDE * number)]
    if mode != SYNCHRONOUS:
        flags += ["--fully-async", "--async-data-buffer-capacity-factor", str(settings.capacity_factor)]
        bound = settings.modes[mode]
        flags += [] if bound is None else ["--max-weight-staleness", str(bound)]
    return load_config(flags)


class Job:
    """The loop of one turn after the other; made in a process of its own.

    Args:
        engine: host:port. master: address of the Mooncake master. checkpoint: that the engine started from.
    """

    def __init__(self, settings: Settings, engine: str, master: str, checkpoint: Path) -> None:
        self._settings, self._engine, self._master, self._checkpoint = settings, engine, master, checkpoint
        self._turn = ExitStack()

    def begin(self, mode: str, number: int) -> None:
        """Start the manager of a turn, and give the engine its first weights, as a job does."""
        settings = self._settings
        config = config_of(settings, mode, number, self._engine)
        self._bound = 0 if mode == SYNCHRONOUS else settings.modes[mode]
        run_id = f"{settings.run}-{number}-{list(settings.modes).index(mode)}"
        directory = settings.logs / run_id
        directory.mkdir()
        self._manager = RolloutManager(config, self._master, run_id, directory, ranks=1)
        self._turn.callback(self._manager.close)
        self._manager.start_engines(self._checkpoint, "127.0.0.1", ())
        self._store = open_rollout_store(config, self._master, run_id, contribute_segment=False)
        self._turn.callback(self._store.close)
        self._turn.callback(self._manager.settle)
        journey, versions = _Journey(settings.update_seconds), _Versions(self._manager)
        self._updater = Updater(journey, Ranks(), versions, config.pause_generation_mode)
        self._turn.callback(self._updater.close)
        self._update()

    def step(self, number: int) -> Step:
        """Generate, get, train and update.

        Raises:
            RuntimeError: a rollout is not what the settings allow, or the engine took no update.
        """
        began = time.monotonic()
        rollout = self._manager.generate(number)
        check(rollout, self._settings.samples, self._bound)
        self._train(rollout)
        update = self._update()
        ended = time.monotonic()
        prepared = update.seconds["prepare"]
        paused = update.seconds["converge"] - prepared
        return Step(began, ended, rollout.seconds["generate"], rollout.tokens, prepared, paused, rollout.buffer)

    def end(self) -> None:
        """End a turn; what is generated is given up. Idempotent."""
        self._turn.close()

    close = end

    def _train(self, rollout: Rollout) -> None:
        (shard,) = rollout.shards
        got = self._store.get(
            shard.ref, partition=shard.rank, on_release=lambda: self._manager.acknowledge(shard.ref.key, shard.rank)
        )
        with got:
            time.sleep(self._settings.step_seconds)

    def _update(self) -> WeightUpdate:
        update = self._updater.update(lambda: iter(()), self._manager.engines())
        assert update is not None, "this is rank 0"
        if update.left:
            raise RuntimeError(f"an engine took no weight update: {update.left}")
        return update


def check(rollout: Rollout, samples: int, bound: int | None) -> None:
    """Raise RuntimeError for a batch that is short, or for samples that are older than they may be.

    Args:
        samples: that there must be. bound: how many versions they may be behind, at most; None: any number.
    """
    if rollout.samples != samples or rollout.left_out:
        raise RuntimeError(f"{rollout.samples} samples, {rollout.left_out} left out; there must be {samples}, and all")
    made, current = [int(version) for version in rollout.weight_versions], rollout.weight_version
    # What was current when a rollout was asked for still is when it is there: the update comes after it.
    if current is None or (bound is not None and current - min(made) > bound):
        raise RuntimeError(f"samples of version {min(made)} at version {current}; allowed are {bound} behind")


class _Journey:
    """Implements `Transport`: the weights of a model that is not there, on their way for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def connect(self, engines: Sequence[EngineAddress]) -> dict[str, str]:  # noqa: ARG002
        return {}

    def send(self, tensors: Iterable[NamedTensor]) -> Sent:
        for _ in tensors:
            pass
        time.sleep(self._seconds)
        return Sent(0)

    def close(self) -> None: ...


class _Versions:
    """Implements `Authority`, by a manager in this process."""

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager
        manager.register_trainer(_TRAINER)

    def allocate(self) -> int:
        return self._manager.allocate_version(_TRAINER)

    def verify(self, version: int) -> None:
        self._manager.verify_version(version, _TRAINER)

    def announce(self, version: int) -> None:
        self._manager.announce_version(version, _TRAINER)

    def commit(self, version: int, confirmed: Sequence[str], left: Sequence[Left]) -> None:
        self._manager.commit_version(version, _TRAINER, confirmed, left)
