"""What is decided before and around a job: the plan, the engines' command lines."""

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("ray", reason="the extra `train` is not installed")

from miles_plugin import checkpoint, cli, job, preflight
from miles_plugin.arguments_sources import load_config, load_config_and_origins
from miles_plugin.checkpoint import Progress
from miles_plugin.engines.launch import EngineSpec, command, environment
from miles_plugin.job import check_digests
from miles_plugin.parts import SlowCalls
from miles_plugin.report.record import ShardRecord
from mooncake_store.errors import ConfigError, IntegrityError
from tests.report_samples import make_report

MOONCAKE = ["--object-store-backend", "mooncake"]
PORTS = (1234, 1235, 1236)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)


def plan(*argv: str, gpus: int = 0, monkeypatch: pytest.MonkeyPatch) -> preflight.Plan:
    monkeypatch.setattr(preflight, "_visible_gpus", lambda: list(range(gpus)))
    return preflight.check(load_config(argv))


def test_gpus_are_dealt_to_trainers_then_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ("--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2")
    dealt = plan(*layout, gpus=8, monkeypatch=monkeypatch)
    assert ([node.gpus for node in dealt.trainer_nodes], dealt.rollout_node.gpus) == ([[0, 1, 2, 3]], [4, 5, 6, 7])
    layout = ("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1")
    dealt = plan(*layout, gpus=5, monkeypatch=monkeypatch)
    assert ([node.gpus for node in dealt.trainer_nodes], dealt.rollout_node.gpus) == ([[0, 1], [2, 3]], [4])
    without = plan("--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "2", monkeypatch=monkeypatch)
    assert not without.trainer_nodes[0].gpus
    assert without.trainer_nodes[0].cpus == 4


@pytest.mark.parametrize(
    ("argv", "gpus", "expected"),
    [
        (["--rollout-num-gpus", "2"], 3, "4 GPUs are needed, this machine shows 3"),
        (["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"], 8, "multiple of"),
        (["--actor-num-nodes", "4", "--actor-num-gpus-per-node", "2"], 8, "9 GPUs are needed, this machine shows 8"),
        (["--actor-num-nodes", "3", "--actor-num-gpus-per-node", "1"], 0, "rollout_batch_size=32 must be a multiple"),
        (["--colocate"], 0, "colocate=True: .*mode=broadcast.*--rollout-num-gpus"),
        (["--lr", "1e-5", "--min-lr", "1e-4"], 0, r"min_lr=0\.0001 is more than lr=1e-05"),
        (["--max-weight-staleness", "2"], 0, r"max_weight_staleness=2 without fully_async: add --fully-async"),
        (["--fully-async", "--pause-generation-mode", "abort"], 0, r"pause_generation_mode=abort with fully_async: .*"),
        (
            ["--fully-async", "--async-max-concurrent-samples", "7"],
            0,
            r"async_max_concurrent_samples=7 is less than a group of n_samples_per_prompt=8",
        ),
        (["--fully-async", "--async-data-buffer-capacity-factor", "0.01"], 0, r"a buffer of 0\.01 times .* no place"),
        (
            ["--custom-async-data-buffer-path", "json.X"],
            0,
            r"custom_async_data_buffer_path=json\.X without fully_async",
        ),
        (
            ["--fully-async", "--custom-async-data-buffer-path", "json.X"],
            0,
            r"custom_async_data_buffer_path=json\.X: .*",
        ),
        ([*MOONCAKE, "--mooncake-store-init-kwargs", '{"protocol": "udp"}'], 0, "protocol"),
    ],
)
def test_what_cannot_work_is_refused(
    argv: list[str], gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan(*argv, gpus=gpus, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("policy", "allowed"), [((), [1, 2, 4, 8]), (("--tiny-num-experts", "4"), [1, 2, 4])], ids=["dense", "experts"]
)
def test_an_engine_has_as_many_ranks_as_its_model_can_be_shared_out_to(
    policy: tuple[str, ...], allowed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in range(1, 9):
        flags = [*policy, "--rollout-num-gpus-per-engine", str(ranks), "--rollout-num-gpus", str(ranks)]
        if ranks in allowed:
            plan(*flags, monkeypatch=monkeypatch)
            continue
        with pytest.raises(ConfigError) as caught:
            plan(*flags, monkeypatch=monkeypatch)
        said = str(caught.value)
        assert said.startswith(f"rollout_num_gpus_per_engine={ranks} with the tiny policy (tiny_hidden_size=")
        assert said.endswith(f": of this model {', '.join(map(str, allowed))} ranks are allowed")


def test_a_local_job_needs_one_segment_that_is_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    tcp = ["--mooncake-store-init-kwargs", '{"protocol": "tcp"}']
    with pytest.raises(ConfigError, match="mooncake_replica_num=3: object_store_backend=ray keeps one copy"):
        plan("--mooncake-replica-num", "3", monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match="mooncake_replica_num=2"):
        plan(*MOONCAKE, *tcp, "--mooncake-replica-num", "2", monkeypatch=monkeypatch)
    empty = ["--mooncake-store-init-kwargs", '{"protocol": "tcp", "global_segment_size": 0}']
    with pytest.raises(ConfigError, match="global_segment_size=0"):
        plan(*MOONCAKE, *empty, monkeypatch=monkeypatch)


@pytest.fixture
def saved(tmp_path: Path) -> list[str]:
    """Flags that resume a job which saved after its second rollout."""
    (tmp_path / "config.json").write_text("{}")
    partial = checkpoint.begin(tmp_path / "saved", 2)
    (partial / ".metadata").touch()
    progress = Progress("real", 2, {"cursor": 64, "prompts": "spell_backward"}, 3, str(tmp_path))
    report = make_report("--rm-type", "math").to_dict()
    checkpoint.commit(partial, progress, load_config([]), report)
    return ["--load", str(tmp_path / "saved")]


def test_a_job_that_is_done_starts_nothing_and_is_no_error(
    saved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("miles_plugin.interrupt.install", lambda: None)
    for flags in ([], ["--dry-run"], ["--save", saved[1]]):
        assert cli.main(["train", *saved, "--num-rollout", "2", *flags]) == 0
        out, error = capsys.readouterr()
        assert not out
        assert "nothing to do" in error
        assert not (tmp_path / "runs").exists()


def test_a_job_that_goes_on_is_checked_against_what_was_saved(
    saved: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("miles_plugin.interrupt.install", lambda: None)
    assert cli.main(["train", *saved, "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "changed since iter_0000002 rm_type 'math' -> None (from the defaults)" in printed
    record = Path(saved[1]) / "iter_0000002" / "job.json"
    record.write_text(record.read_text().replace('"prompts": "spell_backward"', '"prompts": "20 items, content 0"'))
    assert cli.main(["train", *saved, "--dry-run"]) == 2
    assert "had the prompts '20 items, content 0', task=spell_backward gives" in capsys.readouterr().err


def test_a_job_that_goes_on_says_what_has_changed(
    saved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "_run", lambda *_: None)
    settings, origins = load_config_and_origins([*saved, "--lr", "1e-5", "--report", str(tmp_path / "report")])
    job.train(settings, origins)
    changed = "rm_type 'math' -> None (from the defaults), lr 0.0001 -> 1e-05 (from the command line)"
    assert f"warning: changed since {saved[1]}/iter_0000002 was saved: {changed}\n" in capfd.readouterr().out


def test_a_shard_that_arrives_changed_stops_the_job() -> None:
    check_digests([ShardRecord(0, "k", 4, "a", "a")])
    with pytest.raises(IntegrityError, match="put a, rank 1 got b"):
        check_digests([ShardRecord(0, "k", 4, "a", "a"), ShardRecord(1, "l", 4, "a", "b")])


def test_the_job_starts_a_master_only_when_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = MagicMock()
    monkeypatch.setattr(preflight, "open_rollout_store", joined)
    tcp = ["--mooncake-store-init-kwargs", '{"protocol": "tcp"}']
    assert plan(*MOONCAKE, *tcp, monkeypatch=monkeypatch).own_master
    assert not plan(monkeypatch=monkeypatch).own_master, "the ray backend needs none"
    assert not joined.called
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.9:50051")
    assert not plan(*MOONCAKE, *tcp, monkeypatch=monkeypatch).own_master
    named = ["--mooncake-store-init-kwargs", '{"protocol": "tcp", "master_server_address": "10.0.0.1:50051"}']
    assert not plan(*MOONCAKE, *named, monkeypatch=monkeypatch).own_master
    assert joined.call_count == joined.return_value.close.call_count == 2


def test_a_function_that_runs_for_long_is_said_each_time_that_has_doubled() -> None:
    said: list[str] = []
    running: list[float] = []
    slow = SlowCalls(
        lambda _waited: ("custom_rm_path=mine.reward, sample 7", running[-1]) if running else None, said.append
    )
    for waited in range(1, 1000):
        if waited == 100:
            running.append(0.0)
        slow.look(float(waited))
        running[-1:] = [seconds + 1.0 for seconds in running[-1:]]
    assert [int(re.findall(r"after (\d+) s", line)[0]) for line in said] == [60, 120, 240, 480]
    assert said[0] == (
        "custom_rm_path=mine.reward, sample 7: still running after 60 s, which nothing limits; Ctrl-C ends the job"
    )


def test_a_gpu_engine_is_the_ordinary_server_and_never_meets_the_cpu_recipe() -> None:
    spec = EngineSpec(Path("/m"), "127.0.0.1", gpus=(4, 5), seed=3, log=Path("log"))
    line = " ".join(command(spec, PORTS))
    assert "-m sglang.launch_server" in line
    assert "--tp 2" in line
    assert "sglang_cpu" not in line
    assert environment(spec)["CUDA_VISIBLE_DEVICES"] == "4,5"
    cpu = EngineSpec(Path("/m"), "127.0.0.1", gpus=(), seed=3, log=Path("log"))
    assert "-m miles_plugin.engines.sglang_cpu.server" in " ".join(command(cpu, PORTS))


@pytest.mark.parametrize(
    ("cores", "ranks", "bound"), [({0, 1, 2, 5}, 2, "0,2|1,5"), ({3}, 2, "3|3"), ({0, 1, 2}, 2, "0,2|1")]
)
def test_ranks_of_an_engine_on_a_cpu_share_its_cores(
    cores: set[int], ranks: int, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: cores)
    spec = EngineSpec(Path("/m"), "127.0.0.1", gpus=(), seed=3, log=Path("log"), cpu_ranks=ranks)
    assert f"--tp {ranks}" in " ".join(command(spec, PORTS))
    assert environment(spec)["SGLANG_CPU_OMP_THREADS_BIND"] == bound
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(replace(spec, cpu_ranks=1))


@pytest.mark.parametrize(("gpus", "protocol"), [((), "tcp"), ((0, 1), "rdma")])
def test_only_a_target_of_p2p_registers_its_memory(
    gpus: tuple[int, ...], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOONCAKE_PROTOCOL", "MC_FORCE_TCP"):
        monkeypatch.delenv(name, raising=False)
    flag = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
    spec = EngineSpec(Path("/m"), "10.0.0.7", gpus, seed=3, log=Path("log"))
    assert flag not in command(spec, PORTS)
    assert "MOONCAKE_PROTOCOL" not in environment(spec)
    target = replace(spec, p2p_protocol=protocol)
    line = " ".join(command(target, PORTS))
    assert flag in line
    assert "--engine-info-bootstrap-port 1236 --dist-init-addr 10.0.0.7:1235" in line
    assert ("--moe-runner-backend triton" in line) == bool(gpus)
    assert environment(target)["MOONCAKE_PROTOCOL"] == protocol
    assert ("MC_FORCE_TCP" in environment(target)) == (protocol == "tcp")
