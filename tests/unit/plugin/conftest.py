"""Fixtures of the tests of policy versions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_plugin import version
from miles_plugin.version import VersionAuthority
from tests.unit.plugin.version_writers import TRAINER, open_versions


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "ENDING_SECONDS", 0.0)
    monkeypatch.setattr(version, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(version, "_LOOK_SECONDS", 0.0)


@pytest.fixture
def versions(tmp_path: Path) -> Iterator[VersionAuthority]:
    opened = open_versions(tmp_path / "versions")
    opened.register_trainer(TRAINER)
    yield opened
    opened.close()
