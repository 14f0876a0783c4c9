"""The counters of the buffer between two looks at its metrics, under miles's names where miles has them."""

from collections import Counter

from miles_plugin.fully_async.staleness import Judgement, Verdict

PREFIX = "rollout/fully_async/"
# Staleness from which on the histogram has one bar.
MANY = 8
_FILTERED = {
    Verdict.STALE: "stale_groups_filtered",
    Verdict.UNSTAMPED: "unstamped_groups_filtered",
    Verdict.AHEAD: "foreign_groups_filtered",
    Verdict.OTHER_RUN: "foreign_groups_filtered",
}
_CONSUMED = {Verdict.UNSTAMPED: "unstamped_groups_consumed", Verdict.AHEAD: "foreign_groups_consumed"}
_HISTOGRAM = [f"consumed_staleness_{staleness}" for staleness in range(MANY)] + [f"consumed_staleness_{MANY}_or_more"]
# Always there, so that a plot has no holes; the others come with their first count.
_ALWAYS = (
    "aborted_groups_filtered",
    *dict.fromkeys([*_FILTERED.values(), *_CONSUMED.values()]),
    "consumed_groups",
    "recycled_groups",
    "dropped_groups",
    "lost_groups",
    "duplicate_groups_filtered",
    *_HISTOGRAM,
)


class Staleness:
    """The average and the greatest of some numbers."""

    def __init__(self) -> None:
        self._sum = self._count = self._most = 0

    def add(self, staleness: int, groups: int = 1) -> None:
        self._sum += staleness * groups
        self._count += groups
        self._most = max(self._most, staleness)

    def metrics(self, name: str) -> dict[str, float]:
        """`<name>avg_staleness` and `<name>max_staleness`; empty when there was none."""
        if not self._count:
            return {}
        return {f"{name}avg_staleness": self._sum / self._count, f"{name}max_staleness": self._most}


class Counts:
    """What happened since `take` was called last."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._counts: Counter[str] = Counter()
        self._judged, self._consumed = Staleness(), Staleness()

    def add(self, name: str) -> None:
        """One more of `name`."""
        self._counts[name] += 1

    def judged(self, judgement: Judgement) -> None:
        """A group was judged, and handed out or filtered accordingly."""
        verdict, staleness, keep = judgement
        if staleness is not None:
            self._judged.add(staleness)
        if not keep:
            self._counts[_FILTERED[verdict]] += 1
            return
        self._counts["consumed_groups"] += 1
        if verdict in _CONSUMED:
            self._counts[_CONSUMED[verdict]] += 1
        if staleness is not None:
            self._consumed.add(staleness)
            self._counts[_HISTOGRAM[min(staleness, MANY)]] += 1

    def take(self) -> dict[str, float]:
        """The metrics without `PREFIX`; all start anew."""
        metrics: dict[str, float] = {**dict.fromkeys(_ALWAYS, 0), **self._counts}
        metrics |= {**self._judged.metrics(""), **self._consumed.metrics("consumed_")}
        self._clear()
        return metrics
