"""Run a command and end it, with everything it started, when the process that asked for it is gone.

`python -S -E process_guard.py COMMAND...`, standard library only. The guard holds the read end of a pipe (its
standard input) whose write end only its parent has: end-of-file means that the parent closed it or died, however it
died. PR_SET_PDEATHSIG would be less code, but fires when the *thread* that forked ends, and only for one process.

The guard is the child of a relay, which only passes the exit status on: Ray kills the direct children of a worker that
ends, and would take the guard and leave what it guards. The guard leads a session of its own, so the command and its
descendants form one process group.
"""

import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 3.0
KILLED_SECONDS = 2.0  # for a process that was killed to be gone: its memory is freed first


def _end_group() -> None:
    """SIGTERM to the group, then SIGKILL to what is left of it, this process included."""
    os.killpg(0, signal.SIGTERM)
    _wait_for_end(os.getpgrp(), GRACE_SECONDS)
    if _is_left(os.getpgrp()):
        os.killpg(0, signal.SIGKILL)


def _wait_for_end(group: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _is_left(group) and time.monotonic() < deadline:
        time.sleep(0.05)


def _default_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_left(group: int) -> bool:
    """Whether a process of the group runs, other than this one."""
    me = os.getpid()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                state, _parent, member_of = stat.read().rpartition(b")")[2].split()[:3]
        except OSError:
            continue
        if int(member_of) == group and state != b"Z":
            return True
    return False


def main(command: list[str]) -> int:
    guard = os.fork()
    if guard:
        ended = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
        _wait_for_end(guard, KILLED_SECONDS)  # whoever waits for this process counts on all having ended
        return _shell_status(ended)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole group below; the guard must outlast it
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_sigterm)
    select.select([0, os.pidfd_open(child.pid)], [], [])
    status = child.poll()
    if status is None or _is_left(os.getpgrp()):  # a command's own children must not outlive it either
        _end_group()
    return _shell_status(child.wait())


def _shell_status(code: int) -> int:
    """128 + n for a process that signal n ended."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
