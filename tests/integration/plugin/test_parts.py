"""Parts that fail are named at once: real Ray actors on real raylets, killed and hung on purpose."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="the extra `train` is not installed")

from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.cluster import ROLLOUT_NODE, LocalCluster, NodeSpec, local_cluster, trainer_node  # noqa: E402
from miles_plugin.engines.sglang import EngineError  # noqa: E402
from miles_plugin.logs import redirect_output  # noqa: E402
from miles_plugin.object_store import start_segment_holder  # noqa: E402
from miles_plugin.parts import Part, PartFailed, Parts, Watch, devices_differ  # noqa: E402
from mooncake_store.errors import ConfigError, StoreFull  # noqa: E402
from mooncake_store.master import MasterProcess  # noqa: E402

pytestmark = pytest.mark.integration


class Actor:
    """Stands for a trainer and for the manager, whose engines it says have died when told so."""

    def __init__(self, log: Path) -> None:
        redirect_output(log)
        self._engine_died = False

    def pid(self) -> int:
        print("last words", flush=True)
        return os.getpid()

    def add(self, value: int) -> int:
        return value + 1

    def hang(self) -> None:
        time.sleep(600)

    def fail(self, error: Exception) -> None:
        raise error

    def lose_engine(self) -> None:
        self._engine_died = True

    def break_check(self) -> None:
        del self._engine_died  # as in a manager whose set-up failed half way

    def check_engines(self, _patience: float) -> None:
        if self._engine_died:
            raise EngineError("SGLang at http://127.0.0.1:1 ended with status 137; its log x ends:\n...")

    def longest_call(self) -> tuple[str, float]:
        return "custom_rm_path=mine.reward", 75.0

    def hold_python(self) -> None:
        re.match("(a+)+$", 60 * "a" + "b")  # for years, without a moment for another thread

    def stop_engines(self) -> None:
        pass


class Heard(Exception):
    """What the job was told."""


def _heard(text: str) -> None:
    raise Heard(text)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(NodeSpec(1), [NodeSpec(2)]) as running:
        yield running


@pytest.fixture
def parts(cluster: LocalCluster, tmp_path: Path) -> Parts:
    return make_parts(Watch([cluster]), tmp_path)


def make_parts(watch: Watch, tmp_path: Path) -> Parts:
    def part(name: str, node: str) -> Part:
        log = tmp_path / f"{name}.log"
        remote: Any = ray.remote(concurrency_groups={"control": 1})(Actor)
        return Part(name, remote.options(resources={node: 0.1}, num_cpus=0).remote(log), log)

    trainers = [part(f"trainer rank {rank}", trainer_node(0)) for rank in range(2)]
    made = Parts(watch, part("the rollout manager", ROLLOUT_NODE), trainers, say=_heard)
    made.each("pid")
    made.managed("pid")
    return made


def test_results_come_in_rank_order_and_failures_by_their_part(parts: Parts) -> None:
    assert parts.each_with("add", [1, 5]) == [2, 6]
    assert parts.managed("add", 1) == 2
    with pytest.raises(ConfigError, match="lr=0"):
        parts.managed("fail", ConfigError("lr=0"))
    with pytest.raises(PartFailed, match=r"^trainer rank (\d): StoreFull: no room; its log: .*trainer rank \1\.log$"):
        parts.each("fail", StoreFull("no room"))
    parts.managed("break_check")
    with pytest.raises(PartFailed, match=r"^the rollout manager: StoreFull: no room; its log"):
        parts.managed("fail", StoreFull("no room"))
    parts.managed("lose_engine")
    with pytest.raises(PartFailed, match=r"^no answer; SGLang at http://127\.0\.0\.1:1 ended with status 137"):
        parts.each("fail", EngineError("no answer"))


@pytest.mark.parametrize(
    "error",
    [
        EngineError("too long", 400),
        pytest.param(StoreFull("no room"), marks=pytest.mark.slow),
        pytest.param(RuntimeError("gloo"), marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_ended_is_not_to_blame_for_what_fails_without_it(parts: Parts, error: Exception) -> None:
    parts.managed("lose_engine")
    with pytest.raises(PartFailed, match=r"^trainer rank \d: \w+: (no room|too long|gloo); its log"):
        parts.each("fail", error)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("hang", "^custom_rm_path=mine.reward: still running after 75 s"),
        ("hold_python", "^the rollout manager, kept from answering, .*: still running after 60 s"),
    ],
)
def test_a_function_of_the_users_that_hangs_is_said(
    method: str, expected: str, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = parts._slow.look
    monkeypatch.setattr(parts._slow, "look", lambda _waited: look(60.0))
    with pytest.raises(Heard, match=expected):
        parts.managed(method)
    parts.abandon()


def test_a_killed_trainer_is_named_while_the_other_hangs(parts: Parts) -> None:
    pids = parts.each("pid")
    hanging = [parts.start(part, "hang") for part in parts._trainers]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(
        PartFailed, match=r"^trainer rank 1 ended; its log .*trainer rank 1\.log ends:\n(.*\n)*last words"
    ):
        parts.wait(hanging)
    parts.abandon()


def test_a_killed_trainer_is_named_also_when_another_feels_it_first(parts: Parts) -> None:
    pids = parts.each("pid")
    first, second = parts._trainers
    calls = [parts.start(first, "fail", RuntimeError("gloo: closed by peer")), parts.start(second, "hang")]
    threading.Timer(1, os.kill, (pids[1], signal.SIGKILL)).start()
    with pytest.raises(PartFailed, match=r"^trainer rank 1 ended"):
        parts.wait(calls)
    parts.abandon()


def test_a_killed_manager_is_named_also_when_a_trainer_feels_it_first(parts: Parts) -> None:
    os.kill(parts.managed("pid"), signal.SIGKILL)
    with pytest.raises(PartFailed, match=r"^the rollout manager ended; its log .*the rollout manager\.log ends:"):
        parts.each("fail", EngineError("no answer"))
    parts.abandon()


def test_a_killed_segment_holder_is_named_while_the_others_hang(cluster: LocalCluster, tmp_path: Path) -> None:
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed")
    with MasterProcess(tmp_path / "master.log") as master:
        settings = {"protocol": "tcp", "local_hostname": "127.0.0.1", "global_segment_size": "16mb"}
        config = load_config(
            ["--object-store-backend", "mooncake", "--mooncake-store-init-kwargs", json.dumps(settings)]
        )
        holder = start_segment_holder(config, master.address, tmp_path / "segment-holder.log")
        assert holder is not None
        try:
            named = {"master_server_address": master.address}
            joining = config.model_copy(update={"mooncake_store_init_kwargs": settings | named})
            assert start_segment_holder(joining, None, tmp_path / "second.log") is None, "one serves this node already"
            parts = make_parts(Watch([master, holder, cluster]), tmp_path)
            hanging = [parts.start(part, "hang") for part in parts._trainers]
            os.kill(holder.record.pid, signal.SIGKILL)
            with pytest.raises(
                PartFailed, match=r"^segment holder ended with status 137; last lines of .*segment-holder\.log:\n"
            ):
                parts.wait(hanging)
            parts.abandon()
        finally:
            holder.stop()


def test_a_killed_raylet_is_named_though_its_actors_still_answer(parts: Parts, cluster: LocalCluster) -> None:
    # Not the rollout node's, to which this process belongs: Ray may end it along. A whole job is tested with that one.
    (raylet,) = cluster._nodes[trainer_node(0)].all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGKILL)

    def call_for_ever() -> None:
        while True:
            parts.each("add", 1)

    with pytest.raises(
        PartFailed, match=r"^raylet of the trainer node 0 ended with status 137; its log \S+raylet\S*\.out "
    ):
        call_for_ever()
    parts.abandon()


CLUSTER_THAT_LOSES_A_WORKER = """
import os, signal, sys, time
from pathlib import Path
from miles_plugin.cluster import NodeSpec, local_cluster
from miles_plugin.report.console import ClaimedStdout

said = Path(sys.argv[1])
claimed = ClaimedStdout("utf-8")
signal.signal(signal.SIGTERM, lambda *_: print("told to end", file=sys.stderr, flush=True))
with local_cluster(NodeSpec(1), []):
    import ray

    os.kill(os.getpid(), signal.SIGTERM)

    class Dying:
        def die(self):
            os.kill(os.getpid(), 9)

    try:
        ray.get(ray.remote(Dying).remote().die.remote())
    except ray.exceptions.RayActorError:
        pass
    deadline = time.monotonic() + 60
    while "(raylet" not in said.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
claimed.release()
"""


def test_ray_leaves_standard_output_and_sigterm_alone_and_uses_no_colours(tmp_path: Path) -> None:
    """On a terminal too, and when a worker has died, of which Ray tells."""
    said = tmp_path / "stderr"
    terminal, stdout = pty.openpty()
    with said.open("w") as stderr:
        command = [sys.executable, "-c", CLUSTER_THAT_LOSES_A_WORKER, str(said)]
        subprocess.run(
            command, stdout=stdout, stderr=stderr, env=os.environ | {"TERM": "dumb"}, timeout=120, check=True
        )
    os.set_blocking(terminal, False)
    with pytest.raises(BlockingIOError):
        pytest.fail(f"on standard output: {os.read(terminal, 1000)!r}")
    os.close(stdout)
    os.close(terminal)
    assert "(raylet" in said.read_text()
    assert "\x1b" not in said.read_text()
    assert said.read_text().count("told to end") == 1
    assert "SIGTERM received" not in said.read_text(), "Ray would dump its stacks and abort"


def test_one_device_name_for_different_nodes_is_warned_about() -> None:
    assert devices_differ(None, [["mlx5_0"], ["mlx5_1"]]) is None
    assert devices_differ("mlx5_0", [["mlx5_0", "mlx5_1"], ["mlx5_0", "mlx5_1"]]) is None
    warning = devices_differ("mlx5_0", [["mlx5_0"], [], ["mlx5_0"]])
    assert warning is not None
    assert "device_name='mlx5_0'" in warning
    assert "mlx5_0 | none" in warning
    assert "MOONCAKE_DEVICE on each node" in warning
