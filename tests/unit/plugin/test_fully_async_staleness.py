"""Staleness: what a group is measured by, never less than 0, and what the rules say of what cannot be measured."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_plugin.fully_async.staleness import (
    ANNOUNCED,
    ASKED,
    Origin,
    Verdict,
    Watermark,
    is_final,
    judge,
    number_of,
    origin_of,
)
from tests.unit.plugin.fully_async_groups import finished

texts = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["default", "", "-1", "7.0", "v7", "٣", "1" * 30]))
versions = st.one_of(st.none(), st.integers(0, 12))


@pytest.mark.parametrize(
    ("version", "number"),
    [("0", 0), ("7", 7), ("007", 7), (7, 7), ("9" * 19, int("9" * 19))]
    + [(odd, None) for odd in ("default", "", "-1", "+1", " 7", "7.0", "1_0", "٣", "²", "9" * 20, -1, True, None, 7.0)],
)
def test_a_number_is_decimal_text_and_nothing_else(version: object, number: int | None) -> None:
    assert number_of(version) == number


def test_a_group_is_as_old_as_its_oldest_span() -> None:
    assert origin_of(finished(0, "5", "7").group) == (5, 7, False, None)
    nested = [finished(0, "6").group, *finished(1, "9", "4").group]
    assert origin_of(nested, "run") == Origin(4, 9, False, "run")  # type: ignore[arg-type]


@pytest.mark.parametrize("spans", [(), ("default",), ("default", "7"), ("7", "v8")])
def test_one_span_without_a_number_makes_a_group_unstamped(spans: tuple[str, ...]) -> None:
    assert origin_of(finished(0, *spans).group).unstamped
    mixed = finished(0, "7").group
    assert not origin_of(mixed).unstamped
    assert origin_of([mixed[0], replace(mixed[1], weight_versions=list(spans))]).unstamped  # type: ignore[type-var]
    assert origin_of([]).unstamped


@pytest.mark.parametrize(
    ("origin", "current", "most", "verdict", "staleness", "keep"),
    [
        (Origin(5, 7, False), None, 0, Verdict.FRESH, None, True),
        (Origin(None, None, True), None, 0, Verdict.FRESH, None, True),
        (Origin(0, 0, False), 0, 0, Verdict.FRESH, 0, True),
        (Origin(0, 0, False), 1, 0, Verdict.STALE, 1, False),
        (Origin(5, 7, False), 7, 2, Verdict.FRESH, 2, True),
        (Origin(5, 7, False), 8, 2, Verdict.STALE, 3, False),
        (Origin(5, 7, False), 99, None, Verdict.FRESH, 94, True),
        (Origin(7, 7, True), 7, 9, Verdict.UNSTAMPED, None, False),
        (Origin(None, None, True), 0, 9, Verdict.UNSTAMPED, None, False),
        (Origin(None, None, True), 0, None, Verdict.UNSTAMPED, None, True),
        (Origin(8, 8, False), 7, 9, Verdict.AHEAD, None, False),
        (Origin(5, 8, False), 7, 9, Verdict.AHEAD, None, False),
        (Origin(5, 8, False), 7, None, Verdict.AHEAD, None, True),
        (Origin(7, 7, False, "this"), 7, 0, Verdict.FRESH, 0, True),
        (Origin(7, 7, False, "other"), 7, 0, Verdict.OTHER_RUN, None, False),
        (Origin(7, 7, False, "other"), 7, None, Verdict.OTHER_RUN, None, False),
        (Origin(7, 7, False, "other"), None, None, Verdict.OTHER_RUN, None, False),
    ],
)
def test_the_rules(
    origin: Origin, current: int | None, most: int | None, verdict: Verdict, staleness: int | None, keep: bool
) -> None:
    assert judge(origin, current, most, "this") == (verdict, staleness, keep)


def test_a_run_that_is_not_known_is_no_other_one() -> None:
    assert judge(Origin(7, 7, False, "other"), 7, 0, None).keep
    assert judge(Origin(7, 7, False, None), 7, 0, "this").keep


@given(
    st.lists(st.tuples(st.sampled_from([ANNOUNCED, ASKED]), versions)),
    st.lists(texts, max_size=4),
    st.one_of(st.none(), st.integers(0, 4)),
)
def test_staleness_is_never_negative_whatever_comes(
    heard: list[tuple[str, int | None]], spans: list[str], most: int | None
) -> None:
    watermark, origin = Watermark(), origin_of(finished(0, *spans).group)
    seen: list[int] = []
    was_final = False
    for source, version in heard:
        watermark.note(version, source)
        seen += [] if version is None else [version]
        assert watermark.current == max(seen, default=None)
        judgement = judge(origin, watermark.current, most)
        assert judgement.staleness is None or judgement.staleness >= 0
        assert judgement.keep or watermark.current is not None
        if judgement.keep and most is not None and watermark.current is not None:
            assert watermark.current - most <= min(map(int, spans)) <= max(map(int, spans)) <= watermark.current
        assert not (was_final and judgement.keep), "what is given up for good would have been kept later"
        was_final = is_final(judgement)


def test_a_step_back_is_kept_out_and_counted_once() -> None:
    watermark = Watermark()
    for version in (10, 7, 7, 7, None, 8, 9):
        watermark.note(version, ASKED)
        assert watermark.current == 10
    assert watermark.take_steps_back() == 1
    assert watermark.take_steps_back() == 0
    watermark.note(8, ASKED)
    watermark.note(6, ASKED)
    assert watermark.take_steps_back() == 2


def test_a_rollout_that_was_asked_for_before_an_update_is_no_step_back() -> None:
    watermark = Watermark()
    watermark.note(6, ASKED)
    watermark.note(7)
    watermark.note(6, ASKED)
    assert (watermark.current, watermark.take_steps_back()) == (7, 0)


@pytest.mark.parametrize("version", [-1, True, "7", 7.0])
def test_what_is_no_version_is_refused(version: Any) -> None:
    watermark = Watermark()
    with pytest.raises(ValueError, match="is no policy version"):
        watermark.note(version)
    assert watermark.current is None


def test_threads_that_announce_lose_nothing() -> None:
    watermark = Watermark()
    threads = [
        threading.Thread(target=lambda s=source: [watermark.note(v, s) for v in (*range(999), 5)])  # type: ignore[misc]
        for source in map(str, range(8))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (watermark.current, watermark.take_steps_back()) == (998, 8)
