"""What an actor prints goes to a file that has a name before anything fails, and that a message can point to."""

import logging
import os
import sys
from pathlib import Path


def redirect_output(log: Path) -> None:
    """Append this process's standard output and error to `log`, and its warnings with time and origin."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
