"""`miles-mooncake materialize`, run as it is on a small model's published versions."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miles_plugin import cli, materialize_command
from miles_plugin.materialize_command import run_materialize
from miles_plugin.weight_transfer.disk_delta.local_checkpoint import Checkpoint
from mooncake_store.errors import IntegrityError
from tests.unit.plugin.delta_readers import ROOT, World

SECONDS = 60.0
LOADS = ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.source.mkdir(exist_ok=True)
    return made


def arguments(world: World, *more: str) -> list[str]:
    return ["--source", str(world.source), "--base", str(world.base), "--local", str(world.local), *more]


def materialize(
    capsys: pytest.CaptureFixture[str], argv: list[str], command: str = "materialize"
) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    try:
        status = cli.main([command, *argv])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def await_condition(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Server:
    """An engine's HTTP side: what it was asked, and whether it refuses to load."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refusals = 0
        self.address = ""

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        self.calls.append((request.path, body))
        is_refused = request.path == "/update_weights_from_disk" and self.refusals > 0
        self.refusals -= is_refused
        text = json.dumps({"success": not is_refused, "message": "out of memory" if is_refused else "done"}).encode()
        request.send_response(400 if is_refused else 200)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)


@contextmanager
def serving() -> Iterator[Server]:
    engine = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            engine.answer(self)

        def log_message(self, *_arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    engine.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def report(world: World, reader: str = "host-1") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((world.source / "readers" / f"{reader}.json").read_text())
    return found


# Once


def test_the_newest_version_comes_and_the_publisher_is_told(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.publish(1, 2)
    status, out, error = materialize(capsys, arguments(world, "--reader", "host-1", "--engine", "10.0.0.1:30000"))
    assert (status, error, world.seen()) == (0, "", 2)
    assert out.startswith(f"version 2 in {world.local}/a: ")
    assert " read, " in out
    told = report(world)
    del told["at"]
    assert told == {
        "version": "000002", "path": f"{world.local}/a", "engines": ["10.0.0.1:30000"], "problem": "", "base": False,
        "fingerprint": Checkpoint(world.base).fingerprint(),
    }  # fmt: skip


def test_before_the_first_version_it_is_what_the_job_starts_from(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert materialize(capsys, arguments(world, "--reader", "host-1"))[0] == 0
    assert (world.seen(), report(world)["version"], report(world)["base"]) == (0, "000000", True)


def test_a_version_that_was_asked_for(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.publish(1, 2, 3)
    for version in (2, 3, 1):
        status, out, _ = materialize(capsys, arguments(world, "--version", str(version), "--json"))
        said = json.loads(out)
        assert (status, world.seen(), said["version"]) == (0, version, version)
        assert Path(said["path"]).resolve() == (world.local / "current").resolve()
        assert said.keys() == {"version", "path", "bytes_read", "seconds", "notes"}
    assert len(out.splitlines()) == 1


def test_what_was_got_around_is_said(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.publish(1)
    materialize(capsys, arguments(world))
    (world.local / "a.json").write_text("{")
    world.publish(2)
    status, out, _ = materialize(capsys, arguments(world))
    assert (status, world.seen()) == (0, 2)
    assert "\n  note: slot a, which engines read, is in doubt" in out


def test_the_console_script_does_it(world: World) -> None:
    world.publish(1)
    done = subprocess.run(
        [sys.executable, "-m", "miles_plugin", "materialize", *arguments(world)],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stderr, world.seen()) == (0, "", 1)


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's in the working directory, by its name."""
    name = f"hooks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "def note(args, version_dir):\n    open(args.local.parent / 'noted', 'a').write(version_dir + '\\n')\n"
        "def refuse(args, version_dir):\n    raise OSError('the mount is stale')\n"
    )
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_function_of_the_user_s_is_called_before_a_version_is_read(
    world: World, hooks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.publish(1)
    status, _, _ = materialize(capsys, arguments(world, "--custom-update-weight-pre-read-path", f"{hooks}.note"))
    assert (status, world.seen()) == (0, 1)
    noted = (world.local.parent / "noted").read_text().splitlines()
    assert f"{world.source}/weight_v000001" in noted


@pytest.mark.parametrize(
    ("function", "said"),
    [("refuse", "the mount is stale"), ("other", "has no 'other'; it has")],
)
def test_one_that_fails_or_is_not_there_leaves_what_was_shown(
    function: str, said: str, world: World, hooks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.publish(1)
    materialize(capsys, arguments(world))
    world.publish(2)
    more = ("--custom-update-weight-pre-read-path", f"{hooks}.{function}")
    status, _, error = materialize(capsys, arguments(world, *more))
    assert (status != 0, len(error.splitlines()), world.seen()) == (True, 1, 1)
    assert said in error


# What is checked


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_verify_says_which_tensors_lost_bits_and_the_next_run_makes_them_anew(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.publish(1)
    materialize(capsys, arguments(world))
    status, out, _ = materialize(capsys, arguments(world, "--verify"))
    assert (status, out) == (0, f"version 1 in {world.local}/a: every tensor as it was written\n")
    flip_bit(sorted((world.local / "a").glob("*.safetensors"))[0])
    status, out, error = materialize(capsys, arguments(world, "--verify"))
    assert (status, out, len(error.splitlines())) == (2, "", 1)
    assert f"{world.local}/a: 1 tensors are not as they were written: " in error
    assert "without --verify" in error
    assert materialize(capsys, arguments(world))[0] == 0
    assert world.seen() == 1
    status, out, _ = materialize(capsys, arguments(world, "--verify", "--json"))
    assert (status, json.loads(out)["version"]) == (0, 1)


def test_verify_before_the_first_run_says_what_to_do(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = materialize(capsys, arguments(world, "--verify"))
    assert (status, len(error.splitlines())) == (2, 1)
    assert "has no version yet; run miles-mooncake materialize without --verify" in error


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--version", "7"], "version 7 of the weights: there is no weight_v000007/"),
        (["--version", "-1"], "version=-1: versions are counted from 0"),
        (["--engine", "10.0.0.1"], "'10.0.0.1' is not host:port"),
        (["--engine", "http://10.0.0.1:30000"], "'http://10.0.0.1:30000' is not host:port"),
        (["--load"], "--load: no engine is named; add --engine host:port"),
        (["--reader", "a/b"], "reader_id='a/b'"),
        (["--source", "{tmp}/none"], "/none: no such directory; mount it, start the job"),
        (["--source", "ftp://host/weights"], "ftp://host/weights: no place to publish"),
        (["--base", "{tmp}/none"], "/none"),
        (["--local", "/proc/local"], "/proc/local"),
    ],
)
def test_what_is_wrong_is_one_line(
    more: list[str], expected: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.publish(1)
    more = [each.format(tmp=world.root) for each in more]
    status, out, error = materialize(capsys, arguments(world, *more))
    assert (status, out, len(error.splitlines())) == (2, "", 1), error
    assert expected in error
    assert not (world.root / "none").exists()


def test_a_source_that_is_not_mounted_is_not_made(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """What is mounted there later would hide it, and this reader would wait for ever."""
    for more in ([], ["--follow"]):
        assert materialize(capsys, [*arguments(world), "--source", str(world.root / "typo"), *more])[0] == 2
    assert not (world.root / "typo").exists()


@pytest.mark.parametrize("more", [["--version", "x"], ["--follow", "--verify"], ["--version", "1", "--follow"], ["-x"]])
def test_wrong_use_is_status_2(more: list[str], world: World, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = materialize(capsys, arguments(world, *more))
    assert (status, out) == (2, "")
    assert error.startswith("usage: miles-mooncake materialize")


# Engines that load here


def test_engines_load_the_version_between_pausing_and_resuming(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.publish(1)
    with serving() as first, serving() as second:
        more = ["--engine", first.address, "--engine", second.address, "--load"]
        assert materialize(capsys, arguments(world, *more))[0] == 0
    assert first.paths() == second.paths() == LOADS
    load = dict(first.calls)["/update_weights_from_disk"]
    assert (load["model_path"], load["weight_version"]) == (f"{world.local}/a", "1")


def test_an_engine_that_does_not_load_stays_paused_and_the_others_load(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.publish(1)
    with serving() as bad, serving() as good:
        bad.refusals = 1
        more = ["--engine", bad.address, "--engine", "127.0.0.1:1", "--engine", good.address, "--load"]
        status, _, error = materialize(capsys, arguments(world, *more))
        assert (status, len(error.splitlines())) == (1, 1)
        assert "version 1 is not loaded by 2 engines: " in error
        assert f"{bad.address}/update_weights_from_disk: HTTP 400" in error
        assert "127.0.0.1:1/pause_generation: no answer" in error
    assert bad.paths() == LOADS[:3]
    assert good.paths() == LOADS


# Until Ctrl-C


@contextmanager
def following(world: World, *more: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "miles_plugin", "materialize", *arguments(world, "--follow", "--json", *more)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    found: dict[str, Any] = json.loads(line)
    return found


def test_every_new_version_comes_until_ctrl_c(world: World) -> None:
    with serving() as engine, following(world, "--reader", "h", "--engine", engine.address, "--load") as process:
        assert said(process)["version"] == 0
        for version in (1, 2):
            world.publish(version)
            assert said(process)["version"] == version
            assert world.seen() == version
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, error) == (130, "", "")
    assert (report(world, "h")["version"], report(world, "h")["problem"]) == ("000002", "")
    assert engine.paths() == 3 * LOADS


def test_a_version_0_that_is_published_after_all_comes_too(world: World) -> None:
    """The trainer did not start from the checkpoint that readers have."""
    with following(world, "--reader", "h") as process:
        assert (said(process)["version"], report(world, "h")["base"]) == (0, True)
        world.publisher.versions.clear()
        world.publisher.versions[0] = {}
        world.publisher.full(0, World(world.root / "other", base=None).next(9))
        assert said(process)["version"] == 0
    assert world.seen() == 0
    assert report(world, "h")["base"] is False


class Followed:
    """`follow` in this process: its clock stands still but when it waits, and it ends after so many waits."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
        self.world, self.more = world, more
        self.now = 1000.0
        self.waits: list[Callable[[], object]] = []
        monkeypatch.setattr(materialize_command, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if not self.waits:
            raise KeyboardInterrupt
        self.waits.pop(0)()

    def run(self, *waits: Callable[[], object]) -> None:
        self.waits = list(waits)
        with pytest.raises(KeyboardInterrupt):
            run_materialize(arguments(self.world, "--follow", "--json", "--reader", "h", *self.more))


def nothing() -> None: ...


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_what_cannot_be_brought_is_said_once_and_a_newer_version_is_tried_at_once(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(1)
    followed = Followed(world, monkeypatch)

    def damage() -> None:
        world.publish(2)
        for path in world.publisher.directory(2).glob("*.safetensors"):
            path.write_bytes(b"damaged")

    def look() -> None:
        assert report(world, "h")["version"] == "000001"
        assert "version 2 of the weights cannot be made" in report(world, "h")["problem"]
        assert world.seen() == 1
        world.anchor(3)

    followed.run(damage, *[nothing] * 5, look)
    told = lines(capsys)
    assert [each.get("version") for each in told] == [1, None, 3]
    assert "version 2 of the weights cannot be made" in told[1]["problem"]
    assert (world.seen(), report(world, "h")["problem"]) == (3, "")


def test_what_cannot_be_brought_is_tried_less_and_less_often(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each try may read all that there is."""
    tried: list[float] = []
    followed = Followed(world, monkeypatch)

    def fail(*_arguments: Any, **_more: Any) -> None:
        tried.append(followed.now)
        raise IntegrityError("version 1 is damaged")

    world.publish(1)
    monkeypatch.setattr("miles_plugin.weight_transfer.disk_delta.materialize.Materializer.bring_to", fail)
    followed.run(*[nothing] * 300)
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert gaps[:3] == [0.5, 1.0, 2.0]
    assert max(gaps) == gaps[-1] == 30.0
    assert len(lines(capsys)) == 1


@pytest.mark.parametrize("how", ["is no directory", "is empty", "shows what was there before"])
def test_a_place_that_is_away_for_a_while_ends_nothing_and_leads_nobody_back(
    how: str, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = world.root / "away"
    world.publish(1)
    shutil.copytree(world.source, world.root / "before")
    world.publish(2)

    def lose() -> None:
        world.source.rename(away)
        if how == "is no directory":
            world.source.write_text("")
        elif how == "is empty":
            world.source.mkdir()
        else:
            (world.root / "before").rename(world.source)

    def back() -> None:
        assert world.seen() == 2
        world.source.rename(world.root / "gone")
        away.rename(world.source)

    followed = Followed(world, monkeypatch)
    followed.run(lose, nothing, back, *[nothing] * 8, lambda: world.publish(3))
    told = lines(capsys)
    assert [each["version"] for each in told if "version" in each] == [2, 2, 3]
    assert "has version 2, " in told[1]["problem"]
    assert "the place is not mounted, or another run publishes there" in told[1]["problem"]
    assert (world.seen(), report(world, "h")["problem"]) == (3, "")


def test_once_it_goes_back_only_to_a_version_that_was_named(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.publish(1, 2)
    materialize(capsys, arguments(world))
    world.publisher.latest(1)
    status, out, error = materialize(capsys, arguments(world))
    assert (status, out, len(error.splitlines()), world.seen()) == (2, "", 1, 2)
    assert "has version 2, version 1 is the newest that is published: " in error
    assert materialize(capsys, arguments(world, "--version", "1"))[0] == 0
    assert world.seen() == 1


def test_an_engine_that_comes_back_loads_and_those_that_have_it_are_left_alone(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(1)
    with serving() as bad, serving() as good:
        bad.refusals = 2
        followed = Followed(world, monkeypatch, "--engine", bad.address, "--engine", good.address, "--load")
        followed.run(*[nothing] * 10)
    assert bad.paths() == 2 * LOADS[:3] + LOADS
    assert good.paths() == LOADS
    told = lines(capsys)
    assert "out of memory" in told[0]["problem"]
    assert [each.get("version") for each in told] == [None, 1]
    assert report(world, "h")["problem"] == ""
