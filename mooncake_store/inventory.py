"""What a store holds: the runs and what each has put, and the memory that is lent. For people, not for the data path.

Mooncake lists keys and segments only on its master's metrics port; everything else is asked of the master itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from typing import NamedTuple

from mooncake_store.addresses import fetch
from mooncake_store.claim import Claimant, living, owner_of
from mooncake_store.client import MooncakeClient
from mooncake_store.errors import ConfigError, StoreUnavailable
from mooncake_store.owners import Owners
from mooncake_store.records import Records
from mooncake_store.segment import SegmentRecord

METRICS_PORT = 9003  # mooncake_master's default
_KEY = re.compile(r"run/(?P<run>[^/]+)/(?:b/(?P<batch>[^/]+)/)?")
_USE = re.compile(r"Used\(bytes\)\s*:\s*(?P<used>\d+)\s+Capacity\(bytes\)\s*:\s*(?P<size>\d+)")
_PER_CALL = 1000  # keys in one question to the master


@dataclass(frozen=True, slots=True)
class Run:
    """One run that has something in the store.

    Attributes:
        run_id: as in its keys.
        alive: whether its heartbeat changed while it was watched.
        owner: the process that claims it; None when it was given up.
        batches: how many it has put that were not removed.
        nbytes: of all its objects, records and every copy included.
    """

    run_id: str
    alive: bool
    owner: Claimant | None
    batches: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Lent:
    """One segment.

    Attributes:
        name: what Mooncake calls it, "host:port".
        used, size: in bytes.
        holder: who lends it; None for memory that no segment holder lends.
    """

    name: str
    used: int
    size: int
    holder: SegmentRecord | None


class Metrics:
    """The HTTP endpoints of a master.

    Args:
        url: "http://host:port".
        source: what the user changes to name another, for messages.
    """

    def __init__(self, url: str, source: str = "metrics_url") -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{source} = {url!r}: allowed: the http or https URL of a mooncake_master's metrics port")
        self._url, self._source = url.rstrip("/"), source

    def list_keys(self) -> list[str]:
        """Keys of all objects, also of those that are still being written."""
        return self._get("/get_all_keys").split()

    def segments(self) -> list[str]:
        """Names of all segments."""
        return self._get("/get_all_segments").split()

    def use_of(self, segment: str) -> tuple[int, int]:
        """Bytes used and lent of a segment; (0, 0) for one that has gone meanwhile."""
        try:
            found = _USE.search(self._get(f"/query_segment?segment={segment}"))
        except StoreUnavailable:
            if segment in self.segments():
                raise
            return 0, 0
        return (int(found["used"]), int(found["size"])) if found else (0, 0)

    def _get(self, path: str) -> str:
        # Mooncake does not decode %-escapes, and nothing that we name needs them.
        try:
            return fetch(self._url + path, timeout=10.0).decode(errors="replace")
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise StoreUnavailable(
                f"the metrics port of the master does not answer at {self._url}{path} ({reason}); it lists what is in "
                f"the store: name it with {self._source} (mooncake_master has it at --metrics_port, {METRICS_PORT} by "
                f"default)"
            ) from error


def runs(client: MooncakeClient, records: Records, metrics: Metrics) -> list[Run]:
    """The runs that have something in the store, by name. Takes a few seconds when one of them is dead.

    Raises:
        StoreUnavailable: the master or its metrics port does not answer.
        ConfigError: the metrics port is another master's.
    """
    objects = _objects(client, metrics.list_keys())
    by_run: dict[str, list[_Object]] = {}
    for item in objects:
        by_run.setdefault(item.run_id, []).append(item)
    alive = living(records, by_run)
    return [
        Run(
            run_id,
            run_id in alive,
            owner_of(records, run_id),
            len({item.batch for item in of_run} - {None}),
            sum(item.nbytes for item in of_run),
        )
        for run_id, of_run in sorted(by_run.items())
    ]


def run_ids(metrics: Metrics) -> list[str]:
    """Names of the runs that have something in the store; StoreUnavailable when the metrics port does not answer."""
    return sorted({found["run"] for key in metrics.list_keys() if (found := _KEY.match(key))})


def lent(client: MooncakeClient, records: Records, metrics: Metrics) -> list[Lent]:
    """All memory that is lent, by name; StoreUnavailable when the master or its metrics port does not answer."""
    holders = {record.name: record for record in Owners(client, records, share_memory=False).refresh()}
    return [Lent(name, *metrics.use_of(name), holders.get(name)) for name in sorted(metrics.segments())]


class _Object(NamedTuple):
    run_id: str
    batch: str | None
    nbytes: int


def _objects(client: MooncakeClient, keys: Sequence[str]) -> list[_Object]:
    found: list[_Object] = []
    known = 0
    remaining = iter(keys)
    while some := list(islice(remaining, _PER_CALL)):
        for key, location in zip(some, client.locate(some), strict=True):
            known += location is not None
            if match := _KEY.match(key):
                found.append(_Object(match["run"], match["batch"], location.nbytes if location else 0))
    if keys and not known:
        raise ConfigError(
            f"the metrics port lists {len(keys)} objects of which this master knows none: it is another master's; name "
            f"the one that belongs to master_server_address"
        )
    return found
