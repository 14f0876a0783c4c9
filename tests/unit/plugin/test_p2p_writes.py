"""What a trainer rank writes, and from where: every byte in its place, never more at once than a peer takes."""

import ctypes
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from transformers import Qwen3Config

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.weight_transfer import p2p
from miles_plugin.weight_transfer.equality import Expected
from miles_plugin.weight_transfer.layout import Layout
from miles_plugin.weight_transfer.p2p import PeerWriter, _Peer
from miles_plugin.weight_transfer.sources import NamedTensor

MOST_QUEUED = 2048  # of a peer, over TCP
CONFIG = Qwen3Config(
    architectures=["Qwen3ForCausalLM"], vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
)  # fmt: skip


class Local:
    """In place of a Transfer Engine: writes into this process's memory. batches: lengths of the writes of each call."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.batches: list[list[int]] = []

    def register_memory(self, address: int, nbytes: int) -> int:
        self.registered.append((address, nbytes))
        return 0

    def unregister_memory(self, _address: int) -> int:
        return 0

    def batch_transfer_sync_write(self, _session: str, here: list[int], there: list[int], sizes: list[int]) -> int:
        self.batches.append(sizes)
        if len(sizes) > MOST_QUEUED:
            return -1
        for source, target, nbytes in zip(here, there, sizes, strict=True):
            ctypes.memmove(target, source, nbytes)
        return 0


class Engine:
    """The memory of an engine's ranks, and a writer that knows it."""

    def __init__(self, tp: int, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.layout = Layout(CONFIG, tp, torch.bfloat16)
        self.ranks = [
            {name: torch.zeros(each.numel, dtype=torch.bfloat16) for name, each in self.layout.parameters.items()}
            for _ in range(tp)
        ]
        memory = [
            {name: (tensor.data_ptr(), tensor.numel(), tensor.element_size()) for name, tensor in rank.items()}
            for rank in self.ranks
        ]
        self.transfer = Local()
        monkeypatch.setattr(p2p, "start_transfer_engine", lambda *_: self.transfer)
        peer = _Peer(EngineAddress("http://engine", tp), self.layout, tuple(map(str, range(tp))), tuple(memory))
        monkeypatch.setattr(PeerWriter, "_meet", lambda *_: peer)
        self.writer = PeerWriter("127.0.0.1", 0, 1, cast(Any, None), **{"stage_bytes": 1 << 20, **more})
        assert not self.writer.connect([peer.address])

    def assert_holds(self, weights: dict[str, torch.Tensor]) -> None:
        expected = Expected(self.layout)
        for name, tensor in weights.items():
            expected.add(name, tensor)
        found = [{name: expected._checksum(tensor) for name, tensor in rank.items()} for rank in self.ranks]
        assert found == expected.checksums()


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = Layout(CONFIG, 1, torch.bfloat16).weights
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stage_bytes", [64 << 10, 16 << 20])
def test_every_byte_gets_to_its_place(
    protocol: str, tp: int, stage_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tp, monkeypatch, protocol=protocol, stage_bytes=stage_bytes)
    for seed in range(2):
        sent = weights(seed)
        found = engine.writer.send(sent.items())
        assert (found.failed, found.nbytes) == ({}, sum(tensor.nbytes for tensor in sent.values()))
        engine.assert_holds(sent)


def test_rdma_reads_registered_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(1, monkeypatch, protocol="rdma")
    write = engine.transfer.batch_transfer_sync_write

    def checked(session: str, here: list[int], there: list[int], sizes: list[int]) -> int:
        for begin, nbytes in zip(here, sizes, strict=True):
            assert any(first <= begin and begin + nbytes <= first + size for first, size in engine.transfer.registered)
        return write(session, here, there, sizes)

    monkeypatch.setattr(engine.transfer, "batch_transfer_sync_write", checked)
    assert not engine.writer.send(weights(0).items()).failed


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_no_more_is_written_at_a_time_than_a_peer_takes(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(1, monkeypatch, protocol=protocol, piece_bytes=1)  # a row is never cut: one piece each
    sent = weights(0)
    assert not engine.writer.send(sent.items()).failed
    assert sum(map(len, engine.transfer.batches)) > MOST_QUEUED
    engine.assert_holds(sent)


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_an_update_that_raises_leaves_nothing_for_the_next_one_to_write(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(1, monkeypatch, protocol=protocol)

    def breaks() -> Iterator[NamedTensor]:
        yield next(iter(weights(0).items()))
        raise RuntimeError("a rank failed")

    with pytest.raises(RuntimeError, match="a rank failed"):
        engine.writer.send(breaks())
    engine.writer.send(weights(1).items())
    written = sum(map(sum, engine.transfer.batches))
    assert written == sum(tensor.nbytes for tensor in weights(1).values())
    engine.assert_holds(weights(1))


@pytest.mark.parametrize("setting", [{"enable_dp_attention": True}, {"ep_size": 2}, {"tp_size": 2}, {}])
def test_an_engine_whose_settings_move_its_weights_is_never_written_to(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and sizes of what it registered agree all the same."""
    layout = Layout(CONFIG, 1, torch.bfloat16)
    memory = {name: (64, each.numel, 2) for name, each in layout.parameters.items()}

    class Client:
        def __init__(self, url: str, _seconds: float) -> None:
            self.url = url

        def server_info(self) -> dict[str, Any]:
            return {"tp_size": 1} | setting

        def registered_memory(self, _rank: int) -> tuple[str, dict[str, tuple[int, int, int]]]:
            return "session", memory

        def close(self) -> None: ...

    monkeypatch.setattr(p2p, "SGLangEngine", Client)
    monkeypatch.setattr(p2p, "start_transfer_engine", lambda *_: Local())
    writer = PeerWriter("127.0.0.1", 0, 1, lambda tp: Layout(CONFIG, tp, torch.bfloat16), 1 << 20)
    failed = writer.connect([EngineAddress("http://engine", 1)])
    assert [name in failed.get("http://engine", "") for name in setting] == [True] * len(setting)
    assert bool(failed) == bool(setting)
    writer.close()
