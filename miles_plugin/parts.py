"""The parts of a running job: how they are started, called, watched and ended.

The master, the segment holder, the Ray cluster, the rollout manager with its engines, and one trainer per rank.
Whatever fails, the caller gets a PartFailed that names the part, the path of its log and the log's last lines.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles_plugin.arguments import TrainConfig
from miles_plugin.cluster import ROLLOUT_NODE, LocalCluster, local_cluster, trainer_node
from miles_plugin.engines.sglang import EngineError
from miles_plugin.fully_async.rollouts import Waiting
from miles_plugin.interrupt import no_descendant_left
from miles_plugin.joined_cluster import HEAD_RESOURCE, JoinedCluster, joined_cluster
from miles_plugin.object_store import start_segment_holder
from miles_plugin.plan import Plan
from miles_plugin.report.units import nbytes
from miles_plugin.rollout.lanes import ACKNOWLEDGE, CONTROL
from miles_plugin.shared_files import share
from mooncake_store.errors import ConfigError
from mooncake_store.master import MasterProcess
from mooncake_store.process import tail

# Seconds between looks at the parts while the job waits for one of them.
_CHECK_SECONDS = 1.0
# Seconds that Ray waits without a pause, in which Python handles no signal.
_WAIT_SECONDS = 0.2
# Seconds that the manager gets to answer, and the engines to end.
_ABANDON_SECONDS = 5.0
# Seconds that a dying engine gets to be seen dead.
_DYING_SECONDS = 5.0
# Seconds after which a running function of the user's is worth a line.
_SLOW_SECONDS = 60.0


class PartFailed(RuntimeError):
    """A part of a running job failed; the message says which, why, and where its log is."""


@dataclass(frozen=True)
class Part:
    """An actor of the job. name: what messages call it. log: what its process prints."""

    name: str
    actor: Any
    log: Path


class Watched(Protocol):
    """One or several processes that may end."""

    def check(self) -> None:
        """Raise an error that names one that has ended, its log, and the log's last lines."""


class Watch:
    """Looks after the processes that nobody may be waiting for: the master, the segment holder and Ray's own."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self._checked_at = time.monotonic()

    def check(self) -> None:
        """Raise PartFailed for one that has ended."""
        self._checked_at = time.monotonic()
        try:
            for process in self._watched:
                process.check()
        except Exception as error:
            raise PartFailed(str(error)) from error

    def check_if_due(self) -> None:
        """`check`, once a second at most."""
        if time.monotonic() > self._checked_at + _CHECK_SECONDS:
            self.check()


class SlowCalls:
    """Says which function of the user's has been running for long: after a minute, then each time it has doubled.

    Args:
        longest: the call that has been running for longest, and its seconds; None when there is none. It is told how
            many seconds the caller has waited.
        say: told in one line.
    """

    def __init__(self, longest: Callable[[float], tuple[str, float] | None], say: Callable[[str], None]) -> None:
        self._longest, self._say = longest, say
        self._limit = _SLOW_SECONDS

    def look(self, waited: float) -> None:
        """Ask and say, when the caller has waited for `waited` seconds."""
        if waited < self._limit:
            return
        call = self._longest(waited)
        if call is not None and call[1] >= self._limit:
            where, seconds = call
            self._limit = 2 * seconds
            self._say(f"{where}: still running after {seconds:.0f} s, which nothing limits; Ctrl-C ends the job")


class Parts:
    """Everything a job has started. Calls wait for their results and look after all parts meanwhile.

    Args:
        say: told of functions of the user's that take long.
    """

    def __init__(self, watch: Watch, manager: Part, trainers: list[Part], say: Callable[[str], None]) -> None:
        self._watch, self._manager, self._trainers = watch, manager, trainers
        self._slow = SlowCalls(self._longest_call, say)

    @property
    def manager(self) -> Any:
        """The manager's handle, for trainers that call it themselves."""
        return self._manager.actor

    def each(self, method: str, *arguments: Any, tick: Callable[[], None] | None = None) -> list[Any]:
        """Call a method on every trainer at once; the results in rank order. tick: called now and then meanwhile."""
        return self.wait([self.start(part, method, *arguments) for part in self._trainers], tick)

    def each_with(self, method: str, *arguments: list[Any]) -> list[Any]:
        """Like `each`, every argument being a list with one item per rank."""
        return self.wait(
            [self.start(part, method, *own) for part, *own in zip(self._trainers, *arguments, strict=True)]
        )

    def managed(self, method: str, *arguments: Any, tick: Callable[[], None] | None = None) -> Any:
        """Call a method of the manager. tick: called now and then meanwhile."""
        return self.wait([self.start(self._manager, method, *arguments)], tick)[0]

    def start(self, part: Part, method: str, *arguments: Any) -> tuple[Part, Any]:
        """Call a method without waiting; `wait` takes what this returns."""
        return part, getattr(part.actor, method).remote(*arguments)

    def start_managed(self, method: str, *arguments: Any) -> tuple[Part, Any]:
        return self.start(self._manager, method, *arguments)

    def start_first(self, method: str, *arguments: Any) -> tuple[Part, Any]:
        """Call a method of trainer rank 0 without waiting."""
        return self.start(self._trainers[0], method, *arguments)

    def progress(self) -> tuple[int, int] | None:
        """Bytes that a weight update under way has sent, and of how many; None when nobody says."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            done: tuple[int, int] = ray.get(self._control("progress"), timeout=_CHECK_SECONDS)
            return done
        return None

    def waiting(self) -> Waiting | None:
        """What a fully asynchronous rollout waits for; None when it does not, or nobody says."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            waiting: Waiting | None = ray.get(self._control("waiting"), timeout=_CHECK_SECONDS)
            return waiting
        return None

    def wait(self, calls: list[tuple[Part, Any]], tick: Callable[[], None] | None = None) -> list[Any]:
        """Results of started calls, in order. The first failure is raised at once: the other ranks may wait for the
        failed one in a collective, and would hold the job until that times out.

        Raises:
            PartFailed: a part ended, or raised.
            ConfigError: a part raised it.
        """
        import ray

        pending = {reference: part for part, reference in calls}
        started = looked = time.monotonic()
        while pending:
            ready, _ = ray.wait(list(pending), timeout=_WAIT_SECONDS)
            # Also when calls are answered: actors go on for a while without their raylet (ray 2.60).
            self._watch.check_if_due()
            if not ready and time.monotonic() < looked + _CHECK_SECONDS:
                continue
            looked = time.monotonic()
            if tick is not None:
                tick()
            if self._manager in pending.values():  # which is what runs them
                self._slow.look(looked - started)
            for reference in ready:
                part = pending.pop(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    self._explain(part, error, pending)
        results: list[Any] = ray.get([reference for _, reference in calls])
        return results

    def close(self) -> None:
        """Let every actor leave in order: the trainers' group and the store first, then the engines."""
        self.each("close")
        self.managed("close")

    def abandon(self) -> None:
        """End the actors and the engines without waiting for what they do: a part may hang because another failed."""
        import ray

        for part in self._trainers:
            ray.kill(part.actor)
        # If the manager is gone as well, the engines' guards have seen it and end them.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._control("stop_engines"), timeout=_ABANDON_SECONDS)
        ray.kill(self.manager)

    def _control(self, method: str, *arguments: Any) -> Any:
        return getattr(self.manager, method).options(concurrency_group=CONTROL).remote(*arguments)

    def _longest_call(self, waited: float) -> tuple[str, float] | None:
        import ray

        try:
            call: tuple[str, float] | None = ray.get(self._control("longest_call"), timeout=_ABANDON_SECONDS)
            return call
        except ray.exceptions.GetTimeoutError:
            return "the rollout manager, kept from answering, e.g. by a custom function in native code", waited
        except ray.exceptions.RayError:  # `wait` will see why
            return None

    def _explain(self, part: Part, error: Exception, pending: Mapping[Any, Part]) -> None:
        """Raise what was behind `error`: the first part that is dead, else what this one raised.

        Args:
            pending: calls of other parts that have not returned.
        """
        import ray

        cause = getattr(error, "cause", None) or error  # Ray wraps what a part raised
        self._watch.check()
        # Others serve on without an engine that has ended, unless this is a failure for want of engines; of one that
        # dies the requests may fail before it has ended.
        for_want = isinstance(cause, EngineError) and cause.status is None
        ended = self._ended_engine(_DYING_SECONDS if for_want else 0.0)
        if isinstance(error, ray.exceptions.RayActorError):
            raise self._ended(part) from error
        # A rank's collectives fail when another rank dies, which may be seen later.
        if isinstance(cause, RuntimeError) and (dead := self._dying(pending)):
            raise self._ended(dead) from error
        if isinstance(cause, ConfigError):
            raise cause from error
        if ended and for_want:
            raise PartFailed(f"{cause}; {ended}") from error
        raise PartFailed(f"{part.name}: {type(cause).__name__}: {cause}; its log: {part.log}") from error

    def _ended_engine(self, patience: float) -> str | None:
        """An engine that has ended, or ends within `patience` seconds, with its log's last lines. Raises PartFailed for
        the manager that has ended."""
        import ray

        try:
            ray.get(self._control("check_engines", patience), timeout=patience + _ABANDON_SECONDS)
        except ray.exceptions.RayActorError as error:  # the engines ended with their manager
            raise self._ended(self._manager) from error
        except ray.exceptions.RayTaskError as error:
            return str(error.cause) if isinstance(error.cause, EngineError) else None
        except ray.exceptions.GetTimeoutError:
            pass
        return None

    @staticmethod
    def _dying(pending: Mapping[Any, Part]) -> Part | None:
        """Of the parts that these calls wait for, one that ends within `_DYING_SECONDS`."""
        import ray

        deadline = time.monotonic() + _DYING_SECONDS
        left: dict[Any, Part] = dict(pending)
        while left and (seconds := deadline - time.monotonic()) > 0:
            for reference in ray.wait(list(left), timeout=seconds)[0]:
                part: Part = left.pop(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayActorError:
                    return part
                except ray.exceptions.RayError:
                    continue
        return None

    @staticmethod
    def _ended(part: Part) -> PartFailed:
        return PartFailed(f"{part.name} ended; its log {part.log} ends:\n{tail(part.log)}")


@contextlib.contextmanager
def start_parts(
    config: TrainConfig,
    plan: Plan,
    run_id: str,
    directory: Path,
    checkpoint: Callable[[Callable[[], None]], Path],
    say: Callable[[str], None],
) -> Iterator[tuple[Parts, Path]]:
    """Start the parts of a job; at exit, end them in the opposite order.

    Args:
        checkpoint: makes or finds the Hugging Face directory that the engines serve and the trainers start from;
            called when the cluster is up, since it may take minutes, with what it must call now and then meanwhile.
        say: told what has come up.

    Raises:
        PartFailed, ConfigError, StoreUnavailable.
    """
    with contextlib.ExitStack() as stack:
        descendants = stack.enter_context(no_descendant_left())
        watched: list[Watched] = []
        master: str | None = None
        if plan.own_master:
            own = stack.enter_context(MasterProcess(log=directory / "logs" / "mooncake_master.log"))
            master = own.address
            watched.append(own)
            say(f"mooncake_master at {master}, its metrics at {own.metrics_url}")
        # Before those who put and get, and ended after them: what lies in its memory must outlive both.
        holder = start_segment_holder(config, master, directory / "logs" / "segment-holder.log")
        if holder is not None:
            stack.callback(holder.stop)
            watched.append(holder)
            say(f"segment holder: {nbytes(holder.record.nbytes)} lent as {holder.record.name}")
        trainers = len(plan.trainer_nodes)
        cluster: LocalCluster | JoinedCluster
        if config.ray_address:
            cluster = stack.enter_context(
                joined_cluster(config.ray_address, trainers, config.pin_rollout_manager_to_head)
            )
        else:
            cluster = stack.enter_context(local_cluster(plan.rollout_node, plan.trainer_nodes))
        say(f"Ray: a rollout node and {trainers} trainer node{'s'[: trainers > 1]}{_where(config, plan)}")
        watch = Watch([*watched, cluster])
        start_from = checkpoint(watch.check_if_due)
        if isinstance(cluster, JoinedCluster):
            share(cluster, config, start_from)
        say("starting the trainers and SGLang, which takes about half a minute")
        parts = Parts(watch, _manager(config, plan, directory), _trainers(config, plan, run_id, directory), say)
        try:
            _connect(parts, master, config, plan, run_id, directory, start_from, say)
            yield parts, start_from
            parts.close()
        finally:
            descendants.note()  # once its parent is gone, a process is no descendant any more
            parts.abandon()
            if holder is not None:  # nobody is left who reads from it; it ends while Ray does
                holder.end()


def _where(config: TrainConfig, plan: Plan) -> str:
    if not config.ray_address:
        return ""
    return f": {plan.rollout_node.host} and {', '.join(node.host for node in plan.trainer_nodes)}"


def _manager(config: TrainConfig, plan: Plan, directory: Path) -> Part:
    import ray

    from miles_plugin.rollout.actor import RolloutManagerActor

    # In a local cluster the rollout node is the head. In another one, a head that starts no engines offers only itself.
    on_head = config.ray_address and config.pin_rollout_manager_to_head and config.rollout_external
    resources = {HEAD_RESOURCE: 0.001} if on_head else {ROLLOUT_NODE: 1}
    log = directory / "logs" / "rollout-manager.log"
    actor = (
        ray.remote(concurrency_groups={CONTROL: 1, ACKNOWLEDGE: 1})(RolloutManagerActor)
        .options(resources=resources, num_cpus=1, num_gpus=len(plan.rollout_node.gpus))
        .remote(log)
    )
    return Part("the rollout manager", actor, log)


def _trainers(config: TrainConfig, plan: Plan, run_id: str, directory: Path) -> list[Part]:
    import ray

    from miles_plugin.training.actor import TrainerActor

    parts = []
    per_node = config.actor_num_gpus_per_node
    for rank in range(config.world_size):
        node = rank // per_node
        log = directory / "logs" / f"trainer-{rank}.log"
        actor = (
            ray.remote(TrainerActor)
            .options(
                resources={trainer_node(node): 1 / per_node},
                num_cpus=1,
                num_gpus=1 if plan.trainer_nodes[node].gpus else 0,
                runtime_env={"env_vars": {"LOCAL_RANK": str(rank % per_node)}},
            )
            .remote(log, config, run_id, rank, plan.trainer_nodes[node].host)
        )
        parts.append(Part(f"trainer rank {rank}", actor, log))
    return parts


def _connect(
    parts: Parts,
    master: str | None,
    config: TrainConfig,
    plan: Plan,
    run_id: str,
    directory: Path,
    checkpoint: Path,
    say: Callable[[str], None],
) -> None:
    devices = parts.each("open_store", master)
    if warning := devices_differ(config.mooncake_store_init_kwargs.get("device_name"), devices):
        say(warning)
    parts.managed("set_up", config, master, run_id, directory)
    # In a cluster that was there before, Ray says which.
    gpus = parts.managed("gpus") if config.ray_address else plan.rollout_node.gpus
    engines = parts.start_managed("start_engines", checkpoint, plan.rollout_node.host, gpus)
    (port,) = parts.wait([parts.start_first("rendezvous_port")])
    parts.each("join", plan.trainer_nodes[0].host, port)
    parts.wait([engines])
    say("SGLang serves")


def devices_differ(device_name: str | None, devices: list[list[str]]) -> str | None:
    """A warning when one `device_name` is given for nodes whose RDMA devices are not the same; None otherwise.

    Args:
        device_name: of `mooncake_store_init_kwargs`, which every process reads.
        devices: names of the RDMA devices that each process sees.
    """
    kinds = sorted({", ".join(names) or "none" for names in devices})
    if not device_name or len(kinds) < 2:
        return None
    return (
        f"warning: mooncake_store_init_kwargs names device_name={device_name!r} for all nodes, but their RDMA devices "
        f"differ ({' | '.join(kinds)}); leave it out and set MOONCAKE_DEVICE on each node"
    )
