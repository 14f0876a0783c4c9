"""Items -> generated and scored samples: in one request per engine, or sample by sample with the user's function."""

import asyncio
import copy
import inspect
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.fleet import Fleet, Left
from miles_plugin.engines.routed_experts import decode, read_routing
from miles_plugin.engines.sglang import AsyncHTTP, EngineError
from miles_plugin.rollout.accept import accept
from miles_plugin.rollout.custom import CONCURRENCY_PER_ENGINE, Call, arguments, current_call, for_engine
from miles_plugin.rollout.functions import CustomFunctionError, call_function, load_function
from miles_plugin.rollout.prompts import Item, PromptSource, check_length, context_length, load_tokenizer, to_text
from miles_plugin.rollout.reward import load_reward
from miles_plugin.rollout.sample import Sample

# How often a sample is generated that keeps being aborted.
_TRIES = 3


class Sampler:
    """Generates and scores samples on some engines.

    Args:
        config: the job's settings.
        source: the items' source, for its verifier.
        checkpoint: Hugging Face directory of the policy, for its tokenizer.
        fleet: the engines; those in rotation generate.
    """

    def __init__(self, config: TrainConfig, source: PromptSource, checkpoint: Path, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self._tokenizer = load_tokenizer(checkpoint)
        self._context = context_length(checkpoint)
        self._routing = read_routing(checkpoint) if config.return_routed_experts else None
        self._settings = arguments(config, checkpoint)
        self._reward = load_reward(config, source)
        path = config.custom_generate_function_path
        self._custom = None if path is None else CustomGenerate(path)
        self._concurrency = CONCURRENCY_PER_ENGINE * len(fleet.addresses())
        # One loop for every rollout: what custom functions keep between calls is bound to it.
        self._runner = asyncio.Runner()
        self._http = AsyncHTTP(self._concurrency)
        self._closing = ExitStack()
        for close in (self._runner.close, self._close_http, self._reward.close):  # the last one is called first
            self._closing.callback(close)

    def sample(
        self, items: Sequence[Item], first_group: int, group_size: int, temperature: float, evaluation: bool = False
    ) -> list[Sample]:
        """`group_size` samples of each item, in order; groups are numbered from `first_group`.

        An aborted sample is generated again, `_TRIES` times in all. One that is aborted each time has no reward, only
        its prompt's tokens, and no part in the loss.

        Raises:
            ConfigError: a prompt that leaves no room for a response; names the item.
            EngineError: no engine is left, or every sample was aborted each time.
            CustomFunctionError: a function of the user's failed or returned what it must not.
        """
        prompts = [to_text(item, self._tokenizer, self._config) for item in items]
        for item, prompt in zip(items, prompts, strict=True):
            check_length(item, prompt, self._tokenizer, self._context, self._config)
        params = {
            "max_new_tokens": self._config.rollout_max_response_len,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
        }
        size = len(items) * group_size
        samples: dict[int, Sample] = {}
        pending = list(range(size))
        for _ in range(_TRIES):
            asked = [
                Sample(
                    index=first_group * group_size + position,
                    group_index=first_group + position // group_size,
                    prompt=prompts[position // group_size],
                    label=items[position // group_size].label,
                    metadata=copy.deepcopy(dict(items[position // group_size].metadata)),
                )
                for position in pending
            ]
            if self._custom is None:
                self._generate(asked, params)
            chosen = [items[position // group_size] for position in pending]
            finished = self._runner.run(self._finish_all(asked, chosen, params, evaluation))
            samples.update(zip(pending, finished, strict=True))
            pending = [position for position in pending if samples[position].status is Sample.Status.ABORTED]
            if not pending:
                break
        if len(pending) == size:
            raise EngineError(f"all {size} samples were aborted {_TRIES} times in a row")
        for position in pending:
            self._leave_out(samples[position])
        return [samples[position] for position in range(size)]

    def close(self) -> None:
        """Release connections and processes; idempotent."""
        self._closing.close()

    def _close_http(self) -> None:
        self._runner.run(self._http.close())

    def _generate(self, samples: Sequence[Sample], params: dict[str, Any]) -> None:
        """Fill in the responses, in one request per engine. What an engine that fails was asked for, others are."""
        prompts = [self._encode(sample) for sample in samples]
        answers: dict[int, dict[str, Any]] = {}
        while missing := [position for position in range(len(prompts)) if position not in answers]:
            version = self._fleet.version
            engines = self._fleet.serving()[: len(missing)]  # one that is asked for nothing refuses
            chunks = _split_evenly(missing, len(engines))
            with ThreadPoolExecutor(len(engines)) as pool:
                jobs = [
                    pool.submit(engine.generate, [prompts[at] for at in chunk], params, self._routing is not None)
                    for engine, chunk in zip(engines, chunks, strict=True)
                ]
            for engine, chunk, job in zip(engines, chunks, jobs, strict=True):
                try:
                    answered = job.result()
                    spans = (span for each in answered for span in each["meta_info"].get("weight_versions", ()))
                    _check_made_by(engine.url, [span["version"] for span in spans], version)
                    answers.update(zip(chunk, answered, strict=True))
                except EngineError as error:
                    if error.status in range(400, 500):
                        raise  # of the request, whoever is asked
                    self._fleet.leave(Left(engine.url, "generate", str(error)))
        for position, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
            answer = answers[position]
            meta = answer["meta_info"]
            sample.tokens = prompt + list(answer["output_ids"])
            sample.response_length = len(answer["output_ids"])
            sample.response = self._tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
            sample.rollout_log_probs = [log_prob for log_prob, _token, _text in meta["output_token_logprobs"]]
            sample.update_from_meta_info(None, meta)
            if self._routing is not None and sample.status is not Sample.Status.ABORTED:
                sample.rollout_routed_experts = decode(meta, len(sample.tokens), self._routing)

    async def _finish_all(
        self, asked: Sequence[Sample], items: Sequence[Item], params: dict[str, Any], evaluation: bool
    ) -> list[Sample]:
        semaphore = asyncio.Semaphore(self._concurrency)

        async def finish(sample: Sample, item: Item) -> Sample:
            async with semaphore:
                return await self._finish(sample, item, params, evaluation)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(finish(sample, item)) for sample, item in zip(asked, items, strict=True)]
        except BaseExceptionGroup as failures:  # the first one made the group cancel the others
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _finish(self, sample: Sample, item: Item, params: dict[str, Any], evaluation: bool) -> Sample:
        """Generate with the custom function, if there is one, and score."""
        engines = self._fleet.serving()
        engine = engines[sample.group_index % len(engines)]  # a group shares its prompt's cache
        args = for_engine(self._settings, engine.url)
        call, version = Call(self._http), self._fleet.version
        current_call.set(call)
        if self._custom is not None:
            try:
                sample = await self._custom(args, sample, dict(params), evaluation, call)
                _check_made_by(engine.url, call.weight_versions, version)
            except EngineError as error:
                self._fleet.leave(Left(engine.url, "generate", str(error)))
                sample.status = Sample.Status.ABORTED  # others are asked
            except CustomFunctionError as error:
                cause = error.__cause__
                if not isinstance(cause, EngineError) or not _no_answer(engine.url, cause):
                    raise
                self._fleet.leave(Left(engine.url, "generate", str(cause)))
                sample.status = Sample.Status.ABORTED  # others are asked
        if sample.reward is None and sample.status is not Sample.Status.ABORTED:
            sample.reward = await self._reward(args, sample, item)
        return sample

    def _leave_out(self, sample: Sample) -> None:
        sample.tokens = self._encode(sample)
        sample.response, sample.response_length = "", 0
        sample.loss_mask, sample.rollout_log_probs, sample.rollout_routed_experts = [], [], None
        sample.reward, sample.remove_sample = None, True

    def _encode(self, sample: Sample) -> list[int]:
        return list(self._tokenizer.encode(sample.prompt, add_special_tokens=False))


class CustomGenerate:
    """`custom_generate_function_path`: async (args, sample, sampling_params) -> sample, and `evaluation` if it wants.

    Raises:
        ConfigError: the function cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        self._named = f"custom_generate_function_path={path}"
        self._function = load_function("custom_generate_function_path", path, ("args", "sample", "sampling_params"))
        self._wants_evaluation = "evaluation" in inspect.signature(self._function).parameters

    async def __call__(
        self, args: Namespace, asked: Sample, params: dict[str, Any], evaluation: bool, call: Call
    ) -> Sample:
        """The sample that the function makes of a copy of `asked`, checked.

        Raises:
            CustomFunctionError: it raised, or returned what cannot be trained on.
        """
        more = {"evaluation": evaluation} if self._wants_evaluation else {}
        where = f"{self._named}, sample {asked.index} (prompt {asked.prompt!r:.60})"
        returned = await call_function(self._function, where, args, copy.deepcopy(asked), params, **more)
        return accept(asked, returned, call.weight_versions, self._named)


def _check_made_by(url: str, versions: Sequence[str], least: int | None) -> None:
    """Raise EngineError for an answer of weights older than the engine has confirmed: it was started anew since."""
    old = [version for version in versions if not version.isdigit() or int(version) < (least or 0)]
    if least is not None and old:
        raise EngineError(f"{url} answered by version {old[0]!r}, not by {least}: it was started anew")


def _no_answer(url: str, error: EngineError) -> bool:
    return error.status is None and str(error).startswith(f"{url}/")


def _split_evenly(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    edges = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(edges)]
