"""rm_type=math with its real child processes: right answers, wrong ones, and those that must not hang a job."""

import asyncio
from argparse import Namespace
from collections.abc import Iterator

import pytest

pytest.importorskip("math_verify", reason="the extra `train` is not installed")

from miles_plugin.rollout.math_reward import MathReward
from miles_plugin.rollout.prompts import Item
from miles_plugin.rollout.sample import Sample

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward()
    yield made
    made.close()
    made.close()


@pytest.mark.parametrize(
    ("response", "label"),
    [
        (r"so it is \boxed{42}.", 42),
        (r"so it is \boxed{42}.", 42.0),
        (r"\boxed{1,000}", "1000"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{1/2}", r"\frac{1}{2}"),
        (r"\boxed{0.5}", r"\boxed{\dfrac12}"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{(1,2]}", "(1, 2]"),
        (r"\boxed{x \in [1,2)}", "[1,2)"),
        (r"\boxed{\{1,2\}}", r"\{2,1\}"),
        (r"\boxed{x+1}", "1+x"),
        (r"\boxed{\$12}", "12"),
        (r"\boxed{12\text{ cm}}", 12),
        (r"\boxed{\text{Yes}}", "yes"),
        (r"first \boxed{3}, no, \boxed{4}", "4"),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"$\begin{pmatrix}1\\2\end{pmatrix}$"),
        ("48 + 24 = 72 clips.", "72"),
        ("The answer is **-7**.", "-7"),
        ("it is $\\frac34$", "0.75"),
    ],
)
def test_right_answers(response: str, label: str | float, reward: MathReward) -> None:
    assert reward.score(response, label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("", "1"),
        ("no idea", "1"),
        (r"\boxed{}", "0"),
        (r"\boxed{3", "3"),
        (r"\boxed{5}", "-5"),
        (r"\boxed{[1,2]}", "(1,2)"),
        (r"\boxed{1} or \boxed{2}", "1"),
        (r"\boxed{1, 2, 3}", "2"),
        (r"\boxed{3} although 4 was asked", "4"),
        (r"\boxed{0.33}", r"\frac13"),
        (r"\boxed{lEveyn}", "Evelyn"),
        ("I said yes", "yes"),
        (r"\boxed{\frac{1}{0}}", "0"),
    ],
)
def test_wrong_answers(response: str, label: str | float, reward: MathReward) -> None:
    assert reward.score(response, label) == 0.0


HOSTILE = {
    "a tower": "9**9**9",
    "a boxed tower": r"\boxed{9^{9^{9^{9}}}}",
    "a factorial": r"\boxed{1000000000!}",
    "an endless sum": r"\boxed{\sum_{k=1}^{10^{12}} k^{-k}}",
    "a hard integral": r"\boxed{\int_0^1 \sin(\cos(\tan(x^x))) dx}",
    "deep nesting": r"\boxed{" + r"\frac{1}{" * 120 + "2" + "}" * 120 + "}",
    "parentheses": "(" * 100_000,
    "a long sum": "1 + " * 100_000,
    "digits": "1" * 1_000_000,
    "open boxes": r"\boxed{" * 20_000,
    "dollars": "$" * 20_000,
    "no Unicode": "\x00\ud800 7\ud800",
}


def test_a_hostile_answer_is_wrong_and_the_next_one_is_not(reward: MathReward) -> None:
    """Each comparison is bounded in CPU time; the suite's timeout is what a hang would run into."""

    async def score_all() -> list[float]:
        samples = [Sample(response=response) for response in (*HOSTILE.values(), r"\boxed{7}")]
        item = Item(0, "question", label=r"(x+2)^{5000}")
        easy = Item(0, "question", label="7")
        scores = [reward(Namespace(), sample, item) for sample in samples[:-1]]
        return await asyncio.gather(*scores, reward(Namespace(), samples[-1], easy))

    *hostile, good = asyncio.run(score_all())
    assert dict(zip(HOSTILE, hostile, strict=True)) == dict.fromkeys(HOSTILE, 0.0)
    assert good == 1.0
    assert reward.score(r"\boxed{\frac{2}{4}}", "1/2") == 1.0
