"""Prompts from files: their order, what is held out, and what is said of a file that is wrong."""

import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="the extra `train` is not installed")
import pyarrow.parquet as pq  # noqa: E402

from miles_plugin.arguments import TrainConfig  # noqa: E402
from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.rollout import check  # noqa: E402
from miles_plugin.rollout.check import check_data  # noqa: E402
from miles_plugin.rollout.data import PromptData  # noqa: E402
from miles_plugin.rollout.prompts import to_text  # noqa: E402
from miles_plugin.rollout.source import check_same_prompts  # noqa: E402
from mooncake_store.errors import ConfigError  # noqa: E402

Rows = list[dict[str, Any]]
MATH = ["--label-key", "answer", "--rm-type", "math"]


def rows(count: int, first: int = 0) -> Rows:
    return [{"input": f"What is {i}?", "answer": str(i), "metadata": {"level": i}} for i in range(first, first + count)]


def write_jsonl(path: Path, content: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def write_parquet(path: Path, content: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(content), path, row_group_size=7)
    return path


WRITERS: list[tuple[str, Callable[[Path, Rows], Path]]] = [("x.jsonl", write_jsonl), ("x.parquet", write_parquet)]


def config(path: Path, *more: str, held_out: int = 4) -> TrainConfig:
    return load_config(["--prompt-data", str(path), "--held-out-size", str(held_out), *MATH, *more])


def stream(data: PromptData, start: int, count: int) -> list[tuple[int, Any]]:
    return [(item.index, item.label) for item in islice(data.rollout(start), count)]


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_items_carry_prompt_label_and_metadata(name: str, write: Callable[[Path, Rows], Path], tmp_path: Path) -> None:
    path = write(tmp_path / name, rows(20))
    data = PromptData(config(path))
    item = next(data.rollout())
    assert (item.index, item.prompt, item.label, item.metadata) == (4, "What is 4?", "4", {"level": 4})
    assert str(path) in item.origin
    assert [item.label for item in data.held_out] == ["0", "1", "2", "3"]


def test_a_job_goes_on_with_the_same_content_wherever_it_lies(tmp_path: Path) -> None:
    """Training prompts and held-out ones; neither the path nor the number of items counts, what is in them does."""
    data, other = tmp_path / "data", tmp_path / "other"
    for directory in (data, other):
        directory.mkdir()
        write_jsonl(directory / "x.jsonl", rows(20))
        write_jsonl(directory / "y.jsonl", rows(20, first=100))

    def settings(directory: Path, held_out: str = "y.jsonl") -> TrainConfig:
        return config(directory / "x.jsonl", "--eval-prompt-data", str(directory / held_out))

    state = {"cursor": 3, "prompts": PromptData(settings(data)).name}
    (other / "y.jsonl").rename(other / "renamed.jsonl")
    moved = settings(other, "renamed.jsonl")
    check_same_prompts(moved, PromptData(moved), state)
    for changed in ("x.jsonl", "y.jsonl"):
        content = (data / changed).read_text()
        (data / changed).write_text(content.replace('"answer": "1', '"answer": "2', 1))
        with pytest.raises(ConfigError, match=r"had the prompts '20 items, .*x\.jsonl gives '20 items, .*start anew"):
            check_same_prompts(settings(data), PromptData(settings(data)), state)
        (data / changed).write_text(content)
    check_same_prompts(settings(data), PromptData(settings(data)), state)


@pytest.mark.parametrize("shuffle", [[], ["--rollout-shuffle"]])
@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_a_stream_goes_on_where_it_is_told_to_over_epochs(
    name: str, write: Callable[[Path, Rows], Path], shuffle: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / name, rows(20))
    whole = stream(PromptData(config(path, *shuffle)), 0, 50)
    labels = [label for _, label in whole]
    epochs = [labels[:16], labels[16:32], labels[32:48]]
    assert all(sorted(map(int, epoch)) == list(range(4, 20)) for epoch in epochs), "each epoch has every item once"
    assert (epochs[0] == epochs[1]) == (not shuffle)
    again = PromptData(config(path, *shuffle))
    for taken in (1, 15, 16, 17, 40):
        cursor = whole[taken - 1][0] + 1
        assert stream(again, cursor, 10) == whole[taken : taken + 10]
    if shuffle:
        assert stream(PromptData(config(path, *shuffle, "--seed", "1")), 0, 50) != whole


@pytest.mark.parametrize("evaluated_apart", [False, True])
def test_no_held_out_prompt_is_trained_on(evaluated_apart: bool, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [*rows(10), *rows(10), *rows(3, 50)])
    more = ["--eval-prompt-data", str(write_parquet(tmp_path / "eval.parquet", rows(6)))] if evaluated_apart else []
    data = PromptData(config(path, *more))
    held_out = {item.prompt for item in data.held_out}
    assert len(held_out) == (6 if evaluated_apart else 4)
    assert not held_out & {item.prompt for item in islice(data.rollout(), 40)}


def test_a_directory_is_all_its_files_in_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", rows(5, 10))
    write_jsonl(tmp_path / "a.jsonl", rows(10))
    (tmp_path / "README.md").write_text("no prompts")
    assert stream(PromptData(config(tmp_path)), 0, 12) == [(i, str(i)) for i in range(4, 15)] + [(19, "4")]


def test_blank_lines_are_skipped_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in rows(6)]
    (tmp_path / "x.jsonl").write_text("\n" + "\n\n".join(lines))
    item = next(PromptData(config(tmp_path / "x.jsonl", held_out=2)).rollout())
    assert (item.index, item.label) == (2, "2")
    assert item.origin.endswith("line 6")


class Templated:
    """A tokenizer whose template shows what it was given."""

    chat_template = "any"
    name_or_path = "checkpoint"

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("no system messages, please")
        return json.dumps([messages, options], sort_keys=True)


def test_messages_and_text_go_through_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    content = [{"input": messages, "answer": 1}, {"input": [{"role": "system", "content": "c"}], "answer": 1}]
    for name, write in WRITERS:
        path = write(tmp_path / name, content)
        chat = config(path, "--apply-chat-template", "--apply-chat-template-kwargs", '{"thinking": false}', held_out=1)
        data = PromptData(chat)
        (first,) = data.held_out
        options = {"tokenize": False, "add_generation_prompt": True, "thinking": False}
        assert json.loads(to_text(first, Templated(), chat)) == [messages, options]
        with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}.*no system messages, please"):
            to_text(next(data.rollout()), Templated(), chat)
    text = config(write_jsonl(tmp_path / "t.jsonl", rows(9)), "--apply-chat-template")
    plain = next(PromptData(text).rollout())
    assert json.loads(to_text(plain, Templated(), text))[0] == [{"role": "user", "content": "What is 4?"}]
    without = Templated()
    without.chat_template = ""
    with pytest.raises(ConfigError, match="apply_chat_template: the tokenizer of checkpoint has no chat template"):
        to_text(plain, without, text)


GOOD = json.dumps({"input": "a", "answer": "1"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"input": "a", "answer" "1"}', r"line 2, column 25: not JSON"),
        ("[1]", r"line 2: a list; every line must be a JSON object"),
        ('{"imput": "a", "answer": "1"}', r"line 2: no 'input' \(input_key\).*did you mean 'imput'"),
        ('{"input": "a"}', r"line 2: no 'answer' \(label_key\); it has 'input'"),
        ('{"input": "a", "answer": null}', r"line 2: 'answer' \(label_key\) is null"),
        ('{"input": "a", "answer": [1]}', r"line 2: label 'answer' is a list; rm_type=math"),
        ('{"input": "", "answer": "1"}', r"line 2: prompt 'input' is ''"),
        ('{"input": 3, "answer": "1"}', r"line 2: prompt 'input' is 3; it must be text or a list of chat messages"),
        ('{"input": [], "answer": "1"}', r"line 2: prompt 'input' is \[\]"),
        ('{"input": [{"role": "user"}], "answer": "1"}', r"line 2: prompt 'input' holds .*a role and a content"),
        ('{"input": [{"role": "user", "content": "x"}], "answer": "1"}', r"line 2.*add --apply-chat-template"),
        ('{"input": "a", "answer": "1", "metadata": "m"}', r"line 2: metadata 'metadata' is a str"),
        ('{"input": "\\xff", "answer": "1"}', r"line 2, column 12: not JSON"),
    ],
)
def test_a_wrong_line_is_named(line: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}, ") + expected):
        PromptData(config(path, held_out=1))


def test_a_wrong_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    for content, expected in (
        ([{"input": "a", "answr": 1}], r"no column 'answer' \(label_key\); it has .*did you mean 'answr'"),
        ([{"input": "a", "answer": 1}, {"input": "b", "answer": None}], r"row 1: 'answer' \(label_key\) is null"),
        ([{"input": "a", "answer": 1}, {"input": None, "answer": 1}], r"row 1: 'input' \(input_key\) is null"),
    ):
        path = write_parquet(tmp_path / "x.parquet", content)
        with pytest.raises(ConfigError, match=f"{re.escape(str(path))}.*{expected}"):
            PromptData(config(path, held_out=1))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.json", b"{}", r"prompt_data=.*x\.json: unknown extension '\.json'; \.jsonl and \.parquet"),
        ("x.parquet", b"PAR0", r"x\.parquet: not a readable parquet file"),
        ("x.jsonl", b"", r"prompt_data=.*no items"),
        ("x.jsonl", b"\n \n", r"prompt_data=.*no items"),
        ("x.jsonl", b'{"input": "\xff"}\n', r"line 1: not UTF-8"),
        ("x.jsonl", f"{GOOD}\n{GOOD}\n".encode(), r"no other prompt is left to train on; lower held_out_size"),
        ("nothing", None, r"prompt_data=.*nothing: no such file or directory"),
    ],
)
def test_a_wrong_file_is_named(name: str, content: bytes | None, expected: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        PromptData(config(tmp_path / name, held_out=1))


def test_an_empty_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"no \.jsonl or \.parquet file in this directory \(notes\.txt\)"):
        PromptData(config(tmp_path))


def test_too_few_items_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", rows(4))
    with pytest.raises(ConfigError, match="of its 4 items 4 are held out"):
        PromptData(config(path, held_out=5))
    assert len(PromptData(config(path, held_out=3)).held_out) == 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that sees 1024 tokens, one per character."""
    pytest.importorskip("torch", reason="the extra `train` is not installed")
    from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint

    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(build_model(32, 1, seed=0), build_tokenizer(), directory)
    return directory


@pytest.mark.parametrize(("name", "write"), WRITERS)
@pytest.mark.parametrize(("row", "held_out"), [(19, 4), (2, 4), (5, 1)])
def test_a_prompt_that_leaves_no_room_is_named_before_the_job_starts(
    name: str, write: Callable[[Path, Rows], Path], row: int, held_out: int, checkpoint: Path, tmp_path: Path
) -> None:
    content = rows(20)
    content[row]["input"] = "1" * 1009
    path = write(tmp_path / name, content)
    settings = ["--hf-checkpoint", str(checkpoint), "--rollout-shuffle"]
    where = f"{path}, {f'line {row + 1}' if path.suffix == '.jsonl' else f'row {row}'}"
    expected = (
        rf"^{re.escape(where)}: a prompt of 1009 tokens .*allowed are 1008: .*context of 1024 less "
        "rollout_max_response_len=16; .*lower rollout_max_response_len to 15$"
    )
    with pytest.raises(ConfigError, match=expected):
        check_data(config(path, *settings, held_out=held_out))
    check_data(config(path, *settings, "--rollout-max-response-len", "15", held_out=held_out))


def test_of_many_prompts_the_first_are_measured_and_that_is_said(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = rows(20)
    content[-1]["input"] = "1" * 2000
    settings = config(write_jsonl(tmp_path / "x.jsonl", content), "--hf-checkpoint", str(checkpoint))
    monkeypatch.setattr(check, "_CHECKED_CHARACTERS", 100)
    check_data(settings)
    (warning,) = caplog.messages
    checked = "x.jsonl: only the first 10 prompts, 4 of them held out, were checked"
    assert checked in warning
