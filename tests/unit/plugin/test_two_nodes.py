"""The launcher of two nodes without nodes: its settings, its notes of what it started, what it checks and submits."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("psutil", reason="the extra `train` is not installed")

import psutil

from examples.two_node_fsdp import checks, job, launch
from examples.two_node_fsdp.background import Background, NotReady, Started, await_ready
from examples.two_node_fsdp.settings import ROOT, Settings, load
from miles_plugin.arguments_sources import load_config
from mooncake_store.errors import ConfigError

IPS = {"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2"}
HERE = Settings(head_ip="127.0.0.1", worker_ip="10.255.255.254")


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_variable_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(
        "cluster: {head_ip: 1.1.1.1, worker_ip: 2.2.2.2, segment_size: 8gb}\nnum_rollout: 7\nmiles: {lr: 1}\n"
    )
    settings = load(file, {"HEAD_IP": "3.3.3.3", "MODEL_PATH": "", "MOONCAKE_DEVICE": " mlx5_1 "})
    assert (settings.head_ip, settings.worker_ip, settings.segment_size) == ("3.3.3.3", "2.2.2.2", "8gb")
    assert (settings.model_path, settings.device) == (None, "mlx5_1")
    assert (settings.job, settings.miles) == ({"num_rollout": 7}, {"lr": 1})
    assert (settings.master_address, settings.ray_address) == ("3.3.3.3:50051", "3.3.3.3:6379")


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_the_protocol_chooses_the_file(protocol: str) -> None:
    settings = load(None, {**IPS, "MOONCAKE_PROTOCOL": protocol})
    assert settings.protocol == protocol
    assert settings.job["object_store_backend"] == "mooncake"


@pytest.mark.parametrize(
    ("content", "environ", "expected"),
    [
        ("", {}, "HEAD_IP is not set: export it, or write head_ip under `cluster`"),
        ("", {"HEAD_IP": "10.0.0.1"}, "WORKER_IP is not set"),
        ("cluster: {heads: 1}", IPS, "cluster has heads; allowed: buffer_size"),
        ("cluster: {ray_port: high}", IPS, "ray_port = 'high' .*nodes.yaml, cluster.*a whole number"),
        ("cluster: {ray_port: 70000}", IPS, "ray_port = 70000 .*below 65536"),
        ("cluster: {gpus: true}", IPS, "gpus = True .*a whole number"),
        ("cluster: {segment_size: 3}", IPS, "segment_size = 3 .*in quotes"),
        ("cluster: {protocol: udp}", IPS, "protocol .*'udp'; allowed: tcp, rdma"),
        ("", {**IPS, "TRAINER": "megatron"}, r"trainer \(TRAINER\) = 'megatron'; allowed: repository, miles"),
        ("cluster: 3", IPS, "under cluster and miles"),
        ("[1]", IPS, "no mapping"),
        ("a: [", IPS, "nodes.yaml"),
    ],
)
def test_what_is_wrong_is_said_with_its_source(
    content: str, environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        load(file, environ)


def test_no_file_and_no_protocol() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*name a file like configs/two_node_tcp\.yaml"):
        load(Path("nowhere.yaml"), IPS)
    with pytest.raises(ConfigError, match="MOONCAKE_PROTOCOL = 'udp'"):
        load(None, {**IPS, "MOONCAKE_PROTOCOL": "udp"})


# --- the job ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_the_submitted_settings_are_those_of_a_job(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    settings = load(None, {**IPS, "MOONCAKE_PROTOCOL": protocol, "MODEL_PATH": "/m", "DATASET_PATH": "/d"})
    command = job.entrypoint(settings, "run-1", tmp_path)
    assert command[1:4] == ["-m", "miles_plugin", "train"]
    config = load_config(command[4:])
    assert (config.run_id, config.report, config.ray_address) == ("run-1", tmp_path / "report", "10.0.0.1:6379")
    assert (str(config.hf_checkpoint), str(config.prompt_data)) == ("/m", "/d")
    assert config.mooncake_store_init_kwargs == {"master_server_address": "10.0.0.1:50051", "protocol": protocol}


def test_a_miles_script_gets_flags(tmp_path: Path) -> None:
    miles: dict[str, Any] = {
        "lr": 1e-6,
        "shuffle": True,
        "off": False,
        "none": None,
        "names": ["a", "b"],
        "json": {"k": 1},
    }
    settings = Settings("1.1.1.1", "2.2.2.2", trainer="miles", miles_home="/miles", model_path="/m", miles=miles)
    command = job.entrypoint(settings, "run", tmp_path)
    assert command[1:4] == ["-m", "miles_plugin.run", "/miles/train.py"]
    assert command[4:] == [
        "--lr", "1e-06", "--shuffle", "--names", "a", "b", "--json", '{"k": 1}', "--object-store-backend", "mooncake",
        "--mooncake-store-init-kwargs", '{"master_server_address": "1.1.1.1:50051", "protocol": "tcp"}',
        "--hf-checkpoint", "/m",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("job_settings", "expected"),
    [
        ({"num_rolout": 3}, "num_rollout"),
        ({"lr": "high"}, "lr"),
        ({"mooncake_store_init_kwargs": "tcp"}, "mooncake_store_init_kwargs = 'tcp': allowed is a mapping"),
    ],
)
def test_a_wrong_setting_of_the_job_is_said_before_it_is_submitted(
    job_settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        job.entrypoint(Settings("1.1.1.1", "2.2.2.2", job=job_settings), "run", tmp_path)


def test_paths_are_those_of_where_the_launcher_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(None, {**IPS, "STATE_DIR": "state", "MODEL_PATH": "model", "MILES_HOME": "~/miles"})
    assert (settings.state_dir, settings.model_path) == (str(tmp_path / "state"), str(tmp_path / "model"))
    assert settings.miles_home == str(Path("~/miles").expanduser())


def test_dry_run_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**IPS, "STATE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert launch.main(["submit", "--dry-run", "--no-wait"]) == 0
    assert "job submit --address=http://127.0.0.1:8265" in capsys.readouterr().out


# --- checks -----------------------------------------------------------------------------------------------------------


def test_an_address_of_another_host_is_refused() -> None:
    assert checks.interface_of("127.0.0.1", "head") == "lo"
    with pytest.raises(
        ConfigError, match=r"HEAD_IP = 10\.255\.255\.254 is no address of this host, which has .*127\.0\.0\.1"
    ):
        checks.interface_of("10.255.255.254", "head")
    assert checks.roles_here(HERE) == ["head"]


def test_a_port_that_is_taken_is_named() -> None:
    refused = pytest.raises(ConfigError, match=r"ray_port = \d+ on 127\.0\.0\.1.*another process")
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        checks.check_ports("127.0.0.1", {"ray_port": taken.getsockname()[1]})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            Settings("1", "2", model_path="/nowhere"),
            r"MODEL_PATH = '/nowhere' on this host \(head\): no config.json and no weights",
        ),
        (Settings("1", "2", dataset_path="/nowhere"), "DATASET_PATH = '/nowhere'"),
        (Settings("1", "2", trainer="miles"), "MILES_HOME, a miles checkout"),
        (Settings("1", "2", trainer="miles", miles_home="/tmp"), "it is '/tmp'"),
    ],
)
def test_a_path_that_is_missing_is_named(settings: Settings, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        checks.check_files(settings, "head")


def test_the_data_is_needed_on_the_head_only() -> None:
    checks.check_files(Settings("1", "2", dataset_path="/nowhere"), "worker")


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def background(tmp_path: Path) -> Background:
    return Background(tmp_path / "state")


def start(background: Background, code: str, name: str = "part") -> Started:
    return background.start(name, [sys.executable, "-c", code], os.environ)


def await_ended(started: Started) -> None:
    until = time.monotonic() + 20
    while started.process() and time.monotonic() < until:
        time.sleep(0.05)


def test_what_was_started_is_found_by_another_command_and_stopped(background: Background) -> None:
    started = start(background, "print('up', flush=True); import time; time.sleep(100)")
    await_ready(started, lambda: "up" in started.said(), 20)
    later = Background(background.directory)
    assert later.running("part") == started
    said: list[str] = []
    assert later.start_once("part", ["false"], os.environ, said.append) == started
    assert said == [f"part runs already, pid {started.pid}"]
    assert later.stop("part")
    assert started.process() is None
    assert not later.started()
    assert not later.stop("part")


@pytest.mark.parametrize("content", ["{", '[{"name": "part"}]', "3"])
def test_damaged_notes_are_refused(background: Background, content: str) -> None:
    background.directory.mkdir()
    (background.directory / "processes.json").write_text(content)
    with pytest.raises(ConfigError, match=r"processes\.json"):
        background.started()


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="STATE_DIR"):
        Background(tmp_path / "file" / "state").start("part", ["true"], os.environ)


def test_children_and_what_ignores_sigterm_are_ended(background: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.two_node_fsdp.background.STOP_SECONDS", 1.0)
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print(child.pid, flush=True); time.sleep(100)"
    )
    started = start(background, code)
    await_ready(started, lambda: bool(started.said().strip()), 20)
    child = int(started.said())
    assert background.stop("part")
    assert started.process() is None
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_pid_that_is_somebody_else_s_now_is_left_alone(background: Background) -> None:
    started = start(background, "pass")
    await_ended(started)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        background._note([Started("part", other.pid, started.created - 100, started.log, 0)])
        assert background.running("part") is None
        assert not background.stop("part")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_part_that_ends_or_is_never_ready_says_its_last_words(background: Background) -> None:
    earlier = start(background, "print('earlier', flush=True)")
    await_ended(earlier)
    failing = start(background, "raise SystemExit('no device')")
    with pytest.raises(NotReady, match=r"part ended; its log .*\n(.*\n)*no device"):
        await_ready(failing, lambda: False, 20)
    assert "earlier" not in failing.said()
    slow = start(background, "import time; time.sleep(100)", "slow")
    with pytest.raises(NotReady, match="slow is not ready after 0 s"):
        await_ready(slow, lambda: False, 0.1)
    background.stop("slow")


# --- the script -------------------------------------------------------------------------------------------------------


def test_the_script_is_clean_and_shows_its_help() -> None:
    script = ROOT / "examples" / "two_node_fsdp" / "launch.sh"
    checker = Path(sys.executable).parent / "shellcheck"
    if checker.exists() or shutil.which("shellcheck"):
        done = subprocess.run(
            [str(checker) if checker.exists() else "shellcheck", script], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    for words in ("HEAD_IP", "MOONCAKE_DEVICE", "submit", "nothing else"):
        assert words in done.stdout
    bad = subprocess.run(
        [script, "status"], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHON": "/no/python"}
    )
    assert bad.returncode == 2
    assert "name an interpreter with PYTHON=" in bad.stderr


def test_the_configurations_differ_in_the_protocol_only() -> None:
    tcp, rdma = (yaml.safe_load((ROOT / "configs" / f"two_node_{each}.yaml").read_text()) for each in ("tcp", "rdma"))
    assert rdma["cluster"].pop("device", "absent") is None
    assert {tcp["cluster"].pop("protocol"), rdma["cluster"].pop("protocol")} == {"tcp", "rdma"}
    assert tcp == rdma


def test_interrupting_says_what_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "start_head", interrupted)
    for name, value in IPS.items():
        monkeypatch.setenv(name, value)
    assert launch.main(["head"]) == 128 + signal.SIGINT
    assert "launch.sh stop" in capsys.readouterr().err
