"""The whole job on data, rewards and generation of one's own: the ways in for those who train a real model."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tests.e2e.jobs import SMALL, Marked, read_report, run, steps_of

pytestmark = [pytest.mark.integration, pytest.mark.e2e, pytest.mark.slow]
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


def test_chat_messages_from_parquet_with_a_template_and_the_math_reward(
    checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATE
    chat = tmp_path / "checkpoint"
    chat.mkdir()
    for file in checkpoint.iterdir():
        (chat / file.name).symlink_to(file)
    for file in ("tokenizer_config.json", "tokenizer.json"):
        (chat / file).unlink()
    tokenizer.save_pretrained(chat)
    rows = [{"messages": [{"role": "user", "content": f"{n} + 1 = ?"}], "answer": str(n + 1)} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    settings = [item for item in SMALL if item not in ("--config", "configs/local.yaml")]
    arguments = [
        *settings, "--num-rollout", "2", "--hf-checkpoint", str(chat), "--report", str(tmp_path / "run"),
        "--prompt-data", str(tmp_path / "train.parquet"), "--input-key", "messages", "--label-key", "answer",
        "--apply-chat-template", "--rm-type", "math", "--rollout-shuffle", "--rollout-max-response-len", "8",
    ]  # fmt: skip
    done = run(arguments, marked)
    assert done.returncode == 0, done.stderr
    steps = steps_of(read_report(tmp_path / "run"))
    assert len({step["prompts_digest"] for step in steps}) == 2
    assert all(shard["put_digest"] == shard["got_digest"] for step in steps for shard in step["shards"])


def test_the_two_turn_example(checkpoint: Path, tmp_path: Path, marked: Marked) -> None:
    arguments = [
        "--config", "examples/two_turn_tool/config.yaml", "--num-rollout", "2", "--rollout-batch-size", "8",
        "--held-out-size", "16", "--hf-checkpoint", str(checkpoint), "--report", str(tmp_path / "run"),
    ]  # fmt: skip
    done = run(arguments, marked)
    assert done.returncode == 0, done.stderr
    steps = steps_of(read_report(tmp_path / "run"))
    assert [step["samples"] for step in steps] == [64, 64]
    assert all(shard["put_digest"] == shard["got_digest"] for step in steps for shard in step["shards"])


@pytest.mark.parametrize(("fails", "message"), [("1 / 0", "ZeroDivisionError"), ("sys.exit(3)", "SystemExit: 3")])
def test_a_function_that_fails_is_named_with_its_line(
    fails: str, message: str, checkpoint: Path, tmp_path: Path, marked: Marked
) -> None:
    (tmp_path / "mine.py").write_text(f"import sys\ndef reward(args, sample):\n    return {fails}\n")
    config = Path("configs/local.yaml").absolute()
    arguments = [
        "--config", str(config), *SMALL[2:], "--num-rollout", "2", "--hf-checkpoint", str(checkpoint),
        "--report", str(tmp_path / "run"), "--custom-rm-path", "mine.reward",
    ]  # fmt: skip
    done = run(arguments, marked, tmp_path)
    assert done.returncode == 1
    assert "custom_rm_path=mine.reward" in done.stderr
    assert message in done.stderr
    assert "mine.py:3" in done.stderr
    assert not marked.processes()
    assert "Traceback" not in done.stderr
