"""How ranks share out what is written, and what becomes of engines whose writes fail, hang or land late."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("transformers", reason="the extra `train` is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from miles_plugin.engines.fleet import EngineAddress  # noqa: E402
from miles_plugin.engines.sglang import EngineError  # noqa: E402
from miles_plugin.weight_transfer import p2p  # noqa: E402
from miles_plugin.weight_transfer.layout import Layout, LayoutMismatch  # noqa: E402
from miles_plugin.weight_transfer.p2p import PeerWriter, _Peer, pieces  # noqa: E402
from tests.unit.plugin.test_layout import BF16, layouts, make_config  # noqa: E402

CONFIG = make_config("Qwen3ForCausalLM", vocab_size=300)
PIECE_BYTES = 512


@settings(max_examples=25)
@given(layouts(), st.integers(1, 2000))
def test_pieces_write_every_element_of_every_rank_once(made: tuple[Any, int], most: int) -> None:
    config, tp = made
    layout = Layout(config, tp, BF16)
    for weight, shape in layout.weights.items():
        tensor = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
        expected: dict[tuple[int, str], Any] = {}
        for rank, placements in enumerate(layout.placements(weight, shape)):
            for placement in placements:
                memory = torch.zeros(layout.parameters[placement.parameter].numel, dtype=torch.int32)
                part = placement.part(tensor)
                memory[placement.offset : placement.offset + part.numel()] = part.reshape(-1)
                expected[rank, placement.parameter] = memory
        written = {key: torch.zeros_like(memory) for key, memory in expected.items()}
        sent = 0
        for piece in pieces(layout, weight, tensor, most):
            assert piece.source.nbytes <= most or len(piece.source) == 1
            sent += piece.source.nbytes
            for place in piece.places:
                memory = written[place.rank, place.parameter][place.offset : place.offset + piece.source.numel()]
                assert len(memory) == piece.source.numel()
                assert not memory.any(), "written before"
                memory.copy_(piece.source.reshape(-1))
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[key], memory) for key, memory in expected.items())
        assert sent == tensor.nbytes, "once, however many ranks hold a copy"


class Writing(threading.Thread):
    """A write under way; what came of it, None first if it hangs."""

    def __init__(self, call: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.outcome: SimpleQueue[int | None] = SimpleQueue()

    def run(self) -> None:
        self.outcome.put(self._call())


class Transfer:
    """In place of a Transfer Engine. Writes to sessions in `failing` fail; those to `hanging` wait until `release`."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.release = threading.Event()
        self.calls: list[tuple[str, list[int], list[int]]] = []
        self.registered: list[int] = []

    def register_memory(self, address: int, _nbytes: int) -> int:
        self.registered.append(address)
        return 0

    def unregister_memory(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_transfer_sync_write(self, session: str, here: list[int], there: list[int], sizes: list[int]) -> int:
        self.calls.append((session, list(there), list(sizes)))
        if session in self.hanging:
            cast(Writing, threading.current_thread()).outcome.put(None)
            self.release.wait()
        if session in self.failing:
            return -1
        for source, target, nbytes in zip(here, there, sizes, strict=True):
            ctypes.memmove(target, source, nbytes)
        return 0

    def calls_to(self, url: str) -> int:
        return sum(session.startswith(f"{url}#") for session, _, _ in self.calls)


class Engines:
    """Engines' memory, by URL, and the transfer engine of whoever writes to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ranks: int) -> None:
        self.addresses = {name: EngineAddress(f"http://{name}:1", tp) for name, tp in ranks.items()}
        self.layouts = {tp: Layout(CONFIG, tp, BF16) for tp in {*ranks.values()}}
        self.memory = {
            name: [
                {
                    parameter: torch.zeros(each.numel, dtype=BF16)
                    for parameter, each in self.layouts[tp].parameters.items()
                }
                for _ in range(tp)
            ]
            for name, tp in ranks.items()
        }
        self.transfer = Transfer()
        self.met: list[EngineAddress] = []
        self.refusing: dict[str, Exception] = {}
        monkeypatch.setattr(p2p, "start_transfer_engine", lambda *_: self.transfer)
        monkeypatch.setattr(p2p, "bounded", self._bounded)
        monkeypatch.setattr(PeerWriter, "_meet", lambda _writer, address: self._meet(address))

    def _bounded(self, call: Callable[[], int], seconds: float, name: str) -> int | None:
        writing = Writing(call)
        writing.start()
        return writing.outcome.get()

    def _meet(self, address: EngineAddress) -> _Peer:
        self.met.append(address)
        if address.url in self.refusing:
            raise self.refusing[address.url]
        name = address.url.removeprefix("http://").removesuffix(":1")
        return _Peer(
            address,
            self.layouts[address.ranks],
            tuple(f"{address.url}#{rank}" for rank in range(address.ranks)),
            tuple(
                {parameter: (each.data_ptr(), each.numel(), each.element_size()) for parameter, each in rank.items()}
                for rank in self.memory[name]
            ),
        )

    def writer(self, rank: int = 0, size: int = 1, **more: Any) -> PeerWriter:
        more = {"stage_bytes": 4 * PIECE_BYTES, "piece_bytes": PIECE_BYTES} | more
        return PeerWriter("127.0.0.1", rank, size, cast(Any, None), **more)

    def holds(self, name: str, value: float) -> bool:
        """Whether every weight of an engine is `value`; padding is not written."""
        return all(
            bool((tensor == value)[: None if "embed" not in parameter and "lm_head" not in parameter else 24].all())
            for rank in self.memory[name]
            for parameter, tensor in rank.items()
        )

    def values(self, name: str) -> set[float]:
        return {value for rank in self.memory[name] for tensor in rank.values() for value in tensor.unique().tolist()}


def constant(value: float) -> list[tuple[str, Any]]:
    shapes = Layout(CONFIG, 1, BF16).weights
    return [(name, torch.full(shape, value, dtype=BF16)) for name, shape in shapes.items()]


TOTAL = sum(tensor.nbytes for _, tensor in constant(0.0))
LARGEST_PIECE = max(
    piece.source.nbytes
    for name, tensor in constant(0.0)
    for piece in pieces(Layout(CONFIG, 1, BF16), name, tensor, PIECE_BYTES)
)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_write_even_shares_that_are_all_and_nothing_twice(
    size: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch, a=tp, b=tp)
    loads = []
    for rank in range(size):
        writer = engines.writer(rank, size)
        assert not writer.connect(list(engines.addresses.values()))
        sent = writer.send(constant(1.0))
        assert not sent.failed
        loads.append(sent.nbytes)
        writer.close()
    assert sum(loads) == TOTAL, "counted once, whatever the number of engines"
    assert max(loads) - min(loads) <= LARGEST_PIECE
    places = [(session, there) for session, theres, _ in engines.transfer.calls for there in theres]
    assert len(set(places)) == len(places)
    assert engines.holds("a", 1.0)
    assert engines.holds("b", 1.0)
    assert not engines.transfer.registered


class Told:
    """An engine's answers: how it was started, and the memory that it registered."""

    info: dict[str, Any]
    memory: dict[str, tuple[int, int, int]]

    def __init__(self, url: str, _seconds: float) -> None:
        self.url = url

    def server_info(self) -> dict[str, Any]:
        return self.info

    def registered_memory(self, _rank: int) -> tuple[str, dict[str, tuple[int, int, int]]]:
        return "session", self.memory

    def close(self) -> None: ...


@pytest.mark.parametrize("wrong", ["", "missing", "short", "wide", "more", "tp_size"])
def test_an_engine_whose_memory_is_not_what_the_table_says_is_not_written_to(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(CONFIG, 1, BF16)
    memory = {name: (1 << 20, each.numel, BF16.itemsize) for name, each in layout.parameters.items()}
    name, (address, elements, width) = next(iter(memory.items()))
    changes = {
        "missing": {},
        "short": {name: (address, elements - 1, width)},
        "wide": {name: (address, elements, 2 * width)},
        "more": {name: memory[name], "lora.weight": (address, 1, width)},
    }
    if wrong in changes:
        del memory[name]
        memory |= changes[wrong]
    Told.info, Told.memory = ({"tp_size": 2} if wrong == "tp_size" else {}), memory
    monkeypatch.setattr(p2p, "SGLangEngine", Told)
    monkeypatch.setattr(p2p, "start_transfer_engine", lambda *_: Transfer())
    writer = PeerWriter("127.0.0.1", 0, 1, lambda _tp: layout, 1 << 20)
    engine = EngineAddress("http://a:1", 1)
    failed = writer.connect([engine])
    writer.close()
    assert list(failed) == ([engine.url] if wrong else [])
    if wrong:
        assert {"more": "lora.weight", "tp_size": "tp_size=2"}.get(wrong, name) in failed[engine.url]


def test_engines_of_different_sizes_get_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, a=1, b=2)
    for rank in range(2):
        writer = engines.writer(rank, 2)
        writer.connect(list(engines.addresses.values()))
        assert not writer.send(constant(1.0)).failed
    assert engines.holds("a", 1.0)
    assert engines.holds("b", 1.0)


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
@pytest.mark.parametrize("session", ["http://b:1#0", "http://b:1#1"])
def test_an_engine_that_refuses_a_write_is_written_to_no_more(
    protocol: str, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch, a=2, b=2)
    writer = engines.writer(protocol=protocol)
    writer.connect(list(engines.addresses.values()))
    engines.transfer.failing = {session}
    sent = writer.send(constant(1.0))
    assert list(sent.failed) == ["http://b:1"]
    assert f"to {session} failed with code -1" in sent.failed["http://b:1"]
    assert not sent.broken, "the others have everything"
    assert engines.holds("a", 1.0)
    calls = [called for called, _, _ in engines.transfer.calls]
    assert calls.count(session) == 1 < calls.count("http://a:1#1")
    engines.transfer.failing = set()
    assert not writer.connect(list(engines.addresses.values()))
    assert not writer.send(constant(2.0)).failed
    assert engines.holds("a", 2.0)
    assert engines.holds("b", 2.0)


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_a_write_that_hangs_keeps_its_engine_out_until_it_has_landed(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(monkeypatch, a=1, b=1)
    a, b = engines.addresses.values()
    writer = engines.writer(protocol=protocol)
    writer.connect([a, b])
    engines.transfer.hanging = {f"{b.url}#0"}
    sent = writer.send(constant(1.0))
    assert list(sent.failed) == [b.url]
    assert "has not ended after 30 s (p2p_transfer_timeout)" in sent.failed[b.url]
    assert engines.holds("a", 1.0)
    hung = engines.transfer.calls_to(b.url)
    assert hung == 1

    failed = writer.connect([a, b])
    assert list(failed) == [b.url]
    assert f"{hung} writes of an earlier update have not ended" in failed[b.url]
    assert not writer.send(constant(2.0)).failed
    assert engines.transfer.calls_to(b.url) == hung
    assert engines.values("b") == {0.0}

    ended = list(writer._late[b.url])
    engines.transfer.hanging = set()
    engines.transfer.release.set()
    for each in ended:
        assert each.wait(60)
    assert engines.values("b") <= {0.0, 1.0}, "what it was to write, though others were written to since"
    assert engines.values("b") != {0.0}
    assert not writer.connect([a, b])
    assert not writer.send(constant(3.0)).failed
    assert engines.holds("a", 3.0)
    assert engines.holds("b", 3.0)
    assert len(engines.transfer.registered) == 2, "what late writes could read is let go of when they have ended"
    writer.close()
    assert not engines.transfer.registered


def test_an_engine_is_met_once_in_each_of_its_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, a=1, b=1)
    a, b = engines.addresses.values()
    again = EngineAddress(b.url, 1, life=1)
    writer = engines.writer()
    rounds: Sequence[tuple[list[EngineAddress], list[EngineAddress]]] = [
        ([a, b], [a, b]), ([a, b], []), ([a, again], [again]), ([again], []), ([a, again], [a]),
    ]  # fmt: skip
    for asked, met in rounds:
        engines.met.clear()
        assert not writer.connect(asked)
        assert sorted(engines.met, key=str) == sorted(met, key=str)


def test_who_is_not_connected_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, a=1, b=1)
    a, b = engines.addresses.values()
    writer = engines.writer()
    writer.connect([a, b])
    writer.connect([a])
    assert writer.send(constant(1.0)).nbytes == TOTAL
    assert engines.values("b") == {0.0}


@pytest.mark.parametrize("error", [EngineError("no answer"), LayoutMismatch("it is quantized")])
def test_an_engine_that_cannot_be_met_is_left_out(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, a=1, b=1)
    a, b = engines.addresses.values()
    engines.refusing[b.url] = error
    writer = engines.writer()
    assert writer.connect([a, b]) == {b.url: str(error)}
    assert not writer.send(constant(1.0)).failed
    assert engines.values("b") == {0.0}
    engines.refusing.clear()
    assert not writer.connect([a, b])
    assert not writer.send(constant(2.0)).failed
    assert engines.holds("b", 2.0)


def test_memory_that_cannot_be_registered_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch, a=1)
    writer = engines.writer()
    writer.connect([engines.addresses["a"]])
    monkeypatch.setattr(engines.transfer, "register_memory", lambda *_: -600)
    with pytest.raises(EngineError, match="refused to register 2048 bytes: code -600"):
        writer.send(constant(1.0))
