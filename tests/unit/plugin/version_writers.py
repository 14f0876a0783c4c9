"""Writers of versions, alive and dead, and what the tests of the version log do with them again and again."""

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from miles_plugin.version import VersionAuthority
from miles_plugin.version_owner import Owner
from mooncake_store.claim import Claimant

ROOT = Path(__file__).parents[3]
TRAINER = "run/trainer-0@here:1"


def elsewhere(run_id: str = "other", host: str = "elsewhere") -> Owner:
    """An owner that cannot be seen from here."""
    return Owner(run_id, Claimant(os.urandom(16).hex(), host, 17, f"another-boot/1/17-{random.random()}"))


def dead(run_id: str = "dead") -> Owner:
    """An owner on this host whose process is gone."""
    here = Claimant.here()
    return Owner(run_id, Claimant(here.token, here.host, here.pid, here.process + "0"))


def open_versions(directory: Path, run_id: str = "run", takeover: bool = False) -> VersionAuthority:
    return VersionAuthority(directory, Owner.here(run_id), takeover)


def update(versions: VersionAuthority, trainer: str = TRAINER) -> int:
    number = versions.allocate(trainer)
    versions.announce(number, trainer)
    versions.commit(number, trainer)
    return number


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def directory_in_memory() -> Path:
    """Processes die and race there as on a disk, and a thousand times in seconds."""
    return Path(tempfile.mkdtemp(prefix="versions-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
