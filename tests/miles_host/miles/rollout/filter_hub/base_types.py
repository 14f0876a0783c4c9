"""A user's filter of finished groups may say why."""

from collections import Counter
from types import SimpleNamespace


def call_dynamic_filter(fn, *args, **kwargs):
    said = True if fn is None else fn(*args, **kwargs)
    return SimpleNamespace(keep=said, reason=None) if isinstance(said, bool) else said


class MetricGatherer:
    def __init__(self):
        self._dropped = Counter()

    def on_dynamic_filter_drop(self, reason):
        if reason:
            self._dropped[reason] += 1

    def collect(self):
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}
