"""Real engines, one of them tensor-parallel, that one updater keeps at the trainer's weights, idle and generating."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.fleet import EngineAddress, Fleet
from miles_plugin.engines.launch import EngineSpec, RunningEngine, start_engines
from miles_plugin.engines.sglang import SGLangEngine
from miles_plugin.rollout.generate import Sampler
from miles_plugin.rollout.sample import Sample
from miles_plugin.rollout.task import Task
from miles_plugin.weight_transfer.sources import NamedTensor, full_parameters
from miles_plugin.weight_transfer.transfer import Bounds, Updater, WeightUpdate
from tests.integration.plugin.conftest import make_checkpoint
from tests.integration.plugin.test_moe import gaps
from tests.integration.plugin.test_sglang_cpu import GREEDY, PROMPTS, ROUNDING, hugging_face_gap
from tests.weight_updates import Versions, broadcasting, expecting, layouts, writing

pytestmark = [pytest.mark.integration, pytest.mark.slow]
MODES = ("broadcast", "p2p")
BOUNDS = Bounds(call=60, join=60, bucket=60)  # tight ones are for stand-ins
# Long enough to be updated midway, and for how many tokens they have together when that begins.
LONG = {"max_new_tokens": 160, "temperature": 0.0, "ignore_eos": True}
BEGUN = 40


@dataclass
class Pair:
    """An engine of one rank and one of two, and the checkpoint that both hold, one of `checkpoints`."""

    servers: list[RunningEngine]
    checkpoints: list[Path]
    experts: int
    versions: Versions = field(default_factory=Versions)
    held: int = 0

    @property
    def addresses(self) -> list[EngineAddress]:
        return [EngineAddress(server.engine.url, server.ranks) for server in self.servers]

    @contextmanager
    def updater(self, mode: str, pause_mode: str = "retract") -> Iterator[Updater]:
        proof = expecting(self.checkpoints[0], self.addresses)
        if mode == "broadcast":
            made = broadcasting(self.versions, pause_mode, BOUNDS, proof)
        else:
            made = writing(self.versions, self.checkpoints[0], pause_mode, BOUNDS, proof)
        try:
            yield made
        finally:
            made.close()

    def update(self, updater: Updater) -> WeightUpdate:
        """To the other checkpoint, by a proven update of both engines."""
        self.held = 1 - self.held
        model = AutoModelForCausalLM.from_pretrained(self.checkpoints[self.held])

        def source() -> Iterator[NamedTensor]:
            return full_parameters(model, torch.bfloat16)

        update = updater.update(source, self.addresses)
        assert update is not None
        assert (update.left, update.confirmed) == ((), tuple(each.url for each in self.addresses))
        assert update.nbytes == sum(parameter.nbytes for parameter in model.parameters())
        assert update.proven == len(layouts(self.checkpoints[0])(1).parameters), "of the engine that proves least"
        assert all(server.engine.weight_version() == str(update.version) for server in self.servers)
        return update


@pytest.fixture(scope="module", params=[0, 4], ids=["dense", "experts"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory, experts = tmp_path_factory.mktemp("pair"), request.param
    checkpoints = [make_checkpoint(directory / str(seed), seed, experts) for seed in (0, 1)]
    specs = [
        EngineSpec(
            checkpoints[0],
            "127.0.0.1",
            (),
            0,
            directory / f"sglang-{ranks}.log",
            return_routed_experts=experts > 0,
            cpu_ranks=ranks,
            p2p_protocol="tcp",
        )
        for ranks in (1, 2)
    ]
    servers = start_engines(specs)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield Pair(servers, checkpoints, experts)
    finally:
        torch.distributed.destroy_process_group()
        for server in servers:
            server.stop()


def test_engines_of_several_sizes_take_updates_of_either_mode_in_turn(pair: Pair) -> None:
    for mode in (*MODES, *MODES):
        with pair.updater(mode) as updater:
            update = pair.update(updater)
        assert pair.versions.events[-1] == ("commit", update.version, update.confirmed, ())
        for server in pair.servers:
            responses = server.engine.generate(PROMPTS, GREEDY, pair.experts > 0)
            here, other = (pair.checkpoints[index] for index in (pair.held, 1 - pair.held))
            if pair.experts:
                assert max(gaps(here, PROMPTS, responses)) < ROUNDING
                assert max(gaps(other, PROMPTS, responses)) > 5 * ROUNDING
            else:
                assert max(hugging_face_gap(here, responses)) < ROUNDING
                assert min(hugging_face_gap(other, responses)) > 5 * ROUNDING
            for response in responses:
                assert [span["version"] for span in response["meta_info"]["weight_versions"]] == [str(update.version)]


def distances(checkpoint: Path, prompt: list[int], response: dict[str, Any]) -> torch.Tensor:
    """Of each token of a response, how far its log-probability is from the one under the model of `checkpoint`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = torch.tensor([prompt + response["output_ids"]])
    with torch.no_grad():
        every = torch.log_softmax(model(tokens).logits[0, len(prompt) - 1 : -1], -1)
    engine = torch.tensor([entry[0] for entry in response["meta_info"]["output_token_logprobs"]])
    return (every.gather(-1, tokens[0, len(prompt) :, None]).squeeze(-1) - engine).abs()


def await_tokens(engine: SGLangEngine, tokens: int) -> None:
    """Until an engine holds so many tokens of requests that it works on."""
    deadline = time.monotonic() + 60
    while sum(each["num_used_tokens"] for each in httpx.get(f"{engine.url}/v1/loads").json()["loads"]) < tokens:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def beside(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a call while the body does; its result when the body has ended."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    yield results
    thread.join(120)
    assert results, "it failed or hangs"


@pytest.mark.parametrize(
    ("mode", "pause_mode"), [(mode, pause_mode) for mode in MODES for pause_mode in ("retract", "in_place")]
)
def test_a_response_that_an_update_lands_in_says_which_version_made_each_token(
    mode: str, pause_mode: str, pair: Pair
) -> None:
    prompts = PROMPTS[:2]
    with pair.updater(mode, pause_mode) as updater:
        pair.update(updater)
        generators = [server.engine for server in pair.servers]
        for _ in range(5):  # until none has ended before the update lands
            old = pair.held
            with (
                beside(lambda: generators[0].generate(prompts, LONG)) as one,
                beside(lambda: generators[1].generate(prompts, LONG)) as two,
            ):
                for engine in generators:
                    await_tokens(engine, BEGUN)
                version = pair.update(updater).version
            if all(len(response["meta_info"]["weight_versions"]) == 2 for response in one[0] + two[0]):
                break
    for prompt, response in zip(2 * prompts, one[0] + two[0], strict=True):
        meta = response["meta_info"]
        assert len(response["output_ids"]) == LONG["max_new_tokens"]
        first, second = meta["weight_versions"]
        assert (first["version"], second["version"]) == (str(version - 1), str(version))
        assert (first["start"], first["end"], second["end"]) == (0, second["start"], LONG["max_new_tokens"])
        assert 0 < first["end"] < LONG["max_new_tokens"]
        sample = Sample()
        sample.update_from_meta_info(None, meta)
        assert sample.weight_versions == [str(version - 1), str(version)]
        if pair.experts:
            continue  # without the engine's choice of experts the model computes another token where two tie
        before, after = (distances(pair.checkpoints[index], prompt, response) for index in (old, 1 - old))
        assert before[: first["end"]].max() < ROUNDING < 5 * ROUNDING < after[: first["end"]].max()
        assert before[second["start"] :].max() > 5 * ROUNDING
        if pause_mode == "retract":
            assert after[second["start"] :].max() < ROUNDING, "also what they attend to is the new policy's"
        else:
            assert after[second["start"] :].max() > 5 * ROUNDING, "they attend to what the old policy computed"


@pytest.mark.parametrize("mode", MODES)
def test_a_response_that_an_update_aborts_is_asked_for_again(
    mode: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(["--task", "chain_sum", "--held-out-size", "8", "--rollout-max-response-len", "160"])
    task = Task(config.task, config.task_kwargs, config.held_out_size, config.seed)
    ended: list[str] = []
    generate = SGLangEngine.generate

    def recorded(self: SGLangEngine, *arguments: Any) -> list[dict[str, Any]]:
        answers = generate(self, *arguments)
        ended.extend(answer["meta_info"]["finish_reason"]["type"] for answer in answers)
        return answers

    monkeypatch.setattr(SGLangEngine, "generate", recorded)
    sampler = Sampler(config, task, pair.checkpoints[0], Fleet(pair.servers))
    items = list(islice(task.rollout(), 2))
    try:
        with pair.updater(mode, "abort") as updater:
            pair.update(updater)
            with beside(lambda: sampler.sample(items, 0, 2, temperature=0.0)) as sampled:
                for server in pair.servers:
                    await_tokens(server.engine, 2 * BEGUN)
                version = pair.update(updater).version
    finally:
        sampler.close()
        sampler.close()  # idempotent
    assert ended[:4] == ["abort"] * 4
    for sample in sampled[0]:
        assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        assert sample.weight_versions == [str(version)]
        assert sample.reward is not None
