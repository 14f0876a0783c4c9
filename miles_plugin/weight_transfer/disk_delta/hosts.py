"""The engines' hosts, as the rollout manager sees them: its own, and those where `miles-mooncake materialize` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
from miles_plugin.weight_transfer.disk_delta.readers import ReaderReport, read_reports
from miles_plugin.weight_transfer.disk_delta.storage import Storage
from mooncake_store.bounded import attempts
from mooncake_store.errors import StoreError, StoreUnavailable

# Seconds that another host may take for a version; and one that did not have the version before within its time.
HOST_SECONDS, LATE_SECONDS = 600.0, 10.0


@dataclass(frozen=True)
class Brought:
    """Where engines find a version, by URL; why others do not; what was found amiss and got around, for people."""

    paths: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class EngineHosts:
    """Brings the checkpoints of all engines' hosts to a version.

    Args:
        materializer: of this host. It serves every engine that no other host's report names.
        seconds: that another host may take.
        late_seconds: the same, of engines that did not get the version before: their host may be gone for good, and
            must not hold up every update.
    """

    def __init__(
        self,
        storage: Storage,
        materializer: Materializer,
        seconds: float = HOST_SECONDS,
        late_seconds: float = LATE_SECONDS,
    ) -> None:
        self._storage, self._materializer = storage, materializer
        self._seconds, self._late_seconds = seconds, late_seconds
        self._late = frozenset[str]()

    def bring_to(self, version: int | None, engines: Sequence[str]) -> Brought:
        """Bring the hosts of `engines` (URLs) to a version; None: what they start from. Bounded.

        Raises:
            PublicationUnavailable: the reports cannot be read.
        """
        elsewhere = {url for report in read_reports(self._storage).values() for url in _urls(report)}
        brought = Brought()
        here = [url for url in engines if url not in elsewhere]
        if here:
            self._bring_here(version, here, brought)
        waiting = [url for url in engines if url in elsewhere]
        prompt = [url for url in waiting if url not in self._late]
        self._await(version, prompt, self._seconds, brought)
        self._await(version, [url for url in waiting if url in self._late], self._late_seconds, brought)
        self._late = frozenset(url for url in waiting if url in brought.failed)
        return brought

    def _bring_here(self, version: int | None, engines: Sequence[str], brought: Brought) -> None:
        try:
            made = self._materializer.bring_to(version)
        except StoreError as error:
            brought.failed.update(dict.fromkeys(engines, str(error)))
            return
        brought.paths.update(dict.fromkeys(engines, str(made.path)))
        brought.notes.extend(made.notes)

    def _await(self, version: int | None, engines: Sequence[str], seconds: float, brought: Brought) -> None:
        waiting, problems = set(engines), dict[str, str]()
        for _ in attempts(seconds) if waiting else ():
            problems.update(self._look(version, waiting, brought))
            if not waiting:
                break
        wanted = "what readers start from" if version is None else f"version {version}"
        for url in waiting:
            said = problems.get(url, "its reader is gone")
            brought.failed[url] = (
                f"its host has not got {wanted} within {seconds:g} s: {said}; see whether miles-mooncake materialize "
                "runs there"
            )

    def _look(self, version: int | None, waiting: set[str], brought: Brought) -> dict[str, str]:
        """Take those that have it out of `waiting`; what keeps the others, by URL."""
        problems = dict[str, str]()
        try:
            reports = read_reports(self._storage)
        except StoreUnavailable as error:  # it may be back within the time
            return dict.fromkeys(waiting, str(error))
        for reader, report in reports.items():
            for url in waiting.intersection(_urls(report)):
                if problem := self._problem(report, version):
                    problems[url] = f"reader {reader} {problem}"
                else:
                    waiting.discard(url)
                    brought.paths[url] = report.path
        return problems

    def _problem(self, report: ReaderReport, version: int | None) -> str:
        """Why a reader's engines cannot load a version; "" when they can."""
        if (None if report.is_base else report.version) != version:
            has = "what it started from" if report.is_base else f"version {report.version}"
            return f"has {has}; {report.problem or 'it is slow'}"
        # Every published version has its checksums; what a reader starts from has none.
        if version is None and report.fingerprint not in ("", here := self._materializer.fingerprint()):
            return (
                f"started from a checkpoint with the fingerprint {report.fingerprint}, the job's has {here}; give it "
                "the job's (--base)"
            )
        return ""


def _urls(report: ReaderReport) -> list[str]:
    return [f"http://{address}" for address in report.engines]
