"""Child process of `math_reward`: reads [answer, label] as JSON, a line each; writes 1 if they are equal, else 0.

Started by its path, so that it imports nothing of the package.
"""

import json
import logging
import os
import resource
import signal
import sys
import time
from types import FrameType

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# Seconds of CPU per comparison: at the first bound it is interrupted, at the second, if it is deaf to that, the kernel
# ends the process.
_SECONDS, _MORE_SECONDS = 1.0, 2
_MEMORY_BYTES = 2 * 1024**3
_TARGETS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


class OutOfTime(BaseException):
    """Not an Exception: math-verify catches those."""


def equal(answer: str, label: str) -> bool:
    """Whether two texts of a number, an expression, a set, an interval, ... mean the same."""
    expected = label if "$" in label else f"${label}$"
    parsed = parse(expected, _TARGETS, parsing_timeout=None), parse(answer, _TARGETS, parsing_timeout=None)
    return bool(verify(*parsed, timeout_seconds=None))


def bounded(answer: str, label: str) -> bool:
    """`equal`, or False when it would take too much time or memory."""
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(_SECONDS) + _MORE_SECONDS, resource.RLIM_INFINITY))
    try:
        signal.setitimer(signal.ITIMER_PROF, _SECONDS, _SECONDS / 4)
        try:
            return equal(answer, label)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (OutOfTime, Exception):  # whatever a hostile answer brings about, it is not the label
        return False


def main() -> None:
    """Serve until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(int(bounded(*json.loads(line))), file=answers, flush=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise OutOfTime


if __name__ == "__main__":
    main()
