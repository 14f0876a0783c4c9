"""The trainer ranks act together: rank 0 says which step comes, every rank takes it, rank 0 hears how it went."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_log = logging.getLogger(__name__)


class RankFailed(RuntimeError):
    """A trainer rank raised in a step that all of them took; the message says which, and what."""


# What a rank does when rank 0 says so, by name; what it is given and returns travels between processes.
Steps = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class _Raised:
    text: str


class Ranks:
    """Rank 0 among the trainer ranks, or one of the others.

    Args:
        group: of all trainer ranks, over a network (gloo): its timeout bounds how long a rank that hangs can hold the
            others. None for a trainer of one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self.rank = self._group.rank() if self._group is not None else 0
        self.size = self._group.size() if self._group is not None else 1

    def take(self, steps: Steps, name: str, *arguments: Any) -> list[Any]:
        """On rank 0: every rank takes the step `name`; what each returned, in the order of ranks.

        Raises:
            RankFailed: a rank raised. What rank 0 itself raises is raised as it is.
            RuntimeError: a rank ended, or hung for longer than the group's timeout.
        """
        if self._group is None:
            return [steps[name](*arguments)]
        self._say((name, arguments))
        failure: Exception | None = None
        try:
            own = steps[name](*arguments)
        except Exception as error:
            # The others may be in a collective of the step, in which they would wait for this rank.
            _log.error("step %s of rank 0: %r", name, error)
            own, failure = _Raised(repr(error)), error
        try:
            answers = self._gather(own)
        except RuntimeError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Raised):
                raise RankFailed(f"trainer rank {rank}, step {name}: {answer.text}")
        return answers

    def follow(self, steps: Steps) -> None:
        """On the other ranks: take the steps that rank 0 says, until it dismisses them."""
        assert self._group is not None
        while (said := self._heard()) is not None:
            name, arguments = said
            try:
                answer = steps[name](*arguments)
            except Exception as error:
                answer = _Raised(repr(error))
            self._gather(answer)

    def dismiss(self) -> None:
        """On rank 0: let the others return from `follow`."""
        if self._group is not None:
            self._say(None)

    def _say(self, said: tuple[str, tuple[Any, ...]] | None) -> None:
        assert self._group is not None
        dist.broadcast_object_list([said], src=dist.get_global_rank(self._group, 0), group=self._group)

    def _heard(self) -> tuple[str, tuple[Any, ...]] | None:
        assert self._group is not None
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard, src=dist.get_global_rank(self._group, 0), group=self._group)
        said: tuple[str, tuple[Any, ...]] | None = heard[0]
        return said

    def _gather(self, answer: Any) -> list[Any]:
        assert self._group is not None
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, answer, group=self._group)
        return answers
