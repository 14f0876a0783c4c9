"""The same model again, the slow and plain way: every sample an object, every remaining time counted down.

Shares with the simulation only the draws and the order in which they are made. For whole numbers of seconds all of its
arithmetic is exact.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_plugin.simulation.distributions import stream
from miles_plugin.simulation.settings import Settings


@dataclass
class Sample:
    remaining: float = 0.0
    number: int = 0
    began: float | None = None
    ended: float | None = None
    versions: list[int] = field(default_factory=list)


class Group:
    def __init__(self, size: int) -> None:
        self.samples = [Sample() for _ in range(size)]

    @property
    def finished(self) -> bool:
        return all(sample.ended is not None for sample in self.samples)

    @property
    def oldest(self) -> int:
        return min(version for sample in self.samples for version in sample.versions)


class Reference:
    """Where a list is looked through in the simulation something is counted."""

    def __init__(self, settings: Settings, seed: int, synchronous: bool) -> None:
        self.settings, self.synchronous = settings, synchronous
        draws = [np.random.default_rng(part) for part in np.random.SeedSequence(seed).spawn(4)]
        times = settings.generation, settings.training, settings.prepare, settings.update
        self.generation, self.training, self.preparing, self.updating = map(stream, times, draws)
        self.now = 0.0
        self.version = self.steps = self.begun = 0
        self.groups: list[Group] = []  # that are not finished
        self.buffer: list[Group] = []
        self.blocked: list[Group] = []
        self.batch: list[Group] = []
        self.state, self.until = "between", math.inf
        self.sums: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()

    def run(self, steps: int, warmup: int) -> None:
        while self.steps < warmup or self.state != "between":
            self.event()
        self.sums.clear()
        self.staleness.clear()
        while self.steps < warmup + steps or self.state != "between":
            self.event()

    def running(self) -> list[Sample]:
        samples = [sample for group in self.groups for sample in group.samples]
        found = [sample for sample in samples if sample.began is not None and sample.ended is None]
        return sorted(found, key=lambda sample: (sample.remaining, sample.number))

    def event(self) -> None:
        if self.state == "between":
            ready = self.running()[:1]
            if ready and ready[0].remaining == 0:  # ends at this moment, and so before the step begins
                self.sample_ends(ready[0])
            else:
                self.next_step()
            return
        running = [] if self.state == "update" else self.running()
        first = running[0].remaining if running else math.inf
        wait = min(first, self.until - self.now)
        self.pass_time(wait)
        if first <= wait:
            self.sample_ends(running[0])
        elif self.state == "train":
            self.trained()
        elif self.state == "prepare":
            self.prepared()
        else:
            self.updated()

    def pass_time(self, seconds: float) -> None:
        running = self.running()
        self.sums["seconds"] += seconds
        self.sums["held"] += seconds * len(running)
        self.sums["buffered"] += seconds * len(self.buffer)
        if self.state != "update":
            self.sums["busy"] += seconds * len(running)
            for sample in running:
                sample.remaining -= seconds
        self.now += seconds

    def sample_ends(self, sample: Sample) -> None:
        sample.ended = self.now
        self.sums["finished"] += 1
        self.sums["finished_seconds"] += self.now - sample.began
        self.fill()  # the slot, before anything else is submitted
        for group in [group for group in self.groups if group.finished]:
            self.groups.remove(group)
            room = len(self.buffer) < self.settings.buffer_groups
            (self.buffer if room else self.blocked).append(group)
            self.collect()
        self.submit()
        if self.state == "drain" and not self.running():
            self.update()

    def fill(self) -> None:
        if self.state in ("drain", "update"):
            return
        waiting = [sample for group in self.groups for sample in group.samples if sample.began is None]
        for sample in waiting[: self.settings.all_slots - len(self.running())]:
            self.begin(sample)

    def begin(self, sample: Sample) -> None:
        self.begun += 1
        sample.remaining, sample.began, sample.number = next(self.generation), self.now, self.begun
        sample.versions = [self.version]

    def submit(self) -> None:
        size = self.settings.n_samples_per_prompt
        while not self.synchronous and not self.blocked:
            unfinished = [sample for group in self.groups for sample in group.samples if sample.ended is None]
            by_group = self.settings.rollout_submission_granularity == "group"
            in_flight = len(self.groups) * size if by_group else len(unfinished)
            budget = self.settings.async_max_concurrent_samples or self.settings.batch_samples
            if in_flight + size > max(1, budget // size) * size:
                return
            self.new_group()

    def new_group(self) -> None:
        self.groups.append(Group(self.settings.n_samples_per_prompt))
        self.fill()

    def next_step(self) -> None:
        self.state, self.until = "collect", math.inf
        if self.synchronous:
            for _ in range(self.settings.rollout_batch_size):
                self.new_group()
        self.collect()
        self.submit()

    def collect(self) -> None:
        while self.state == "collect" and self.buffer:
            group = self.buffer.pop(0)
            if self.blocked:
                self.buffer.append(self.blocked.pop(0))
            staleness = self.version - group.oldest
            bound = self.settings.max_weight_staleness
            if bound is not None and staleness > bound and not self.synchronous:
                self.sums["unused"] += 1
                continue
            self.staleness[staleness] += 1
            self.batch.append(group)
            if len(self.batch) == self.settings.rollout_batch_size:
                seconds = [next(self.training) / self.settings.trainers for _ in range(self.settings.trainers)]
                self.sums["training"] += sum(seconds) / len(seconds)
                self.state, self.until = "train", self.now + max(seconds)

    def trained(self) -> None:
        for sample in (sample for group in self.batch for sample in group.samples):
            self.sums["trained_seconds"] += sample.ended - sample.began
            self.sums["mixed"] += len(sample.versions) > 1
        self.batch.clear()
        self.steps += 1
        self.state, self.until = "between", math.inf
        if self.steps % self.settings.update_weights_interval == 0:
            seconds = next(self.preparing)
            self.sums["preparing"] += seconds
            self.state, self.until = "prepare", self.now + seconds

    def prepared(self) -> None:
        self.state, self.until = "drain", math.inf
        if self.settings.pause_generation_mode != "wait" or not self.running():
            self.update()

    def update(self) -> None:
        seconds = next(self.updating)
        self.sums["updating"] += seconds
        self.sums["updates"] += 1
        self.state, self.until = "update", self.now + seconds
        if self.settings.pause_generation_mode == "abort":
            for sample in self.running():
                self.sums["aborted"] += 1
                self.sums["aborted_seconds"] += self.now - sample.began

    def updated(self) -> None:
        self.version += 1
        for sample in sorted(self.running(), key=lambda sample: sample.number):
            if self.settings.pause_generation_mode == "abort":
                self.begin(sample)
            else:
                sample.versions.append(self.version)
        self.state, self.until = "between", math.inf
        self.fill()

    def result(self) -> dict[str, Any]:
        """What `Run` has under the same names."""
        sums, settings = self.sums, self.settings
        samples = sum(self.staleness.values()) * settings.n_samples_per_prompt
        return {
            "seconds": sums["seconds"],
            "samples": samples,
            "updates": sums["updates"],
            "staleness": dict(sorted(self.staleness.items())),
            "unused": sums["unused"],
            "aborted_samples": sums["aborted"],
            "finished": sums["finished"],
            "engines_busy": sums["busy"] / settings.all_slots / sums["seconds"],
            "engines_paused": sums["updating"] / sums["seconds"],
            "trainers_updating": (sums["preparing"] + sums["updating"]) / sums["seconds"],
            "trainers_busy": sums["training"] / sums["seconds"],
            "running": sums["held"] / sums["seconds"],
            "buffered": sums["buffered"] / sums["seconds"],
            "mixed": sums["mixed"] / samples,
            "trained_sample_seconds": sums["trained_seconds"] / samples,
            "finished_seconds": sums["finished_seconds"],
            "aborted_seconds": sums["aborted_seconds"],
        }
