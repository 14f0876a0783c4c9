"""Commands that test_version_processes.py runs: `python -m tests.unit.plugin.version_processes COMMAND ...`."""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from miles_plugin import durable, version, version_log
from miles_plugin.version import VersionAuthority, VersionFenced
from miles_plugin.version_owner import Owner

WATCHED = {module.__file__ for module in (durable, version, version_log)}


def kill_at_line(survives: int) -> None:
    """SIGKILL to this process before the line after `survives` lines of the code under test."""
    left = survives

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in WATCHED or frame.f_code.co_name.startswith("<"):
            return None  # comprehensions touch no file
        if event == "line":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return trace

    sys.settrace(trace)


def one_life(directory: Path, told: Path) -> None:
    """Open, update, leave; what has returned is told."""

    def tell(name: str, number: int) -> None:
        with told.open("a") as file:
            print(json.dumps([name, number]), file=file)

    versions = VersionAuthority(directory, Owner.here("run"))
    versions.register_trainer("trainer")
    number = versions.allocate("trainer")
    tell("newest", number)
    versions.announce(number, "trainer")
    tell("current", number)
    versions.commit(number, "trainer")
    tell("committed", number)
    versions.close()


def crash(moment: str, root: Path) -> None:
    """Live that life and die at its first line, its second, ... ; look at what is left. Prints how many there were."""
    template = root / "template"
    template.mkdir()
    if moment == "later":  # a log that is being pruned
        versions = VersionAuthority(template / "versions", Owner.here("before"))
        versions.register_trainer("trainer")
        for _ in range(version_log.KEPT):
            versions.allocate("trainer")
        versions.close()
    for survives in range(10_000):
        directory = root / "life"
        shutil.copytree(template, directory)
        told_path = root / "told"
        told_path.write_text("")
        child = os.fork()
        if child == 0:
            kill_at_line(survives)
            one_life(directory / "versions", told_path)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told = dict(json.loads(line) for line in told_path.read_text().splitlines())
        look_at(directory / "versions", told)
        shutil.rmtree(directory)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            print(survives)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


def look_at(directory: Path, told: dict[str, int]) -> None:
    """The next owner is let in without a question, knows at least what was told, and gives out nothing twice."""
    versions = VersionAuthority(directory, Owner.here("next"))
    assert versions.newest >= told.get("newest", -1)
    for name in ("current", "committed"):
        value = getattr(versions, name)
        assert (-1 if value is None else value) >= told.get(name, -1), (name, value, told)
    assert {path.suffix for path in directory.iterdir()} == {".json", ".beat"}
    assert len(list(directory.glob("*.beat"))) == 1
    newest = versions.newest
    versions.register_trainer("next")
    assert versions.allocate("next") == newest + 1
    versions.close()
    assert {path.suffix for path in directory.iterdir()} == {".json"}
    assert len(list(directory.iterdir())) <= version_log.KEPT


def storm(directory: Path, processes: int, each: int) -> None:
    """Processes that take over from each other at random moments; prints every number that one of them was given."""
    children = []
    for index in range(processes):
        child = os.fork()
        if child == 0:
            draw(directory, each, directory.parent / f"numbers-{index}")
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert not any(statuses), statuses
    for index in range(processes):
        print((directory.parent / f"numbers-{index}").read_text())


def draw(directory: Path, count: int, into: Path) -> None:
    """Be given `count` numbers, taking over as often as that takes."""
    chance = random.Random(os.getpid())
    numbers: list[int] = []
    trainer = f"trainer-{os.getpid()}"
    while len(numbers) < count:
        versions = VersionAuthority(directory, Owner.here("storm"), takeover=True)
        try:
            versions.register_trainer(trainer)
            for _ in range(min(chance.randrange(1, 40), count - len(numbers))):
                numbers.append(versions.allocate(trainer))
            if chance.random() < 0.3:
                versions.close()
        except VersionFenced:
            time.sleep(chance.uniform(0, 0.02))
    into.write_text("\n".join(map(str, numbers)))


def hold(directory: Path) -> None:
    """Own a log, and allocate once more when told to; prints the number, then why there is no second one."""
    versions = VersionAuthority(directory, Owner.here("held"))
    versions.register_trainer("held")
    print(versions.allocate("held"), flush=True)
    sys.stdin.readline()
    try:
        print(versions.allocate("held"), flush=True)
    except VersionFenced as error:
        print(error, flush=True)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "crash":
        crash(arguments[0], Path(arguments[1]))
    elif command == "storm":
        storm(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
    else:
        hold(Path(arguments[0]))
