"""Weight updates while engines fail, in every step and in every way, by broadcast, peer to peer and disk-delta.

The engines are stand-ins that fail when told to, with real process groups and real registered memory. Every element of
an update's weights tells its version, so that an engine which serves a mixture of two shows it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from miles_plugin.engines.fleet import EngineAddress, External, Fleet
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.engines.stand_in.process import StandIn
from miles_plugin.weight_transfer.transfer import Bounds, UpdateFailed, Updater, WeightUpdate
from tests.integration.plugin.conftest import make_checkpoint
from tests.weight_updates import Versions, broadcasting, constant, expecting, publishing, writing

pytestmark = pytest.mark.integration
BOUNDS = Bounds(answer=3, call=3, join=3, bucket=3)
PROMPT, PARAMS = [[1, 2, 3]], {"max_new_tokens": 2}
STEPS = {
    "/model_info": "prepare",
    "/pause_generation": "pause",
    "/flush_cache": "flush",
    "/begin_weight_update": "begin",
    "/update_weight_version": "stamp",
    "/end_weight_update": "end",
    "/update_weights_from_disk": "load",
    "/weights_checker": "verify",
    "/continue_generation": "resume",
}
MODES = {
    "broadcast": {"/init_weights_update_group": "prepare", "/update_weights_from_distributed": "transfer"},
    "p2p": {"/remote_instance_transfer_engine_info": "prepare"},
    "disk-delta": dict[str, str](),
}
# How weights come in, and which steps there are for it.
WRITTEN = ("/begin_weight_update", "/update_weight_version", "/end_weight_update")
LOADED = ("/update_weights_from_disk",)


def steps(mode: str) -> dict[str, str]:
    others = WRITTEN if mode == "disk-delta" else LOADED
    return {path: phase for path, phase in STEPS.items() if path not in others}


# Of what takes long, disk-delta is in the long tests.
MOSTLY = [pytest.param(mode, marks=pytest.mark.slow if mode == "disk-delta" else ()) for mode in MODES]
CASES = [
    (mode, path, phase, do)
    for mode, own in MODES.items()
    for path, phase in (steps(mode) | own).items()
    for do in ("status", "drop", "die", "hang", "drip", "stop")
]
# In every `make test`: each step once, and each way to fail.
QUICK = {
    ("broadcast", "/update_weights_from_distributed", "die"),
    ("broadcast", "/init_weights_update_group", "status"),
    ("broadcast", "/end_weight_update", "drop"),
    ("p2p", "/continue_generation", "status"),
    ("p2p", "/pause_generation", "die"),
    ("p2p", "/weights_checker", "stop"),
    ("disk-delta", "/update_weights_from_disk", "drip"),
}


def value_of(version: int) -> float:
    """What every element is in an update: another value than in the update before, and one that bfloat16 has."""
    return float(version % 251)


class Engines:
    """Two stand-ins that come back at the same address when they died, and the versions of their updates."""

    def __init__(self, checkpoint: Path, logs: Path) -> None:
        self._checkpoint, self._logs = checkpoint, logs
        self.standing = [self._start(index, 0) for index in range(2)]
        self.versions = Versions()

    def _start(self, index: int, port: int) -> StandIn:
        return StandIn(
            self._checkpoint, self._logs / f"{index}.log", port=port, transfer_engine=True, group_timeout=BOUNDS.join
        )

    def heal(self) -> None:
        """Nobody is told to fail any more, and whoever died or stopped is back."""
        for index, each in enumerate(self.standing):
            if self.is_alive(index):
                os.kill(each.pid, signal.SIGCONT)
                try:
                    each.clear_faults()
                    continue
                except httpx.ConnectError:  # it has just died
                    pass
            each.stop()
            self.standing[index] = self._start(index, int(each.url.rpartition(":")[2]))

    def is_alive(self, index: int) -> bool:
        """Whether its process is there, its relay's word for it awaited where it is not."""
        try:
            os.kill(self.standing[index].pid, 0)
        except ProcessLookupError:
            return False
        return self.standing[index].process.exit_status() is None

    def kill(self, index: int) -> None:
        os.kill(self.standing[index].pid, signal.SIGKILL)
        while self.is_alive(index):
            time.sleep(0.02)

    def addresses(self, life: int = 0) -> list[EngineAddress]:
        return [EngineAddress(each.url, 1, life) for each in self.standing]

    def update(self, updater: Updater, life: int = 0) -> WeightUpdate:
        version = self.versions.next
        update = updater.update(lambda: constant(self._checkpoint, value_of(version)), self.addresses(life))
        assert update is not None
        return update

    def served(self, index: int) -> tuple[str, list[float]]:
        """The version that an engine says made a response, and the values in the weights that did."""
        client = SGLangEngine(self.standing[index].url, timeout=10)
        try:
            meta = client.generate(PROMPT, PARAMS)[0]["meta_info"]
        finally:
            client.close()
        assert len(meta["weight_versions"]) == 1
        return meta["weight_versions"][0]["version"], meta["policy"]

    def stop(self) -> None:
        for index, each in enumerate(self.standing):
            if self.is_alive(index):
                os.kill(each.pid, signal.SIGCONT)
            each.stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=0)


@pytest.fixture(scope="module")
def started(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    engines = Engines(checkpoint, tmp_path_factory.mktemp("stand-ins"))
    yield engines
    engines.stop()
    torch.distributed.destroy_process_group()


@pytest.fixture
def engines(started: Engines) -> Iterator[Engines]:
    started.heal()
    yield started
    started.heal()


@pytest.fixture
def open_updater(checkpoint: Path, engines: Engines, tmp_path: Path) -> Iterator[Callable[..., Updater]]:
    opened: list[Updater] = []

    def make(mode: str, **more: Any) -> Updater:
        more = {"bounds": BOUNDS, "prove": expecting(checkpoint)} | more
        if mode == "broadcast":
            opened.append(broadcasting(engines.versions, **more))
        elif mode == "disk-delta":
            opened.append(publishing(engines.versions, checkpoint, tmp_path, **more))
        else:
            opened.append(writing(engines.versions, checkpoint, **more))
        return opened[-1]

    yield make
    for updater in opened:
        updater.close()


@pytest.mark.parametrize(
    ("mode", "path", "phase", "do"),
    [pytest.param(*case, marks=() if (case[0], case[1], case[3]) in QUICK else pytest.mark.slow) for case in CASES],
)
def test_an_engine_that_fails_leaves_and_comes_back_with_the_next_update(
    mode: str, path: str, phase: str, do: str, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    updater = open_updater(mode)
    if phase != "prepare":
        assert len(engines.update(updater).confirmed) == 2
    bad, good = engines.standing
    bad.fault(path, do, times=1 if do in ("die", "stop") else 9)  # an engine is asked again to join, alone
    update = engines.update(updater)
    version = str(update.version)
    assert update.confirmed == (good.url,)
    ((url, failed_in, reason),) = [(left.url, left.phase, left.reason) for left in update.left]
    assert (url, failed_in) == (bad.url, phase), reason
    assert engines.served(1) == (version, [value_of(update.version)])
    assert engines.versions.events[-1] == ("commit", update.version, (good.url,), (bad.url,))
    engines.heal()
    if bad is engines.standing[0]:  # it did not die: what it may serve in the meantime is one policy
        assert_serves_no_mixture(bad)
    update = engines.update(updater, life=1)
    if do == "stop" and phase == "prepare" and update.left:
        # It was stopped while it joined, goes on with that for a while, and may be late for the next.
        update = engines.update(updater, life=2)
    assert not update.left
    assert [engines.served(index) for index in (0, 1)] == [(str(update.version), [value_of(update.version)])] * 2


def assert_serves_no_mixture(engine: StandIn) -> None:
    """It is paused, or its weights are of one update."""
    client = SGLangEngine(engine.url, timeout=1)
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.extend(client.generate(PROMPT, PARAMS))
        except EngineError:
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(1)
    policies = [answer["meta_info"]["policy"] for answer in answers]
    assert all(policy is None or len(policy) == 1 for policy in policies), "None: those that it was started with"


@pytest.mark.parametrize("join", [2, pytest.param(5, marks=pytest.mark.slow, id="the good one gives up, too")])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_engine_that_joins_alone_but_not_with_the_other_is_left_out(
    bad: int, join: float, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    """Both wait when they are to join together; the one that says no first is to blame, wherever it stands."""
    updater = open_updater("broadcast", bounds=replace(BOUNDS, join=join))
    culprit, good = engines.standing[bad], engines.standing[1 - bad]
    for after in (1, 3):  # of its calls the second one is to join alone
        culprit.fault("/init_weights_update_group", "status", after=after)
    update = engines.update(updater)
    assert update.confirmed == (good.url,)
    ((url, phase, reason),) = [(left.url, left.phase, left.reason) for left in update.left]
    assert (url, phase) == (culprit.url, "prepare")
    assert f"joins a process group alone; with {good.url}: " in reason
    assert f"{culprit.url}/init_weights_update_group: HTTP 500" in reason
    assert engines.served(1 - bad) == (str(update.version), [value_of(update.version)])
    engines.heal()
    assert not engines.update(updater, life=1).left


@pytest.mark.parametrize(
    "when", ["during", pytest.param("before", marks=pytest.mark.slow), pytest.param("after", marks=pytest.mark.slow)]
)
def test_the_others_get_everything_again_when_one_dies_in_the_middle_of_a_broadcast(
    when: str, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    updater = open_updater("broadcast")
    engines.update(updater)
    engines.standing[0].fault("/update_weights_from_distributed", "die", after=2, when=when)
    update = engines.update(updater)
    assert [left.phase for left in update.left] == ["transfer"]
    assert engines.served(1) == (str(update.version), [value_of(update.version)])
    assert update.proven > 0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_the_others_load_when_one_dies_while_it_loads(
    when: str, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    updater = open_updater("disk-delta")
    engines.update(updater)
    engines.standing[0].fault("/update_weights_from_disk", "die", when=when)
    update = engines.update(updater)
    assert [left.phase for left in update.left] == ["load"]
    assert engines.served(1) == (str(update.version), [value_of(update.version)])
    assert update.proven > 0


@pytest.mark.parametrize("mode", MOSTLY)
def test_where_no_engine_is_left_the_update_fails_and_its_number_is_a_hole(
    mode: str, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    updater = open_updater(mode)
    before = engines.update(updater).version
    for each in engines.standing:
        each.fault((LOADED if mode == "disk-delta" else WRITTEN)[-1], "status")
    with pytest.raises(UpdateFailed) as caught:
        engines.update(updater)
    assert all(each.url in str(caught.value) for each in engines.standing)
    assert engines.versions.events[-1] == ("allocate", before + 1), "never announced"
    engines.heal()
    for each in engines.standing:
        assert_serves_no_mixture(each)
    update = engines.update(updater, life=1)
    assert (update.version, update.left) == (before + 2, ())
    assert engines.served(0) == (str(update.version), [value_of(update.version)])


@pytest.mark.parametrize("mode", MODES)
def test_steps_come_in_order_and_none_resumes_before_all_are_stamped_and_the_manager_knows(
    mode: str, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    updater = open_updater(mode)
    engines.update(updater)
    seen = [len(each.calls()) for each in engines.standing]
    engines.update(updater)
    order = [path for path in steps(mode) if path != "/model_info"]
    for each, before in zip(engines.standing, seen, strict=True):
        paths = [call["path"] for call in each.calls()[before:]]
        assert [path for path in dict.fromkeys(paths) if path in order] == order
    stamped = LOADED[0] if mode == "disk-delta" else "/update_weight_version"
    assert max(_when(engines, stamped, seen)) < min(_when(engines, "/continue_generation", seen))


def _when(engines: Engines, path: str, after: list[int]) -> list[float]:
    """When each engine was asked, after so many calls."""
    return [_began(each, path, before) for each, before in zip(engines.standing, after, strict=True)]


def _began(engine: StandIn, path: str, after: int) -> float:
    (began,) = [call["began"] for call in engine.calls()[after:] if call["path"] == path]
    return float(began)


@pytest.mark.parametrize("mode", MOSTLY)
def test_an_engine_that_was_started_anew_gets_no_request_before_it_has_the_newest_weights(
    mode: str, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    updater = open_updater(mode)
    fleet = Fleet([External(each.url, 1) for each in engines.standing])

    def update() -> None:
        version = engines.versions.next
        done = updater.update(lambda: constant(engines._checkpoint, value_of(version)), fleet.addresses())
        assert done is not None
        fleet.updated(done.version, done.confirmed, done.left)

    update()
    assert fleet.roll_call() == []
    engines.kill(0)
    engines.heal()
    late = engines.standing[0].url
    assert fleet.roll_call() == [late]
    assert [engine.url for engine in fleet.serving()] == [engines.standing[1].url]
    assert engines.served(0)[0] == "default"
    update()
    assert fleet.roll_call() == []
    assert {engine.url for engine in fleet.serving()} == {each.url for each in engines.standing}
    assert engines.served(0)[0] == str(engines.versions.next - 1)
    fleet.stop()


@pytest.mark.parametrize("mode", MOSTLY)
@pytest.mark.parametrize("number", [1, 2])
def test_engines_that_were_started_anew_unseen_take_the_next_update(
    number: int, mode: str, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    """Between the roll call and the update, while trainers learn: with the last engine the job would end."""
    updater = open_updater(mode)
    engines.update(updater)
    for index in range(number):
        engines.kill(index)
    engines.heal()
    update = engines.update(updater)
    assert not update.left
    assert [engines.served(index) for index in (0, 1)] == [(str(update.version), [value_of(update.version)])] * 2


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_joins_late_gets_no_request_before_it_has_the_newest_weights(
    mode: str, engines: Engines, open_updater: Callable[..., Updater]
) -> None:
    updater = open_updater(mode)
    first, late = (External(each.url, 1) for each in engines.standing)
    fleet = Fleet([first])
    served = []
    for join in (False, True, False):
        if join:
            fleet.join(late)
            assert fleet.roll_call() == [late.engine.url]
            assert [engine.url for engine in fleet.serving()] == [first.engine.url]
        version = engines.versions.next
        done = updater.update(lambda: constant(engines._checkpoint, value_of(version)), fleet.addresses())  # noqa: B023
        assert done is not None
        fleet.updated(done.version, done.confirmed, done.left)
        served.append([engine.url for engine in fleet.serving()])
        assert fleet.roll_call() == []
    assert served == [[first.engine.url]] + 2 * [[first.engine.url, late.engine.url]]
    newest = engines.versions.next - 1
    for index in range(2):
        version, values = engines.served(index)
        assert (version, set(values)) == (str(newest), {value_of(newest)})
    fleet.stop()
