"""Fixtures of the tests of policy versions and of published weights."""

import urllib.request
import uuid
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


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an object store that speaks S3 on this machine, with a bucket."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    yield url
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place in it, as users name it."""
    pytest.importorskip("obstore")
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{uuid.uuid4().hex}"
