"""Commands that test_delta_materialize_crashes.py runs: `python -m tests.unit.plugin.delta_processes COMMAND ...`."""

from __future__ import annotations

import linecache
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from miles_plugin import durable
from miles_plugin.weight_transfer.disk_delta import codec, local_checkpoint, patching, slots
from miles_plugin.weight_transfer.disk_delta.materialize import FOLD
from tests.delta_publisher import changed, random_tensors
from tests.unit.plugin.delta_readers import World, seen

WATCHED = {module.__file__ for module in (durable, local_checkpoint, patching, slots)}
# Lines that change something outside of the process: files, their names, their contents, what is on the disk.
EFFECT = re.compile(
    r"\.write\(|fsync\(|\.replace\(|\.rename\(|symlink_to|unlink\(|mkdir\(|rmtree\(|flush\(|ftruncate|pwrite|"
    r"sync_directory\(|\.open\(|copyto\(|\.apply\("
)
LARGE = [(f"layers.{number}.weight", "BF16", (150, 512)) for number in range(6)]


class Kill:
    """SIGKILL to this process before and after each line with an effect: at the one that follows `survives` others.
    Within the two that write a tensor also half way."""

    def __init__(self, survives: int) -> None:
        self._left = survives
        self._after = False
        copyto, apply = np.copyto, codec.Decoder.apply

        def torn(tensor: Any, write: Callable[[Any], Any]) -> None:
            if self._left == 0:
                written = tensor.copy()
                write(written)
                tensor[: tensor.size // 2] = written[: tensor.size // 2]
            self.count()

        def torn_copy(target: Any, source: Any) -> None:
            torn(target, lambda written: copyto(written, source))
            copyto(target, source)

        def torn_apply(decoder: Any, payloads: Any, tensor: Any, width: int) -> str:
            torn(tensor, lambda written: apply(decoder, payloads, written, width))
            return apply(decoder, payloads, tensor, width)

        np.copyto, codec.Decoder.apply = torn_copy, torn_apply  # type: ignore[assignment,method-assign]
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def count(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            is_effect = bool(EFFECT.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)))
            if self._after or is_effect:
                self.count()
            self._after = is_effect
        return self.trace


def history(world: World, moment: str) -> tuple[int, ...]:
    """Bring a reader to where it will be killed; the version that it is to come to then, a later one, and one that a
    slot holds before."""
    reader = world.reader(threads=1)
    world.publish(1)
    if moment in ("branch", "remade"):
        # Both versions change the one that the slot holds, or held: the later one only one tensor of it.
        reader.bring_to()
        world.publish(2)
        reader.bring_to()
        before = world.publisher.versions[1]
        world.publisher.delta(3, changed(before, 3, 0.5), base=1)
        name = "norm.weight"
        world.publisher.delta(4, {**before, name: changed(before, 4, 0.5)[name]}, base=1)
        if moment == "remade":
            sorted((world.local / "a").glob("*.safetensors"))[0].unlink()
            shutil.rmtree(world.publisher.directory(2))
        return 3, 4, 1 if moment == "branch" else 3
    if moment == "first":
        target = 1
    elif moment == "second":
        reader.bring_to()
        world.publish(2)
        target = 2
    elif moment in ("deltas", "late"):
        reader.bring_to()
        world.publish(2)
        reader.bring_to()
        target = 3 if moment == "deltas" else 2 * FOLD
        world.publish(*range(3, target + 1))
    else:
        for version in (2, 3):
            reader.bring_to()
            world.publish(version)
        world.anchor(4)
        world.publish(5)
        target = 5
        if moment == "mended":  # what engines read has lost a bit, and is made anew in the other slot
            reader.bring_to()
            weights = sorted(reader.bring_to().path.glob("*.safetensors"))[0]
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
            assert reader.verify()
    world.publish(target + 1)
    return target, target + 1, {"deltas": 1, "late": 1, "full": 2}.get(moment, target)


def crash(moment: str, root: str) -> None:
    """Kill a reader at its first effect, its second, ... until it comes through. Each time engines see a whole version,
    the old or the new one, and another reader comes to the version, to a later one, or back to what the slot that was
    being changed held before. Prints how many there were."""
    world = World(Path(root) / "world")
    target, *others = history(world, moment)
    goals = [target, *others]
    template, survives = Path(root) / "template", 0
    if world.local.exists():
        world.local.rename(template)
    else:
        template.mkdir()
    while True:
        shutil.rmtree(world.local, ignore_errors=True)
        shutil.copytree(template, world.local, symlinks=True)
        before = None if moment == "mended" else world.seen()
        child = os.fork()
        if child == 0:
            reader = world.reader(threads=1)
            Kill(survives)
            reader.bring_to(target)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL, status
        current = world.local / "current"
        if moment != "mended" or (current.is_symlink() and os.readlink(current) != os.readlink(template / "current")):
            assert world.seen() in ({before, target} if os.WIFSIGNALED(status) else {target}), survives
        goal = goals[survives % len(goals)]
        done = world.reader(threads=1).bring_to(goal)
        assert (done.version, world.seen()) == (goal, goal), survives
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        survives += 1
    print(survives)


def memory(root: str) -> None:
    """Bring a reader forward, from the base, from a slot that is whole and from one that is torn. Prints by how many
    bytes its memory grew at most, other than the files that it mapped."""
    world = World(Path(root) / "world", base=random_tensors(0, [("embed.weight", "BF16", (5000, 8000))]))
    world.publish(1, 2, 3, 4, density=0.01, share=1.0)
    world.publisher.versions.clear()
    stop, grown = threading.Event(), [0]
    before = _anonymous()

    def watch() -> None:
        while not stop.wait(0.001):
            grown[0] = max(grown[0], _anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for version in range(1, 5):
        if version == 4:
            name = world.local / ("b" if os.readlink(world.local / "current") == "a" else "a")
            with sorted(name.glob("*.safetensors"))[0].open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\0")
        world.reader().bring_to(version)
    stop.set()
    watcher.join()
    print(grown[0])


def _anonymous() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def kill(root: str, kills: int, seed: int) -> None:
    """Kill a reader that goes from version to version at any moment, `kills` times; each time look at what engines see.
    It goes on where it was, and starts anew after the last version. Prints how often one was killed."""
    generator = random.Random(seed)
    world = World(Path(root) / "world", base=random_tensors(0, LARGE))
    for version in range(1, 16):
        if version == 8:
            world.anchor(version)
        else:
            world.publish(version, density=generator.choice([0.001, 0.02, 0.5]))
    last, killed, version = max(world.publisher.versions), 0, 0
    while killed < kills:
        child = os.fork()
        if child == 0:
            reader = world.reader()
            for goal in range(version + 1, last + 1, generator.choice([1, 1, 1, 4])):
                reader.bring_to(goal)
            os._exit(0)
        time.sleep(generator.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        now = seen(world.local, world.publisher) if world.local.exists() else None
        assert (now or 0) >= version, (now, version)
        version = now or 0
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            shutil.rmtree(world.local)
            version = 0
        generator.random()  # the child has drawn, too
    done = world.reader().bring_to()
    assert (done.version, world.seen()) == (last, last)
    print(killed)


def together(root: str, processes: int) -> None:
    """Readers of one local directory, each on its way from version to version. Prints how many came to the last."""
    world = World(Path(root) / "world")
    world.publish(*range(1, 9))
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            generator = random.Random(number)
            for version in [*(generator.randint(1, 8) for _ in range(6)), 8]:
                assert world.reader(wait_seconds=100).bring_to(version).version == version
            os._exit(0)
        children.append(child)
    while world.seen() is None:
        time.sleep(0.001)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * processes
    assert world.seen() is not None
    print(processes)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "crash":
        crash(*arguments)
    elif command == "memory":
        memory(*arguments)
    elif command == "together":
        together(arguments[0], int(arguments[1]))
    else:
        kill(arguments[0], int(arguments[1]), int(arguments[2]))
