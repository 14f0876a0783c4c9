"""Engines that ask to join a job that runs, by way of its report's directory."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from miles_plugin.cli import main
from miles_plugin.engines.joining import JoinRequests, ask_to_join
from mooncake_store.errors import ConfigError
from tests.report_samples import make_report


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_report().write(tmp_path / "report.json")
    return tmp_path


def test_each_request_is_read_once_and_in_order(directory: Path) -> None:
    requests = JoinRequests(directory)
    assert requests.new() == []
    ask_to_join(directory, ["10.0.0.3:30000", "[fd00::5]:30000"])
    ask_to_join(directory, ["10.0.0.4:30000"])
    assert requests.new() == ["10.0.0.3:30000", "[fd00::5]:30000", "10.0.0.4:30000"]
    assert requests.new() == []
    ask_to_join(directory, ["10.0.0.3:30000"])
    assert requests.new() == ["10.0.0.3:30000"]


def test_a_line_under_way_is_read_when_it_is_whole(directory: Path) -> None:
    requests, path = JoinRequests(directory), directory / "engines-to-join"
    path.write_text("10.0.0.3:300")
    assert requests.new() == []
    path.write_text("10.0.0.3:30000\n\n 10.0.0.4:1 \n")
    assert requests.new() == ["10.0.0.3:30000", "10.0.0.4:1"]


def test_the_command_asks(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = JoinRequests(directory)
    assert main(["add-engine", str(directory), "10.0.0.3:30000"]) == 0
    assert capsys.readouterr().out == "asked: 10.0.0.3:30000; the job looks before its next rollout\n"
    assert requests.new() == ["10.0.0.3:30000"]


@pytest.mark.parametrize("address", ["10.0.0.3", "http://10.0.0.3:30000", "10.0.0.3:0", "10.0.0.3:1\n10.0.0.4:1"])
def test_what_is_no_address_is_refused_before_anything_is_asked(
    directory: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = JoinRequests(directory)
    assert main(["add-engine", str(directory), "10.0.0.3:30000", address]) == 2
    assert "is not host:port" in capsys.readouterr().err
    assert requests.new() == []


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b"\xff"])
def test_a_directory_without_a_report_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(ConfigError, match="name the directory of a job's report"):
        ask_to_join(tmp_path, ["10.0.0.3:30000"])


def test_a_job_that_has_ended_is_named(directory: Path) -> None:
    report = make_report()
    report.status = "finished"
    report.write(directory / "report.json")
    with pytest.raises(ConfigError, match=r"its job has ended \(finished\); name the directory of one that runs"):
        ask_to_join(directory, ["10.0.0.3:30000"])


def test_a_job_that_was_killed_is_told_from_one_that_runs(directory: Path) -> None:
    """Its report says for ever that it runs."""
    code = "import sys, time, pathlib; from miles_plugin.engines.joining import JoinRequests\n"
    code += "requests = JoinRequests(pathlib.Path(sys.argv[1])); print('reads', flush=True); time.sleep(600)"
    job = subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "reads\n"
        ask_to_join(directory, ["10.0.0.3:30000"])
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
    with pytest.raises(ConfigError, match="its job was killed; name the directory of one that runs"):
        ask_to_join(directory, ["10.0.0.3:30000"])


def test_where_files_cannot_be_locked_a_job_is_asked_all_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    requests = JoinRequests(directory)
    ask_to_join(directory, ["10.0.0.3:30000"])
    assert requests.new() == ["10.0.0.3:30000"]
