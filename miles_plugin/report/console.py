"""Standard output: written line by line, and kept for one writer where a program reads it."""

import os
import sys
from typing import TextIO


def write_line(stream: TextIO, text: str) -> None:
    """Write and flush a line. Characters that the stream cannot encode are escaped.

    Raises:
        BrokenPipeError: the reader has gone. From then on the stream leads nowhere, so that flushing it when Python
            ends does not fail as well and spoil the exit status.
    """
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        raise


class ClaimedStdout:
    """Standard output for one writer alone: whatever else this process and its children print goes to stderr.

    Args:
        encoding: of what is written to `stream`.
    """

    def __init__(self, encoding: str) -> None:
        sys.stdout.flush()
        self.stream = os.fdopen(os.dup(1), "w", encoding=encoding)
        os.dup2(2, 1)

    def release(self) -> None:
        """Give standard output back; idempotent."""
        if self.stream.closed:
            return
        sys.stdout.flush()
        os.dup2(self.stream.fileno(), 1)
        self.stream.close()
