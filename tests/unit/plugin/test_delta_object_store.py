"""An object store's URL, as a user gives it, does what a directory does; by a server on this machine that speaks S3."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin import cli  # noqa: E402
from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.weight_transfer.disk_delta import opened, storage  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.materialize import Materializer  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.prune import prune, published_versions  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.readers import read_reports  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.storage import PublicationUnavailable, open_storage  # noqa: E402
from mooncake_store.errors import ConfigError  # noqa: E402
from tests.delta_reader import read_checkpoint, rebuild  # noqa: E402
from tests.unit.plugin.delta_training import Ranks, held, make_base, some_weights, step  # noqa: E402


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_version_arrives_and_old_ones_go(encoding: str, s3: str, tmp_path: Path) -> None:
    weights = some_weights()
    base = make_base(tmp_path / "base", weights)
    ranks = Ranks([open_storage(s3) for _ in range(2)], base, encoding, anchor_every=3)
    place, reader = open_storage(s3, make=False), Materializer(open_storage(s3), tmp_path / "local", base)
    assert not ranks.publish(0, weights).is_published
    assert reader.bring_to().version == 0
    for version in range(1, 6):
        step(weights, version)
        ranks.publish(version, weights)
        assert rebuild(lambda name: bytes(place.read(name)), base, version) == held(weights)
        assert reader.bring_to().version == version
        assert read_checkpoint(tmp_path / "local" / "current") == held(weights)
    reader.report("host")
    prune(place, 1, {reader: report.version for reader, report in read_reports(place).items()}, 200)
    ranks.close()
    assert published_versions(place.names()) == [3, 4, 5]
    assert bytes(place.read("latest")) == b"000005\n"
    assert Materializer(place, tmp_path / "late", base).bring_to().version == 5
    assert read_checkpoint(tmp_path / "late" / "current") == held(weights)


def test_the_command_brings_what_a_job_s_settings_publish_there(
    s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = some_weights()
    base = make_base(tmp_path / "base", weights)
    settings = load_config(["--update-weight-transfer-mode", "disk-delta", "--update-weight-disk-dir", s3])
    opened.check_settings(settings)
    assert open_storage(s3).names() == []
    publisher = opened.open_publisher(settings, tmp_path, base, 0, 1)
    publisher.finish(0, [publisher.encode(0, weights.items())])
    step(weights, 1)
    publisher.finish(1, [publisher.encode(1, weights.items())])
    publisher.close()
    where = ["--source", s3, "--base", str(base), "--local", str(tmp_path / "local"), "--reader", "host"]
    assert cli.main(["materialize", *where]) == 0
    assert capsys.readouterr().out.startswith("version 1 in ")
    assert read_checkpoint(tmp_path / "local" / "current") == held(weights)
    assert read_reports(open_storage(s3))["host"].version == 1


def test_what_cannot_be_published_in_is_said_at_the_start(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = ["--update-weight-transfer-mode", "disk-delta", "--update-weight-disk-dir"]
    with pytest.raises(PublicationUnavailable, match=r"s3://no-such-bucket/run, "):
        opened.check_settings(load_config([*mode, "s3://no-such-bucket/run"]))

    def replaces(place: storage.Storage) -> None:
        raise ConfigError("conditional writes: it has none")

    monkeypatch.setattr(opened, "check_publishable", replaces)
    with pytest.raises(ConfigError, match="conditional writes"):
        opened.check_settings(load_config([*mode, s3]))
