"""`miles-mooncake COMMAND ...`.

Exit status: 0 success; 1 a part failed; 2 wrong use, a wrong setting, or a store that does not answer; 130 Ctrl-C.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from miles_plugin.arguments_sources import load_config
from miles_plugin.job import JobFailed, train
from mooncake_store.errors import ConfigError, StoreUnavailable


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="miles-mooncake", description="RL post-training over Mooncake Store.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="run the main job: rollout, training and weight updates", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return {"train": _train}[arguments.command](rest)
    except (ConfigError, StoreUnavailable) as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        print("miles-mooncake: interrupted; everything this job started has been stopped", file=sys.stderr)
        return 130
    except JobFailed as error:
        return _fail(error, 1)


def _train(argv: Sequence[str]) -> int:
    train(load_config(argv), say=_say)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(error: Exception, status: int) -> int:
    print(f"miles-mooncake: {type(error).__name__}: {error}", file=sys.stderr)
    return status


def _interrupt(_signal: int, _frame: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
