"""The fully asynchronous job: against which number its groups are measured, how much waits, what is said of a failure,
and what a run that goes on after a killed one learns from."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.engines.fleet import EngineAddress  # noqa: E402
from miles_plugin.engines.sglang import EngineError, SGLangEngine  # noqa: E402
from miles_plugin.fully_async.journal import Journal, JournalUnavailable  # noqa: E402
from miles_plugin.rollout.manager import RolloutManager  # noqa: E402
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402
from miles_plugin.version import VersionFenced  # noqa: E402
from miles_plugin.weight_transfer.ranks import Ranks  # noqa: E402
from miles_plugin.weight_transfer.transfer import Updater  # noqa: E402
from mooncake_store.errors import ObjectLost  # noqa: E402
from tests.unit.plugin.fully_async_groups import let_run  # noqa: E402
from tests.unit.plugin.fully_async_job import (  # noqa: E402
    BATCH,
    CAPACITY,
    CONCURRENT,
    SIZE,
    URLS,
    Life,
    Saved,
    World,
    in_thread,
    make_world,
    until,
)
from tests.unit.plugin.test_weight_update import WEIGHTS, FakeEngine, FakeTransport  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(build_model(32, 1, seed=0), build_tokenizer(), directory)
    return directory


@pytest.fixture
def world(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, checkpoint, monkeypatch)


# The window between the manager's knowing a number and the first engine's resuming with it


class Managed:
    """The manager as trainer rank 0 calls it."""

    def __init__(self, manager: RolloutManager) -> None:
        self._manager = manager

    def allocate(self) -> int:
        return self._manager.allocate_version("trainer")

    def verify(self, version: int, /) -> None:
        self._manager.verify_version(version, "trainer")

    def announce(self, version: int, /) -> None:
        self._manager.announce_version(version, "trainer")

    def commit(self, version: int, confirmed: Any, left: Any, /) -> None:
        self._manager.commit_version(version, "trainer", confirmed, left)


class HeldEngine(FakeEngine):
    """Resumes when it is let."""

    def __init__(self, url: str) -> None:
        super().__init__(url, [])
        self.asked, self.go_on = threading.Event(), threading.Event()

    def resume(self) -> None:
        self.asked.set()
        assert self.go_on.wait(60)


class HeldUpdate:
    """An update of both engines by the job's own steps, up to where the first one would resume."""

    def __init__(self, life: Life) -> None:
        self._engines = {url: HeldEngine(url) for url in URLS}
        clients = cast(dict[str, SGLangEngine], dict(self._engines))
        updater = Updater(FakeTransport([]), Ranks(), Managed(life.manager), "retract", clients=clients)
        self._running = in_thread(lambda: updater.update(WEIGHTS.items, [EngineAddress(url) for url in URLS]))
        for engine in self._engines.values():
            assert engine.asked.wait(60)

    def resume(self) -> None:
        assert not self._running.is_done()
        for engine in self._engines.values():
            engine.go_on.set()
        self._running.join()


@pytest.mark.parametrize("bound", [0, 1])
def test_what_is_drained_as_engines_resume_is_measured_against_the_number_they_resume_with(
    bound: int, world: World
) -> None:
    """A rollout waits since before the update; groups of the old weights come while no engine has resumed yet."""
    with world.life(max_weight_staleness=bound) as life:
        world.engines.hold()
        rollout = in_thread(life.take)
        until(lambda: world.engines.in_flight == CONCURRENT)
        update = HeldUpdate(life)
        assert life.manager.current_version() == 1
        world.engines.hold()  # but those in flight, which version 0 answers
        drained = CONCURRENT // SIZE
        until(lambda: life.counted("stale_groups_filtered" if bound == 0 else "consumed_groups") == drained)
        update.resume()
        world.engines.version, world.engines.answered = "1", None
        rollout.join()
        assert life.last is not None
        assert life.metric("stale_groups_filtered") == (drained if bound == 0 else 0)
        assert life.metric("consumed_max_staleness") == bound
        assert life.metric("consumed_staleness_1") == (0 if bound == 0 else drained)
        assert life.last.weight_versions == (["1"] if bound == 0 else ["0", "1"])


@pytest.mark.parametrize("bound", [0, 1])
def test_what_lay_there_is_measured_against_the_number_that_engines_are_about_to_resume_with(
    bound: int, world: World
) -> None:
    with world.life(max_weight_staleness=bound) as life:
        life.take()
        life.fill()
        there = len(life.manager.state()["unfinished"])
        world.engines.hold()
        update = HeldUpdate(life)
        rollout = in_thread(life.take)
        if bound == 0:
            until(lambda: life.counted("stale_groups_filtered") == there)
            assert not rollout.is_done(), "all of it is generated again"
        else:
            rollout.join()
        update.resume()
        world.engines.version, world.engines.answered = "1", None
        rollout.join()
        assert life.metric("stale_groups_filtered") == (there if bound == 0 else 0)
        assert life.metric("consumed_staleness_1") == (0 if bound == 0 else BATCH)


# A number that steps back


@pytest.mark.parametrize(
    ("made_by", "counted"), [("3", "stale_groups_filtered"), ("6", "foreign_groups_filtered"), ("4", "")]
)
def test_after_a_step_back_nothing_looks_fresher_than_it_is(made_by: str, counted: str, world: World) -> None:
    """The manager knew 5, and hears 3 from whoever took over; groups of before and after come."""
    with world.life(max_weight_staleness=1) as life:
        world.engines.hold()
        life.manager.continue_versions(4)
        assert life.manager.allocate_version("trainer") == 5
        life.manager.announce_version(5, "trainer")
        rollout = in_thread(life.take)
        until(lambda: life.manager.waiting() is not None and world.engines.in_flight == CONCURRENT)
        with pytest.raises(VersionFenced):
            life.manager.announce_version(3, "trainer")
        life.async_rollouts.announce(3)  # past the owner of the versions
        world.engines.version = made_by
        world.engines.hold()
        until(lambda: life.counted(counted or "consumed_groups") == CONCURRENT // SIZE)
        world.engines.version, world.engines.answered = "5", None
        rollout.join()
        kept_out = CONCURRENT // SIZE if counted else 0
        filtered = {name: life.metric(name) for name in ("stale_groups_filtered", "foreign_groups_filtered")}
        assert filtered == {name: kept_out if name == counted else 0 for name in filtered}
        assert life.metric("version_steps_back") == 1
        assert life.metric("consumed_staleness_1") == (0 if counted else CONCURRENT // SIZE)
        staleness = [value for name, value in life.last.buffer.items() if "staleness" in name]  # type: ignore[union-attr]
        assert min(staleness) >= 0


# Too much, and nothing


def test_a_full_buffer_stops_the_generation_until_a_rollout_takes_groups(world: World) -> None:
    with world.life() as life:
        waiting: list[int] = []
        life.take()
        world.engines.at_request = lambda: waiting.append(len(life.async_rollouts._producer.position()[1]))
        for _ in range(2):
            life.fill()
            asked = len(world.engines.asked)
            life.manager._sampling.loop.run(let_run(500))
            assert len(world.engines.asked) == asked, "nothing more is asked for"
            assert life.async_rollouts.metrics()["rollout/fully_async/spilled_groups"] == CAPACITY - BATCH
            life.take()
        life.fill()
        assert len(world.engines.asked) > asked, "and goes on"
        assert world.engines.most <= CONCURRENT
        assert max(waiting) <= CAPACITY + CONCURRENT, "those in flight have their place, or wait for it"


def test_engines_that_are_gone_fail_the_rollout_at_once(world: World) -> None:
    with world.life() as life:
        life.take()
        life.fill()
        world.engines.hold()
        for _ in range(len(life.manager.state()["unfinished"]) // BATCH):
            life.take()
        rollout = in_thread(life.take)
        until(lambda: life.manager.waiting() is not None)
        world.engines.gone = True
        with pytest.raises(EngineError, match="connection refused"):
            rollout.join()
        with pytest.raises(EngineError, match="connection refused"):
            life.take()


# Going on after the end of a process


def goes_on(world: World) -> Life:
    """A run from the newest checkpoint that learns from all that is unfinished there."""
    with world.life(resume=world.saved[-1]) as life:
        learn_from_all(life, world.saved[-1])
    return life


def learn_from_all(life: Life, before: Saved) -> None:
    for _ in range(10):
        life.step()
        if {*before.state["unfinished"]} <= {*life.learned}:
            break
    else:
        pytest.fail(f"lost: {sorted({*before.state['unfinished']} - {*life.learned})}")
    life.world.exactly_once(life.save())


def taken(life: Life) -> None:
    life.take()


def trained_on(life: Life) -> None:
    life.step()


def saved_and_not_noted(life: Life) -> None:
    life.step()
    life.save(noted=False)


def saved(life: Life) -> None:
    life.step()
    life.save()


def in_flight(life: Life) -> None:
    life.fill()
    held = len(life.engines.asked)
    life.engines.answered = held + 1
    life.take()
    until(lambda: life.engines.in_flight == CONCURRENT - 1 and len(life.engines.asked) == held + CONCURRENT)


@pytest.mark.parametrize("end", [taken, trained_on, saved_and_not_noted, saved, Life.fill, in_flight])
def test_wherever_a_run_is_killed_the_next_one_learns_from_every_group_once(
    end: Callable[[Life], None], world: World
) -> None:
    with world.life() as life:
        life.step()
        life.save()
        life.fill()
        life.step()
        end(life)
        world.engines.answered = None
        life.kill()
    goes_on(world)


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_again_and_again_learns_from_every_group_once(seed: int, world: World) -> None:
    chance = random.Random(seed)
    with world.life() as life:
        world.exactly_once(life.save())
    for _ in range(5):
        with world.life(resume=world.saved[-1]) as life:
            for _ in range(chance.randrange(4)):
                life.step()
                if chance.random() < 0.5:
                    world.exactly_once(life.save(chance.random() < 0.5))
                if chance.random() < 0.5:
                    life.fill()
            life.kill()
        if chance.random() < 0.3:
            world.carrier.objects.clear()
    goes_on(world)


def killed_with_a_full_buffer(world: World, *undone: Callable[[Life], object]) -> list[int]:
    """Positions of the items of which groups lie in the store when a run is killed, after a checkpoint."""
    with world.life() as life:
        life.step()
        life.save()
        for each in undone:
            each(life)
        life.fill()
        stored = life.stored()
        life.kill()
    assert len(stored) == len(world.carrier.objects) == CAPACITY - BATCH
    world.engines.asked.clear()
    return stored


def test_what_lies_in_a_store_that_lives_is_not_generated_again(world: World) -> None:
    stored = killed_with_a_full_buffer(world)
    life = goes_on(world)
    assert {*stored} <= {*life.learned}
    assert not {*stored} & {*world.engines.asked}


def test_what_was_removed_from_the_store_is_generated_again(world: World) -> None:
    stored = killed_with_a_full_buffer(world)
    world.carrier.objects.clear()
    goes_on(world)
    assert {*stored} <= {*world.engines.asked}


def test_where_the_first_group_is_lost_with_its_memory_the_others_are_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read takes a third of a minute to say so."""
    stored, lost, get = killed_with_a_full_buffer(world), {*world.carrier.objects}, world.carrier.get
    asked: list[str] = []

    def without(ref: Any, *more: Any) -> Any:
        asked.append(ref.key)
        if ref.key in lost:
            raise ObjectLost(f"the memory of {ref.key!r} is gone")
        return get(ref, *more)

    monkeypatch.setattr(world.carrier, "get", without)
    goes_on(world)
    assert {*stored} <= {*world.engines.asked}
    assert len(lost.intersection(asked)) == sum(key in lost for key in asked) == 1


def test_a_store_that_begins_with_the_job_is_not_asked_for_what_was_before(world: World) -> None:
    stored = killed_with_a_full_buffer(world)
    with world.life(resume=world.saved[-1], master="127.0.0.1:1") as life:
        learn_from_all(life, world.saved[-1])
    assert {*stored} <= {*world.engines.asked}, "though it would have had it"


def test_what_weights_made_that_are_undone_is_generated_again(world: World) -> None:
    """Their numbers are below the next one, though the model that goes on never had them."""

    def twice(life: Life) -> None:
        for _ in range(2 * CAPACITY // BATCH):
            life.step()

    killed_with_a_full_buffer(world, twice)
    undone, left = int(world.engines.version), {*world.carrier.objects}
    life = goes_on(world)
    assert min(map(int, life.versions)) > undone
    assert not left & {*world.carrier.objects}, "removed from the store"


def test_a_run_that_saves_elsewhere_leaves_the_first_one_its_samples(world: World) -> None:
    stored = killed_with_a_full_buffer(world)
    left = list(world.carrier.objects)
    with world.life(resume=world.saved[-1], save="elsewhere") as life:
        learn_from_all(life, world.saved[-1])
    assert {*stored} <= {*world.engines.asked}
    assert {*left} == {*world.carrier.objects}


def test_what_another_run_left_in_the_new_directory_is_not_taken_up(world: World) -> None:
    """Its versions are not those of the checkpoint, though they have the same numbers."""
    stored = killed_with_a_full_buffer(world)
    (world.directory / "elsewhere").mkdir()
    world.journal.rename(world.directory / "elsewhere" / world.journal.name)
    with world.life(resume=world.saved[-1], save="elsewhere") as life:
        learn_from_all(life, world.saved[-1])
    assert {*stored} <= {*world.engines.asked}


def test_an_older_checkpoint_learns_again_from_what_came_after_it(world: World) -> None:
    with world.life() as life:
        for _ in range(3):
            life.step()
            life.save()
        life.kill()
    del world.saved[1:]
    goes_on(world)


def test_a_checkpoint_without_samples_goes_on_as_well(world: World) -> None:
    """Of a synchronous job, or of a release that named no version."""
    with world.life() as life:
        life.step()
        life.save()
        life.fill()
        life.kill()
    before, left = world.saved[-1], {*world.carrier.objects}
    del before.state["version"], before.state["unfinished"]
    with world.life(resume=before) as life:
        assert min(life.step()) >= before.state["cursor"]
        assert not left & {*world.carrier.objects}


def test_the_next_arm_begins_anew(world: World) -> None:
    with world.life() as life:
        for _ in range(2):
            life.step()
        life.save()
        life.fill()
        life.manager.begin(True)
        assert not world.carrier.objects
        assert {0, 1} <= {*life.take(), *life.take()}
        assert life.metric("duplicate_groups_filtered") == 0


def test_with_a_buffer_of_the_user_s_nothing_is_stored_or_noted_and_all_is_generated_again(world: World) -> None:
    custom = {"custom_async_data_buffer_path": "tests.unit.plugin.test_fully_async_custom.NewestFirst"}
    with world.life(**custom) as life:
        life.step()
        life.save()
        life.take()
        life.kill()
    assert not world.carrier.objects
    assert not world.journal.exists()
    world.engines.asked.clear()
    goes_on(world)
    assert {*world.saved[0].state["unfinished"]} <= {*world.engines.asked}


def test_a_journal_that_cannot_be_written_costs_no_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: Journal) -> list[int]:
        raise JournalUnavailable("no space left on device")

    with world.life() as life:
        life.step()
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "flush", full)
            life.save()
            assert "no space left on device" in caplog.text
        life.kill()
    goes_on(world)


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_ends_in_order_leaves_nothing_in_the_store(saves: bool, world: World) -> None:
    with world.life(save="saved" if saves else None) as life:
        life.step()
        until(lambda: len(world.carrier.objects) > 0)
    assert not world.carrier.objects
    assert world.journal.exists() == saves
