"""Which engine generates what, and what becomes of the prompts of one that fails."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.fleet import Fleet, Member
from miles_plugin.engines.sglang import EngineError
from miles_plugin.rollout.generate import Sampler
from miles_plugin.rollout.sample import Sample
from miles_plugin.rollout.task import Task
from miles_plugin.training.tiny_policy import build_model, save_checkpoint
from tests.unit.plugin.test_rollout_custom import TOKENIZER, FakeEngine

NO_ANSWER = EngineError("no answer: connection reset")
OVERLOADED = EngineError("HTTP 503: the scheduler has died", 503)
REFUSED = EngineError("HTTP 400: the prompt is too long", 400)


def told_apart(ids: list[int], params: dict[str, Any]) -> tuple[str, str]:
    return str(hash(tuple(ids)) % 10**6), "stop"


class Engine(FakeEngine):
    """Notes what it is asked for, and raises `error` if there is one; SGLang, too, refuses to be asked for nothing."""

    def __init__(self, port: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}", told_apart, str(port))
        self.asked: list[list[list[int]]] = []
        self.error: EngineError | None = None

    def generate(
        self, input_ids: Sequence[Sequence[int]], sampling_params: dict[str, Any], return_routed_experts: bool = False
    ) -> list[dict[str, Any]]:
        self.asked.append([list(ids) for ids in input_ids])
        if not input_ids:
            raise EngineError("HTTP 400: Either text, input_ids or input_embeds should be provided.", 400)
        if self.error is not None:
            raise self.error
        return super().generate(input_ids, sampling_params, return_routed_experts)


class Rollouts:
    def __init__(self, checkpoint: Path, engines: int) -> None:
        self.engines = [Engine(port) for port in range(1, engines + 1)]
        members = [SimpleNamespace(engine=engine, ranks=1, ended=lambda _: None) for engine in self.engines]
        self.fleet = Fleet([cast(Member, member) for member in members])
        self._task = Task("chain_sum", {}, held_out_size=4, seed=0)
        self.sampler = Sampler(load_config([]), self._task, checkpoint, self.fleet)

    def sample(self, items: int, group_size: int = 2) -> list[Sample]:
        return self.sampler.sample(list(itertools.islice(self._task.rollout(), items)), 0, group_size, 1.0)

    def outside(self) -> dict[str, str]:
        return {left.url: f"{left.phase}: {left.reason}" for left in self.fleet.outside()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(build_model(32, 1, seed=0), TOKENIZER, directory)
    return directory


@pytest.fixture
def make(checkpoint: Path) -> Iterator[Callable[[int], Rollouts]]:
    made: list[Rollouts] = []

    def make(engines: int) -> Rollouts:
        made.append(Rollouts(checkpoint, engines))
        return made[-1]

    yield make
    for each in made:
        each.sampler.close()


def assert_answered(samples: Sequence[Sample], by: set[str]) -> None:
    """Each with the answer to its own prompt."""
    for sample in samples:
        prompt = TOKENIZER.encode(sample.prompt, add_special_tokens=False)
        assert sample.response == told_apart(prompt, {})[0]
        assert sample.tokens[: len(prompt)] == prompt
        (version,) = sample.weight_versions
        assert version in by


@pytest.mark.parametrize("error", [NO_ANSWER, OVERLOADED])
def test_what_an_engine_that_fails_was_asked_for_the_others_are(
    error: EngineError, make: Callable[[int], Rollouts]
) -> None:
    rollouts = make(3)
    first, second, third = rollouts.engines
    second.error = error
    samples = rollouts.sample(6)
    assert_answered(samples, {"1", "3"})
    assert [len(asked) for asked in first.asked] == [len(asked) for asked in third.asked] == [4, 2]
    assert first.asked[1] + third.asked[1] == second.asked[0]
    assert rollouts.outside() == {second.url: f"generate: {error}"}
    second.error = None
    assert_answered(rollouts.sample(6), {"1", "3"})
    assert len(second.asked) == 1, "nothing is asked of it before it has confirmed an update"


def test_engines_may_fail_one_after_another(make: Callable[[int], Rollouts]) -> None:
    rollouts = make(3)
    first, second, third = rollouts.engines
    second.error = NO_ANSWER
    generate = third.generate

    def fail_later(*arguments: Any) -> Any:
        if third.asked:
            third.error = OVERLOADED
        return generate(*arguments)

    third.generate = fail_later  # type: ignore[method-assign]
    samples = rollouts.sample(6)
    assert_answered(samples, {"1", "3"})
    assert rollouts.outside().keys() == {second.url, third.url}
    assert sum(len(asked) for asked in first.asked) == 8


def test_without_an_engine_left_all_are_named(make: Callable[[int], Rollouts]) -> None:
    rollouts = make(2)
    rollouts.engines[0].error, rollouts.engines[1].error = NO_ANSWER, OVERLOADED
    with pytest.raises(EngineError, match="no engine is in rotation") as caught:
        rollouts.sample(2)
    for engine, error in zip(rollouts.engines, (NO_ANSWER, OVERLOADED), strict=True):
        assert f"{engine.url} failed in generate: {error}" in str(caught.value)


def test_a_request_that_is_refused_is_no_engine_s_failure(make: Callable[[int], Rollouts]) -> None:
    rollouts = make(2)
    rollouts.engines[1].error = REFUSED
    with pytest.raises(EngineError, match="the prompt is too long"):
        rollouts.sample(2)
    assert not rollouts.outside()


@pytest.mark.parametrize("group_size", [1, 2])
def test_no_engine_is_asked_for_nothing(group_size: int, make: Callable[[int], Rollouts]) -> None:
    rollouts = make(3)
    assert_answered(rollouts.sample(1, group_size), {"1", "2"})
    assert not rollouts.engines[2].asked
    assert not rollouts.outside()


@pytest.mark.parametrize("says", ["default", "6"])
def test_what_an_engine_that_was_started_anew_answered_is_asked_of_others(
    says: str, make: Callable[[int], Rollouts]
) -> None:
    """After the roll call, so that nobody has noticed."""
    rollouts = make(3)
    for engine in rollouts.engines:
        engine.version = "7"
    rollouts.fleet.updated(7, [engine.url for engine in rollouts.engines], ())
    second = rollouts.engines[1]
    second.version = says
    assert_answered(rollouts.sample(6), {"7"})
    assert rollouts.outside() == {
        second.url: f"generate: {second.url} answered by version {says!r}, not by 7: it was started anew"
    }


def test_before_the_first_update_any_version_will_do(make: Callable[[int], Rollouts]) -> None:
    rollouts = make(2)
    rollouts.engines[0].version = "default"
    assert_answered(rollouts.sample(4), {"default", "2"})
    assert rollouts.outside() == {}
