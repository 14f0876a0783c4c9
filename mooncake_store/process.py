"""Child processes that end with their parent: started in the background, logged to a file, stopped by pid only."""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("process_guard.py")
GRACE_SECONDS = 3.0
_KILLED_SECONDS = 5.0  # for what was killed to be gone


class ManagedProcess:
    """A running command whose whole process group ends when `stop()` is called or this process dies.

    Args:
        name: what messages call it, e.g. "mooncake_master".
        command: program and arguments.
        log: file that gets the command's output, appended; parent directories are made.
        env: environment of the command, instead of this process's own.
        grace: seconds that it gets to end by itself; 0: it has nothing to put in order, and is killed at once.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.name, self.log, self._grace = name, log, grace
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._relay = subprocess.Popen(
                [sys.executable, "-S", "-E", str(_GUARD), str(grace), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=None if env is None else dict(env),
                start_new_session=True,
            )

    def exit_status(self) -> int | None:
        """The command's exit status, 128 + n when signal n ended it; None while it runs."""
        status = self._relay.poll()
        return status if status is None or status >= 0 else 128 - status

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        return tail(self.log, lines)

    def end(self) -> None:
        """Begin to end the command and its descendants, without waiting for that; idempotent."""
        if self._relay.stdin is not None and not self._relay.stdin.closed:
            self._relay.stdin.close()

    def stop(self) -> None:
        """End the command and its descendants; idempotent. Returns within its grace and about 5 seconds."""
        self.end()
        try:
            self._relay.wait(self._grace + _KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            self._relay.kill()
            self._relay.wait()


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log file, each cut to 400 characters; a remark in brackets when there is nothing to show."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65536))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    return "\n".join(line[:400] for line in text.splitlines()[-lines:]) or "(nothing)"


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different TCP ports that are free on `host` at this moment."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(held.getsockname()[1]) for held in sockets]
    for held in sockets:
        held.close()
    return ports
