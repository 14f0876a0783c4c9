"""Whoever keeps others from a process group is left out by name; the others form one."""

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.weight_transfer.joiners import Joiners, NotFormed

PATIENCE = 100.0  # seconds; every trial here takes none


def engines(number: int) -> list[EngineAddress]:
    return [EngineAddress(f"http://10.0.0.{index}:30000") for index in range(number)]


class Trials:
    """Which groups were tried; one forms where `forms` says so. Who is in `refusing` says so, if a group does not."""

    def __init__(self, forms: Callable[[set[EngineAddress]], bool], refusing: Sequence[EngineAddress] = ()) -> None:
        self._forms, self._refusing = forms, refusing
        self.tried: list[tuple[EngineAddress, ...]] = []

    @property
    def failed(self) -> int:
        """How many did not form: each takes as long as an engine may take to join."""
        return sum(not self._forms(set(group)) for group in self.tried)

    def form(self, group: Sequence[EngineAddress]) -> None:
        self.tried.append(tuple(group))
        if not self._forms(set(group)):
            raise NotFormed("it did not form", next((each.url for each in self._refusing if each in group), None))


def without(*bad: EngineAddress) -> Callable[[set[EngineAddress]], bool]:
    """Groups form unless one of these is in them."""
    return lambda group: not group & set(bad)


def alone(*bad: EngineAddress) -> Callable[[set[EngineAddress]], bool]:
    """Groups form unless one of these is in them with others."""
    return lambda group: len(group) == 1 or not group & set(bad)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_where_all_join_one_group_is_tried(number: int) -> None:
    trials = Trials(lambda _: True)
    joiners = Joiners(trials.form, PATIENCE)
    assert joiners.most(engines(number), ()) == engines(number)
    assert (joiners.failed, len(trials.tried)) == ({}, 1)


@pytest.mark.parametrize("kind", [without, alone])
@pytest.mark.parametrize(("number", "at"), [(number, at) for number in (3, 4, 5, 8) for at in range(number)])
def test_the_one_that_is_to_blame_is_left_out_wherever_it_stands(
    number: int, at: int, kind: Callable[..., Callable[[set[EngineAddress]], bool]]
) -> None:
    """It answers like those whom it keeps waiting."""
    all_engines = engines(number)
    bad = all_engines[at]
    trials = Trials(kind(bad))
    joiners = Joiners(trials.form, PATIENCE)
    assert set(joiners.most(all_engines, ())) == {*all_engines} - {bad}
    assert joiners.failed.keys() == {bad.url}
    assert len(set(map(frozenset, trials.tried))) == len(trials.tried), "nothing is tried twice"
    assert ("joins a process group alone; with" in joiners.failed[bad.url]) == (kind is alone)


def test_several_that_are_to_blame_are_left_out() -> None:
    all_engines = engines(8)
    for bad in combinations(all_engines, 2):
        for kind in (without, alone):
            joiners = Joiners(Trials(kind(*bad)).form, PATIENCE)
            assert set(joiners.most(all_engines, ())) == {*all_engines} - {*bad}
            assert joiners.failed.keys() == {each.url for each in bad}


@pytest.mark.parametrize("at", range(5))
def test_where_one_refuses_those_who_waited_for_it_are_tried_next(at: int) -> None:
    all_engines = engines(5)
    bad = all_engines[at]
    trials = Trials(alone(bad), refusing=[bad])
    assert set(Joiners(trials.form, PATIENCE).most(all_engines, ())) == {*all_engines} - {bad}
    assert trials.failed == 1


@pytest.mark.parametrize("at", [0, 1])
def test_of_two_the_one_that_refuses_is_to_blame_and_not_the_one_that_waits_for_it(at: int) -> None:
    pair = engines(2)
    bad, good = pair[at], pair[1 - at]
    joiners = Joiners(Trials(alone(bad), refusing=[bad]).form, PATIENCE)
    assert joiners.most(pair, ()) == [good]
    assert joiners.failed.keys() == {bad.url}


def test_two_that_do_not_reach_each_other_cost_one_of_them() -> None:
    all_engines = engines(4)
    apart = {all_engines[1], all_engines[2]}
    joiners = Joiners(Trials(lambda group: not apart <= group).form, PATIENCE)
    joined = joiners.most(all_engines, ())
    assert len(joined) == 3
    (left,) = joiners.failed
    assert {each.url for each in apart} - {each.url for each in joined} == {left}


@pytest.mark.parametrize("kind", [without, alone])
def test_those_that_were_together_before_pay_once_at_most_for_one_that_comes(
    kind: Callable[..., Callable[[set[EngineAddress]], bool]],
) -> None:
    """It is offered each update, and each group that does not form takes a minute."""
    *before, bad = engines(6)
    trials = Trials(kind(bad))
    joiners = Joiners(trials.form, PATIENCE)
    assert joiners.most([bad, *before], before) == before
    assert joiners.failed.keys() == {bad.url}
    assert trials.tried[0] == (bad,), "alone first: the others serve meanwhile"
    assert trials.failed == 1


def test_where_nobody_joins_each_says_why() -> None:
    joiners = Joiners(Trials(lambda _: False).form, PATIENCE)
    assert joiners.most(engines(3), engines(3)[:1]) == []
    assert joiners.failed == {each.url: "it did not form" for each in engines(3)}


@pytest.mark.parametrize("at", range(16))
def test_few_groups_fail_before_the_one_of_many_that_hangs_is_found(at: int) -> None:
    """Each keeps all of them waiting for as long as an engine may take to join."""
    all_engines = engines(16)
    trials = Trials(alone(all_engines[at]))
    Joiners(trials.form, PATIENCE).most(all_engines, ())
    assert trials.failed <= 5


def test_the_search_ends_when_its_time_is_up_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other trainer ranks wait for it, and not for ever."""
    *before, bad, untried = engines(4)
    now = 0.0
    trials = Trials(alone(bad))

    def form(group: Sequence[EngineAddress]) -> None:
        nonlocal now
        now += 60.0
        trials.form(group)

    monkeypatch.setattr("time.monotonic", lambda: now)
    joiners = Joiners(form, 200.0)
    assert joiners.most([*before, bad, untried], before) == before
    assert len(trials.tried) == 4
    assert "not tried any more, to find out who joins whom has taken 200 s" in joiners.failed[untried.url]
