"""`launch.sh`: start two nodes, submit a job to them, look at them, stop them."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.two_node_fsdp import job
from examples.two_node_fsdp.background import Background, NotReady
from examples.two_node_fsdp.checks import check_files, roles_here
from examples.two_node_fsdp.nodes import JOB_STOP_SECONDS, RAY, environment, require_nodes, start_head, start_worker
from examples.two_node_fsdp.settings import Settings, load
from miles_plugin.joined_cluster import hosts
from mooncake_store.errors import ConfigError, StoreError

PROG = "launch.sh"
_VARIABLES = """variables (they win over the file):
  HEAD_IP, WORKER_IP   of the nodes, in the network that carries the data; needed
  MOONCAKE_PROTOCOL    tcp (default) or rdma
  MOONCAKE_DEVICE      RDMA device of this node, e.g. mlx5_0
  MODEL_PATH           Hugging Face checkpoint, the same path on both nodes (default: a tiny policy is made)
  DATASET_PATH         prompts, on the head (default: arithmetic)
  TRAINER              repository (default) or miles, which needs MILES_HOME, a miles checkout
  STATE_DIR            notes and logs (default: /tmp/miles-mooncake-two-nodes)
  PYTHON               the interpreter; default: .venv of this checkout

in this order: `head` on the head, `worker` on the worker, `submit` on the head; `stop` on both at the end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand: 0 done, 1 a part or the job failed, 2 a setting or a node not up, 3 `status`: a part down."""
    arguments = _parser().parse_args(argv)
    try:
        settings = load(arguments.config)
        return int(arguments.run(settings, arguments) or 0)
    except StoreError as error:
        return _fail(error, 2)
    except NotReady as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; what was started runs on: `{PROG} status`, `{PROG} stop`", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Two-node training: rollout on the head, FSDP trainers on the worker, batches over Mooncake.",
        epilog=_VARIABLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML (default: configs/two_node_PROTOCOL.yaml of this checkout)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, summary in (
        ("head", _head, "start mooncake_master, a segment holder and Ray's head here; what runs is left alone"),
        ("worker", _worker, "start a segment holder and a Ray node here that joins the head"),
        ("submit", _submit, "give the job to Ray and follow it to its end; Ctrl-C leaves it running"),
        ("status", _status, "what runs on this node; exit status 3 when a part is down"),
        ("stop", _stop, "end what was started on this node, and nothing else"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        if name == "submit":
            command.add_argument("--no-wait", action="store_true", help="return when Ray has it (default: follow it)")
            command.add_argument("--dry-run", action="store_true", help="print the command, start nothing")
    return parser


def _head(settings: Settings, _: argparse.Namespace) -> None:
    start_head(settings, _background(settings, "head"), _say)
    _say(f"the head is up; on {settings.worker_ip} run: {PROG} worker, then here: {PROG} submit")


def _worker(settings: Settings, _: argparse.Namespace) -> None:
    start_worker(settings, _background(settings, "worker"), _say)
    _say(f"the worker is up; on {settings.head_ip} run: {PROG} submit")


def _submit(settings: Settings, arguments: argparse.Namespace) -> int:
    check_files(settings, "head")
    run_id = job.new_id()
    directory = Path(settings.state_dir) / run_id
    driver = job.entrypoint(settings, run_id, directory)
    ray = str(Path(sys.executable).parent / "ray")
    command = [ray, "job", "submit", f"--address={settings.dashboard}", f"--submission-id={run_id}"]
    if arguments.no_wait:
        command.append("--no-wait")
    command += ["--", *driver]
    if arguments.dry_run:
        print(shlex.join(command))
        return 0
    require_nodes(settings)
    _say(f"job {run_id}; its report: {directory / 'report'}")
    _say(f"to end it: {ray} job stop --address={settings.dashboard} {run_id}")
    done = subprocess.run(command, env=environment(settings, "head"))
    return done.returncode


def _status(settings: Settings, _: argparse.Namespace) -> int:
    entries = [(role, started) for role in _roles(settings) for started in _background(settings, role).started()]
    for role, started in entries:
        state = "runs" if started.process() else "ENDED"
        print(f"{role:7} {started.name:16} {state:6} pid {started.pid:<8} log {started.log}")
    if not entries:
        print("nothing was started on this node")
    is_up = bool(entries) and all(started.process() for _, started in entries)
    for role, started in entries:
        if started.name == RAY and started.process():
            os.environ.update(environment(settings, role))
            is_up &= _show_cluster(settings, role)
    return 0 if is_up else 3


def _show_cluster(settings: Settings, role: str) -> bool:
    """The nodes and, on the head, the jobs of the cluster; whether this host is one of the nodes."""
    try:
        found = hosts(settings.ray_address)
    except StoreError as error:
        print(f"Ray     {error}")
        return False
    for host, offers in found.items():
        print(f"Ray     {host:16} {', '.join(offers)}")
    if role == "head":
        for line in job.jobs(settings):
            print(line)
    if settings.ip_of(role) not in found:
        print(f"Ray     {settings.ip_of(role):16} is not in this cluster: run `{PROG} {role}` again")
    return settings.ip_of(role) in found


def _stop(settings: Settings, _: argparse.Namespace) -> None:
    for role in _roles(settings):
        background = _background(settings, role)
        if role == "head" and background.running(RAY):
            _stop_jobs(settings)
        for started in reversed(background.started()):
            was = background.stop(started.name)
            _say(f"{started.name} of the {role}: {'stopped' if was else 'had ended already'}")


def _roles(settings: Settings) -> list[str]:
    """Of this host; the notes of another may lie on a file system that both share, and its pids mean nothing here."""
    roles = roles_here(settings)
    if not roles:
        raise ConfigError(
            f"this host has neither HEAD_IP = {settings.head_ip} nor WORKER_IP = {settings.worker_ip}; run this on one "
            f"of them"
        )
    return roles


def _stop_jobs(settings: Settings) -> None:
    """End jobs in order, so that their reports say how they ended."""
    os.environ.update(environment(settings, "head"))
    for line in job.stop_all(settings, JOB_STOP_SECONDS):
        _say(line)


def _background(settings: Settings, role: str) -> Background:
    return Background(Path(settings.state_dir) / f"{role}-{settings.ip_of(role)}")


def _say(text: str) -> None:
    print(f"{PROG}: {text}", flush=True)


def _fail(error: Exception, status: int) -> int:
    print(f"{PROG}: {type(error).__name__}: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
