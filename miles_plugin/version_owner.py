"""Which process owns a run's policy versions, and the heartbeat by which other hosts see that it lives.

On the same host the process table tells. Across hosts an owner is alive while its heartbeat changes before the eyes of
whoever asks: no clock is compared with another's. A wrong judgement costs the owner its run, never a number: whoever
was taken over is fenced by the log itself.
"""

import threading
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec

from mooncake_store.claim import Claimant

BEAT_SECONDS = 3.0
# Silence that makes an owner on another host dead: ten beats, since a busy process or file server may be late.
SILENT_SECONDS = 30.0
# Given to an owner on this host whose job was just killed, to end as well.
ENDING_SECONDS = 5.0


class Owner(msgspec.Struct, frozen=True):
    """The one process that may append to a version log.

    run_id: of its job. process: host, pid, and what tells it from every other process there ever was; its token is new
    for each owner, so that a process which opens a log again is another owner.
    """

    run_id: str
    process: Claimant

    @classmethod
    def here(cls, run_id: str) -> "Owner":
        """This process, for the job `run_id`."""
        return cls(run_id, Claimant.here())

    @property
    def token(self) -> str:
        """32 hex digits, of this owner alone."""
        return self.process.token

    def __str__(self) -> str:
        return f"run {self.run_id}, {self.process}"


class Heartbeat:
    """A file whose content changes every BEAT_SECONDS, until `stop`, or until somebody removes it.

    Rewritten in place: on a network file system a reader that opens it sees what was written before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with suppress(OSError):  # of a full disk: then this owner is silent, which is not unsafe
            path.write_text("0\n")
        self._stopped = threading.Event()
        weakref.finalize(self, self._stopped.set).atexit = False  # the thread refers to the event alone
        arguments = (path, self._stopped)
        threading.Thread(target=_beat, args=arguments, name="version-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """End it and remove the file; idempotent."""
        self._stopped.set()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_beat(path: Path) -> str | None:
    """What the heartbeat shows just now; None when there is none."""
    try:
        return path.read_text()
    except OSError:
        return None


def _beat(path: Path, stopped: threading.Event) -> None:
    for beat in count(1):
        if stopped.wait(BEAT_SECONDS):
            return
        try:
            with path.open("r+") as file:
                file.write(f"{beat}\n")
        except FileNotFoundError:  # another owner took over
            return
        except OSError:  # the next one may be written
            continue
