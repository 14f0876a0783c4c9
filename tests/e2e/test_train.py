"""The whole job through its command line, on real Mooncake, Ray, SGLang and torch ranks; too small to learn."""

import json
from pathlib import Path

import pytest

from miles_plugin.arguments_sources import load_config
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint
from tests.e2e.jobs import SMALL, Marked, read_report, run, steps_of

pytestmark = [pytest.mark.integration, pytest.mark.e2e]


@pytest.mark.parametrize(
    ("backend", "mode", "control", "nodes"),
    [
        ("mooncake", "p2p", "none", 1),
        pytest.param("ray", "broadcast", "none", 1, marks=pytest.mark.slow),
        pytest.param("mooncake", "broadcast", "both", 2, marks=pytest.mark.slow),
    ],
)
def test_a_short_job_ends_with_a_complete_report(
    backend: str, mode: str, control: str, nodes: int, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    arguments = [
        *SMALL, "--num-rollout", "2", "--hf-checkpoint", str(checkpoint), "--report", str(tmp_path / "run"),
        "--object-store-backend", backend, "--reward-control", control,
        "--update-weight-transfer-mode", mode, "--check-weight-update-equal",
        "--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(2 // nodes),
    ]  # fmt: skip
    expected = load_config(arguments)
    done = run(arguments, marked)
    assert done.returncode == 0, done.stderr
    report = read_report(tmp_path / "run")
    assert report["status"] == "finished"
    assert list(report["arms"]) == (["real", "shuffled"] if control == "both" else ["real"])
    assert report["object_store"]["puts"] == len(steps_of(report)), "one batch for all ranks"
    assert report["object_store"]["puts"] == report["object_store"]["removes"], "acknowledged means removed"
    assert report["object_store"]["bytes_put"] == sum(step["nbytes"]["put"] for step in steps_of(report))
    version = 0
    for arm in report["arms"].values():
        # Version `version` is the checkpoint, served before the arm's first rollout; each step serves the next.
        for step in arm["steps"]:
            assert step["sample_versions"] == [str(version)]
            version += 1
            assert step["served_version"] == version
        version += 1
    for step in steps_of(report):
        assert [shard["rank"] for shard in step["shards"]] == [0, 1]
        assert all(shard["put_digest"] == shard["got_digest"] for shard in step["shards"])
        assert len({shard["key"] for shard in step["shards"]}) == 1
        assert sum(shard["rows"] for shard in step["shards"]) == step["samples"] == 32
        assert set(step["seconds"]) == {"generate", "put", "get", "train", "update", "evaluate"}
        assert step["nbytes"]["put"] == step["nbytes"]["get"] > 0
        assert step["nbytes"]["update"] > 0
        (update,) = step["updates"]
        assert update["proven"] > 0, "tensors of the engine are the trainers'"
        assert (update["version"], update["left"]) == (step["served_version"], [])
        assert 0 <= step["held_out_accuracy"] <= 1
    assert (tmp_path / "run" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
    assert load_config(["--config", str(tmp_path / "run" / "config.yaml")]) == expected
    names = {"mooncake_master", "segment-holder", "rollout-manager", "sglang-0", "trainer-0", "trainer-1"}
    logs = {log.stem for log in (tmp_path / "run" / "logs").iterdir()}
    assert logs == (names if backend == "mooncake" else names - {"mooncake_master", "segment-holder"})


@pytest.mark.slow
def test_the_engine_s_experts_travel_with_the_batch(tmp_path: Path, marked: Marked) -> None:
    checkpoint = tmp_path / "checkpoint"
    save_checkpoint(build_model(32, 2, seed=0, num_experts=4), build_tokenizer(), checkpoint)
    arguments = [
        *SMALL, "--num-rollout", "2", "--hf-checkpoint", str(checkpoint), "--report", str(tmp_path / "run"),
        "--return-routed-experts", "--custom-rm-path", "tests.e2e.reward.one_expert_pair_per_token_and_layer",
    ]  # fmt: skip
    done = run(arguments, marked)
    assert done.returncode == 0, done.stderr
    steps = steps_of(read_report(tmp_path / "run"))
    assert [step["reward"] for step in steps] == [1.0, 1.0], "the reward function saw them on every sample"
    assert all(shard["put_digest"] == shard["got_digest"] for step in steps for shard in step["shards"])
    # int32 for two experts in each of two layers for each token but a sample's last: more than all else together.
    assert all(step["nbytes"]["put"] > 16 * 32 * 10 for step in steps)


def test_a_report_is_never_overwritten(tmp_path: Path, marked: Marked) -> None:
    (tmp_path / "report.json").write_text("{}")
    done = run(["--report", str(tmp_path)], marked)
    assert done.returncode == 2
    assert "holds the report of another run" in done.stderr
    assert (tmp_path / "report.json").read_text() == "{}"


def test_a_dry_run_prints_the_plan_and_starts_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    config = Path("configs/local.yaml").absolute()
    arguments = [
        "--config", str(config), "--hf-checkpoint", str(checkpoint), "--dry-run", "--save", "saved",
        "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "2",
    ]  # fmt: skip
    text = run(arguments, marked, tmp_path)
    assert text.returncode == 0, text.stderr
    for words in (
        "mooncake_master",
        "segment holder",
        "trainer_node_1",
        "SGLang engine",
        "global_segment_size",
        "init_kwargs",
        "saved",
    ):
        assert words in text.stdout
    plan = json.loads(run([*arguments, "--log-format", "json"], marked, tmp_path).stdout)
    counts = {(item["node"], item["process"]): item["count"] for item in plan["processes"]}
    assert counts["rollout_node", "SGLang engine"] == 2
    assert counts["trainer_node_0", "trainer rank"] == counts["trainer_node_1", "trainer rank"] == 1
    assert plan["object_store_settings"]["protocol"] == {"value": "tcp", "source": "init_kwargs"}
    assert not list(tmp_path.iterdir())
