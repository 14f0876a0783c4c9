"""examples/two_node_fsdp on two hosts: launch.sh's own commands in two namespaces, and what happens to the link.

No test starts anything outside of the namespaces, which take every process in them along when they end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.jobs import read_report, steps_of
from tests.e2e.namespaces import Host, two_hosts, why_not

ROOT = Path(__file__).parents[2]
LAUNCH = str(ROOT / "examples" / "two_node_fsdp" / "launch.sh")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]


@dataclass
class Nodes:
    """Both hosts, and what launch.sh reads there."""

    head: Host
    worker: Host
    directory: Path
    environment: dict[str, str]

    def launch(
        self, host: Host, *arguments: str, seconds: float = 240, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return host.run([LAUNCH, *arguments], env=self.environment | variables, seconds=seconds)

    def up(self) -> None:
        """Start what does not run."""
        for host in (self.head, self.worker):
            done = self.launch(host, host.name)
            assert done.returncode == 0, done.stdout + done.stderr

    def submit(self, **settings: Any) -> subprocess.CompletedProcess[str]:
        return self.launch(self.head, "--config", str(self.config(**settings)), "submit")

    @contextmanager
    def submitted(self, **settings: Any) -> Iterator[subprocess.Popen[str]]:
        """A job in the background, followed by `submit`."""
        command = self.head.command([LAUNCH, "--config", str(self.config(**settings)), "submit"])
        with (self.directory / "submit.log").open("w") as log:
            following = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, text=True)
            try:
                yield following
            finally:
                following.kill()
                following.wait()

    def said(self) -> str:
        return (self.directory / "submit.log").read_text()

    def await_words(self, words: str, seconds: float = 180) -> None:
        until = time.monotonic() + seconds
        while words not in self.said():
            assert time.monotonic() < until, self.said()
            time.sleep(0.2)

    def config(self, **settings: Any) -> Path:
        """The repository's own configuration, smaller."""
        given = yaml.safe_load((ROOT / "configs" / "two_node_tcp.yaml").read_text())
        given["cluster"] |= {"segment_size": "64mb", "buffer_size": "64mb"}
        small = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "held_out_size": 16, "num_rollout": 3}
        path = self.directory / "job.yaml"
        path.write_text(yaml.safe_dump({**given, **small, **settings}))
        return path

    def report(self, done: subprocess.CompletedProcess[str] | None = None) -> dict[str, Any]:
        """Of the job that was submitted last."""
        said = self.said() if done is None else done.stdout
        found = re.findall(r"its report: (\S+)", said)
        return read_report(Path(found[-1]))


@pytest.fixture(scope="module")
def nodes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("two_nodes")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MOONCAKE_", "RAY_"))}
    with two_hosts() as (head, worker):
        environment = {
            **clean,
            "HEAD_IP": head.address,
            "WORKER_IP": worker.address,
            "MODEL_PATH": str(checkpoint),
            "STATE_DIR": str(directory / "state"),
        }
        yield Nodes(head, worker, directory, environment)


def check_steps(report: dict[str, Any], rollouts: int) -> None:
    """Every rollout was trained on, and every rank got what was put for it."""
    assert report["status"] == "finished"
    steps = steps_of(report)
    assert len(steps) == rollouts
    for step in steps:
        assert [shard["rank"] for shard in step["shards"]] == [0, 1]
        assert all(shard["put_digest"] == shard["got_digest"] for shard in step["shards"])


def received_bytes(host: Host) -> int:
    (line,) = [line for line in host.run(["cat", "/proc/net/dev"]).stdout.splitlines() if "veth0" in line]
    return int(line.partition(":")[2].split()[0])


_LIST = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        command = open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\\0", b" ").decode(errors="replace").strip()
    except OSError:
        continue
    if int(pid) not in (1, os.getpid()) and command:
        print(command.replace("\\n", " "))
"""


def processes(host: Host) -> list[str]:
    """Command lines of what runs there, without its first process. One that has ended has none."""
    return sorted(host.run([sys.executable, "-S", "-E", "-c", _LIST]).stdout.splitlines())


def test_two_nodes_from_start_to_stop(nodes: Nodes) -> None:
    early = nodes.launch(nodes.worker, "worker")
    assert early.returncode == 2
    assert "run `launch.sh head` on 10.77.0.1 first" in early.stderr
    early = nodes.launch(nodes.head, "submit")
    assert early.returncode == 2
    assert "run `launch.sh head`" in early.stderr
    # Somebody else's, with the names of ours: they stay.
    others = [
        ["bash", "-c", "exec -a mooncake_master sleep 1000 >/dev/null 2>&1"],
        ["bash", "-c", "exec -a raylet sleep 1000 >/dev/null 2>&1"],
    ]
    for other in others:
        nodes.head.run(["setsid", "-f", *other])
    nodes.up()
    again = nodes.launch(nodes.head, "head")
    assert again.stdout.count("runs already") == 3
    before = received_bytes(nodes.worker)
    done = nodes.submit()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = nodes.report(done)
    check_steps(report, rollouts=3)
    moved = received_bytes(nodes.worker) - before
    assert moved > sum(step["nbytes"]["put"] for step in steps_of(report)), "batches crossed the link"
    status = nodes.launch(nodes.head, "status")
    assert status.returncode == 0, status.stdout
    for words in ("10.77.0.1", "10.77.0.2", "trainer_node_0", "SUCCEEDED"):
        assert words in status.stdout
    for host in (nodes.worker, nodes.head):
        stopped = nodes.launch(host, "stop")
        assert stopped.returncode == 0
        assert stopped.stdout.count("stopped") == (2 if host is nodes.worker else 3)
        assert "nothing was started" in nodes.launch(host, "status").stdout
    assert not processes(nodes.worker)
    assert processes(nodes.head) == ["mooncake_master 1000", "raylet 1000"]
    assert not nodes.launch(nodes.head, "stop").stdout


SLOW = pytest.mark.slow


@SLOW
def test_the_harness_measures_between_the_hosts(nodes: Nodes) -> None:
    command = [sys.executable, "-m", "miles_plugin", "bench", "rdma"]
    environment = {**nodes.environment, "PYTHONPATH": str(ROOT)}
    output = nodes.directory / "rdma"
    serving = subprocess.Popen(
        nodes.worker.command([*command, "--serve", "--listen", nodes.worker.address]),
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert serving.stdout is not None
        assert "serving on 10.77.0.2:50060" in serving.stdout.readline()
        before = received_bytes(nodes.worker)
        flags = ["--peer", nodes.worker.address, "--protocol", "tcp", "--quick", "--output", str(output)]
        done = nodes.head.run([*command, *flags], env=environment, seconds=240)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (output / "measurements.jsonl").read_text().splitlines()]
        put = sum(line["bytes"] for line in lines if (line["peer"], line["operation"]) == ("store", "put"))
        assert received_bytes(nodes.worker) - before > put, "the objects crossed the link"
        rdma = nodes.head.run([*command, "--peer", nodes.worker.address, "--protocol", "rdma"], env=environment)
        assert rdma.returncode == 2
        assert "no RDMA device" in rdma.stderr
    finally:
        serving.kill()
        serving.wait()


PATIENCE = 200  # seconds after which a job that lost a node has said so: Ray waits about half a minute


def ends(nodes: Nodes, following: subprocess.Popen[str], expected: str) -> None:
    """The job fails by itself, names what is gone, and its report says the same."""
    assert following.wait(PATIENCE) != 0, nodes.said()
    assert re.search(expected, nodes.said()), nodes.said()[-3000:]
    assert nodes.report()["status"].startswith("stopped")


@SLOW
def test_a_short_break_of_the_link_is_survived(nodes: Nodes) -> None:
    nodes.up()
    with nodes.submitted(num_rollout=12) as following:
        nodes.await_words("rollout   1")
        nodes.worker.link(up=False)
        time.sleep(4)
        nodes.worker.link(up=True)
        assert following.wait(PATIENCE) == 0, nodes.said()
    check_steps(nodes.report(), rollouts=12)


@SLOW
def test_a_slow_link_is_only_slow(nodes: Nodes) -> None:
    nodes.up()
    for host in (nodes.head, nodes.worker):
        host.shape("40mbit")
    try:
        done = nodes.submit()
    finally:
        for host in (nodes.head, nodes.worker):
            host.shape(None)
    assert done.returncode == 0, done.stdout[-3000:]
    check_steps(nodes.report(done), rollouts=3)


def check_that_the_next_job_runs(nodes: Nodes) -> None:
    nodes.up()
    done = nodes.submit()
    assert done.returncode == 0, done.stdout[-3000:]
    check_steps(nodes.report(done), rollouts=3)


def kill(nodes: Nodes, host: Host, name: str) -> None:
    """End one of the launcher's processes as the kernel would for want of memory."""
    notes = next((nodes.directory / "state").glob(f"{host.name}-*/processes.json"))
    pid = next(each["pid"] for each in json.loads(notes.read_text()) if each["name"] == name)
    host.run(["kill", "-9", str(pid)])


def pull_the_cable(nodes: Nodes) -> None:
    nodes.worker.link(up=False)


def kill_its_ray(nodes: Nodes) -> None:
    kill(nodes, nodes.worker, "ray")


@SLOW
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(pull_the_cable, r"trainer.*(is gone|ended)|trainer rank|no answer", id="link lost"),
        pytest.param(kill_its_ray, r"trainer.*(is gone|ended)|trainer rank", id="worker's Ray killed"),
    ],
)
def test_a_lost_worker_ends_the_job_and_the_next_one_runs(
    nodes: Nodes, fault: Callable[[Nodes], None], expected: str
) -> None:
    nodes.up()
    try:
        with nodes.submitted(num_rollout=1000) as following:
            nodes.await_words("rollout   1")
            fault(nodes)
            ends(nodes, following, expected)
    finally:
        nodes.worker.link(up=True)
    nodes.launch(nodes.worker, "stop")
    check_that_the_next_job_runs(nodes)


@SLOW
def test_a_lost_head_leaves_nothing_on_the_worker(nodes: Nodes) -> None:
    nodes.up()
    with nodes.submitted(num_rollout=1000) as following:
        nodes.await_words("rollout   1")
        kill(nodes, nodes.head, "ray")
        assert following.wait(PATIENCE) != 0
    assert nodes.launch(nodes.head, "status").returncode == 3
    until = time.monotonic() + PATIENCE
    while any("TrainerActor" in line for line in processes(nodes.worker)):
        assert time.monotonic() < until, processes(nodes.worker)
        time.sleep(1)
    for host in (nodes.worker, nodes.head):
        nodes.launch(host, "stop")
    check_that_the_next_job_runs(nodes)


@SLOW
def test_a_master_that_is_killed_is_started_again_by_head_and_the_job_goes_on(nodes: Nodes) -> None:
    nodes.up()
    with nodes.submitted(num_rollout=40) as following:
        nodes.await_words("rollout   1")
        kill(nodes, nodes.head, "mooncake_master")
        again = nodes.launch(nodes.head, "head")
        assert again.returncode == 0, again.stderr
        assert "mooncake_master started" in again.stdout
        assert following.wait(PATIENCE) == 0, nodes.said()[-3000:]
    check_steps(nodes.report(), rollouts=40)


@SLOW
def test_stop_ends_a_running_job_in_order(nodes: Nodes) -> None:
    nodes.up()
    with nodes.submitted(num_rollout=1000) as following:
        nodes.await_words("rollout   1")
        stopped = nodes.launch(nodes.head, "stop")
        assert re.search(r"job two-nodes-\S+: STOPPED", stopped.stdout), stopped.stdout
        following.wait(60)
    assert nodes.report()["status"] == "stopped: interrupted"
    nodes.launch(nodes.worker, "stop")
    assert not [line for line in processes(nodes.worker) if "ray" in line]


@SLOW
def test_a_miles_script_runs_on_the_two_nodes(nodes: Nodes) -> None:
    nodes.up()
    config = nodes.config(miles={"dp_size": 2, "num_rollout": 3, "trainer_resource": "trainer_node_0"})
    done = nodes.launch(
        nodes.head, "--config", str(config), "submit",
        TRAINER="miles", MILES_HOME=str(ROOT / "tests" / "miles_host"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    stores = lines[-1]
    ours = "miles_plugin.in_miles.object_store"
    assert stores["driver"] == ours
    assert {each["class"] for each in stores["workers"]} == {ours}
    assert [each["host"] for each in stores["workers"][1:]] == [nodes.worker.address] * 2
    assert len(lines) == 4
