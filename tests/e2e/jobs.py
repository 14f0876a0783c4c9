"""Running the whole job from a test: its command, a mark on all its processes, and waiting for what it says."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "miles_plugin", "train"]
# Too small to learn, with a checkpoint of its own: half a minute to start, a second per rollout.
SMALL = [
    "--config", "configs/local.yaml", "--rollout-batch-size", "8", "--num-steps-per-rollout", "2",
    "--n-samples-per-prompt", "4", "--held-out-size", "16", "--reward-control", "none",
]  # fmt: skip
_MARK = "JOB_OF_TEST"
# Ray's own agents notice within about a minute that the driver, and so their raylet, was killed.
_LINGERING_SECONDS = 90


@dataclass(frozen=True)
class Marked:
    """An environment that every process of a job inherits, so that those left over can be found."""

    mark: str

    @property
    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}
        return clean | {_MARK: self.mark}

    def processes(self) -> dict[int, str]:
        """Command lines by pid."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
            except OSError:
                continue
        return found

    def shared_memory(self) -> list[Path]:
        """Files in /dev/shm that they have mapped now."""
        inodes = set()
        for pid in self.processes():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                inodes |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
        return [path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes]


@contextmanager
def no_process_left() -> Iterator[Marked]:
    """Compare the process list before and after: what carries the mark at the end fails the test, and is ended."""
    marked = Marked(uuid.uuid4().hex)
    assert not marked.processes()
    yield marked
    deadline = time.monotonic() + _LINGERING_SECONDS
    while (left := marked.processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes outlived their job: {left}"


def run(arguments: list[str], marked: Marked, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a job to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], env=marked.environment, capture_output=True, text=True, timeout=280, cwd=cwd
    )


@contextmanager
def running(arguments: list[str], marked: Marked, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job in the background whose output goes to a file; killed at exit if it is still there."""
    with output.open("w") as file:
        job = subprocess.Popen([*COMMAND, *arguments], env=marked.environment, stdout=file, stderr=file)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.kill()
        job.wait()


def await_output(job: subprocess.Popen[bytes], output: Path, words: str, seconds: float = 240) -> None:
    """Wait until the job has said `words`; fails when it ends before, or takes too long."""
    deadline = time.monotonic() + seconds
    while words not in output.read_text():
        assert job.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


def read_report(directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return report


def steps_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for arm in report["arms"].values() for step in arm["steps"]]
