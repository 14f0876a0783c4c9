"""The command: its help, its exit statuses, and completion as a shell does it."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_plugin import __main__, cli
from miles_plugin.arguments import TrainConfig


def output(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command."""
    try:
        status = cli.main(argv)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_names_every_command_and_each_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = output(["--help"], capsys)
    assert status == 0
    for name, command in cli.COMMANDS.items():
        assert name in text
        assert command.summary in " ".join(text.split())
        status, own, _ = output([name, "--help"], capsys)
        assert status == 0
        assert f"usage: miles-mooncake {name}" in own
        for action in command.parser()._actions:
            assert action.help, f"{name} {action.dest} says nothing"
            if action.option_strings and action.dest not in ("help", "config"):
                assert "(default: " in action.help or "default" in action.help, action.dest


def test_the_command_ends_without_a_search_for_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among all that a job has imported it takes seconds, after everything has been stopped."""
    monkeypatch.setattr("miles_plugin.interrupt.install", lambda: None)
    monkeypatch.setattr(cli, "main", lambda: 3)
    try:
        assert __main__.main() == 3
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("argv", [[], ["trian"], ["completion", "fishy"], ["report"], ["sweep"]])
def test_wrong_use_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = output(argv, capsys)
    assert status == 2
    assert not out
    assert "usage" in error


def test_a_report_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = output(["report", str(tmp_path)], capsys)
    assert status == 2
    assert str(tmp_path) in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["holder", "--global-segment-size", "1mb"], "global_segment_size = '1mb' (from the command line): allowed: 0"),
        (
            ["holder", "--global-segment-size", "0"],
            "global_segment_size = '0' (from the command line): a segment holder",
        ),
        (["holder", "--global-segment-size", "9000gb"], "less than"),
        (["ls", "--protocol", "udp"], "protocol = 'udp' (from the command line): allowed: tcp, rdma"),
        (["ls"], "no Mooncake master answers at '127.0.0.1:1'"),
        (["sweep", "--dead"], "(from environment variable MOONCAKE_MASTER)"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line_with_the_setting_s_source(
    argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    status, out, error = output(argv, capsys)
    assert status == 2
    assert not out
    assert expected in error
    assert len(error.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["completion", "bash"], ["completion", "--help"], ["--version"]])
def test_output_that_cannot_be_written_is_status_1(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "miles_plugin", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "miles-mooncake: standard output: No space left on device\n")


def test_a_reader_that_has_gone_is_status_1_and_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "miles_plugin", "completion", "bash"],
            stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = output(["--version"], capsys)
    assert status == 0
    assert text.startswith("miles-mooncake ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "--num-ro"], {"--num-rollout"}),
        (["train", "--object-store-backend", ""], {"ray", "mooncake"}),
        (["train", "--reward-control", "s"], {"shuffled"}),
        (["completion", "ba"], {"bash"}),
        (["ho"], {"holder"}),
        (["sweep", "--de"], {"--dead", "--device-name"}),
        (["holder", "--protocol", ""], {"tcp", "rdma"}),
    ],
)
def test_bash_completes(
    words: list[str], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, script, _ = output(["completion", "bash"], capsys)
    (tmp_path / "completion.sh").write_text(script)
    line = " ".join(f"'{word}'" for word in ["miles-mooncake", *words])
    done = subprocess.run(
        ["bash", "-c", f"source completion.sh; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
         "$(complete -p miles-mooncake | sed 's/.*-F \\([^ ]*\\).*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_shell_gets_every_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, script, _ = output(["completion", shell], capsys)
    assert status == 0
    missing = [name for name in TrainConfig.model_fields if name.replace("_", "-") not in script]
    assert not missing
