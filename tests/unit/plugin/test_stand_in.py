"""The pure parts of the stand-in engine: which call meets a fault, what a response was made under, what weights are."""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_plugin.engines.stand_in.admission import Admission
from miles_plugin.engines.stand_in.faults import Calls, Fault, FaultDrop, Faults, FaultStatus, striker, without_bulk
from miles_plugin.engines.stand_in.group import WeightsGroup
from miles_plugin.engines.stand_in.scheduler import Latency, Request, Scheduler
from miles_plugin.engines.stand_in.spans import Spans
from miles_plugin.engines.stand_in.tokens import TokenSource
from miles_plugin.engines.stand_in.weights import State, Weights, read_checkpoint
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint
from mooncake_store.errors import ConfigError
from mooncake_store.process import free_ports

FIRST, SECOND = State("first", (1.0,)), State("second", (2.0,))
# Longer than any test: what happens within one does not depend on how fast it runs.
NEVER = 3600.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(build_model(32, 1, 0), build_tokenizer(), directory)
    return directory


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_fault_is_for_calls_of_its_path_from_one_on_and_so_many() -> None:
    faults = Faults()
    faults.post(Fault(path="/generate", do="drop", after=2, times=2))
    assert [len(faults.meet("/generate")) for _ in range(5)] == [0, 1, 1, 0, 0]
    assert faults.meet("/flush_cache") == []
    (described,) = faults.described()
    assert (described["seen"], described["met"]) == (5, 2)
    faults.clear()
    assert faults.described() == []


def test_faults_of_one_call_strike_in_order_and_at_their_moment() -> None:
    due = [Fault(path="/generate", do="status", status=503, when="after"), Fault(path="/generate", do="drop")]
    striker(due, "during")()
    with pytest.raises(FaultDrop):
        striker(due, "before")()
    with pytest.raises(FaultStatus) as caught:
        striker(due, "after")()
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"path": "generate"}, "must begin with /"),
        ({"do": "explode"}, "Invalid enum value 'explode'"),
        ({"after": 0}, "after=0"),
        ({"times": 0}, "times=0"),
        ({"do": "delay"}, "needs seconds"),
        ({"status": 200}, "status=200"),
        ({"when": "during"}, "when='during' is for /update_weights_from_distributed"),
        ({"whne": "before"}, "unknown field `whne`"),
    ],
)
def test_a_fault_that_would_never_strike_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"path": "/generate", "do": "drop", **wrong}, Fault)


def test_calls_are_kept_in_order_without_their_bulk() -> None:
    calls = Calls()
    calls.begin("POST", "/generate", {"input_ids": [1] * 9, "sampling_params": {"stop": [1]}, "text": "x" * 999})
    calls.begin("GET", "/model_info", None).end()
    first, second = calls.described()
    assert first["body"] == {"input_ids": {"length": 9}, "sampling_params": {"stop": [1]}, "text": "x" * 200}
    assert (first["path"], first["ended"]) == ("/generate", None)
    assert second["path"] == "/model_info"
    assert second["ended"] >= second["began"]
    assert without_bulk([[1] * 9]) == [{"length": 9}]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20))))
def test_spans_cover_every_token_once_and_neighbours_differ(steps: list[tuple[str, int]]) -> None:
    spans: Spans[str] = Spans()
    labels: list[str] = []
    for label, end in steps:
        spans.extend(label, end)
        labels += [label] * (end - len(labels))
    assert [label for label, start, end in spans for _ in range(start, end)] == labels
    assert all(one != other for one, other in zip(spans.labels, spans.labels[1:], strict=False))


def test_tokens_follow_from_prompt_and_seed_and_never_end_the_response(checkpoint: Path) -> None:
    source = TokenSource(checkpoint, Weights(checkpoint, 1).config)
    tokens, log_probs = source.response([1, 2], 0, 2000)
    assert source.response([1, 2], 0, 2000) == (tokens, log_probs)
    assert source.response([1, 2], 0, 20) == (tokens[:20], log_probs[:20])
    assert source.response([1, 2], 1, 2000) != (tokens, log_probs) != source.response([1], 0, 2000)
    assert 0 not in tokens
    assert max(log_probs) <= 0.0
    assert source.decode(source.encode("3+4=")) == "3+4="


def test_tokens_keep_what_they_were_made_under() -> None:
    now = [FIRST]
    scheduler = Scheduler(Latency(token=NEVER), "default", lambda: now[0])
    request = Request(wanted=3)
    scheduler.submit(request)
    eventually(lambda: request.made == 1)
    with scheduler.exclusive():
        now[0] = SECOND
    scheduler.stamp("7")
    scheduler.abort_all()  # it ends with its next token, which is not due: the test makes it so
    with scheduler.exclusive():
        request.due = 0.0
    eventually(request.done.is_set)
    assert list(request.versions) == [("default", 0, 1), ("7", 1, 2)]
    assert list(request.weights) == [(FIRST, 0, 1), (SECOND, 1, 2)]
    assert request.ended == "aborted"


def test_every_request_ends_at_a_time_of_its_own() -> None:
    scheduler = Scheduler(Latency(token=0.02), "default", lambda: FIRST)
    long, short = Request(wanted=4), Request(wanted=2)
    for request in (long, short):
        scheduler.submit(request)
    assert long.done.wait(10.0)
    assert 0.0 < short.ended_at < long.ended_at <= time.monotonic()


def test_tokens_that_were_due_before_new_weights_are_made_by_the_old() -> None:
    now = [FIRST]
    scheduler = Scheduler(Latency(prefill=NEVER), "default", lambda: now[0])
    request = Request(wanted=2)
    scheduler.submit(request)
    with scheduler._changed:  # the scheduler's own thread has no time to make it
        request.due = 0.0
        with scheduler.exclusive():
            now[0] = SECOND
    assert list(request.weights) == [(FIRST, 0, 2)]


def test_a_retracted_request_can_be_flushed_aborted_or_resumed() -> None:
    scheduler = Scheduler(Latency(token=NEVER), "default", lambda: FIRST)
    running, other = Request(wanted=2), Request(wanted=2)
    scheduler.submit(running)
    eventually(lambda: running.made == 1)
    assert not scheduler.is_idle()
    scheduler.pause("in_place")
    assert not scheduler.is_idle()
    scheduler.pause("retract")
    assert scheduler.is_idle()
    scheduler.submit(other)
    scheduler.resume()
    eventually(running.done.is_set)  # after a new prefill, which takes no time here
    assert (running.ended, running.made, running.retractions) == ("length", 2, 1)
    scheduler.pause("retract")
    scheduler.abort_all()
    assert other.ended == "aborted waiting"


def test_no_token_is_made_while_paused() -> None:
    scheduler = Scheduler(Latency(), "default", lambda: FIRST)
    request = Request(wanted=1)
    scheduler.pause("in_place")
    scheduler.submit(request)
    assert not request.done.wait(0.05)
    assert not scheduler.wait_until_running(0.01)
    scheduler.resume()
    assert request.done.wait(10.0)


def test_nobody_ends_the_pause_of_an_update() -> None:
    admission = Admission()
    with admission.pausing(True):
        pass
    with admission.update():
        assert not admission._pause.acquire(blocking=False)
    with admission.update(hold_pause=False):
        assert admission._pause.acquire(blocking=False)


def test_a_group_whose_sender_never_comes_is_given_up() -> None:
    (port,) = free_ports(1)
    with pytest.raises(RuntimeError):
        WeightsGroup("127.0.0.1", port, 1, 2, 3, "nobody", timedelta(seconds=0.2))


def test_ranks_of_one_process_receive_what_rank_0_sends() -> None:
    (port,) = free_ports(1)
    with ThreadPoolExecutor(2) as pool:
        root, ranks = pool.map(
            lambda member: WeightsGroup("127.0.0.1", port, *member, 3, "all", timedelta(seconds=60)), [(0, 1), (1, 2)]
        )
        received = torch.zeros(5, dtype=torch.int64)
        for job in [pool.submit(root.receive, torch.arange(5)), pool.submit(ranks.receive, received)]:
            job.result()
    assert received.tolist() == [0, 1, 2, 3, 4]


def test_weights_say_when_they_are_torn(checkpoint: Path) -> None:
    weights = Weights(checkpoint, 1)
    assert weights.state().policy is None
    loaded = list(read_checkpoint(checkpoint))
    halfway: list[State] = []
    weights.load([(name, torch.full_like(tensor, 1.0)) for name, tensor in loaded])
    whole = weights.state()
    weights.load(
        [(name, torch.full_like(tensor, 2.0)) for name, tensor in loaded], lambda: halfway.append(weights.state())
    )
    assert (whole.policy, halfway[0].policy, weights.state().policy) == ((1.0,), (1.0, 2.0), (2.0,))
    assert len({whole.digest, halfway[0].digest, weights.state().digest}) == 3
    name, tensor = max(loaded, key=lambda each: each[1].numel())
    tensor = torch.full_like(tensor, 2.0)
    tensor.view(-1)[-1] = 3.0
    weights.load([(name, tensor)])
    assert weights.state().policy == (2.0, 3.0)


def test_ranks_hold_their_parts_and_padding_is_no_policy(tmp_path: Path) -> None:
    model = build_model(32, 1, 0)
    model.resize_token_embeddings(100)  # engines pad the vocabulary to a multiple of 64
    save_checkpoint(model, build_tokenizer(), tmp_path)
    whole, halves = Weights(tmp_path, 1), Weights(tmp_path, 2)
    fused = "model.layers.0.mlp.gate_up_proj.weight"
    assert whole.addresses(0)[fused][1] == sum(halves.addresses(rank)[fused][1] for rank in (0, 1))
    for weights in (whole, halves):
        weights.load([(name, torch.full_like(tensor, 4.0)) for name, tensor in read_checkpoint(tmp_path)])
        assert weights.state().policy == (4.0,)
    norm = torch.full((32,), 4.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert [rank["model.norm.weight"] for rank in halves.checksums(())] == [hashlib.sha256(norm).hexdigest()[:16]] * 2
    assert not any("norm" in name for rank in halves.checksums(["norm"]) for name in rank)


def test_a_weight_of_another_shape_is_refused_and_an_unknown_one_skipped(checkpoint: Path) -> None:
    weights = Weights(checkpoint, 1)
    before = weights.state()
    weights.load([("visual.weight", torch.zeros(1))])
    assert weights.state() == before
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        weights.load([("model.norm.weight", torch.zeros(1))])


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Weights(tmp_path, 1)
