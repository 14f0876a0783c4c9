"""Child processes end with what started them, and take their own children along."""

import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from mooncake_store.process import ManagedProcess

# A command that starts a child of its own, writes both pids, and ignores SIGTERM when asked to be stubborn. Its memory
# takes the kernel a while to free once it is killed.
FAMILY = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = b"x" * (400 << 20)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + ".tmp", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""

# A command that shares memory with a child and, under another name, with whoever else maps it, and has a semaphore.
SHARING = """
import mmap, multiprocessing, os, sys, time
files = [open(f"/dev/shm/{name}", "w+b") for name in sys.argv[2:]]
for file in files:
    file.truncate(4096)
maps = [mmap.mmap(file.fileno(), 4096) for file in files]
lock = multiprocessing.get_context("spawn").Lock()
open(sys.argv[1] + ".tmp", "w").write(f"sem.{lock._semlock.name[1:]}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
os.fork()
time.sleep(600)
"""

PARENT = """
import sys, time
from pathlib import Path
from mooncake_store.process import ManagedProcess
process = ManagedProcess("family", [sys.executable, "-c", sys.argv[1], sys.argv[2], "mild"], Path(sys.argv[3]))
time.sleep(600)
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(condition, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def _family(pids: Path) -> list[int]:
    assert _wait_for(pids.exists)
    return [int(pid) for pid in pids.read_text().split()]


@pytest.mark.parametrize("manner", ["mild", "stubborn"])
def test_stop_ends_the_command_and_its_children(tmp_path: Path, manner: str) -> None:
    process = ManagedProcess("family", [sys.executable, "-c", FAMILY, str(tmp_path / "pids"), manner], tmp_path / "log")
    pids = _family(tmp_path / "pids")
    assert all(map(_alive, pids))
    process.stop()
    assert not any(map(_alive, pids))
    process.stop()


@pytest.mark.parametrize("victims", ["the parent", "the parent and its children, as Ray does"])
def test_a_killed_parent_leaves_no_orphan(tmp_path: Path, victims: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, FAMILY, str(tmp_path / "pids"), str(tmp_path / "log")])
    pids = _family(tmp_path / "pids")
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) == 1
    os.kill(parent.pid, signal.SIGKILL)
    if victims != "the parent":
        os.kill(int(children[0]), signal.SIGKILL)
    parent.wait()
    assert _wait_for(lambda: not any(map(_alive, pids)))


def test_exit_status_and_log(tmp_path: Path) -> None:
    process = ManagedProcess(
        "brief", [sys.executable, "-c", "print('last words'); raise SystemExit(7)"], tmp_path / "log"
    )
    assert _wait_for(lambda: process.exit_status() is not None)
    assert process.exit_status() == 7
    assert process.log_tail() == "last words"
    process.stop()


def test_a_command_that_ends_takes_its_children_along(tmp_path: Path) -> None:
    script = FAMILY.replace("time.sleep(600)\n", "\n") + "raise SystemExit(3)"
    process = ManagedProcess("brief", [sys.executable, "-c", script, str(tmp_path / "pids"), "mild"], tmp_path / "log")
    pids = _family(tmp_path / "pids")
    assert _wait_for(lambda: not any(map(_alive, pids)))
    process.stop()


@pytest.mark.parametrize("grace", [0.0, 2.0])
def test_no_shared_memory_outlives_a_command_but_what_others_have_mapped(tmp_path: Path, grace: float) -> None:
    """Who is killed has no time to remove it, and nobody does later."""
    own, shared = (f"test-{os.getpid()}-{uuid.uuid4().hex}" for _ in range(2))
    told = tmp_path / "semaphore"
    command = [sys.executable, "-c", SHARING, str(told), own, shared]
    process = ManagedProcess("sharing", command, tmp_path / "log", grace=grace)
    memory = Path("/dev/shm")
    try:
        assert _wait_for(told.exists), process.log_tail()
        semaphore = told.read_text()
        assert all((memory / name).exists() for name in (own, shared, semaphore))
        with (memory / shared).open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            process.stop()
        left = [name for name in (own, shared, semaphore) if (memory / name).exists()]
        assert left == [shared]
    finally:
        process.stop()
        for name in (own, shared):
            (memory / name).unlink(missing_ok=True)


def test_what_is_told_to_end_ends_while_the_caller_goes_on(tmp_path: Path) -> None:
    process = ManagedProcess("family", [sys.executable, "-c", FAMILY, str(tmp_path / "pids"), "mild"], tmp_path / "log")
    pids = _family(tmp_path / "pids")
    process.end()
    process.end()
    assert _wait_for(lambda: not any(map(_alive, pids)))
    process.stop()
