"""Ctrl-C on a process that has started others, some in sessions of their own and some that ignore signals."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

psutil = pytest.importorskip("psutil", reason="the extra `train` is not installed")

from miles_plugin import interrupt  # noqa: E402

PARENT = """
import subprocess, sys, time
from miles_plugin import interrupt
interrupt.install()
child = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
        "signal.signal(signal.SIGINT, signal.SIG_IGN); " \\
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); " \\
        "print('ready', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
with interrupt.in_order():
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("cleaning up", flush=True)
        time.sleep(600)
"""


IMPORTING = """
import os, runpy, signal, sys
module, sys.argv[1:] = sys.argv[1], ["train", "--dry-run"]
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
runpy.run_module("miles_plugin", run_name="__main__", alter_sys=True)
"""


def marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_what_lost_its_parent_is_ended_too() -> None:
    """An actor whose raylet is gone is nobody's child any more."""
    orphan = "import os, time; os.fork() and time.sleep(600); time.sleep(600)"
    with interrupt.no_descendant_left(patience=0.2) as descendants:
        parent = subprocess.Popen([sys.executable, "-c", orphan])
        while not (children := psutil.Process(parent.pid).children()):
            time.sleep(0.02)
        (left,) = children
        descendants.note()
        parent.kill()
        parent.wait()
        assert left.is_running()
        assert left.ppid() != parent.pid
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE  # where nobody reaps orphans


class Dying(SimpleNamespace):
    """A process that was killed, and takes its time."""

    def kill(self) -> None: ...

    def status(self) -> str:
        return psutil.STATUS_DISK_SLEEP

    __hash__ = object.__hash__


def test_what_lost_its_parent_and_dies_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's child any more, and not dead yet: on a busy machine that takes seconds."""
    child, grandchild = Dying(), Dying()
    children, alive = [[child, grandchild]], [{grandchild}, {grandchild}, set[Dying]()]

    def wait_procs(_left: object, timeout: float) -> tuple[set[Dying], set[Dying]]:
        assert timeout > 0
        return set(), alive.pop(0)

    me = SimpleNamespace(children=lambda **_: children.pop() if children else [])
    monkeypatch.setattr(psutil, "Process", lambda: me)
    monkeypatch.setattr(psutil, "wait_procs", wait_procs)
    interrupt.kill_descendants()
    assert not alive


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_the_second_one_ends_every_process_at_once(signals: tuple[int, int]) -> None:
    mark = uuid.uuid4().hex
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TEST_MARK": mark},
    )  # fmt: skip
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "ready\n"
        while len(marked(mark)) < 3:
            time.sleep(0.02)
        parent.send_signal(signals[0])
        assert parent.stdout.readline() == "cleaning up\n", "the first is an ordinary KeyboardInterrupt"
        assert len(marked(mark)) == 3
        parent.send_signal(signals[1])
        assert parent.wait(30) == 130
        assert marked(mark) == [], "nothing is left at the moment the command returns"
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        parent.wait()
    assert "once more ends everything at once" in parent.stderr.read()  # type: ignore[union-attr]


IN_NATIVE_CODE = """
import hashlib, subprocess, sys
from miles_plugin import interrupt
interrupt.install()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with interrupt.in_order():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # many minutes, in which no Python handler runs
"""


def test_two_count_as_two_while_the_main_thread_is_in_native_code() -> None:
    mark = uuid.uuid4().hex
    parent = subprocess.Popen(
        [sys.executable, "-c", IN_NATIVE_CODE], stdout=subprocess.PIPE, env={**os.environ, "TEST_MARK": mark}
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == b"ready\n"
        process = psutil.Process(parent.pid)
        before = process.cpu_times().user
        while process.cpu_times().user < before + 0.2:  # now it hashes
            time.sleep(0.02)
        parent.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(0.3)
        assert len(marked(mark)) == 2, "one ends nothing at once"
        parent.send_signal(signal.SIGINT)
        assert parent.wait(30) == 130
        assert marked(mark) == []
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        parent.wait()


FORKING = """
import os, signal, time
from miles_plugin import interrupt
interrupt.install()
with interrupt.in_order():
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, lambda *_: os.write(write, b"x"))
        os.write(write, b"x")
        time.sleep(600)
    os.read(ready, 1)
    try:
        print("ready", flush=True)
        os.waitpid(child, 0)
    except KeyboardInterrupt:
        os.read(ready, 1)  # the child got it too
        time.sleep(0.2)
        os.kill(child, signal.SIGKILL)
        print("in order", flush=True)
"""


def test_a_forked_child_s_signals_are_not_counted() -> None:
    """A terminal sends Ctrl-C to both."""
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == b"ready\n"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.read() == b"in order\n"
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


@pytest.mark.parametrize("module", ["argparse", "pydantic", "shtab", "miles_plugin.job", "torch._C", "reasoning_gym"])
def test_ctrl_c_while_the_command_imports_is_quiet(module: str) -> None:
    pytest.importorskip(module.partition(".")[0], reason="the extra `train` is not installed")
    done = subprocess.run([sys.executable, "-c", IMPORTING, module], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("signals_before", [0, 1])
def test_in_order_ends_with_its_block(signals_before: int) -> None:
    code = f"""
import os, signal
from miles_plugin import interrupt
interrupt.install()
try:
    with interrupt.in_order():
        for _ in range({signals_before}):
            os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
os.kill(os.getpid(), signal.SIGINT)
print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (130, "")
    assert ("once more" in done.stderr) == (signals_before == 1)
