"""The trainer that updates dies or hangs, another takes over: versions go on upward, no engine serves a mixture.

The version authority is the real one, in this process, as the rollout manager has it; trainers are processes of their
own that reach it through a pipe. Engines are stand-ins: every element of an update's weights is its version.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from miles_plugin.engines.fleet import EngineAddress, Left
from miles_plugin.version import VersionAuthority, VersionFenced, WriterRefused, newest_version
from miles_plugin.version_owner import Owner
from miles_plugin.weight_transfer.broadcast import Bystander
from miles_plugin.weight_transfer.disk_delta.transport import DeltaTransport
from miles_plugin.weight_transfer.p2p import PeerWriter
from miles_plugin.weight_transfer.ranks import Ranks
from miles_plugin.weight_transfer.sources import NamedTensor
from miles_plugin.weight_transfer.transfer import Transport, Updater
from mooncake_store.process import free_ports
from tests.integration.plugin.test_weight_faults import BOUNDS, Engines, assert_serves_no_mixture
from tests.integration.plugin.test_weight_faults import checkpoint as checkpoint  # fixtures
from tests.integration.plugin.test_weight_faults import engines as engines
from tests.integration.plugin.test_weight_faults import started as started
from tests.weight_updates import broadcasting, constant, delta_transport, layouts, publishing, writing

pytestmark = pytest.mark.integration
SECONDS = 60.0
_SPAWN = multiprocessing.get_context("spawn")


class Asked:
    """The authority as a trainer's process reaches it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.version = -1

    def allocate(self) -> int:
        self.version = self._ask("allocate")
        return self.version

    def verify(self, version: int) -> None:
        self._ask("verify_claim", version)

    def announce(self, version: int) -> None:
        self._ask("announce", version)

    def commit(self, version: int, confirmed: Sequence[str], left: Sequence[Left]) -> None:
        self._ask("commit", version)

    def _ask(self, what: str, *arguments: Any) -> Any:
        self._connection.send((what, arguments))
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def train(connection: Connection, mode: str, checkpoint: Path, root: Path, addresses: list[EngineAddress]) -> None:
    """One update; says how it ended."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    versions = Asked(connection)
    if mode == "broadcast":
        updater = broadcasting(versions, bounds=BOUNDS)
    elif mode == "disk-delta":
        updater = publishing(versions, checkpoint, root, bounds=BOUNDS)
    else:
        updater = writing(versions, checkpoint, bounds=BOUNDS)
    try:
        updater.update(lambda: constant(checkpoint, versions.version), addresses)
        connection.send(("done", ()))
    except Exception as error:
        connection.send(("failed", (error,)))
    finally:
        updater.close()


class Trainer:
    """A trainer in a process, and what the manager answers it."""

    def __init__(
        self, name: str, authority: VersionAuthority, mode: str, checkpoint: Path, root: Path, engines: Engines
    ) -> None:
        self.name, self._authority = name, authority
        self._connection, child = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=train, args=(child, mode, checkpoint, root, engines.addresses()))
        self.process.start()

    def serve(self, until: str) -> tuple[Any, ...]:
        """Answer what it asks, until it asks that, which stays unanswered; or until it has ended."""
        while True:
            assert self._connection.poll(SECONDS), f"{self.name} hangs"
            what, arguments = self._connection.recv()
            if what in (until, "done", "failed"):
                return (what, *arguments)
            self.answer(what, *arguments)

    def answer(self, what: str, *arguments: Any) -> None:
        act: Callable[..., Any] = getattr(self._authority, what)
        try:
            self._connection.send(act(*arguments, self.name))
        except VersionFenced as error:
            self._connection.send(error)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[VersionAuthority]:
    made = VersionAuthority(tmp_path / "versions", Owner.here("run"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("mode", "killed_at"),
    [
        ("p2p", "commit"),
        pytest.param("broadcast", "announce", marks=pytest.mark.slow),
        pytest.param("broadcast", "commit", marks=pytest.mark.slow),
        pytest.param("p2p", "announce", marks=pytest.mark.slow),
        pytest.param("disk-delta", "announce", marks=pytest.mark.slow),
        pytest.param("disk-delta", "commit", marks=pytest.mark.slow),
    ],
)
def test_versions_go_on_upward_when_the_trainer_dies_between_transfer_and_commit(
    mode: str, killed_at: str, authority: VersionAuthority, checkpoint: Path, engines: Engines, tmp_path: Path
) -> None:
    first = Trainer("first", authority, mode, checkpoint, tmp_path, engines)
    authority.register_trainer("first")
    assert first.serve(killed_at)[:2] == (killed_at, 0)
    first.end()
    assert (authority.newest, authority.current) == (0, None if killed_at == "announce" else 0)
    assert authority.committed is None
    if killed_at == "announce":  # stamped, not resumed: nobody has seen version 0
        for each in engines.standing:
            assert_serves_no_mixture(each)
    else:
        assert engines.served(0) == ("0", [0.0])
    with pytest.raises(WriterRefused, match="first is registered"):
        authority.register_trainer("second")
    authority.register_trainer("second", takeover=True)
    second = Trainer("second", authority, mode, checkpoint, tmp_path, engines)
    assert second.serve("nothing") == ("done",)
    assert (authority.newest, authority.current, authority.committed) == (1, 1, 1)
    for index in (0, 1):
        assert engines.served(index) == ("1", [1.0])
    if mode == "disk-delta":  # who comes anew does not know what the other one published last
        published = tmp_path / "published"
        assert (published / "latest").read_text() == "000001\n"
        assert (published / "weight_v000001" / "config.json").is_file(), "a whole one"
        assert not list(published.glob(".*"))
    with pytest.raises(VersionFenced, match="first may not commit version 0"):
        authority.commit(0, "first")
    second.end()
    authority.close()
    assert newest_version(tmp_path / "versions") == 1
    assert VersionAuthority(tmp_path / "versions", Owner.here("run")).current == 1


@pytest.mark.parametrize(
    "mode",
    ["broadcast", pytest.param("p2p", marks=pytest.mark.slow), pytest.param("disk-delta", marks=pytest.mark.slow)],
)
def test_a_trainer_that_was_taken_over_while_it_hung_cannot_commit(
    mode: str, authority: VersionAuthority, checkpoint: Path, engines: Engines, tmp_path: Path
) -> None:
    first = Trainer("first", authority, mode, checkpoint, tmp_path, engines)
    authority.register_trainer("first")
    assert first.serve("commit")[:2] == ("commit", 0)
    first.signal(signal.SIGSTOP)
    authority.register_trainer("second", takeover=True)
    second = Trainer("second", authority, mode, checkpoint, tmp_path, engines)
    assert second.serve("nothing") == ("done",)
    first.signal(signal.SIGCONT)
    first.answer("commit", 0)
    what, error = first.serve("nothing")
    assert what == "failed"
    assert isinstance(error, VersionFenced)
    assert (authority.current, authority.committed) == (1, 1)
    assert engines.served(0) == ("1", [1.0])
    first.end()
    second.end()


def take_part(
    rank: int, port: int, connection: Any, mode: str, checkpoint: Path, root: Path, addresses: Any, dies: bool
) -> None:
    """One of two trainer ranks; the second may die in the midst of sending."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    versions = Asked(connection)
    ranks = Ranks(dist.new_group(backend="gloo"))
    transport: Transport
    if mode == "disk-delta":
        for turn in range(2):
            if turn == rank:
                transport = delta_transport(checkpoint, root, rank, 2, BOUNDS)
            dist.barrier()
    elif mode == "p2p":
        transport = PeerWriter("127.0.0.1", rank, 2, layouts(checkpoint), stage_bytes=1 << 20, bounds=BOUNDS)
    else:
        transport = broadcasting(versions, bounds=BOUNDS).transport if rank == 0 else Bystander()
    delivery = transport if isinstance(transport, DeltaTransport) else None
    authority = versions if rank == 0 else None
    updater = Updater(transport, ranks, authority, "retract", delivery=delivery, bounds=BOUNDS)

    def source() -> Iterator[NamedTensor]:
        # The second rank is told the number by its value alone: all ranks have the same weights.
        value = torch.tensor([float(versions.version)])
        dist.broadcast(value, 0)
        for position, pair in enumerate(constant(checkpoint, value.item())):
            if dies and rank == 1 and position == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    try:
        updater.update(source, addresses)
        outcome: tuple[str, tuple[Any, ...]] = ("done", ())
    except Exception as error:
        outcome = "failed", (RuntimeError(str(error)),)
    if rank == 0:
        connection.send(outcome)
    updater.close()
    os._exit(0)  # the group cannot be left in order when a rank has died


@pytest.mark.parametrize(
    "mode",
    ["p2p", pytest.param("broadcast", marks=pytest.mark.slow), pytest.param("disk-delta", marks=pytest.mark.slow)],
)
def test_a_trainer_rank_that_dies_ends_the_update_and_engines_serve_no_mixture(
    mode: str, authority: VersionAuthority, checkpoint: Path, engines: Engines, tmp_path: Path
) -> None:
    for name, dies in (("first", True), ("second", False)):
        authority.register_trainer(name, takeover=True)
        here, child = _SPAWN.Pipe()
        (port,) = free_ports(1)
        ranks = [
            _SPAWN.Process(
                target=take_part, args=(rank, port, child, mode, checkpoint, tmp_path, engines.addresses(), dies)
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        what, arguments = "", ()
        while what not in ("done", "failed"):
            assert here.poll(SECONDS), "an update hangs"
            what, arguments = here.recv()
            if what not in ("done", "failed"):
                here.send(getattr(authority, what)(*arguments, name))
        for process in ranks:
            process.join()
        assert what == ("failed" if dies else "done"), arguments
        if dies:
            assert (authority.newest, authority.current) == (0, None), "a hole"
            for each in engines.standing:
                assert_serves_no_mixture(each)
    assert (authority.newest, authority.current, authority.committed) == (1, 1, 1)
    for index in (0, 1):
        assert engines.served(index) == ("1", [1.0])
