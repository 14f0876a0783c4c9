"""The engines' hosts, as the rollout manager sees them: its own, and those where `miles-mooncake materialize` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
from miles_plugin.weight_transfer.disk_delta.readers import ReaderReport, read_reports
from miles_plugin.weight_transfer.disk_delta.storage import Storage
from mooncake_store.bounded import attempts
from mooncake_store.errors import StoreError

# Seconds that another host may take for a version.
HOST_SECONDS = 600.0


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
    """

    def __init__(self, storage: Storage, materializer: Materializer, seconds: float = HOST_SECONDS) -> None:
        self._storage, self._materializer, self._seconds = storage, materializer, seconds

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
        self._await(version or 0, [url for url in engines if url in elsewhere], brought)
        return brought

    def _bring_here(self, version: int | None, engines: Sequence[str], brought: Brought) -> None:
        try:
            made = self._materializer.bring_to(version)
        except StoreError as error:
            brought.failed.update(dict.fromkeys(engines, str(error)))
            return
        brought.paths.update(dict.fromkeys(engines, str(made.path)))
        brought.notes.extend(made.notes)

    def _await(self, version: int, engines: Sequence[str], brought: Brought) -> None:
        waiting, problems = set(engines), dict[str, str]()
        for _ in attempts(self._seconds) if waiting else ():
            for reader, report in read_reports(self._storage).items():
                for url in waiting.intersection(_urls(report)):
                    if report.version == version:
                        waiting.discard(url)
                        brought.paths[url] = report.path
                    else:
                        problems[url] = (
                            f"reader {reader} has version {report.version}; {report.problem or 'it is slow'}"
                        )
            if not waiting:
                break
        for url in waiting:
            said = problems.get(url, "its reader is gone")
            brought.failed[url] = (
                f"its host has not got version {version} within {self._seconds:.0f} s: {said}; see whether "
                "miles-mooncake materialize runs there"
            )


def _urls(report: ReaderReport) -> list[str]:
    return [f"http://{address}" for address in report.engines]
