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
