"""The console script. It imports next to nothing before signals are handled: the command's imports take a while."""

import gc
import sys

from miles_plugin import interrupt


def main() -> int:
    """Run `miles-mooncake` with the process's arguments; returns its exit status."""
    interrupt.install()
    from miles_plugin.cli import main as command

    status = command()
    gc.freeze()  # or Python, while it ends, looks for seconds for cycles among all that was imported
    return status


if __name__ == "__main__":
    sys.exit(main())
