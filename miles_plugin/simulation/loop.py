"""One simulated run: engines generate, a buffer holds, trainers learn, weights go back.

Only two things can happen next, the end of a sample or the next event of the trainers, so the one heap is the engines'.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from miles_plugin.simulation.distributions import stream
from miles_plugin.simulation.engines import Engines, Groups, Sums
from miles_plugin.simulation.result import Census, Run
from miles_plugin.simulation.settings import Settings


def simulate(
    settings: Settings,
    seed: int | tuple[int, ...],
    steps: int = 100,
    warmup: int = 20,
    synchronous: bool = False,
    on_step: Callable[[], None] = lambda: None,
) -> Run:
    """Run `warmup` steps that are not counted and `steps` that are, both rounded up to whole update intervals.

    Args:
        seed: the same seed and arguments give the same result.
        synchronous: generate a batch, wait for all of it, train, update; instead of all at a time.
        on_step: called after every step, warm-up included.
    """
    counted, before = whole_intervals(settings, steps, warmup)
    loop = _Loop(settings, seed, synchronous, on_step)
    loop.run(before)
    loop.begin_measuring()
    loop.run(before + counted)
    return loop.result()


def whole_intervals(settings: Settings, steps: int, warmup: int) -> tuple[int, int]:
    """Steps and warm-up as they are run: a part of an interval would count too few updates, or too many."""
    interval = settings.update_weights_interval
    return -(-max(1, steps) // interval) * interval, -(-warmup // interval) * interval


@dataclass
class _Tally:
    """What is added up from `began` on. engines, inside: their sums and the groups in the loop when this began."""

    began: float
    engines: Sums
    inside: int = 0
    steps: int = 0
    updates: int = 0
    training_seconds: float = 0.0
    preparing_seconds: float = 0.0
    updating_seconds: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    mixed: int = 0
    trained_seconds: float = 0.0
    unused_groups: int = 0
    unused_seconds: float = 0.0
    buffered: float = 0.0


class _Loop:
    """The state of a run. Methods that take `now` are what happens then."""

    def __init__(
        self, settings: Settings, seed: int | tuple[int, ...], synchronous: bool, on_step: Callable[[], None]
    ) -> None:
        draws = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(4))
        times = settings.generation, settings.training, settings.prepare, settings.update
        generation, self._training, self._preparing, self._updating = map(stream, times, draws)
        self._settings, self._synchronous, self._on_step = settings, synchronous, on_step
        self._groups = Groups(settings.n_samples_per_prompt)
        self._engines = Engines(
            settings.all_slots,
            self._groups,
            generation,
            restarts=settings.pause_generation_mode == "abort",
        )
        self._bound = math.inf if settings.max_weight_staleness is None else settings.max_weight_staleness
        self._by_group = settings.rollout_submission_granularity == "group"
        self._buffer: deque[int] = deque()
        self._blocked: deque[int] = deque()  # finished, but there is no room
        self._batch: list[int] = []
        # The trainers' next event. Between two steps nothing of either is open.
        self._at, self._between = 0.0, True
        self._then: Callable[[float], None] = self._next_step
        self._collecting = self._draining = False
        self._version = self._steps = 0
        self._submitted = self._open = self._trained = self._unused = 0  # groups; open: not finished
        self._buffer_accounted_at = 0.0
        self._tally = _Tally(0.0, self._engines.sums(0.0))

    def run(self, steps: int) -> None:
        """Go on until so many steps are done, with their updates."""
        engines, left = self._engines, self._groups.left
        while not self._between or self._steps < steps:
            now = engines.next_end()
            if now > self._at:
                self._then(self._at)
                continue
            group = engines.finish(now)
            if left[group] == 0:
                self._group_finished(group, now)
            self._submit(now)
            if self._draining and not engines.running:
                self._update(now)

    def begin_measuring(self) -> None:
        """Forget what was added up so far. Between two steps."""
        self._account_buffer(self._at)
        self._tally = _Tally(self._at, self._engines.sums(self._at), self._inside())

    # --- producer ---

    def _submit(self, now: float) -> None:
        """Submit groups as long as the buffer takes what finishes and the budget allows."""
        if self._synchronous:
            return
        size = self._settings.n_samples_per_prompt
        while not self._blocked and self._in_flight() + size <= self._settings.concurrent_groups * size:
            self._submit_group(now)

    def _in_flight(self) -> int:
        """Samples that count against the budget: by group, those that wait for others of theirs do."""
        if self._by_group:
            return self._open * self._settings.n_samples_per_prompt
        return self._engines.running + self._engines.queued

    def _submit_group(self, now: float) -> None:
        self._submitted += 1
        self._open += 1
        self._engines.submit(self._groups.new(), self._settings.n_samples_per_prompt, now)

    def _group_finished(self, group: int, now: float) -> None:
        self._open -= 1
        if len(self._buffer) < self._settings.buffer_groups:
            self._account_buffer(now)
            self._buffer.append(group)
            if self._collecting:
                self._collect(now)
        else:
            self._blocked.append(group)

    # --- trainers ---

    def _next(self, at: float, then: Callable[[float], None]) -> None:
        self._at, self._then = at, then

    def _next_step(self, now: float) -> None:
        self._between, self._collecting = False, True
        self._next(math.inf, self._next_step)
        if self._synchronous:
            for _ in range(self._settings.rollout_batch_size):
                self._submit_group(now)
        else:
            self._collect(now)
            self._submit(now)

    def _collect(self, now: float) -> None:
        """Take groups from the buffer, the oldest first, until the batch is full or none is left."""
        self._account_buffer(now)
        while self._buffer and len(self._batch) < self._settings.rollout_batch_size:
            group = self._buffer.popleft()
            if self._blocked:
                self._buffer.append(self._blocked.popleft())
            staleness = self._version - self._groups.oldest[group]
            if staleness > self._bound:
                self._discard(group)
            else:
                self._tally.staleness[staleness] += 1
                self._batch.append(group)
        if len(self._batch) == self._settings.rollout_batch_size:
            self._train(now)

    def _discard(self, group: int) -> None:
        self._unused += 1
        self._tally.unused_groups += 1
        self._tally.unused_seconds += self._groups.seconds[group]
        self._groups.free(group)

    def _train(self, now: float) -> None:
        trainers = self._settings.trainers
        seconds = [next(self._training) / trainers for _ in range(trainers)]
        self._tally.training_seconds += sum(seconds) / trainers
        self._collecting = False
        self._next(now + max(seconds), self._step_trained)

    def _step_trained(self, now: float) -> None:
        for group in self._batch:
            self._tally.trained_seconds += self._groups.seconds[group]
            self._tally.mixed += self._groups.mixed[group]
            self._groups.free(group)
        self._trained += len(self._batch)
        self._batch.clear()
        self._steps += 1
        self._tally.steps += 1
        if self._steps % self._settings.update_weights_interval:
            self._step_done(now)
        else:
            seconds = next(self._preparing)
            self._tally.preparing_seconds += seconds
            self._next(now + seconds, self._prepared)

    def _prepared(self, now: float) -> None:
        if self._settings.pause_generation_mode == "wait" and self._engines.running:
            self._draining = True
            self._engines.hold()
            self._next(math.inf, self._update)
        else:
            self._update(now)

    def _update(self, now: float) -> None:
        self._draining = False
        self._engines.pause(now)
        seconds = next(self._updating)
        self._tally.updating_seconds += seconds
        self._tally.updates += 1
        self._next(now + seconds, self._updated)

    def _updated(self, now: float) -> None:
        self._version += 1
        self._engines.resume(now, self._version)
        self._step_done(now)

    def _step_done(self, now: float) -> None:
        self._between = True
        self._next(now, self._next_step)
        self._on_step()

    # --- sums ---

    def _account_buffer(self, now: float) -> None:
        self._tally.buffered += len(self._buffer) * (now - self._buffer_accounted_at)
        self._buffer_accounted_at = now

    def _inside(self) -> int:
        """Groups that are somewhere between their submission and their end."""
        return self._submitted - self._trained - self._unused

    def result(self) -> Run:
        """Since `begin_measuring`. Between two steps."""
        self._account_buffer(self._at)
        settings, tally = self._settings, self._tally
        engines = self._engines.sums(self._at).since(tally.engines)
        seconds = self._at - tally.began
        samples = tally.steps * settings.batch_samples
        retries = settings.async_unused_samples_handler == "retry"
        spent = engines.finished_seconds + engines.aborted_seconds
        return Run(
            seconds=seconds,
            steps=tally.steps,
            updates=tally.updates,
            samples=samples,
            engines_busy=engines.busy / (settings.all_slots * seconds),
            engines_paused=tally.updating_seconds / seconds,
            trainers_busy=tally.training_seconds / seconds,
            trainers_updating=(tally.preparing_seconds + tally.updating_seconds) / seconds,
            staleness=dict(sorted(tally.staleness.items())),
            mixed=tally.mixed / samples,
            recycled_groups=tally.unused_groups if retries else 0,
            dropped_groups=0 if retries else tally.unused_groups,
            aborted_samples=engines.aborted,
            wasted=(tally.unused_seconds + engines.aborted_seconds) / spent if spent else 0.0,
            running=engines.held / seconds,
            buffered=tally.buffered / seconds,
            finished=engines.finished,
            sample_seconds=engines.finished_seconds / engines.finished if engines.finished else math.nan,
            trained_sample_seconds=tally.trained_seconds / samples,
            growth=(self._inside() - tally.inside) * settings.n_samples_per_prompt / samples,
            census=self._census(retries),
        )

    def _census(self, retries: bool) -> Census:
        size = self._settings.n_samples_per_prompt
        engines = self._engines
        return Census(
            submitted=self._submitted * size,
            queued=engines.queued,
            running=engines.running,
            partial=self._open * size - engines.queued - engines.running,
            blocked=len(self._blocked) * size,
            buffered=len(self._buffer) * size,
            collected=len(self._batch) * size,
            trained=self._trained * size,
            recycled=self._unused * size if retries else 0,
            dropped=0 if retries else self._unused * size,
        )
