"""The plan of a dry run: what would be started, where, and what the store's settings came from."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin import plan, preflight
from miles_plugin.arguments_sources import load_config
from miles_plugin.plan import PlannedProcess
from miles_plugin.training.tiny_policy import build_tokenizer
from mooncake_store.errors import ConfigError, StoreUnavailable
from mooncake_store.memory import MemoryLimit

MOONCAKE = ["--object-store-backend", "mooncake"]
TCP = [*MOONCAKE, "--mooncake-store-init-kwargs", '{"protocol": "tcp", "global_segment_size": "64mb"}']


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_visible_gpus", lambda: [])
    for name in ("MOONCAKE_MASTER", "MOONCAKE_MASTER_ADDR", "MOONCAKE_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


def planned(*argv: str) -> dict[tuple[str, str], PlannedProcess]:
    config = load_config(argv)
    return {(item.node, item.process): item for item in plan.processes(config, preflight.check(config))}


def test_every_part_is_counted_on_its_node() -> None:
    found = planned(*TCP, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "3")
    counts = {key: item.count for key, item in found.items()}
    assert counts == {
        ("driver", "miles-mooncake train"): 1,
        ("driver", "mooncake_master"): 1,
        ("driver", "segment holder"): 1,
        ("rollout_node", "Ray head"): 1,
        ("rollout_node", "rollout manager"): 1,
        ("rollout_node", "SGLang engine"): 3,
        ("trainer_node_0", "Ray node"): 1,
        ("trainer_node_0", "trainer rank"): 4,
        ("trainer_node_1", "Ray node"): 1,
        ("trainer_node_1", "trainer rank"): 4,
    }
    one = planned(*TCP)
    assert found["driver", "segment holder"] == one["driver", "segment holder"], "one per machine, not per Ray node"
    assert 64 * 1024**2 < found["driver", "segment holder"].memory < 256 * 1024**2
    assert found["rollout_node", "SGLang engine"].memory == 3 * one["rollout_node", "SGLang engine"].memory
    wide = planned(*TCP, "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2")[
        "rollout_node", "SGLang engine"
    ]
    assert wide.count == 1, "a rank more is a process more"
    assert 1 < wide.memory / one["rollout_node", "SGLang engine"].memory < 2


def test_the_ray_backend_needs_neither_master_nor_holder() -> None:
    assert not {"mooncake_master", "segment holder"} & {process for _, process in planned()}


def test_a_larger_checkpoint_needs_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"transformers cannot read its config\.json"):
        planned("--hf-checkpoint", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"rollout_max_response_len=999999: .* sees 32768 tokens"):
        planned("--hf-checkpoint", str(tmp_path), "--rollout-max-response-len", "999999")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2 * 1024**3)  # sparse
    gib = 1024**3
    monkeypatch.setattr(plan, "memory_limit", lambda: MemoryLimit(64 * gib, "memory.max"))
    more = {"rollout_node": 2 * gib, "trainer_node_0": 8 * gib, "trainer_node_1": 8 * gib}
    # What weights are sent from: of one rank, or of every.
    sends = {"broadcast": {"trainer_node_0": gib}, "p2p": {"trainer_node_0": 2 * gib, "trainer_node_1": 2 * gib}}
    for mode, buffers in sends.items():
        flags = ["--update-weight-transfer-mode", mode, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2"]
        tiny, large = planned(*flags), planned("--hf-checkpoint", str(tmp_path), *flags)
        for node, expected in more.items():
            part = node, "SGLang engine" if node == "rollout_node" else "trainer rank"
            found = large[part].memory - tiny[part].memory
            assert found == pytest.approx(expected + buffers.get(node, 0), abs=0.02 * gib)
    # Of disk-delta what was sent last, and what changed, also where the trainers' own weights are on GPUs.
    flags = ["--hf-checkpoint", str(tmp_path), "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2"]
    config, checked = load_config(flags), preflight.check(load_config(flags))
    less = {item.node: item.memory for item in plan.processes(config, checked)}
    delta = load_config([*flags, "--update-weight-transfer-mode", "disk-delta"])
    more = {item.node: item.memory - less[item.node] for item in plan.processes(delta, checked)}
    assert (more["trainer_node_0"], more["trainer_node_1"]) == pytest.approx((gib, 2 * gib), abs=0.02 * gib)


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ([], "no config.json and no weights (*.safetensors or pytorch_model*.bin) and no tokenizer (tokenizer.json,"),
        (["tokenizer.json", "model.safetensors"], "no config.json there"),
        (["config.json", "tokenizer.json", "model.safetensors.index.json"], "no weights ("),
        (["config.json", "pytorch_model-00001-of-00002.bin", "tokenizer_config.json"], "no tokenizer ("),
    ],
)
def test_a_checkpoint_without_some_of_its_files_is_refused(files: list[str], missing: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        planned("--hf-checkpoint", str(tmp_path))
    assert f"hf_checkpoint={tmp_path}: {missing}" in str(caught.value)


@pytest.mark.parametrize("setting", ["cache_dir", "save", "report"])
def test_a_directory_that_cannot_be_made_or_written_is_refused(setting: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flag = f"--{setting.replace('_', '-')}"
    for directory in (tmp_path / "file", Path("/proc/x"), Path("/proc"), tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=rf"{setting}={directory}: .*that can be written \(.*name another"):
            planned(flag, str(directory))
    planned(flag, str(tmp_path / "new" / "below"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "checking leaves nothing behind"


def test_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"the job needs about .* GB.*10000 x SGLang engine: lower rollout_num_gpus"):
        planned("--rollout-num-gpus", "10000")
    segment = ["--mooncake-store-init-kwargs", '{"protocol": "tcp", "global_segment_size": "3gb"}']
    monkeypatch.setattr(plan, "memory_limit", lambda: MemoryLimit(4 * 1024**3, "memory.max"))
    with pytest.raises(ConfigError, match=r"memory\.max.*3\.1 GB, is for 1 x segment holder: .*global_segment_size"):
        planned(*MOONCAKE, *segment)


def test_a_metadata_server_that_nobody_answers_at_is_found_before_the_start() -> None:
    segment = {"protocol": "tcp", "global_segment_size": "64mb", "metadata_server": "http://127.0.0.1:1/metadata"}
    with pytest.raises(StoreUnavailable, match=r"metadata_server = 'http://127\.0\.0\.1:1/metadata' .*P2PHANDSHAKE"):
        planned(*MOONCAKE, "--mooncake-store-init-kwargs", json.dumps(segment))


def test_settings_come_with_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_LOCAL_BUFFER_SIZE", "32mb")
    config = load_config([*TCP, "--log-format", "json"])
    record = json.loads(plan.describe(config, preflight.check(config)))
    assert record["event"] == "plan"
    settings = record["object_store_settings"]
    assert settings["protocol"] == {"value": "tcp", "source": "init_kwargs"}
    assert settings["local_buffer_size"] == {
        "value": 32 * 1024**2, "source": "environment variable MOONCAKE_LOCAL_BUFFER_SIZE"
    }  # fmt: skip
    assert settings["metadata_server"]["source"] == "default"
    assert settings["master_server_address"]["source"] == "started by the job"
    text = plan.describe(config.model_copy(update={"log_format": "text"}), preflight.check(config))
    for words in ("nothing was started", "MOONCAKE_LOCAL_BUFFER_SIZE", "rollout manager", "MemTotal", "trainer_node_0"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120
