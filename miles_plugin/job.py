"""The main job: the loop that joins rollout, training and weight updates, its report and its checkpoints."""

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from miles_plugin import checkpoint, interrupt
from miles_plugin.arguments import TrainConfig
from miles_plugin.checkpoint import Progress
from miles_plugin.engines.attach import check_loopback
from miles_plugin.engines.joining import ADD_ENGINE, JoinRequests
from miles_plugin.parts import PartFailed, Parts, start_parts
from miles_plugin.plan import Plan
from miles_plugin.preflight import check, check_report
from miles_plugin.report.machine import describe_machine
from miles_plugin.report.observer import Observer
from miles_plugin.report.observers import open_observers
from miles_plugin.report.record import Arm, Report, Resume, ShardRecord, Step, UpdateRecord
from mooncake_store.errors import ConfigError, IntegrityError, StoreUnavailable

if TYPE_CHECKING:
    from miles_plugin.weight_transfer.transfer import WeightUpdate


# Seconds after which a rollout that waits for groups says so, and again.
SILENCE_SECONDS = 30.0


class JobFailed(RuntimeError):
    """A part of a running job failed; the message says which, and ends with its last words."""


def train(config: TrainConfig, origins: Mapping[str, str] | None = None) -> Path:
    """Run the job to its end and return the directory of its report.

    Args:
        origins: of the settings, as `load_config_and_origins` returns them; for messages.

    Raises:
        AlreadyDone: `--load` leaves nothing to do; nothing was started.
        ConfigError, StoreUnavailable: found before anything is started, as far as it can be.
        JobFailed: a part of the job failed; everything the job started has ended by then.
    """
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is imported
        plan = check(config)
    with interrupt.in_order(), checkpoint.claim(config.save, config.takeover):
        plan = replace(plan, resume=checkpoint.find(config))  # another job may have saved there until the claim
        run_id = config.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        directory = _report_directory(config, run_id)
        (directory / "config.yaml").write_text(config.to_yaml())
        report = _new_report(config, run_id, plan.resume)
        observer = open_observers(config, directory)
        observer.run_started(report, directory)
        if plan.resume is not None and (changes := checkpoint.changes(plan.resume, config, origins or {})):
            observer.message(f"warning: changed since {plan.resume.directory} was saved: {', '.join(changes)}")
        with _outcome_in(report, observer):
            _run(config, plan, report, directory, observer)
    return directory


@contextlib.contextmanager
def _outcome_in(report: Report, observer: Observer) -> Iterator[None]:
    """Record how the run ended, whatever ended it, and turn a part's failure into JobFailed."""
    started = time.monotonic() - report.seconds_total
    try:
        yield
        report.status = "finished"
    except (ConfigError, StoreUnavailable) as error:
        report.status = f"stopped: {type(error).__name__}: {error}"
        raise
    except Exception as error:
        report.status = f"stopped: {error if isinstance(error, PartFailed) else f'{type(error).__name__}: {error}'}"
        raise JobFailed(report.status.removeprefix("stopped: ")) from error
    except BaseException as error:
        report.status = "stopped: interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped: {error!r}"
        raise
    finally:
        report.seconds_total = time.monotonic() - started
        observer.run_finished(report)


def _run(config: TrainConfig, plan: Plan, report: Report, directory: Path, observer: Observer) -> None:
    started = time.monotonic() - report.seconds_total
    resume, late_engines = plan.resume, JoinRequests(directory)
    hosts = {node.host for node in (plan.rollout_node, *plan.trainer_nodes)}

    def start_from(each_step: Callable[[], None]) -> Path:
        return _checkpoint(config, observer, each_step)

    with start_parts(config, plan, report.run_id, directory, start_from, observer.message) as (parts, path):
        report.checkpoint = str(path)
        if resume is not None:
            parts.managed("continue_versions", resume.newest_version())
        for reward in config.arms:
            if resume is not None and reward != resume.progress.arm:
                continue  # this arm was finished before
            arm = _begin_arm(config, parts, path, reward, report, resume, observer)
            resume = None
            for rollout_id in range(len(arm.steps), config.num_rollout):
                for address in late_engines.new():
                    _join(parts, address, hosts, observer)
                arm.steps.append(_step(config, parts, rollout_id, observer))
                report.seconds_total = time.monotonic() - started
                observer.step_finished(report, arm)
                _save_if_due(config, parts, report, arm, observer)
        if kept := parts.managed("settle"):
            observer.message(f"warning: {len(kept)} batches were not acknowledged by their readers: {kept}")
        report.object_store = parts.managed("store_stats")


def _begin_arm(
    config: TrainConfig,
    parts: Parts,
    path: Path,
    reward: str,
    report: Report,
    resume: checkpoint.Resume | None,
    observer: Observer,
) -> Arm:
    parts.each("load", path, resume.directory if resume else None)
    parts.managed("begin", reward == "shuffled", resume.progress.manager if resume else None)
    update = _update(parts, observer)
    if resume is not None:
        arm = report.arms[reward]
        observer.message(f"{reward} reward: resumed after {len(arm.steps)} rollouts from {resume.directory}")
    else:
        arm = report.arms[reward] = Arm(reward, parts.managed("evaluate"), first_update=update)
    observer.arm_started(arm, config.num_rollout)
    return arm


def _update(parts: Parts, observer: Observer) -> UpdateRecord:
    """Bring the engines to the trainers' weights."""
    observer.phase_started("update")

    def look() -> None:
        done, total = parts.progress() or (0, 0)
        if total:
            observer.progress(done, total)

    update: WeightUpdate = parts.each("update_weights", parts.manager, tick=look)[0]
    _say_engine_news(parts, observer)
    return UpdateRecord(
        update.version,
        update.nbytes,
        update.density,
        update.seconds,
        list(update.confirmed),
        list(map(str, update.left)),
        update.proven,
    )


def _join(parts: Parts, address: str, hosts: Collection[str], observer: Observer) -> None:
    """Take in an engine that came late, to be updated with those that wait; or say why not, and go on."""
    try:
        check_loopback([address], hosts, ADD_ENGINE)
        refused = parts.managed("join_engine", address)
    except ConfigError as error:
        refused = str(error)
    if refused:
        observer.message(f"warning: {refused}")


def _say_engine_news(parts: Parts, observer: Observer) -> None:
    for news in parts.managed("engine_news"):
        observer.message(news)


class _Silence:
    """Says every half minute what a rollout waits for."""

    def __init__(self, parts: Parts, observer: Observer, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts, self._observer, self._clock = parts, observer, clock
        self._due = clock() + SILENCE_SECONDS

    def look(self) -> None:
        if self._clock() >= self._due and (waiting := self._parts.waiting()) is not None:
            self._due = self._clock() + SILENCE_SECONDS
            self._observer.message(f"waiting for {waiting.seconds:.0f} s: {waiting}")


def _step(config: TrainConfig, parts: Parts, rollout_id: int, observer: Observer) -> Step:
    updates: list[UpdateRecord] = []
    updating = 0.0
    waiting = parts.managed("roll_call")
    _say_engine_news(parts, observer)
    if waiting:
        observer.message(f"engines that wait for weights: {', '.join(waiting)}")
        update_started = time.perf_counter()
        updates.append(_update(parts, observer))
        updating = time.perf_counter() - update_started
    observer.phase_started("generate")
    rollout = parts.managed("generate", rollout_id, tick=_Silence(parts, observer).look if config.fully_async else None)
    observer.phase_started("train")
    results = parts.each_with("train", rollout.shards, [parts.manager] * len(rollout.shards))
    shards = [
        ShardRecord(shard.rank, shard.ref.key, shard.num_rows, shard.digest, result["digest"])
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
        updates.append(_update(parts, observer))
        updating += time.perf_counter() - update_started
        version = updates[-1].version
    if updates:
        seconds["update"], nbytes["update"] = updating, sum(update.nbytes for update in updates)
    accuracy = None
    if (rollout_id + 1) % config.eval_interval == 0 or is_last:
        observer.phase_started("evaluate")
        evaluation_started = time.perf_counter()
        accuracy = parts.managed("evaluate")
        seconds["evaluate"] = time.perf_counter() - evaluation_started
    return Step(
        rollout_id=rollout_id,
        reward=rollout.reward,
        held_out_accuracy=accuracy,
        loss=results[0]["loss"],
        clip_fraction=results[0]["clip_fraction"],
        grad_norm=results[0]["grad_norm"],
        samples=rollout.samples,
        tokens=rollout.tokens,
        prompts_digest=rollout.prompts_digest,
        seconds=seconds,
        nbytes=nbytes,
        sample_versions=rollout.weight_versions,
        served_version=version,
        shards=shards,
        requested_version=rollout.weight_version,
        newest_version=rollout.newest_version,
        updates=updates,
        buffer=rollout.buffer,
    )


def _save_if_due(config: TrainConfig, parts: Parts, report: Report, arm: Arm, observer: Observer) -> None:
    done = len(arm.steps)
    if config.save is None or (done % config.save_interval and done != config.num_rollout):
        return
    observer.phase_started("save")
    started = time.perf_counter()
    number = sum(len(each.steps) for each in report.arms.values())
    partial = checkpoint.begin(config.save, number)
    parts.each("save", partial)
    progress = Progress(arm.reward, done, parts.managed("state"), parts.managed("newest_version"), report.checkpoint)
    final = checkpoint.commit(partial, progress, config, report.to_dict())
    parts.managed("saved", done)
    arm.steps[-1].seconds["save"] = time.perf_counter() - started
    observer.message(f"saved {final}")


def check_digests(shards: list[ShardRecord]) -> None:
    """Raise IntegrityError if a rank got anything but what was put for it."""
    for shard in shards:
        if shard.put_digest != shard.got_digest:
            raise IntegrityError(f"{shard.key}: put {shard.put_digest}, rank {shard.rank} got {shard.got_digest}")


def _checkpoint(config: TrainConfig, observer: Observer, each_step: Callable[[], None]) -> Path:
    if config.hf_checkpoint is not None:
        return config.hf_checkpoint.resolve()
    from miles_plugin.training.warm_start import warm_started_checkpoint

    return warm_started_checkpoint(config, observer.message, each_step)


def _new_report(config: TrainConfig, run_id: str, resume: checkpoint.Resume | None) -> Report:
    report = Report(run_id, config.model_dump(mode="json"), describe_machine(), checkpoint="")
    if resume is not None:
        before = Report.from_dict(resume.report, str(resume.directory))
        report.arms, report.seconds_total = before.arms, before.seconds_total
        done = Resume(before.run_id, resume.progress.arm, resume.progress.rollouts_done)
        report.resumed_at = [*before.resumed_at, done]
    return report


def _report_directory(config: TrainConfig, run_id: str) -> Path:
    check_report(config)
    directory = (config.report or Path("runs") / run_id).resolve()
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"report={directory}: {error}; name a directory that can be made and written") from error
    return directory
