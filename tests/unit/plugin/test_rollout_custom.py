"""Custom generate and reward functions, on an engine that is a stand-in so that its answers can be chosen."""

import asyncio
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.fleet import Fleet, Member
from miles_plugin.engines.http import AsyncHTTP
from miles_plugin.engines.sglang import EngineError
from miles_plugin.rollout.accept import accept
from miles_plugin.rollout.check import check_data
from miles_plugin.rollout.functions import CustomFunctionError, load_function, longest_call
from miles_plugin.rollout.generate import Sampler
from miles_plugin.rollout.prompts import Item
from miles_plugin.rollout.sample import Sample
from miles_plugin.rollout.task import Task
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint
from mooncake_store.errors import ConfigError

TOKENIZER = build_tokenizer()
Answer = Callable[[list[int], dict[str, Any]], tuple[str, str]]


class FakeEngine:
    """Answers with the text and finish reason that `answer` chooses, token by token with log-probability -1/token."""

    def __init__(self, url: str, answer: Answer, version: str = "3") -> None:
        self.url, self.version, self.requests = url, version, 0
        self._answer = answer

    def generate(
        self, input_ids: Sequence[Sequence[int]], sampling_params: dict[str, Any], return_routed_experts: bool = False
    ) -> list[dict[str, Any]]:
        return [self.answer(list(ids), sampling_params) for ids in input_ids]

    def answer(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        self.requests += 1
        text, reason = self._answer(ids, params)
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        return {
            "text": text,
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [[-1.0 / token, token, None] for token in tokens],
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
            },
        }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(build_model(32, 1, seed=0), TOKENIZER, directory)
    return directory


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module `user_functions`, to which a test adds functions."""
    module = ModuleType("user_functions")
    monkeypatch.setitem(sys.modules, "user_functions", module)
    return module


@pytest.fixture
def run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Sample]]]:
    """Samples of some engines and flags; `user_functions.generate` and `.reward` unless told otherwise."""
    samplers = []

    def sample(
        engines: list[FakeEngine], *flags: str, items: int = 4, group_size: int = 2, **more: Any
    ) -> list[Sample]:
        async def post(self: AsyncHTTP, url: str, body: dict[str, Any]) -> Any:
            await asyncio.sleep(0)
            (engine,) = (engine for engine in engines if url == f"{engine.url}/generate")
            return engine.answer(body["input_ids"], body["sampling_params"])

        monkeypatch.setattr(AsyncHTTP, "post", post)
        task = Task("chain_sum", {}, held_out_size=4, seed=0)
        fleet = Fleet(
            [cast(Member, SimpleNamespace(engine=engine, ranks=1, ended=lambda _: None)) for engine in engines]
        )
        sampler = Sampler(load_config(flags), task, checkpoint, fleet)
        samplers.append(sampler)
        return sampler.sample(list(itertools.islice(task.rollout(), items)), 10, group_size, 0.7, **more)

    yield sample
    for sampler in samplers:
        sampler.close()


def engines(answer: Answer) -> list[FakeEngine]:
    return [FakeEngine(f"http://127.0.0.1:{port}", answer, version=str(port)) for port in (1, 2)]


def right(ids: list[int], params: dict[str, Any]) -> tuple[str, str]:
    return "42", "stop"


GENERATE = ("--custom-generate-function-path", "user_functions.generate")
REWARD = ("--custom-rm-path", "user_functions.reward")


async def one_turn(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """What a miles user writes: text, own requests, no versions noted."""
    from miles_plugin.rollout.custom import GenerateState, post

    state = GenerateState(args)
    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": prompt, "sampling_params": sampling_params, "return_logprob": True})
    written = output["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt + [item[1] for item in written]
    sample.response, sample.response_length = output["text"], len(written)
    sample.rollout_log_probs = [item[0] for item in written]
    sample.status = sample.Status.COMPLETED
    return sample


def test_without_custom_functions_the_task_verifies_one_request_per_engine(run: Callable[..., list[Sample]]) -> None:
    asked = []

    def answer(ids: list[int], params: dict[str, Any]) -> tuple[str, str]:
        asked.append(params)
        return "42", "length"

    samples = run(engines(answer))
    assert [(sample.index, sample.group_index) for sample in samples] == [(20 + i, 10 + i // 2) for i in range(8)]
    assert {sample.weight_versions[0] for sample in samples} == {"1", "2"}
    assert all(sample.status is Sample.Status.TRUNCATED and sample.reward is not None for sample in samples)
    assert all(TOKENIZER.decode(sample.tokens) == sample.prompt + "42" for sample in samples)
    assert {params["temperature"] for params in asked} == {0.7}


def test_a_function_written_for_miles_gets_its_args_and_its_versions_noted(
    run: Callable[..., list[Sample]], user: ModuleType
) -> None:
    seen = []

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        seen.append((args.sglang_router_port, sample.group_index, args.n_samples_per_prompt, args.partial_rollout))
        sampling_params["max_new_tokens"] = 1  # each call has its own
        assert args.rollout_temperature == 1.0
        assert not hasattr(args, "mark")
        args.mark = True
        assert (sample.status, sample.tokens, sample.loss_mask) == (sample.Status.PENDING, [], None)
        sample.index, sample.prompt = 7, "rewritten"  # its place and its prompt are not the function's to change
        return await one_turn(args, sample, sampling_params)

    user.generate = generate  # type: ignore[attr-defined]
    samples = run(engines(right), *GENERATE, "--n-samples-per-prompt", "2")
    assert {(port, group % 2) for port, group, _, _ in seen} == {(1, 0), (2, 1)}, "groups take the engines in turn"
    assert {(n, partial) for _, _, n, partial in seen} == {(2, False)}
    assert all(sample.weight_versions == [str(1 + sample.group_index % 2)] for sample in samples)
    assert [sample.index for sample in samples] == list(range(20, 28))
    assert "rewritten" not in {sample.prompt for sample in samples}


def test_the_shipped_example_masks_the_tool_and_keeps_both_turns(run: Callable[..., list[Sample]]) -> None:
    def answer(ids: list[int], params: dict[str, Any]) -> tuple[str, str]:
        if params["max_new_tokens"] == 1:
            engine.version = "3"
            return "1", "length"
        engine.version = "4"
        return "4", "stop"

    engine = FakeEngine("http://127.0.0.1:1", answer)
    flags = ("--custom-generate-function-path", "examples.two_turn_tool.calculator.generate",
             "--custom-rm-path", "examples.two_turn_tool.calculator.reward")  # fmt: skip
    samples = run([engine], *flags, items=1)
    for sample in samples:
        question = sum(map(int, re.findall(r"\d+", sample.prompt)))
        assert sample.response == f"1{str(question)[1]}4"
        assert sample.loss_mask == [1, 0, 1]
        assert sample.tokens[-3:] == TOKENIZER.encode(sample.response, add_special_tokens=False)
        assert sample.rollout_log_probs == [-1.0 / sample.tokens[-3], 0.0, -1.0 / sample.tokens[-1]]
        assert set(sample.weight_versions) == {"3", "4"}
        assert sample.reward == float(sample.response == sample.label)
    assert engine.requests == 4


@pytest.mark.parametrize("is_async", [True, False])
def test_a_reward_function_may_be_async_or_not(
    is_async: bool, run: Callable[..., list[Sample]], user: ModuleType
) -> None:
    def reward(args: Any, sample: Sample, **kwargs: Any) -> Any:
        value = np.float32(sample.index / 4 + (args.rollout_batch_size == 32))
        return asyncio.sleep(0, value) if is_async else value

    user.reward = reward  # type: ignore[attr-defined]
    assert [sample.reward for sample in run(engines(right), *REWARD)] == [1 + i / 4 for i in range(20, 28)]


def test_a_reward_set_while_generating_is_kept(run: Callable[..., list[Sample]], user: ModuleType) -> None:
    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        sample = await one_turn(args, sample, sampling_params)
        sample.reward = 2 if evaluation else 1
        return sample

    user.generate = generate  # type: ignore[attr-defined]
    assert {sample.reward for sample in run(engines(right), *GENERATE)} == {1.0}
    assert {sample.reward for sample in run(engines(right), *GENERATE, evaluation=True)} == {2.0}


def test_an_aborted_sample_is_generated_again_and_at_last_left_out(
    run: Callable[..., list[Sample]], user: ModuleType
) -> None:
    tries: dict[int, int] = {}

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        tries[sample.index] = tries.get(sample.index, 0) + 1
        if sample.index == 20 or (sample.index == 21 and tries[21] < 3):
            sample.metadata["mark"], sample.status = True, sample.Status.ABORTED
            return sample
        assert "mark" not in sample.metadata
        return await one_turn(args, sample, sampling_params)

    user.generate = generate  # type: ignore[attr-defined]
    samples = run(engines(right), *GENERATE)
    assert tries == {20: 3, 21: 3} | dict.fromkeys(range(22, 28), 1)
    first, second, *_ = samples
    assert (first.reward, first.response_length, first.effective_loss_mask) == (None, 0, [])
    assert first.remove_sample
    assert TOKENIZER.decode(first.tokens) == first.prompt
    assert second.reward is not None


def test_a_rollout_of_nothing_but_aborts_is_an_error(run: Callable[..., list[Sample]]) -> None:
    def abort(ids: list[int], params: dict[str, Any]) -> tuple[str, str]:
        return "4", "abort"

    aborting = engines(abort)
    with pytest.raises(EngineError, match="all 8 samples were aborted 3 times"):
        run(aborting)
    assert sum(engine.requests for engine in aborting) == 24


def test_a_failing_function_is_named_with_its_line_and_ends_the_others(
    run: Callable[..., list[Sample]], user: ModuleType
) -> None:
    finished = []

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        if sample.index == 22:
            raise KeyError("no such tool")
        await asyncio.sleep(3600)
        finished.append(sample)

    async def reward(args: Any, sample: Any) -> float:
        return cast(float, {}["score"])

    user.generate, user.reward = generate, reward  # type: ignore[attr-defined]
    expected = r"""user_functions\.generate, sample 22 \(prompt '.*KeyError: 'no such tool' \(.*custom\.py:\d+: raise"""
    with pytest.raises(CustomFunctionError, match=expected):
        run(engines(right), *GENERATE)
    assert not finished
    with pytest.raises(CustomFunctionError, match=r"user_functions\.reward, sample 20 \('42'\): KeyError: 'score'"):
        run(engines(right), *REWARD)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, BaseException])
def test_whatever_a_function_raises_is_named(
    kind: type[BaseException], run: Callable[..., list[Sample]], user: ModuleType
) -> None:
    def reward(args: Any, sample: Any) -> float:
        raise kind

    user.reward = reward  # type: ignore[attr-defined]
    expected = (
        rf"user_functions\.reward, sample 20 \('42'\): (asyncio\.\S+\.)?{kind.__name__} \(.*custom\.py:\d+: raise kind"
    )
    with pytest.raises(CustomFunctionError, match=expected):
        run(engines(right), *REWARD)


def test_what_is_running_is_known_by_name(run: Callable[..., list[Sample]], user: ModuleType) -> None:
    seen = []

    async def reward(args: Any, sample: Any) -> float:
        await asyncio.sleep(0)  # so that all have begun
        seen.append(longest_call(clock=lambda: time.monotonic() + 75))
        return 1.0

    def failing(args: Any, sample: Any) -> float:
        raise KeyError

    user.reward = reward  # type: ignore[attr-defined]
    run(engines(right), *REWARD)
    where, seconds = seen[0] or ("", 0.0)
    assert "custom_rm_path=user_functions.reward, sample 20 ('42')" in where
    assert seconds >= 75
    user.reward = failing  # type: ignore[attr-defined]
    with pytest.raises(CustomFunctionError):
        run(engines(right), *REWARD)
    assert longest_call() is None


def gone(url: str, status: int | None = None) -> FakeEngine:
    """An engine that does not answer, or with an error."""

    def answer(ids: list[int], params: dict[str, Any]) -> tuple[str, str]:
        raise EngineError(f"{url}/generate: {'no answer: connection refused' if status is None else status}", status)

    return FakeEngine(url, answer)


@pytest.mark.parametrize("flags", [GENERATE, ()], ids=["custom", "batched"])
def test_others_are_asked_for_what_an_engine_that_is_gone_was_asked_for(
    flags: tuple[str, ...], run: Callable[..., list[Sample]], user: ModuleType
) -> None:
    user.generate = one_turn  # type: ignore[attr-defined]
    first, second = engines(right)
    samples = run([gone(first.url), second], *flags)
    assert [sample.response for sample in samples] == ["42"] * 8
    assert {version for sample in samples for version in sample.weight_versions} == {second.version}
    with pytest.raises(
        EngineError, match=r"^no engine is in rotation: .*:1 failed in generate: .*refused; .*:2 failed"
    ):
        run([gone(first.url), gone(second.url)], *flags)


def test_an_engine_that_refuses_what_a_function_asks_stays(run: Callable[..., list[Sample]], user: ModuleType) -> None:
    user.generate = one_turn  # type: ignore[attr-defined]
    first, second = engines(right)
    with pytest.raises(CustomFunctionError, match="generate: 400"):
        run([gone(first.url, 400), second], *GENERATE)
    another = gone("http://127.0.0.1:9")  # a server that the function asks besides
    another.url = first.url
    with pytest.raises(CustomFunctionError, match="no answer"):
        run([another, second], *GENERATE)


def returned(**changes: Any) -> SimpleNamespace:
    good = {
        "tokens": [5, 6, 7, 8], "response": "ab", "response_length": 2, "loss_mask": [1, 0],
        "rollout_log_probs": [-0.5, 0.0], "weight_versions": ["3"], "status": "completed", "reward": None,
    }  # fmt: skip
    return SimpleNamespace(**(good | changes))


def test_what_is_returned_need_not_be_of_our_class() -> None:
    asked = Sample(index=7, group_index=1, prompt="p", label="l")
    sample = accept(asked, returned(index=99, group_index=None, tokens=np.arange(4), reward=True), [], "f")
    assert (sample.index, sample.group_index, sample.prompt, sample.label) == (7, 1, "p", "l")
    assert sample.tokens == [0, 1, 2, 3]
    assert sample.status is Sample.Status.COMPLETED
    assert sample.reward == 1.0
    assert accept(asked, returned(status="pending"), [], "f").status is Sample.Status.COMPLETED
    assert accept(asked, returned(weight_versions=[]), ["4", "5"], "f").weight_versions == ["4", "5"]
    for reward, expected in ((np.True_, 1.0), (np.False_, 0.0), (np.int32(2), 2.0), (np.float16(0.5), 0.5)):
        accepted = accept(asked, returned(reward=reward), [], "f").reward
        assert (type(accepted), accepted) == (float, expected)
    experts = np.zeros((3, 2, 1), np.int64)
    assert accept(asked, returned(rollout_routed_experts=experts), [], "f").rollout_routed_experts is not None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": []}, r"tokens is \[\]"),
        ({"tokens": "ab"}, r"tokens is 'ab'; it must be a list of int"),
        ({"tokens": [1, 2.5]}, r"tokens\[1\] is 2\.5; it must be an int"),
        ({"tokens": [1, -1]}, r"tokens is \[1, -1\]"),
        ({"response_length": 4}, r"response_length is 4 with 4 tokens"),
        ({"response_length": 2.0}, r"response_length is 2\.0"),
        ({"loss_mask": [1]}, r"loss_mask has 1 entries, response_length is 2"),
        ({"loss_mask": [1, 2]}, r"loss_mask holds \[1, 2\]"),
        ({"loss_mask": [True, None]}, r"loss_mask\[0\] is True"),
        ({"rollout_log_probs": None}, r"rollout_log_probs is None; send return_logprob=True"),
        ({"rollout_log_probs": [-0.5]}, r"rollout_log_probs has 1 entries, response_length is 2"),
        ({"rollout_log_probs": [-0.5, float("nan")]}, r"rollout_log_probs is nan at response token 1"),
        ({"rollout_log_probs": [-0.5, None]}, r"rollout_log_probs\[1\] is None; it must be a number"),
        ({"weight_versions": []}, r"weight_versions is \[\]; call sample\.update_from_meta_info"),
        ({"weight_versions": [3]}, r"weight_versions is \[3\]"),
        ({"status": "done"}, r"status is 'done'; allowed are Sample\.Status\.PENDING"),
        ({"reward": float("inf")}, r"the reward is inf; it must be one finite number"),
        ({"reward": {"score": 1}}, r"the reward is \{'score': 1\}"),
        ({"reward": 1j}, r"the reward is 1j; it must be one finite number"),
        ({"reward": np.complex64(1)}, r"the reward is .*1\+0j.*; it must be one finite number"),
        ({"reward": 10**400}, r"the reward is 10*; it must be one finite number"),
        ({"rollout_log_probs": [-0.5, np.complex64(1)]}, r"rollout_log_probs\[1\] is .*; it must be a number"),
        ({"metadata": "m"}, r"metadata is 'm'; it must be a dict"),
        (
            {"rollout_routed_experts": np.zeros((4, 2, 1), np.int32)},
            r"rollout_routed_experts is int32 \(4, 2, 1\); it must be int32 \[3,",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_named(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CustomFunctionError, match=rf"^f, sample 7: {expected}"):
        accept(Sample(index=7), returned(**changes), [], "f")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, "returned None, which has no tokens, response"),
        ([Sample(), Sample()], "returned 2 samples; it must return the one"),
        ("text", "returned 'text', which has no tokens"),
    ],
)
def test_what_is_no_sample_is_named(answer: Any, expected: str) -> None:
    with pytest.raises(CustomFunctionError, match=expected):
        accept(Sample(index=7), answer, [], "f")


def test_functions_are_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "found_here.py").write_text("def reward(args, sample):\n    return 1.0\n")
    assert load_function("custom_rm_path", "found_here.reward", ("args", "sample"))(None, None) == 1.0


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("mine.reward", None, r"there is no module 'mine'; it is looked for in .* and in PYTHONPATH"),
        ("mine.sub.reward", "", r"there is no module 'mine\.sub'"),
        ("mine", "", r"write it as package\.module\.function"),
        ("mine.py", "", r"write it as package\.module\.function"),
        ("./mine.py:reward", "", r"write it as package\.module\.function"),
        ("mine.reward", "def rewards(args, sample): ...", r"mine\.py has no 'reward'; it has rewards"),
        ("mine.reward", "reward = 1", r"int, not a function"),
        ("mine.reward", "class reward: ...", r"type, not a function"),
        ("mine.reward", "def reward(sample): ...", r"reward\(sample\) cannot be called with \(args, sample\)"),
        ("mine.reward", "def reward(args, sample, *, key): ...", r"cannot be called.*'key'"),
        ("mine.reward", "x = 1\ny = x / 0", r"importing mine failed: ZeroDivisionError.*mine\.py:2: y = x / 0"),
        ("mine.reward", "import sys\nsys.exit(0)", r"importing mine failed: SystemExit: 0 .*mine\.py:2"),
        ("mine.reward", "def reward(:", r"importing mine failed: SyntaxError.*mine\.py:1"),
        ("mine.reward", "import nothing_like_it", r"No module named 'nothing_like_it'.*mine\.py:1"),
        ("mine.reward", "from miles.utils.types import Sample", r"here in miles_plugin\.rollout\.custom"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(
    path: str, source: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"custom_rm_path={re.escape(path)}: .*{expected}"):
        load_function("custom_rm_path", path, ("args", "sample"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--prompt-data", "DATA", "--rm-type", "math"], r"prompt_data=.* needs hf_checkpoint"),
        (["--prompt-data", "DATA", "--hf-checkpoint", "CHECKPOINT"], r"needs a reward function: set rm_type or custom"),
        (["--prompt-data", "DATA", "--hf-checkpoint", "CHECKPOINT", "--rm-type", "math"], r"needs label_key"),
        (["--prompt-data", "DATA", "--task", "chain_sum"], r"are two sources of prompts"),
        (["--prompt-data", "DATA", "--task-kwargs", '{"min_terms": 2}'], r"are two sources of prompts"),
        (["--label-key", "answer"], r"label_key=answer is set without prompt_data"),
        (["--eval-prompt-data", "DATA"], r"eval_prompt_data=.* is set without prompt_data"),
        (["--apply-chat-template"], r"the tiny policy's tokenizer has no chat template"),
        (["--apply-chat-template-kwargs", '{"a": 1}'], r"is set without apply_chat_template"),
        (["--apply-chat-template", "--hf-checkpoint", "CHECKPOINT"], r"the tokenizer of .* has no chat template"),
        (["--custom-rm-path", "nowhere.f"], r"custom_rm_path=nowhere\.f: there is no module"),
        (["--custom-generate-function-path", "json.loads"], r"json\.loads: loads\(.*cannot be called with \(args, sam"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(
    flags: list[str], expected: str, checkpoint: Path, tmp_path: Path
) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text("".join(f'{{"input": "{i}", "answer": {i}}}\n' for i in range(300)))
    given = [{"DATA": str(data), "CHECKPOINT": str(checkpoint)}.get(flag, flag) for flag in flags]
    with pytest.raises(ConfigError, match=expected):
        check_data(load_config(given))


def test_what_fits_together_passes(checkpoint: Path, tmp_path: Path, user: ModuleType) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text("".join(f'{{"input": "{i}", "answer": {i}}}\n' for i in range(300)))

    def reward(args: Any, sample: Any, **kwargs: Any) -> float:
        return 1.0

    user.reward = reward  # type: ignore[attr-defined]
    base = ["--prompt-data", str(data), "--hf-checkpoint", str(checkpoint)]
    check_data(load_config([*base, "--rm-type", "math", "--label-key", "answer"]))
    check_data(load_config([*base, *REWARD]))
    check_data(load_config(["--rm-type", "math"]))


def test_items_of_both_sources_have_a_key() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert Item(0, messages).key == Item(5, [dict(reversed(messages[0].items()))]).key
    assert Item(0, "a").key != Item(0, "b").key
