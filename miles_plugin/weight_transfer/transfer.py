"""One weight update, step by step:

allocate -> pause -> flush (unless in_place) -> begin -> buckets -> end -> stamp -> announce -> resume

The manager knows a version before the first engine resumes with it, so no sample can carry a version that the manager
has not heard of. If a step fails the engines stay paused: they hold a mixture of two policies.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from miles_plugin.weight_transfer.broadcast import Broadcaster
from miles_plugin.weight_transfer.sources import NamedTensor


@dataclass(frozen=True)
class WeightUpdate:
    """What one update did. nbytes: sent once, whatever the number of engines. seconds: by phase."""

    version: int
    nbytes: int
    seconds: dict[str, float]


def update_weights(
    broadcaster: Broadcaster,
    buckets: Iterable[list[NamedTensor]],
    version: int,
    pause_mode: str,
    announce: Callable[[int], None],
) -> WeightUpdate:
    """Bring every engine to `version`. Runs on trainer rank 0.

    Raises:
        EngineError: an engine failed; none has resumed.
    """
    marks = [("", time.perf_counter())]

    def done(phase: str) -> None:
        marks.append((phase, time.perf_counter()))

    broadcaster.on_engines(lambda engine: engine.pause(pause_mode))
    done("pause")
    if pause_mode != "in_place":
        broadcaster.on_engines(lambda engine: engine.flush_cache())
    done("flush")
    broadcaster.on_engines(lambda engine: engine.begin_update())
    nbytes = sum(broadcaster.send(bucket) for bucket in buckets)
    broadcaster.on_engines(lambda engine: engine.end_update())
    done("transfer")
    broadcaster.on_engines(lambda engine: engine.stamp(version))
    announce(version)
    broadcaster.on_engines(lambda engine: engine.resume())
    done("resume")
    seconds = {phase: end - start for (_, start), (phase, end) in pairwise(marks)}
    return WeightUpdate(version, nbytes, seconds)
