"""Items -> generated and scored samples: a whole rollout in one request per engine, or sample by sample, as the user's
function and groups that are generated beside training are."""

import asyncio
import copy
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.fleet import Fleet, Left
from miles_plugin.engines.http import AsyncHTTP
from miles_plugin.engines.routed_experts import decode, read_routing
from miles_plugin.engines.sglang import EngineError, checked_response
from miles_plugin.rollout.accept import accept
from miles_plugin.rollout.custom import CONCURRENCY_PER_ENGINE, Call, arguments, current_call, for_engine
from miles_plugin.rollout.event_loop import LoopThread
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
        # What custom functions get as `args`, but for the engine's address.
        self.settings = arguments(config, checkpoint)
        self._reward = load_reward(config, source)
        path = config.custom_generate_function_path
        self._custom = None if path is None else CustomGenerate(path)
        self._concurrency = CONCURRENCY_PER_ENGINE * len(fleet.addresses())
        # One for every rollout: what custom functions keep between calls is bound to it.
        self.loop = LoopThread("samples")
        self._http = AsyncHTTP(self._concurrency)
        self._closing = ExitStack()
        for close in (self.loop.close, self._close_http, self._reward.close):  # the last one is called first
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
        prompts, params = list(map(self._prompt, items)), self._params(temperature)
        size = len(items) * group_size
        samples: dict[int, Sample] = {}
        pending = list(range(size))
        for _ in range(_TRIES):
            asked = [
                _asked(
                    items[position // group_size],
                    prompts[position // group_size],
                    first_group * group_size + position,
                    first_group + position // group_size,
                )
                for position in pending
            ]
            if self._custom is None:
                self._generate(asked, params)
            chosen = [items[position // group_size] for position in pending]
            finished = self.loop.run(self._finish_all(asked, chosen, params, evaluation))
            samples.update(zip(pending, finished, strict=True))
            pending = [position for position in pending if samples[position].status is Sample.Status.ABORTED]
            if not pending:
                break
        if len(pending) == size:
            raise EngineError(f"all {size} samples were aborted {_TRIES} times in a row")
        for position in pending:
            self._leave_out(samples[position])
        return [samples[position] for position in range(size)]

    async def group(
        self, item: Item, number: int, size: int, temperature: float, finished: Callable[[], None]
    ) -> list[Sample]:
        """`size` samples of an item as group `number`, each asked for by itself; in `loop`.

        An aborted sample is generated again, `_TRIES` times in all; then it stays aborted.

        Args:
            finished: told of each sample.

        Raises what `sample` does.
        """
        prompt, params = self._prompt(item), self._params(temperature)

        async def one(position: int) -> Sample:
            for _ in range(_TRIES):
                sample = await self._finish(
                    _asked(item, prompt, number * size + position, number), item, params, evaluation=False, ask=True
                )
                if sample.status is not Sample.Status.ABORTED:
                    break
            finished()
            return sample

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(position)) for position in range(size)]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def give_up(self, url: str) -> None:
        """Wait no more for an engine that stays paused: its samples are asked of others. From any thread."""
        self.loop.run(self._http.give_up(url))

    def close(self) -> None:
        """Release connections and processes; idempotent."""
        self._closing.close()

    def _close_http(self) -> None:
        self.loop.run(self._http.close())

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
            self._fill(sample, prompt, answers[position])

    async def _ask(self, engine: str, sample: Sample, params: dict[str, Any], version: int | None) -> None:
        """Fill in the response, by a request of its own."""
        prompt = self._encode(sample)
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        if self._routing is not None:
            body["return_routed_experts"] = True
        answer = checked_response(engine, await self._http.post(f"{engine}/generate", body))
        _check_made_by(engine, [span["version"] for span in answer["meta_info"].get("weight_versions", ())], version)
        self._fill(sample, prompt, answer)

    def _fill(self, sample: Sample, prompt: list[int], answer: dict[str, Any]) -> None:
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

    async def _finish(
        self, sample: Sample, item: Item, params: dict[str, Any], evaluation: bool, ask: bool = False
    ) -> Sample:
        """Generate with the custom function, if there is one, or if asked to, and score."""
        engines = self._fleet.serving()
        engine = engines[sample.group_index % len(engines)]  # a group shares its prompt's cache
        args = for_engine(self.settings, engine.url)
        call, version = Call(self._http), self._fleet.version
        current_call.set(call)
        if self._custom is not None or ask:
            try:
                if self._custom is None:
                    await self._ask(engine.url, sample, params, version)
                else:
                    sample = await self._custom(args, sample, dict(params), evaluation, call)
                    _check_made_by(engine.url, call.weight_versions, version)
            except EngineError as error:
                if self._custom is None and error.status in range(400, 500):
                    raise  # of the request, whoever is asked
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

    def _prompt(self, item: Item) -> str:
        prompt = to_text(item, self._tokenizer, self._config)
        check_length(item, prompt, self._tokenizer, self._context, self._config)
        return prompt

    def _params(self, temperature: float) -> dict[str, Any]:
        longest = self._config.rollout_max_response_len
        return {"max_new_tokens": longest, "temperature": temperature, "top_p": 1.0, "top_k": -1}

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


def _asked(item: Item, prompt: str, index: int, group: int) -> Sample:
    return Sample(index, group, prompt, item.label, copy.deepcopy(dict(item.metadata)))


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
