"""Two threads are begun on two processors where there are two."""

import os
from typing import Any

import pytest

from mooncake_store import processors
from mooncake_store.processors import beside, processor

ALLOWED = os.sched_getaffinity(0)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What the thread was restricted to, in order, of four processors; it is on number 2."""
    found: list[set[int]] = []
    monkeypatch.setattr(processors, "processor", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, allowed: found.append(allowed))
    return found


def test_who_is_on_the_same_one_leaves_it_and_is_free_again(moves: list[set[int]]) -> None:
    assert beside(2, lambda: len(moves)) == 2, "before the call"
    assert moves == [{0, 1, 3}, {0, 1, 2, 3}]


@pytest.mark.parametrize("other", [0, 3, -1])
def test_who_is_on_another_one_stays(other: int, moves: list[set[int]]) -> None:
    assert beside(other, lambda: "called") == "called"
    assert not moves


def test_who_may_run_on_one_only_stays(moves: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2})
    assert beside(2, lambda: "called") == "called"
    assert not moves


def test_who_must_not_move_is_called_all_the_same(moves: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert beside(2, lambda: "called") == "called"


def test_a_library_that_does_not_tell_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "_libc", object())
    assert processor() == -1
    assert beside(processor(), lambda: "called") == "called"


def test_here() -> None:
    assert processor() in ALLOWED
    assert beside(processor(), lambda: processor()) in ALLOWED
    assert os.sched_getaffinity(0) == ALLOWED
