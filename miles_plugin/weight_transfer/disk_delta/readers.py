"""What each host that reads versions says of itself: `readers/<id>.json` where they are published.

    {"version": "000012", "path": "/local/slot-a", "engines": ["10.0.0.3:30000"], "problem": "", "base": false,
     "fingerprint": "...", "at": "..."}

The publisher keeps what the slowest still needs, and learns when an engine on another host can load a version. `base`
says that a reader at version 0 has what readers start from, which is not a version 0 that was published later;
`fingerprint` tells that checkpoint from others. `at` is for people: clocks of hosts differ.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from miles_plugin.weight_transfer.disk_delta.format import READERS, parse_version_text, version_text
from miles_plugin.weight_transfer.disk_delta.storage import Storage
from mooncake_store.errors import ConfigError

_READER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class ReaderReport:
    """One reader. path: where engines find `version`. engines: host:port of each. problem: why it is not further.
    is_base: it has what readers start from, and nothing that was published. fingerprint: of that checkpoint; "" when it
    does not say."""

    version: int
    path: str
    engines: tuple[str, ...] = ()
    problem: str = ""
    is_base: bool = False
    fingerprint: str = ""


class _Written(msgspec.Struct):
    version: str
    path: str = ""
    engines: tuple[str, ...] = ()
    problem: str = ""
    base: bool = False
    fingerprint: str = ""
    at: Any = ""


def check_reader_id(reader_id: str) -> None:
    """Raise ConfigError unless a reader may be called so."""
    if not _READER.fullmatch(reader_id):
        raise ConfigError(f"reader_id={reader_id!r}: allowed are up to 200 letters, digits, '.', '-' and '_'")


def write_report(storage: Storage, reader_id: str, report: ReaderReport) -> None:
    """Say how far a reader is; raises ConfigError for its name, PublicationUnavailable."""
    check_reader_id(reader_id)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    version = version_text(report.version)
    written = _Written(version, report.path, report.engines, report.problem, report.is_base, report.fingerprint, at)
    storage.replace(f"{READERS}/{reader_id}.json", msgspec.json.encode(written))


def read_reports(storage: Storage) -> dict[str, ReaderReport]:
    """By reader. A report that is none is left out: its reader counts for nothing. Raises PublicationUnavailable."""
    reports: dict[str, ReaderReport] = {}
    for name in storage.names(f"{READERS}/"):
        try:
            written = msgspec.json.decode(storage.read(name), type=_Written)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        version = parse_version_text(written.version)
        if version is not None:
            reader = name.removeprefix(f"{READERS}/").removesuffix(".json")
            reports[reader] = ReaderReport(
                version, written.path, written.engines, written.problem, written.base, written.fingerprint
            )
    return reports
