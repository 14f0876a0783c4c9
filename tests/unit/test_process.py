"""Child processes end with what started them, and take their own children along."""

import os
import signal
import subprocess
import sys
import time
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
