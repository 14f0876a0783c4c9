"""Which engines can load a version, by what their hosts say of themselves; hosts that are late, gone, or damaged."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from miles_plugin.weight_transfer.disk_delta.hosts import EngineHosts
from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
from miles_plugin.weight_transfer.disk_delta.readers import ReaderReport, read_reports, write_report
from miles_plugin.weight_transfer.disk_delta.storage import DirectoryStorage, PublicationUnavailable
from mooncake_store.errors import ConfigError
from tests.delta_publisher import changed, write_checkpoint
from tests.unit.plugin.delta_readers import World, seen

HERE, THERE, FAR = "http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://10.0.0.3:30000"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def hosts(world: World, seconds: float = 0, late_seconds: float = 0) -> EngineHosts:
    return EngineHosts(DirectoryStorage(world.source), world.reader(), seconds, late_seconds)


def other_host(world: World, name: str = "other") -> Materializer:
    """A reader on another host, with a local directory of its own."""
    return Materializer(DirectoryStorage(world.source), world.root / name, world.base)


def address(url: str) -> str:
    return url.removeprefix("http://")


def test_engines_that_no_report_names_are_of_this_host(world: World) -> None:
    engines = hosts(world)
    assert engines.bring_to(None, [HERE]).paths == {HERE: str(world.local / "a")}
    world.publish(1)
    brought = engines.bring_to(1, [HERE, THERE])
    assert brought.paths == dict.fromkeys([HERE, THERE], str(world.local / "b"))
    assert (brought.failed, brought.notes, world.seen()) == ({}, [], 1)


def test_engines_of_another_host_load_from_its_own_directory(world: World) -> None:
    world.publish(1)
    other = other_host(world)
    other.bring_to()
    other.report("other", [address(THERE)])
    brought = hosts(world).bring_to(1, [HERE, THERE])
    assert brought.paths == {HERE: str(world.local / "a"), THERE: str(world.root / "other" / "a")}
    assert seen(world.root / "other", world.publisher) == 1


def test_a_host_without_engines_here_makes_no_checkpoint(world: World) -> None:
    world.publish(1)
    other = other_host(world)
    other.bring_to()
    other.report("other", [address(THERE)])
    assert hosts(world).bring_to(1, [THERE]).paths.keys() == {THERE}
    assert not world.local.exists()


def test_another_host_is_waited_for(world: World) -> None:
    other = other_host(world)
    other.bring_to()
    other.report("other", [address(THERE)])
    world.publish(1)

    def follow() -> None:
        other.bring_to()
        other.report("other", [address(THERE)])

    timer = threading.Timer(0.2, follow)
    timer.start()
    brought = hosts(world, seconds=30).bring_to(1, [THERE])
    timer.join()
    assert (brought.failed, list(brought.paths)) == ({}, [THERE])


@pytest.mark.parametrize("problem", ["", "the disk is full"])
def test_a_host_that_is_not_there_in_time_costs_only_its_own_engines(problem: str, world: World) -> None:
    world.publish(1)
    other = other_host(world)
    other.bring_to()
    other.report("other", [address(THERE), address(FAR)], problem)
    world.publish(2)
    brought = hosts(world, seconds=0.05).bring_to(2, [HERE, THERE, FAR])
    assert list(brought.paths) == [HERE]
    assert brought.failed.keys() == {THERE, FAR}
    assert brought.failed[THERE] == (
        f"its host has not got version 2 within 0.05 s: reader other has version 1; {problem or 'it is slow'}; see "
        "whether miles-mooncake materialize runs there"
    )


def test_who_was_late_is_given_less_time_until_it_is_there_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def attempts(seconds: float) -> list[object]:
        waited.append(seconds)
        return [object()]

    monkeypatch.setattr("miles_plugin.weight_transfer.disk_delta.hosts.attempts", attempts)
    engines, other = hosts(world, seconds=600, late_seconds=5), other_host(world)
    other.bring_to()
    other.report("other", [address(THERE)])
    for version in (1, 2, 3):
        world.publish(version)
        assert list(engines.bring_to(version, [HERE, THERE]).failed) == [THERE]
    assert waited == [600, 5, 5], "a host that is gone for good does not hold up every update"
    other.bring_to()
    other.report("other", [address(THERE)])
    assert not engines.bring_to(3, [HERE, THERE]).failed
    world.publish(4)
    engines.bring_to(4, [THERE])
    assert waited == [600, 5, 5, 5, 600]


def test_what_readers_start_from_is_not_a_version_0_that_was_published(world: World) -> None:
    """An engine that loaded the base for version 0 would serve other weights than it says."""
    other = other_host(world)
    other.bring_to()
    other.report("other", [address(THERE)])
    assert read_reports(DirectoryStorage(world.source))["other"].is_base
    assert hosts(world).bring_to(None, [THERE]).paths == {THERE: str(world.root / "other" / "a")}
    world.publisher.full(0, world.next(7))
    failed = hosts(world).bring_to(0, [THERE]).failed
    assert "reader other has what it started from" in failed[THERE]
    assert other.newest() == 0
    other.bring_to()
    other.report("other", [address(THERE)])
    assert hosts(world).bring_to(0, [THERE]).paths.keys() == {THERE}
    assert "has not got what readers start from" in hosts(world).bring_to(None, [THERE]).failed[THERE]


@pytest.mark.parametrize("version", [None, 1])
def test_a_host_that_starts_from_another_checkpoint_serves_only_what_was_published(
    version: int | None, world: World
) -> None:
    """Of what nobody has published no checksum tells that it is something else."""
    other = other_host(world)
    other.base = world.root / "other base"
    write_checkpoint(other.base, changed(world.publisher.versions[0], 5, 0.5))
    if version:
        world.publisher.full(1, world.next(1))
    other.bring_to()
    other.report("other", [address(THERE)])
    brought = hosts(world).bring_to(version, [HERE, THERE])
    assert set(brought.paths) == ({HERE, THERE} if version else {HERE})
    if not version:
        assert re.search(r"reader other started from .*the fingerprint \w+, the job's has \w+", brought.failed[THERE])


def test_a_version_that_cannot_be_made_here_fails_this_host_s_engines_only(world: World) -> None:
    world.publish(1)
    other = other_host(world)
    other.bring_to()
    other.report("other", [address(THERE)])
    for path in world.publisher.directory(1).glob("*.safetensors"):
        path.write_bytes(b"damaged")
    brought = hosts(world).bring_to(1, [HERE, THERE])
    assert list(brought.paths) == [THERE]
    assert "version 1 of the weights cannot be made" in brought.failed[HERE]


def test_what_was_got_around_is_noted(world: World) -> None:
    world.publish(1)
    engines = hosts(world)
    engines.bring_to(1, [HERE])
    world.publish(2)
    world.anchor(3)
    for path in world.publisher.directory(2).glob("*.safetensors"):
        path.write_bytes(b"damaged")
    brought = engines.bring_to(3, [HERE])
    assert (world.seen(), brought.failed) == (3, {})
    (world.local / "a.json").write_text("{")
    world.publish(4)
    assert engines.bring_to(4, [HERE]).paths
    world.publish(5)
    (world.local / "a.json").write_text("{")
    (world.local / "b.json").write_text("{")
    assert any("in doubt" in note for note in engines.bring_to(5, [HERE]).notes)
    assert world.seen() == 5


def test_a_place_that_fails_for_a_moment_is_asked_again(world: World) -> None:
    class Flaky(DirectoryStorage):
        """Its readers' second listing fails."""

        listings = 0

        def names(self, prefix: str = "") -> list[str]:
            self.listings += prefix == "readers/"
            if self.listings == 2:
                raise PublicationUnavailable("stale file handle")
            return super().names(prefix)

    world.publish(1)
    other = other_host(world)
    other.bring_to()
    other.report("other", [address(THERE)])
    flaky = Flaky(world.source)
    brought = EngineHosts(flaky, world.reader(), seconds=30).bring_to(1, [THERE])
    assert (list(brought.paths), flaky.listings) == ([THERE], 3)


@pytest.mark.parametrize("content", ["", "{", '{"version": "x"}', '{"version": "-00001"}', '{"version": 1}', "[]"])
def test_a_report_that_is_none_counts_for_nothing(content: str, world: World) -> None:
    storage = DirectoryStorage(world.source)
    storage.replace("readers/odd.json", content.encode())
    report = ReaderReport(3, "/local/a", ("10.0.0.9:30000",), "a problem", True, "0f")
    write_report(storage, "whole", report)
    assert read_reports(storage) == {"whole": report}


def test_a_report_of_another_program_needs_only_a_version(world: World) -> None:
    storage = DirectoryStorage(world.source)
    storage.replace("readers/x.json", json.dumps({"version": "000007", "at": 1.5, "more": []}).encode())
    assert read_reports(storage) == {"x": ReaderReport(7, "")}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a b", "a\n", "x" * 201])
def test_a_reader_s_name_is_a_file_s_name(name: str, world: World) -> None:
    with pytest.raises(ConfigError, match="reader_id="):
        write_report(DirectoryStorage(world.source), name, ReaderReport(1, ""))


def test_where_a_checkpoint_is_does_not_depend_on_who_asks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has another working directory."""
    monkeypatch.chdir(world.root)
    reader = Materializer(DirectoryStorage(world.source), Path("relative"), world.base)
    assert reader.bring_to().path == world.root / "relative" / "a"
    reader.report("me")
    assert read_reports(DirectoryStorage(world.source))["me"].path == str(world.root / "relative" / "a")
