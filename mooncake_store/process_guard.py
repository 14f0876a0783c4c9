"""Run a command and end it, with everything it started, when the process that asked for it is gone.

`python -S -E process_guard.py GRACE COMMAND...`, standard library only; GRACE: seconds from SIGTERM to SIGKILL, with 0
there is no SIGTERM. The guard holds the read end of a pipe (its standard input) whose write end only its parent has:
end-of-file means that the parent closed it or died, however it died. PR_SET_PDEATHSIG would be less code, but fires
when the *thread* that forked ends, and only for one process.

The guard is the child of a relay, which only passes the exit status on: Ray kills the direct children of a worker that
ends, and would take the guard and leave what it guards. The guard leads a session of its own, so the command and its
descendants form one process group.

Files in /dev/shm that only these processes had mapped are removed when they have ended: who is killed leaves them, and
they take memory until the machine is restarted.
"""

import os
import select
import signal
import subprocess
import sys
import time

SHARED = "/dev/shm/"
KILLED_SECONDS = 2.0  # for a process that was killed to be gone: its memory is freed first


def _end_group(grace: float) -> None:
    """SIGTERM to the group, then SIGKILL to what is left of it, but for this process."""
    group = os.getpgrp()
    shared = _mapped(_members(group))
    if grace:
        os.killpg(0, signal.SIGTERM)
        _wait_for_end(group, grace)
    deadline = time.monotonic() + KILLED_SECONDS
    while (left := _members(group)) and time.monotonic() < deadline:
        for pid in left:
            _kill(pid)
        time.sleep(0.02)
    if shared:
        _remove(shared - _mapped(_processes() - {os.getpid()} - left))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _remove(inodes: set[int]) -> None:
    with os.scandir(SHARED) as entries:
        for path in [entry.path for entry in entries if entry.inode() in inodes]:
            try:
                os.unlink(path)
            except OSError:  # another one's, or gone
                continue


def _wait_for_end(group: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _members(group) and time.monotonic() < deadline:
        time.sleep(0.02)


def _default_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _processes() -> set[int]:
    return {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}


def _members(group: int) -> set[int]:
    """The processes of a group that run, other than this one."""
    members = set()
    for pid in _processes() - {os.getpid()}:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                state, _parent, member_of = stat.read().rpartition(b")")[2].split()[:3]
        except OSError:
            continue
        if int(member_of) == group and state != b"Z":
            members.add(pid)
    return members


def _mapped(processes: set[int]) -> set[int]:
    """Inodes of the files in /dev/shm that processes have mapped, a semaphore by another name than it has."""
    inodes = set()
    for pid in processes:
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as maps:
                inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if f" {SHARED}" in line}
        except OSError:
            continue
    return inodes


def main(grace: float, command: list[str]) -> int:
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
    if status is None or _members(os.getpgrp()):  # a command's own children must not outlive it either
        _end_group(grace)
    return _shell_status(child.wait())


def _shell_status(code: int) -> int:
    """128 + n for a process that signal n ended."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(float(sys.argv[1]), sys.argv[2:]))
