"""The rollout manager: generates groups, puts the shards of each rollout batch, and owns the policy version.

A plain class, so that it can be run without Ray; the job makes one actor of it on the rollout node. Between it and the
trainers only `BatchRef`s travel.
"""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from miles_plugin.arguments import TrainConfig
from miles_plugin.checkpoint import VERSIONS_LOG
from miles_plugin.engines.launch import EngineSpec, RunningEngine, start_engines
from miles_plugin.object_store import open_rollout_store
from miles_plugin.rollout.batch import Shard, split_groups, to_columns
from miles_plugin.rollout.reward import assign_group_advantages, shuffle_rewards
from miles_plugin.rollout.sample import Sample
from miles_plugin.rollout.task import Item, Task
from miles_plugin.version import VersionAuthority
from mooncake_store import BatchRef, batch_digest


@dataclass(frozen=True)
class Rollout:
    """What the manager returns for one rollout.

    reward: mean verifier score before any control touched it. tokens: generated. seconds: of generate and put.
    prompts_digest: of the prompts in order. put_bytes: of all shards. weight_versions: the distinct versions that made the samples.
    """

    shards: list[Shard]
    reward: float
    samples: int
    tokens: int
    prompts_digest: str
    seconds: dict[str, float]
    put_bytes: int
    weight_versions: list[str]


class RolloutManager:
    """Owner of the engines, the items' order and the policy version of one run.

    Args:
        config: the job's settings.
        master: address of the Mooncake master that the job started, if it did.
        run_id: names the run's objects in the store.
        run_dir: gets the version log and the engines' logs.
        ranks: trainer ranks, each of which gets a shard.
    """

    def __init__(self, config: TrainConfig, master: str | None, run_id: str, run_dir: Path, ranks: int) -> None:
        self._config, self._run_dir, self._ranks = config, run_dir, ranks
        self._store = open_rollout_store(config, master, run_id, contribute_segment=False)
        self._versions = VersionAuthority((config.save or run_dir) / VERSIONS_LOG)
        self._task = Task(config.task, config.task_kwargs, config.held_out_size, config.seed)
        self._engines: list[RunningEngine] = []
        self._awaited: dict[str, tuple[BatchRef, set[int]]] = {}
        self.begin(shuffled=False)

    def start_engines(self, checkpoint: Path, host: str, gpus: Sequence[int]) -> None:
        """Serve `checkpoint` on `host`; raises EngineError when a server does not come up."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        size = self._config.rollout_num_gpus_per_engine
        self._engines = start_engines(
            [
                EngineSpec(
                    checkpoint,
                    host,
                    gpus[index * size : (index + 1) * size],
                    self._config.seed + index,
                    self._run_dir / "logs" / f"sglang-{index}.log",
                )
                for index in range(self._config.rollout_num_gpus // size)
            ]
        )

    def engines(self) -> list[tuple[str, int]]:
        """Address and tensor-parallel size of every engine in rotation."""
        return [(server.engine.url, server.ranks) for server in self._engines]

    def begin(self, shuffled: bool, state: Mapping[str, Any] | None = None) -> None:
        """Start from the first item, or where `state` was taken; `shuffled` permutes the rewards of each rollout."""
        self._cursor = 0 if state is None else int(state["cursor"])
        self._items = self._task.rollout(self._cursor)
        self._rng = random.Random(self._config.seed)
        if state is not None:
            version, numbers, gauss = state["rng"]
            self._rng.setstate((version, tuple(numbers), gauss))
        self._shuffled = shuffled

    def generate(self, rollout_id: int) -> Rollout:
        """Generate one rollout batch, put a shard of it for each rank, and return the shards' refs."""
        config = self._config
        started = time.perf_counter()
        items = list(islice(self._items, config.rollout_batch_size))
        self._cursor = items[-1].index + 1
        repeated = [item for item in items for _ in range(config.n_samples_per_prompt)]
        samples = self._sample(repeated, rollout_id * len(repeated), config.rollout_temperature)
        generated = time.perf_counter()
        reward = sum(sample.reward for sample in samples) / len(samples)
        if self._shuffled:
            shuffle_rewards(samples, self._rng)
        assign_group_advantages(samples)
        columns = [to_columns(part, rollout_id, len(samples)) for part in split_groups(samples, self._ranks)]
        digests = [batch_digest(shard) for shard in columns]
        encoded = time.perf_counter()
        refs = [self._store.put(shard) for shard in columns]
        put = time.perf_counter()
        for rank, ref in enumerate(refs):
            self._awaited[ref.key] = (ref, {rank})
        return Rollout(
            shards=[Shard(rank, ref, digest) for rank, (ref, digest) in enumerate(zip(refs, digests, strict=True))],
            reward=reward,
            samples=len(samples),
            tokens=sum(sample.response_length for sample in samples),
            prompts_digest=batch_digest({"prompt": [sample.prompt for sample in samples]}),
            seconds={"generate": generated - started, "put": put - encoded},
            put_bytes=sum(ref.nbytes for ref in refs),
            weight_versions=sorted({version for sample in samples for version in sample.weight_versions}),
        )

    def acknowledge(self, key: str, rank: int) -> None:
        """A rank is done with a shard; the shard is removed when every rank that was to read it is. Idempotent."""
        if key not in self._awaited:
            return
        ref, readers = self._awaited[key]
        readers.discard(rank)
        if not readers:
            self._store.remove(ref)
            del self._awaited[key]

    def evaluate(self) -> float:
        """Share of the held-out items that the engines' current weights answer correctly, decoding greedily."""
        samples = self._sample(self._task.held_out, 0, temperature=0.0)
        return sum(sample.reward == 1.0 for sample in samples) / len(samples)

    def state(self) -> dict[str, Any]:
        """What `begin` needs to go on from here, as JSON holds it: the position in the items, the control's RNG."""
        return {"cursor": self._cursor, "rng": self._rng.getstate()}

    def continue_versions(self, above: int) -> int:
        """Allocate only numbers above `above` from now on. Returns the newest number allocated so far."""
        self._versions.continue_above(above)
        return self._versions.newest

    def newest_version(self) -> int:
        """The newest number allocated; -1 before the first."""
        return self._versions.newest

    def allocate_version(self) -> int:
        return self._versions.allocate()

    def announce_version(self, version: int) -> None:
        """Make `version` the current one; called before the first engine resumes with it."""
        self._versions.announce(version)

    def store_stats(self) -> dict[str, int]:
        """Counts of this process: puts, gets, removes, bytes_put, bytes_got."""
        return self._store.stats()

    def check_engines(self, patience: float = 0.0) -> None:
        """Raise EngineError, with its log's last lines, for an engine that has ended or ends within `patience` s."""
        for server in self._engines:
            server.check(patience)

    def stop_engines(self) -> None:
        """End every engine; a request in flight fails. Idempotent, and safe to call beside any other method."""
        engines, self._engines = self._engines, []
        for server in engines:
            server.stop()

    def close(self) -> None:
        """Stop the engines and leave the store; idempotent."""
        self.stop_engines()
        self._store.close()

    def _sample(self, items: Sequence[Item], first_index: int, temperature: float) -> list[Sample]:
        prompts = [self._tokenizer.encode(item.question, add_special_tokens=False) for item in items]
        params = {
            "max_new_tokens": self._config.rollout_max_response_len,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
        }
        chunks = _split_evenly(prompts, len(self._engines))
        with ThreadPoolExecutor(len(self._engines)) as pool:
            jobs = [
                pool.submit(server.engine.generate, chunk, params)
                for server, chunk in zip(self._engines, chunks, strict=True)
            ]
            responses = [response for job in jobs for response in job.result()]
        return [
            self._to_sample(first_index + position, item, prompt, response)
            for position, (item, prompt, response) in enumerate(zip(items, prompts, responses, strict=True))
        ]

    def _to_sample(self, index: int, item: Item, prompt: list[int], response: dict[str, Any]) -> Sample:
        meta = response["meta_info"]
        text = self._tokenizer.decode(response["output_ids"], skip_special_tokens=True)
        return Sample(
            index=index,
            group=index // self._config.n_samples_per_prompt,
            prompt=item.question,
            tokens=prompt + list(response["output_ids"]),
            log_probs=[log_prob for log_prob, _token, _text in meta["output_token_logprobs"]],
            response=text,
            truncated=meta["finish_reason"]["type"] == "length",
            weight_versions=[span["version"] for span in meta["weight_versions"]],
            reward=self._task.score(text, item),
            metadata={"task": self._task.name, "item": item.index, "answer": item.answer, "response": text},
        )


def _split_evenly(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    edges = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(edges)]
