"""A trainer of one rank takes steps alone; tests/integration has those of several."""

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.weight_transfer.ranks import Ranks


def test_one_rank_takes_steps_alone() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.take({"add": lambda one, two: one + two}, "add", 1, 2) == [3]
    ranks.dismiss()

    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        ranks.take({"fail": fail}, "fail")


def test_what_rank_0_raised_is_not_lost_when_the_others_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may wait for it in a collective of the step, until that times out."""
    ranks = Ranks()
    monkeypatch.setattr(ranks, "_group", object())
    monkeypatch.setattr(ranks, "_say", lambda _said: None)

    def gather(_own: object) -> None:
        assert "the cause" in caplog.text, "said before anybody waits"
        raise RuntimeError("Application timeout caused pair closure")

    monkeypatch.setattr(ranks, "_gather", gather)

    def fail() -> None:
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        ranks.take({"fail": fail}, "fail")
