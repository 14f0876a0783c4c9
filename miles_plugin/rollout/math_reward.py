"""`rm_type=math`: whether the final answer of a response equals the label, as mathematics, by the library math-verify.

An answer is whatever a policy came up with, and may take forever to compute (9**9**9) or all memory. So it is compared
in child processes that the kernel bounds in CPU time and memory; an answer that reaches a bound is wrong. CPU time, not
time on the clock: a reward must not depend on how busy the machine is.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from miles_plugin.rollout.prompts import Item
from miles_plugin.rollout.sample import Sample

_WORKER = Path(__file__).with_name("math_worker.py")
_MAX_WORKERS = 8
# An answer longer than this is none; without a box, the last number is looked for in this much of the response's end.
_MAX_ANSWER_CHARS, _TAIL_CHARS = 1000, 500
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# As mathematics a word is a product of letters, and equals every anagram of itself.
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")


class MathReward:
    """1.0 for a response whose final answer (the last \\boxed{}, else the last number) equals the label, else 0.0.

    A box that is not closed holds no answer. Words are compared as text, without regard to case.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(_MAX_WORKERS, len(os.sched_getaffinity(0))), "math-reward")
        self._own = threading.local()  # each thread has a child of its own
        self._children: list[_Child] = []
        # The responses to one prompt often end in the same answer.
        self._equal = lru_cache(maxsize=1 << 16)(self._ask_child)

    async def __call__(self, args: Namespace, sample: Sample, item: Item) -> float:  # noqa: ARG002
        """The reward of a sample; `item.label` is text or a number."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.score, sample.response, item.label)

    def score(self, response: str, label: str | int | float) -> float:
        """The reward; blocks while a child compares."""
        boxed, answer = _final_answer(response)
        expected = str(label).strip()
        if "\\boxed" in expected:
            expected = _final_answer(expected)[1] or expected
        if not answer:
            return 0.0
        if _WORDS.fullmatch(word := _without_text_command(expected)):
            return float(boxed and _without_text_command(answer).lower() == word.lower())
        if boxed and answer == expected:
            return 1.0
        return float(self._equal(f"\\boxed{{{answer}}}" if boxed else answer, expected))

    def close(self) -> None:
        """End the child processes; idempotent."""
        self._threads.shutdown()
        while self._children:
            self._children.pop().close()

    def _ask_child(self, answer: str, expected: str) -> bool:
        child: _Child | None = getattr(self._own, "child", None)
        if child is None:
            child = self._own.child = _Child()
            self._children.append(child)
        verdict = child.compare(answer, expected)
        if verdict is None:
            self._children.remove(child)
            self._own.child = None
        return bool(verdict)


class _Child:
    """One process that compares; it ends when this one does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{_WORKER.name} did not start: exit status {self._process.wait()}")

    def compare(self, answer: str, expected: str) -> bool | None:
        """Whether both are equal; None when the process ended over it, after which it must not be used again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([answer, expected]) + "\n")
            self._process.stdin.flush()
        verdict = self._process.stdout.readline()
        if verdict:
            return verdict == "1\n"
        self.close()
        return None

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        self._process.wait()


def _final_answer(response: str) -> tuple[bool, str | None]:
    """(whether it is boxed, the answer); None when there is none."""
    boxes = list(_BOX.finditer(response))
    if not boxes:
        return False, response[-_TAIL_CHARS:]
    depth, start = 1, boxes[-1].end()
    for end in range(start, min(len(response), start + _MAX_ANSWER_CHARS)):
        depth += {"{": 1, "}": -1}.get(response[end], 0)
        if depth == 0:
            return True, response[start:end].strip()
    return True, None


def _without_text_command(answer: str) -> str:
    return re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", answer).strip(" $.")
