"""Items from reasoning-gym: fixed, held out, and scored by the library's own verifier."""

from itertools import islice

import pytest

from miles_plugin.rollout.task import _WELL_KNOWN, Task
from mooncake_store.errors import ConfigError

pytest.importorskip("reasoning_gym", reason="the extra `train` is not installed")
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_held_out_items_are_fixed_distinct_and_never_trained_on() -> None:
    task, again = (Task("chain_sum", SMALL, held_out_size=60, seed=3) for _ in range(2))
    questions = [item.prompt for item in task.held_out]
    assert questions == [item.prompt for item in again.held_out]
    assert len(set(questions)) == 60
    for stream in (task.warm_start(), task.rollout(), iter(task.validation(20))):
        assert not {item.prompt for item in islice(stream, 500)} & set(questions)


def test_a_stream_continues_where_it_is_told_to() -> None:
    task = Task("chain_sum", {}, held_out_size=8, seed=0)
    first = list(islice(task.rollout(), 20))
    resumed = list(islice(task.rollout(first[9].index + 1), 10))
    assert [item.prompt for item in resumed] == [item.prompt for item in first[10:]]


def test_streams_differ() -> None:
    task = Task("chain_sum", {"min_digits": 4, "max_digits": 4}, held_out_size=8, seed=0)
    streams = (task.warm_start(), task.rollout(), iter(task.validation(50)))
    seen = [{item.prompt for item in islice(stream, 50)} for stream in streams]
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]


def test_the_verifier_decides() -> None:
    task = Task("chain_sum", SMALL, held_out_size=8, seed=0)
    item = task.held_out[0]
    assert task.score(item.label, item) == 1.0
    assert task.score(f" {item.label}\n", item) == 1.0
    assert task.score("no idea", item) < 1.0
    assert task.score("", item) < 1.0


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("chain_summ", {}, "nearest: chain_sum"),
        ("nonsense", {}, "some are basic_arithmetic, .*; all: python -c 'from reasoning_gym"),
        ("chain_sum", {"min_term": 3}, "min_term"),
        ("chain_sum", {"min_digits": -1}, "min_digits"),
        ("chain_sum", SMALL, "distinct questions"),
    ],
)
def test_what_cannot_be_made_is_a_config_error(name: str, settings: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Task(name, settings, held_out_size=1000, seed=0)


def test_the_tasks_that_are_suggested_exist() -> None:
    from reasoning_gym.factory import DATASETS

    assert set(_WELL_KNOWN) <= set(DATASETS)
