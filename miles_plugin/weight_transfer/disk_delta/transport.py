"""disk-delta as a transport: each trainer rank publishes its share of a version, the engines' hosts bring a checkpoint
of their own to it, and the engines load that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.weight_transfer.disk_delta.format import version_name
from miles_plugin.weight_transfer.disk_delta.hosts import Brought
from miles_plugin.weight_transfer.disk_delta.publish import Published, Publisher
from miles_plugin.weight_transfer.disk_delta.readers import read_reports
from miles_plugin.weight_transfer.disk_delta.storage import Storage
from miles_plugin.weight_transfer.sources import NamedTensor
from miles_plugin.weight_transfer.transfer import Delivered, Sent
from mooncake_store.errors import StoreUnavailable

# Seconds that an engine may take to load a checkpoint.
LOAD_SECONDS = 600.0
# Versions that stay beside what readers need, and that a reader may be behind before it has to take a whole one.
KEEP_VERSIONS, MOST_BEHIND = 2, 200
_log = logging.getLogger(__name__)


class DeltaTransport:
    """One trainer rank's side; implements Transport and Delivery.

    Args:
        bring: has the engines' hosts (URLs) brought to a version, or to what they start from; see `EngineHosts`.
        wrote: called on rank 0 when a version is published, with its directory's name and the engines' URLs, before
            they get it.
        budget: bytes that published versions may take. load_seconds: that an engine may take to load one.
    """

    def __init__(
        self,
        storage: Storage,
        publisher: Publisher,
        bring: Callable[[int | None, Sequence[str]], Brought],
        wrote: Callable[[str, Sequence[str]], None] | None = None,
        budget: int | None = None,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self._storage, self._publisher, self._bring, self._wrote = storage, publisher, bring, wrote
        self._budget, self._load_seconds = budget, load_seconds
        self._version = -1
        self._paths: Mapping[str, str] = {}

    def connect(self, engines: Sequence[EngineAddress]) -> Mapping[str, str]:  # noqa: ARG002
        return {}

    def begin(self, version: int) -> None:
        self._version = version

    def send(self, tensors: Iterable[NamedTensor]) -> Sent:
        share = self._publisher.encode(self._version, tensors)
        return Sent(share.nbytes, share=share)

    def wants_all(self, sent: Sequence[Sent]) -> bool:
        return self._publisher.needs_full([each.share for each in sent])

    def send_all(self) -> Sent:
        share = self._publisher.full(self._version)
        return Sent(share.nbytes, share=share)

    def deliver(self, version: int, sent: Sequence[Sent], engines: Sequence[EngineAddress]) -> Delivered:
        published = self._publisher.finish(version, [each.share for each in sent])
        urls = [engine.url for engine in engines]
        if published.is_published and self._wrote is not None:
            self._wrote(version_name(version), urls)
        brought = self._bring(version if published.is_published else None, urls)
        self._paths = brought.paths
        self._prune(published)
        return Delivered(published.nbytes, published.model_bytes, brought.failed)

    def abandon(self, version: int) -> None:
        self._publisher.abandon(version)

    def load(self, engine: SGLangEngine, version: int) -> None:
        """Raises EngineError, with what to look for where the directory may be another host's."""
        path = self._paths[engine.url]
        try:
            engine.load_checkpoint(path, self._load_seconds, version)
        except EngineError as error:
            raise EngineError(
                f"{error}; it was told to load {path}, on its own host: an engine on a host without a trainer's "
                "manager needs `miles-mooncake materialize --follow` there",
                error.status,
            ) from error

    def close(self) -> None:
        self._publisher.close()

    def _prune(self, published: Published) -> None:
        """Only what lies before a version that is whole can go. Engines have theirs, whatever comes of this."""
        if not published.is_published or published.base is not None:
            return
        try:
            readers = {reader: report.version for reader, report in read_reports(self._storage).items()}
            self._publisher.prune(KEEP_VERSIONS, readers, MOST_BEHIND, self._budget)
        except StoreUnavailable as error:
            _log.warning(
                "older versions stay until version %s is followed by another whole one: %s", published.version, error
            )
