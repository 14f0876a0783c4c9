"""Settings: precedence, merging, and what a mistake is told."""

import re
from pathlib import Path

import pytest

from miles_plugin.arguments import GROUPS, TrainConfig
from miles_plugin.arguments_sources import load_config, load_config_and_origins, with_origins
from mooncake_store.errors import ConfigError


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(
        "num_rollout: 3\nlr: 0.5\nupdate_weight_buffer_size: 1.5mb\n"
        "mooncake_store_init_kwargs: {protocol: tcp, device_name: a}\n"
    )
    return path


def test_flag_over_environment_over_yaml_over_default(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_MOONCAKE_LR", "0.25")
    monkeypatch.setenv("MILES_MOONCAKE_NUM_ROLLOUT", "4")
    config = load_config(["--config", str(yaml_file), "--num-rollout", "5"])
    assert (config.num_rollout, config.lr, config.update_weight_buffer_size) == (5, 0.25, 3 * 2**19)
    assert config.seed == TrainConfig.model_fields["seed"].default


def test_mappings_merge_key_by_key(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_MOONCAKE_MOONCAKE_STORE_INIT_KWARGS", '{"device_name": "b", "chunk_bytes": 1}')
    config = load_config(
        ["--config", str(yaml_file), '--mooncake-store-init-kwargs={"chunk_bytes": 2, "protocol": "rdma"}']
    )
    assert config.mooncake_store_init_kwargs == {"protocol": "rdma", "device_name": "b", "chunk_bytes": 2}


def test_a_variable_of_mooncake_s_wins_over_the_file_and_loses_to_a_flag(
    yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("MOONCAKE_DEVICE", " ")
    argv = ["--config", str(yaml_file)]
    assert load_config(argv).mooncake_store_init_kwargs == {"device_name": "a"}, "the protocol is left to the variable"
    flag = ["--mooncake-store-init-kwargs", '{"protocol": "tcp"}']
    assert load_config([*argv, *flag]).mooncake_store_init_kwargs == {"protocol": "tcp", "device_name": "a"}
    monkeypatch.setenv("MILES_MOONCAKE_MOONCAKE_STORE_INIT_KWARGS", '{"protocol": "tcp"}')
    assert load_config(argv).mooncake_store_init_kwargs == {"protocol": "tcp", "device_name": "a"}


def test_an_error_found_later_says_where_its_settings_came_from(
    yaml_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILES_MOONCAKE_SEED", "3")
    argv = ["--config", str(yaml_file), "--lr", "1", "--mooncake-store-init-kwargs", '{"device_name": "b"}']
    _, origins = load_config_and_origins(argv)
    message = with_origins("lr=1, seed=3, num_rollout=3, device_name = 'b', protocol = 'tcp', min_lr=0", origins)
    assert message.endswith(
        f"[lr from the command line, device_name from the command line, seed from the environment, num_rollout from "
        f"{yaml_file}, protocol from {yaml_file}]"
    )
    assert with_origins("nothing named", origins) == "nothing named"


def test_where_a_setting_of_the_store_came_from_is_said_once(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "0")
    argv = ["--config", str(yaml_file), "--mooncake-store-init-kwargs", '{"device_name": null}']
    _, origins = load_config_and_origins(argv)
    said = "protocol = 'rdma' (from environment variable MOONCAKE_PROTOCOL): no"
    assert with_origins(said, origins) == said
    assert with_origins("device_name = '' (from default): no", origins) == "device_name = '' (from default): no"
    variable = "environment variable MOONCAKE_GLOBAL_SEGMENT_SIZE"
    assert with_origins("global_segment_size=0: no", origins).endswith(f"[global_segment_size from {variable}]")


def test_defaults_are_those_of_miles() -> None:
    config = load_config([])
    assert config.object_store_backend == "ray"
    assert config.mooncake_replica_num == 1
    assert config.update_weight_transfer_mode == "broadcast"
    assert config.update_weight_buffer_size == 512 * 1024**2
    assert config.pause_generation_mode == "retract"
    assert not config.rollout_external
    assert config.rollout_external_engine_addrs is None
    assert (config.p2p_transfer_num_workers, config.p2p_transfer_timeout) == (4, 30.0)
    assert not config.check_weight_update_equal


@pytest.mark.parametrize(
    ("argv", "yaml", "environment"),
    [
        (["--rollout-external-engine-addrs", "a:1", "[::1]:2", "--seed", "3"], "", ""),
        (["--rollout-external-engine-addrs", "a:1", "--rollout-external-engine-addrs=[::1]:2"], "", "b:3"),
        ([], "rollout_external_engine_addrs: [b:3]", "a:1 [::1]:2"),
        ([], "", "a:1, [::1]:2"),
        ([], "rollout_external_engine_addrs: ['a:1', '[::1]:2']", ""),
        ([], "rollout_external_engine_addrs: a:1 [::1]:2", ""),
    ],
)
def test_a_setting_of_several_values(
    argv: list[str], yaml: str, environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(yaml)
    monkeypatch.setenv("MILES_MOONCAKE_ROLLOUT_EXTERNAL_ENGINE_ADDRS", environment)
    config = load_config([*argv, "--config", str(tmp_path / "job.yaml")])
    assert config.rollout_external_engine_addrs == ["a:1", "[::1]:2"]


def test_what_was_resolved_reads_back_the_same(yaml_file: Path, tmp_path: Path) -> None:
    config = load_config(["--config", str(yaml_file), "--task-kwargs", '{"min_word_len": 3}'])
    written = tmp_path / "resolved.yaml"
    written.write_text(config.to_yaml())
    assert load_config(["--config", str(written)]) == config


@pytest.mark.parametrize(
    ("argv", "yaml", "environment", "expected"),
    [
        (["--num-rollouts", "3"], "", {}, ["--num-rollouts", "did you mean --num-rollout?"]),
        ([], "num_rollouts: 3", {}, ["'num_rollouts'", "job.yaml", "did you mean num_rollout?"]),
        (["--lr", "fast"], "", {}, ["lr", "'fast'", "command line", "number"]),
        ([], "lr: fast", {}, ["lr", "'fast'", "job.yaml", "number"]),
        ([], "", {"LR": "fast"}, ["lr", "'fast'", "environment", "number"]),
        (["--num-rollout", "0"], "", {}, ["num_rollout", "'0'", "allowed: 1 or more"]),
        (["--mooncake-replica-num", "0"], "", {}, ["mooncake_replica_num", "allowed: 1 or more"]),
        (["--object-store-backend", "redis"], "", {}, ["object_store_backend", "'redis'", "'ray'", "'mooncake'"]),
        (["--update-weight-buffer-size", "many"], "", {}, ["update_weight_buffer_size", "'many'", "command line"]),
        (
            ["--mooncake-store-init-kwargs", '{"protocol": tcp}'],
            "",
            {},
            ["--mooncake-store-init-kwargs", "line 1, column 14"],
        ),
        (["--task-kwargs", '{"a":\n}'], "", {}, ["--task-kwargs", "line 2, column 1"]),
        (["--task-kwargs", '{"a": 1, "a": 2}'], "", {}, ["--task-kwargs=", "'a' is set twice; keep one"]),
        ([], "", {"TASK_KWARGS": '{"x": {"a": 1, "a": 1}}'}, ["MILES_MOONCAKE_TASK_KWARGS=", "'a' is set twice"]),
        (["--mooncake-store-init-kwargs", "--dry-run"], "", {}, ["init-kwargs: expected one argument"]),
        (["--dry-run", "--task-kwargs"], "", {}, ["--task-kwargs: expected one argument"]),
        ([], "num_rollout: true", {}, ["num_rollout=True", "job.yaml", "allowed: a number"]),
        ([], "lr: yes", {}, ["lr=True", "job.yaml", "allowed: a number"]),
        ([], "update_weight_buffer_size: true", {}, ["update_weight_buffer_size=True", "allowed: a number"]),
        (["--task-kwargs", "[1]"], "", {}, ["--task-kwargs", "JSON object", "list"]),
        ([], "", {"TASK_KWARGS": "{"}, ["MILES_MOONCAKE_TASK_KWARGS", "line 1, column 2"]),
        ([], "", {"NUM_ROLOUT": "3"}, ["MILES_MOONCAKE_NUM_ROLOUT", "did you mean MILES_MOONCAKE_NUM_ROLLOUT?"]),
        ([], "1: 2", {}, ["job.yaml", "the key 1"]),
        ([], "- 1", {}, ["job.yaml", "mapping", "list"]),
        ([], "a: [", {}, ["job.yaml", "not YAML"]),
        (["--run-id", "../up"], "", {}, ["run_id", "'../up'"]),
        (["--seed"], "", {}, ["--seed", "expected one argument"]),
        (["--lr", "inf"], "", {}, ["lr", "'inf'", "allowed: a finite number"]),
        ([], "clip_grad: .nan", {}, ["clip_grad", "finite number"]),
        ([], "save: 3", {}, ["save=3 from ", "job.yaml: allowed: a path; in YAML put it in quotes"]),
        ([], "run_id: 2026-01-02", {}, ["run_id=2026-01-02 from ", "allowed: text; in YAML put it in quotes"]),
        ([], "task_kwargs: 3", {}, ["task_kwargs=3 from ", "allowed: a mapping of names to values"]),
        ([], "dry_run: maybe", {}, ["dry_run='maybe'", "allowed: true or false"]),
        (["--num-rollout", "1.5"], "", {}, ["num_rollout='1.5'", "allowed: a whole number"]),
        (["--warm-start-accuracy", "1"], "", {}, ["warm_start_accuracy='1'", "allowed: less than 1.0"]),
        (["--held-out-size", "20000"], "", {}, ["held_out_size='20000'", "allowed: 16384 or less"]),
        (["--lr", "0"], "", {}, ["lr='0'", "allowed: more than 0"]),
        (["--save", ""], "", {}, ["save", "the path is empty"]),
        (["--update-weight-transfer-mode", "nccl"], "", {}, ["'nccl'", "allowed: 'broadcast', 'p2p' or 'disk-delta'"]),
        (["--update-weight-disk-dir", ""], "", {}, ["update_weight_disk_dir", "the path is empty"]),
        ([], "update_weight_disk_dir: 3", {}, ["update_weight_disk_dir=3 from ", "in YAML put it in quotes"]),
        (["--update-weight-anchor-interval", "0"], "", {}, ["anchor_interval='0'", "allowed: 1 or more"]),
        (["--update-weight-delta-encoding", "zstd"], "", {}, ["'zstd'", "allowed: 'auto', 'xor', 'overwrite'"]),
        (["--update-weight-delta-checksum", "md5"], "", {}, ["'md5'", "allowed: 'xxh3-128', 'blake3' or 'adler32'"]),
        ([], "update_weight_disk_budget: true", {}, ["update_weight_disk_budget=True", "allowed: a number"]),
        (["--update-weight-disk-budget", "much"], "", {}, ["update_weight_disk_budget", "'much'"]),
        (["--rollout-external-engine-addrs"], "", {}, ["expected at least one argument"]),
        ([], "", {"ROLLOUT_EXTERNAL_ENGINE_ADDRS": " "}, ["addrs=[] from the environment: allowed: one or more"]),
        ([], "rollout_external_engine_addrs: 3", {}, ["addrs=3 from ", "allowed: a list"]),
        (["--num-rollout", "3", "5"], "", {}, ["stray value '5' after --num-rollout, which takes one value"]),
        (["--seed", "5", "--num-rollout=3", "5"], "", {}, ["stray value '5' after --num-rollout,"]),
        (["--lr", "1", "-5"], "", {}, ["stray value '-5' after --lr"]),
        (["--dry-run", "true"], "", {}, ["stray value 'true' after --dry-run, which takes none"]),
        ([], "seed: 1\nlr: 1\nseed: 2", {}, ["job.yaml", "'seed' is set twice, in line 1 and in line 3"]),
        ([], "task_kwargs:\n  a: 1\n  b: 2\n  a: 1", {}, ["job.yaml", "'a' is set twice, in line 2 and in line 4"]),
        ([], "task_kwargs: {a: 1, a: 2}", {}, ["'a' is set twice, in line 1 and in line 1"]),
    ],
)
def test_a_mistake_is_named_with_its_source(
    argv: list[str],
    yaml: str,
    environment: dict[str, str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "job.yaml").write_text(yaml)
    for name, value in environment.items():
        monkeypatch.setenv(f"MILES_MOONCAKE_{name}", value)
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(tmp_path / "job.yaml"), *argv])
    for words in expected:
        assert words in str(caught.value)


def test_no_word_of_the_settings_library_is_left(tmp_path: Path) -> None:
    """For each setting, values that no setting of its type takes."""
    for name in TrainConfig.model_fields:
        for value in ("{1: 2}", "[]", "2026-01-02", ".inf", "-1e30"):
            (tmp_path / "job.yaml").write_text(f"{name}: {value}")
            said = ""
            try:
                load_config(["--config", str(tmp_path / "job.yaml")])
            except ConfigError as error:
                said = str(error)
            assert not re.search(r"Input should|Value error|class |datetime|valid ", said)


def test_an_empty_variable_counts_as_not_set(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_config(["--config", str(yaml_file)])
    for name in TrainConfig.model_fields:
        monkeypatch.setenv(f"MILES_MOONCAKE_{name.upper()}", "")
    assert load_config(["--config", str(yaml_file)]) == expected


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        load_config(["--config", "nowhere.yaml"])


def test_help_lists_every_setting_under_its_group_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load_config(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for group in GROUPS:
        assert text.count(f"\n{(group.__doc__ or '').partition(':')[0]}:\n") == 1
        for name in group.model_fields:
            assert re.search(rf"^  --{name.replace('_', '-')}[ ,]", text, re.MULTILINE), name
    assert "(default: retract)" in " ".join(text.split())
