"""The main job: everything it starts, in order, and the loop that joins rollout, training and weight updates."""

import contextlib
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.cluster import LOOPBACK, ROLLOUT_NODE, TRAINER_NODE, local_cluster
from miles_plugin.preflight import Plan, check
from miles_plugin.report.record import Arm, Report, ShardRecord, Step
from mooncake_store.errors import ConfigError, IntegrityError
from mooncake_store.master import MasterProcess

ARMS = {"none": ("real",), "shuffled": ("shuffled",), "both": ("real", "shuffled")}
Say = Callable[[str], None]


class JobFailed(RuntimeError):
    """A part of a running job failed; the message says which, and ends with its last words."""


# Calls of this group reach the manager while it generates.
_CONTROL = "control"
_ABANDON_SECONDS = 8.0


@dataclass(frozen=True)
class Actors:
    """Ray handles of the job: the rollout manager and one trainer per rank."""

    manager: Any
    trainers: list[Any]

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every trainer at once and wait for the results, in rank order."""
        return results_of([getattr(trainer, method).remote(*arguments) for trainer in self.trainers])

    def managed(self, method: str, *arguments: Any) -> Any:
        """Call a method of the manager and wait."""
        import ray

        return ray.get(getattr(self.manager, method).remote(*arguments))


def results_of(calls: list[Any]) -> list[Any]:
    """Results of Ray calls, in order. The first failure is raised at once: the other ranks may wait for the failed
    one in a collective, and would hold the job until that times out.
    """
    import ray

    pending = calls
    while pending:
        ready, pending = ray.wait(pending)
        ray.get(ready)
    results: list[Any] = ray.get(calls)
    return results


def train(config: TrainConfig, say: Say = print) -> Path:
    """Run the job to its end and return the directory of its report.

    Raises:
        ConfigError, StoreUnavailable: found before anything is started, as far as it can be.
        JobFailed: a part of the job failed; everything the job started has ended by then.
    """
    plan = check(config)
    started = time.monotonic()
    run_id = config.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory = _report_directory(config, run_id)
    (directory / "config.yaml").write_text(config.to_yaml())
    report = Report(run_id, config.model_dump(mode="json"), _machine(), checkpoint="")
    report.write(directory / "report.json")
    say(f"run {run_id}: report in {directory}")
    try:
        with _parts(config, plan, run_id, directory, say) as (actors, checkpoint):
            report.checkpoint = str(checkpoint)
            for reward in ARMS[config.reward_control]:
                report.arms[reward] = arm = _begin_arm(actors, checkpoint, reward, say)
                for rollout_id in range(config.num_rollout):
                    arm.steps.append(_step(config, actors, rollout_id))
                    say(_line(arm.steps[-1]))
                    report.seconds_total = time.monotonic() - started
                    report.write(directory / "report.json")
            report.object_store = actors.managed("store_stats")
        report.status = "finished"
    except Exception as error:
        cause = getattr(error, "cause", None) or error  # Ray wraps what a part raised
        report.status = f"stopped: {type(cause).__name__}: {cause}"
        if isinstance(cause, ConfigError):
            raise cause from error
        raise JobFailed(f"{type(cause).__name__}: {cause}") from error
    except BaseException as error:
        report.status = f"stopped: {type(error).__name__}"
        raise
    finally:
        report.seconds_total = time.monotonic() - started
        report.write(directory / "report.json")
        _draw(report, directory)
    for name, summary in report.to_dict()["summary"].items():
        say(
            f"{name} reward: held-out accuracy {summary['initial_accuracy']:.3f} -> {summary['final_accuracy']:.3f} "
            f"({summary['rise']:+.3f}), digests {'equal' if summary['digests_equal'] else 'DIFFER'}"
        )
    say(f"finished in {report.seconds_total:.0f} s: {directory / 'report.json'}, {directory / 'report.png'}")
    return directory


@contextlib.contextmanager
def _parts(config: TrainConfig, plan: Plan, run_id: str, directory: Path, say: Say) -> Iterator[tuple[Actors, Path]]:
    """Start the parts of the job; at exit, end them in the opposite order."""
    with contextlib.ExitStack() as stack:
        master = None
        if plan.own_master:
            master = stack.enter_context(MasterProcess(log=directory / "logs" / "mooncake_master.log"))
            say(f"mooncake_master at {master.address}")
        stack.enter_context(local_cluster(plan.rollout_node, plan.trainer_node))
        say("Ray: a rollout node and a trainer node")
        checkpoint = _checkpoint(config, say)
        say("starting the trainers and SGLang, which takes about half a minute")
        actors = _start_actors(config, plan, master.address if master else None, run_id, directory)
        try:
            _connect(actors, checkpoint, plan, say)
            yield actors, checkpoint
            _close(actors)
        except Exception:
            _name_the_dead(actors, master)
            raise
        finally:
            _abandon(actors)


def _checkpoint(config: TrainConfig, say: Say) -> Path:
    if config.hf_checkpoint is not None:
        return config.hf_checkpoint.resolve()
    from miles_plugin.training.warm_start import warm_started_checkpoint

    return warm_started_checkpoint(config, say)


def _start_actors(config: TrainConfig, plan: Plan, master: str | None, run_id: str, directory: Path) -> Actors:
    import ray

    from miles_plugin.rollout.manager import RolloutManager
    from miles_plugin.training.actor import TrainerActor

    ranks = config.actor_num_gpus_per_node
    trainers = [
        ray.remote(TrainerActor)
        .options(
            resources={TRAINER_NODE: 1 / ranks},
            num_cpus=1,
            num_gpus=1 if plan.trainer_node.gpus else 0,
            runtime_env={"env_vars": {"LOCAL_RANK": str(rank)}},
        )
        .remote(config, rank, ranks)
        for rank in range(ranks)
    ]
    # The trainers' segment must be mounted before the manager puts, so they join the store first.
    actors = Actors(None, trainers)
    actors.each("open_store", master, run_id)
    manager = (
        ray.remote(concurrency_groups={_CONTROL: 1})(RolloutManager)
        .options(
            resources={ROLLOUT_NODE: 1},
            num_cpus=1,
            num_gpus=len(plan.rollout_node.gpus),
        )
        .remote(config, master, run_id, directory, ranks)
    )
    return Actors(manager, trainers)


def _connect(actors: Actors, checkpoint: Path, plan: Plan, say: Say) -> None:
    import ray

    engines = actors.manager.start_engines.remote(checkpoint, LOOPBACK, plan.rollout_node.gpus)
    port = ray.get(actors.trainers[0].rendezvous_port.remote(LOOPBACK))
    actors.each("join", LOOPBACK, port)
    ray.get(engines)
    actors.each("connect_engines", actors.managed("engines"))
    say("SGLang serves; the trainers and the engines share a process group")


def _begin_arm(actors: Actors, checkpoint: Path, reward: str, say: Say) -> Arm:
    actors.each("load", checkpoint)
    actors.managed("begin", reward == "shuffled")
    actors.each("update_weights", actors.manager)
    arm = Arm(reward, actors.managed("evaluate"))
    say(f"{reward} reward: held-out accuracy {arm.initial_accuracy:.3f} before training")
    return arm


def _step(config: TrainConfig, actors: Actors, rollout_id: int) -> Step:
    rollout = actors.managed("generate", rollout_id)
    results = results_of(
        [
            trainer.train.remote(shard, actors.manager)
            for trainer, shard in zip(actors.trainers, rollout.shards, strict=True)
        ]
    )
    shards = [
        ShardRecord(shard.rank, shard.ref.key, shard.ref.num_rows, shard.digest, result["digest"])
        for shard, result in zip(rollout.shards, results, strict=True)
    ]
    check_digests(shards)
    seconds = rollout.seconds | {
        phase: max(result["seconds"][phase] for result in results) for phase in ("get", "train")
    }
    nbytes = {"put": rollout.put_bytes, "get": sum(result["get_bytes"] for result in results)}
    version = None
    is_last = rollout_id + 1 == config.num_rollout
    if (rollout_id + 1) % config.update_weights_interval == 0 or is_last:
        update_started = time.perf_counter()
        update = actors.each("update_weights", actors.manager)[0]
        seconds["update"] = time.perf_counter() - update_started
        nbytes["update"] = update["nbytes"]
        version = update["version"]
    evaluated = (rollout_id + 1) % config.eval_interval == 0 or is_last
    return Step(
        rollout_id=rollout_id,
        reward=rollout.reward,
        held_out_accuracy=actors.managed("evaluate") if evaluated else None,
        loss=results[0]["loss"],
        clip_fraction=results[0]["clip_fraction"],
        grad_norm=results[0]["grad_norm"],
        samples=rollout.samples,
        tokens=rollout.tokens,
        seconds=seconds,
        nbytes=nbytes,
        sample_versions=rollout.weight_versions,
        served_version=version,
        shards=shards,
    )


def check_digests(shards: list[ShardRecord]) -> None:
    """Raise IntegrityError if a rank got anything but what was put for it."""
    for shard in shards:
        if shard.put_digest != shard.got_digest:
            raise IntegrityError(f"{shard.key}: put {shard.put_digest}, rank {shard.rank} got {shard.got_digest}")


def _close(actors: Actors) -> None:
    """Let every actor leave in order: the trainers' group and the store first, then the engines."""
    actors.each("close")
    actors.managed("close")


def _name_the_dead(actors: Actors, master: MasterProcess | None) -> None:
    """If the master or an engine has ended, raise that: what failed after it is only the consequence."""
    import ray

    if master is not None:
        master.check()
    with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        ray.get(actors.manager.check_engines.options(concurrency_group=_CONTROL).remote(), timeout=_ABANDON_SECONDS)


def _abandon(actors: Actors) -> None:
    """End the engines and the actors without waiting for what they do: a part may hang because another failed."""
    import ray

    for trainer in actors.trainers:
        ray.kill(trainer)
    # If the manager is gone as well, the engines' guards have seen it and end them.
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(actors.manager.stop_engines.options(concurrency_group=_CONTROL).remote(), timeout=_ABANDON_SECONDS)
    ray.kill(actors.manager)


def _report_directory(config: TrainConfig, run_id: str) -> Path:
    directory = (config.report or Path("runs") / run_id).resolve()
    if (directory / "report.json").exists():
        raise ConfigError(f"report={directory} holds the report of another run; name another directory or remove it")
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"report={directory}: {error}; name a directory that can be made and written") from error
    return directory


def _draw(report: Report, directory: Path) -> None:
    try:
        from miles_plugin.report.plot import draw
    except ImportError as error:
        logging.getLogger(__name__).warning("no report.png: %s; install the extra `train`", error)
        return
    draw(report, directory / "report.png")


def _machine() -> dict[str, Any]:
    return {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}


def _line(step: Step) -> str:
    accuracy = "" if step.held_out_accuracy is None else f"  held-out {step.held_out_accuracy:.3f}"
    seconds = "  ".join(f"{phase} {value:.2f}" for phase, value in step.seconds.items())
    return f"rollout {step.rollout_id:3d}  reward {step.reward:.3f}{accuracy}  loss {step.loss:+.4f}  s: {seconds}"
