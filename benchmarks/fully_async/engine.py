"""A stand-in engine whose samples take long-tailed times: each prompt's are its own, whoever asks and when."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from miles_plugin.engines.stand_in import messages
from miles_plugin.engines.stand_in.engine import Answer, Engine
from miles_plugin.engines.stand_in.engine import Settings as EngineSettings
from miles_plugin.engines.stand_in.scheduler import Latency
from miles_plugin.engines.stand_in.server import StandInServer
from miles_plugin.simulation.distributions import Distribution
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint

HOST = "127.0.0.1"
MAX_TOKENS = 800  # of a response
_MEAN_TOKENS = 50  # so a time is right to two percent of the mean
_IDLE_SECONDS = 10.0


@dataclass(frozen=True)
class Plan:
    """What the engine is started with: where it may make a checkpoint, what seconds are drawn from, samples of a
    prompt, the seed."""

    checkpoint: Path
    generation: Distribution
    n_samples_per_prompt: int
    seed: int


@dataclass
class Sample:
    """One response: when it was asked for and when it was finished, on the monotonic clock; None if it never was."""

    began: float
    ended: float | None = None


class Tail:
    """How long responses are. Those of a prompt have the same lengths, one after the other, as often as it is asked."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.token_seconds = plan.generation.mean / _MEAN_TOKENS
        self._asked: Counter[int] = Counter()

    def tokens(self, prompt: Sequence[int]) -> int:
        """Of the next response of a prompt, 1 to `MAX_TOKENS`."""
        key = xxhash.xxh3_64_intdigest(np.array(prompt, np.int64).tobytes())
        draws = self._plan.generation.sample(np.random.default_rng([self._plan.seed, key]), self._size)
        number, self._asked[key] = self._asked[key] % self._size, self._asked[key] + 1
        return min(MAX_TOKENS, max(1, ceil(float(draws[number]) / self.token_seconds)))

    @property
    def _size(self) -> int:
        return self._plan.n_samples_per_prompt


class LongTail(Engine):
    """An engine whose responses end by themselves, and which notes when."""

    def __init__(self, settings: EngineSettings, tail: Tail) -> None:
        super().__init__(settings)
        self._tail, self._noting = tail, threading.Lock()
        self._samples: list[Sample] = []

    def generate(self, body: messages.Generate) -> Answer:
        prompts, _ = self._prompts(body)
        assert not isinstance(body.sampling_params, list), "no caller here has others for each prompt"
        given, began = body.sampling_params or {}, time.monotonic()
        with self._noting:
            params = [{**given, "max_new_tokens": self._tail.tokens(prompt)} for prompt in prompts]
            samples = [Sample(began) for _ in prompts]
            self._samples += samples
        status, answer = super().generate(msgspec.structs.replace(body, sampling_params=params))
        answers = answer if isinstance(answer, list) else [answer]
        if status == 200:
            for sample, each in zip(samples, answers, strict=True):
                meta = each["meta_info"]
                if meta["finish_reason"]["type"] != "abort":
                    sample.ended = began + meta["e2e_latency"]
        return status, answer

    def take(self) -> list[Sample]:
        """The samples that were asked for since this was called last; what still runs is ended."""
        self.abort_request(messages.AbortRequest(abort_all=True))
        self._scheduler.wait_until_idle(_IDLE_SECONDS)
        with self._noting:
            taken, self._samples = self._samples, []
        return taken


class EngineProcess:
    """A running engine; made in a process of its own."""

    def __init__(self, plan: Plan) -> None:
        save_checkpoint(build_model(32, 1, seed=0), build_tokenizer(), plan.checkpoint)
        tail = Tail(plan)
        latency = Latency(token=tail.token_seconds)
        settings = EngineSettings(plan.checkpoint, HOST, 1, latency, False, timedelta(minutes=1))
        self._engine = LongTail(settings, tail)
        self._server = StandInServer(HOST, 0, self._engine)
        threading.Thread(target=self._server.serve_forever, name="server", daemon=True).start()

    def address(self) -> str:
        """host:port."""
        return f"{HOST}:{self._server.server_port}"

    def take(self) -> list[Sample]:
        """See LongTail."""
        return self._engine.take()

    def close(self) -> None:
        self._server.shutdown()
