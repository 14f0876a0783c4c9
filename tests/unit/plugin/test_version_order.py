"""Versions in any order of all calls by several owners and trainers: none is given out twice, none steps back."""

import shutil

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miles_plugin.version import VersionAuthority, VersionFenced, WriterRefused
from miles_plugin.version_log import Record, VersionLog
from miles_plugin.version_owner import Owner
from tests.unit.plugin.version_writers import dead, directory_in_memory, elsewhere


class Owners(RuleBasedStateMachine):
    """Several owners share a directory; some die without a word, some are on other hosts, some wake up late."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = directory_in_memory() / "versions"
        self.opened: list[VersionAuthority] = []
        self.owner: VersionAuthority | None = None
        self.trainer: str | None = None
        self.allocated: list[int] = []
        self.announced: list[int] = []
        self.committed: list[int] = []
        self.appended = -1
        self.leaped = -1

    def teardown(self) -> None:
        for each in self.opened:
            each._heartbeat.stop()
        shutil.rmtree(self.directory.parent)

    which = st.integers(0, 3)
    trainers = st.sampled_from(["a", "b"])

    def pick(self, which: int) -> VersionAuthority:
        return self.opened[-1 - which % len(self.opened)]

    def log(self) -> tuple[int, Record]:
        last = VersionLog(self.directory).last()
        return last.index, last.record

    @rule(takeover=st.booleans(), kind=st.sampled_from(["here", "dead", "elsewhere"]))
    def open(self, takeover: bool, kind: str) -> None:
        owner = {"here": Owner.here, "dead": dead, "elsewhere": elsewhere}[kind]("run")
        here = self.owner is not None and self.owner._owner.process.is_here()
        try:
            opened = VersionAuthority(self.directory, owner, takeover)
        except WriterRefused:
            assert here
            assert not takeover
            return
        assert takeover or not here
        self.opened.append(opened)
        self.owner, self.trainer = opened, None

    @precondition(lambda self: self.opened)
    @rule(which=which, trainer=trainers, takeover=st.booleans())
    def register(self, which: int, trainer: str, takeover: bool) -> None:
        versions = self.pick(which)
        with fenced_unless(versions is self.owner):
            try:
                versions.register_trainer(trainer, takeover)
                if versions is self.owner:
                    assert takeover or self.trainer in (None, trainer)
                    self.trainer = trainer
            except WriterRefused:
                assert not takeover

    @precondition(lambda self: self.opened)
    @rule(which=which, trainer=trainers)
    def allocate(self, which: int, trainer: str) -> None:
        versions = self.pick(which)
        with fenced_unless(versions is self.owner and trainer == self.trainer):
            number = versions.allocate(trainer)
            assert number > max([*self.allocated, self.leaped], default=-1)
            assert versions is self.owner
            assert trainer == self.trainer
            self.allocated.append(number)

    @precondition(lambda self: self.opened)
    @rule(which=which, trainer=trainers, back=st.sampled_from([0, 0, 0, 1, 2]))
    def announce(self, which: int, trainer: str, back: int) -> None:
        versions = self.pick(which)
        number = (self.allocated or [0])[-1] - back
        with fenced_unless(False):
            versions.announce(number, trainer)
            assert number in self.allocated
            self.announced.append(number)

    @precondition(lambda self: self.opened)
    @rule(which=which, trainer=trainers, back=st.sampled_from([0, 0, 0, 1, 2]))
    def commit(self, which: int, trainer: str, back: int) -> None:
        versions = self.pick(which)
        number = (self.allocated or [0])[-1] - back
        with fenced_unless(False):
            try:
                versions.commit(number, trainer)
            except ValueError:
                assert number not in self.announced
                return
            assert number in self.announced
            assert number == max(self.allocated)
            self.committed.append(number)

    @precondition(lambda self: self.opened)
    @rule(which=which, by=st.integers(-3, 5))
    def leap(self, which: int, by: int) -> None:
        versions = self.pick(which)
        above = max([*self.allocated, self.leaped], default=-1) + by
        with fenced_unless(False):
            versions.continue_above(above)
            if versions is self.owner:
                self.leaped = max(self.leaped, above)

    @precondition(lambda self: self.opened)
    @rule(which=which)
    def verify(self, which: int) -> None:
        with fenced_unless(self.pick(which) is self.owner):
            self.pick(which).verify_owned()
            assert self.pick(which) is self.owner

    @precondition(lambda self: self.opened)
    @rule(which=which)
    def close(self, which: int) -> None:
        versions = self.pick(which)
        versions.close()
        self.opened.remove(versions)
        if versions is self.owner:
            self.owner = self.trainer = None

    @invariant()
    def nothing_steps_back_and_only_the_owner_writes(self) -> None:
        index, record = self.log()
        assert index >= self.appended
        self.appended = index
        assert record.newest == max([*self.allocated, self.leaped], default=-1)
        assert record.current == max(self.announced, default=None)
        assert record.committed == max(self.committed, default=None)
        assert set(self.committed) <= set(self.announced) <= set(self.allocated)
        assert record.owner == (self.owner._owner if self.owner else None)
        assert record.trainer == self.trainer


class fenced_unless:
    """Passes over VersionFenced, which must not be raised when `allowed`."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is VersionFenced:
            assert not self.allowed
            return True
        return False


@pytest.mark.usefixtures("impatient")
class TestOwners(Owners.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
