"""The stand-in engine, driven by the real client and sender: it takes weights as an engine does, and fails as told."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_plugin.engines.fleet import EngineAddress
from miles_plugin.engines.launch import RunningEngine
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from miles_plugin.engines.stand_in.group import WeightsGroup
from miles_plugin.engines.stand_in.process import StandIn
from miles_plugin.rollout.sample import Sample
from miles_plugin.weight_transfer.broadcast import Broadcaster
from miles_plugin.weight_transfer.ranks import Ranks
from miles_plugin.weight_transfer.sources import NamedTensor
from miles_plugin.weight_transfer.transfer import Updater
from mooncake_store.process import ManagedProcess, free_ports
from tests.weight_updates import BUCKET_BYTES, Versions

pytestmark = pytest.mark.integration
BUCKET = "/update_weights_from_distributed"
# A token takes long enough for a test to get in between, and a response ends soon.
TOKEN_SECONDS = 0.02
LONG = {"max_new_tokens": 60, "temperature": 0.0}


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    log = tmp_path_factory.mktemp("stand_in") / "stand_in.log"
    running = StandIn(checkpoint, log, token_seconds=TOKEN_SECONDS)
    yield running
    running.stop()


@pytest.fixture
def stand_in(shared: StandIn) -> Iterator[StandIn]:
    """One that stays well, or gets well again: for every test the same."""
    yield shared
    shared.clear_faults()
    shared.engine.resume()


@pytest.fixture
def doomed(checkpoint: Path, tmp_path: Path) -> Iterator[StandIn]:
    running = StandIn(checkpoint, tmp_path / "stand_in.log")
    yield running
    running.stop()


def constant(checkpoint: Path, value: float) -> list[NamedTensor]:
    return [
        (name, torch.full_like(tensor, value)) for name, tensor in load_file(checkpoint / "model.safetensors").items()
    ]


Sender = tuple[Broadcaster, EngineAddress]


@contextmanager
def broadcasting(engine: SGLangEngine, ranks: int = 1) -> Iterator[Sender]:
    """What sends to one engine, from update to update."""
    broadcaster = Broadcaster("127.0.0.1", "test", "gloo", BUCKET_BYTES)
    try:
        yield broadcaster, EngineAddress(engine.url, ranks)
    finally:
        broadcaster.close()


def send(sender: Sender, weights: Sequence[NamedTensor], version: int, mode: str = "in_place") -> None:
    broadcaster, address = sender
    updater = Updater(broadcaster, Ranks(), Versions(first=version), mode)
    updater.update(lambda: weights, [address])


def policy(engine: SGLangEngine) -> list[float] | None:
    (response,) = engine.generate([[3]], {"max_new_tokens": 1, "temperature": 0.0})
    values: list[float] | None = response["meta_info"]["policy"]
    return values


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def in_flight(engine: SGLangEngine, params: dict[str, Any] = LONG) -> "Future[list[dict[str, Any]]]":
    """A request for a long response, once it is being generated."""
    pool = ThreadPoolExecutor(1)
    job = pool.submit(SGLangEngine(engine.url).generate, [[5, 6, 7]], {**params, "ignore_eos": True})
    pool.shutdown(wait=False)
    eventually(lambda: not idle(engine))
    return job


def idle(engine: SGLangEngine) -> bool:
    """Whether nothing is generated: the cache can be flushed."""
    return httpx.post(f"{engine.url}/flush_cache", timeout=30.0).is_success


def test_an_update_goes_through_the_steps_and_is_served(stand_in: StandIn, checkpoint: Path) -> None:
    engine = stand_in.engine
    before = len(stand_in.calls())
    with broadcasting(engine) as broadcaster:
        for version, mode in ((4, "retract"), (5, "in_place"), (6, "abort")):
            send(broadcaster, constant(checkpoint, float(version)), version, mode)
            assert policy(engine) == [float(version)]
            assert engine.weight_version() == str(version)
    paths = [call["path"].strip("/") for call in stand_in.calls()[before:] if call["path"] != "/model_info"]
    begin, end = paths.index("begin_weight_update"), paths.index("end_weight_update")
    assert paths[: begin + 1] == [
        "init_weights_update_group", "pause_generation", "flush_cache", "begin_weight_update"
    ]  # fmt: skip
    assert set(paths[begin + 1 : end - 1]) == {BUCKET.strip("/")}
    assert paths[end - 1 : end + 3] == [
        "update_weight_version", "end_weight_update", "continue_generation", "generate"
    ]  # fmt: skip


def test_several_ranks_get_one_broadcast(checkpoint: Path, tmp_path: Path) -> None:
    stand_in = StandIn(checkpoint, tmp_path / "stand_in.log", tp=2)
    try:
        with broadcasting(stand_in.engine, ranks=2) as broadcaster:
            send(broadcaster, constant(checkpoint, 4.0), 4)
        assert policy(stand_in.engine) == [4.0]
        first, second = stand_in.engine.checksums()
        assert first == second  # each holds constants of the same shapes
    finally:
        stand_in.stop()


def test_tensors_may_come_one_by_one_and_late(stand_in: StandIn, checkpoint: Path) -> None:
    engine = stand_in.engine
    weights = constant(checkpoint, 9.0)
    body = {
        "names": [name for name, _ in weights],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
        "group_name": "plain",
        "weight_version": "nine",
    }
    (port,) = free_ports(1)
    stand_in.fault(BUCKET, "delay", seconds=0.2)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(engine.init_weights_group, "127.0.0.1", port, 1, 2, "plain", "gloo")
        sender = WeightsGroup("127.0.0.1", port, 0, 1, 2, "plain", timedelta(seconds=60))
        joining.result()
        engine.begin_update()
        loading = pool.submit(httpx.post, f"{stand_in.url}{BUCKET}", json=body, timeout=60.0)
        for _, tensor in weights:
            sender.receive(tensor)  # a broadcast, which rank 0 sends
        assert loading.result().json()["message"].endswith("Weight version updated to nine.")
    engine.end_update()
    engine.destroy_weights_group("plain", 10)
    assert (policy(engine), engine.weight_version()) == ([9.0], "nine")
    (call,) = [call for call in stand_in.calls() if call["path"] == BUCKET and "weight_version" in call["body"]]
    assert call["ended"] - call["began"] >= 0.2


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_response_that_spans_an_update_says_so_token_by_token(stand_in: StandIn, checkpoint: Path, mode: str) -> None:
    engine = stand_in.engine
    with broadcasting(engine) as broadcaster:
        send(broadcaster, constant(checkpoint, 1.0), 1)
        job = in_flight(engine)
        send(broadcaster, constant(checkpoint, 2.0), 2, mode)
        (response,) = job.result(timeout=60)
    meta = response["meta_info"]
    versions = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
    made_by = [(span["policy"], span["start"], span["end"]) for span in meta["weights_digest"]]
    assert [version for version, _, _ in versions] == ["1", "2"]
    assert made_by == [([float(version)], start, end) for version, start, end in versions]
    assert versions[-1][-1] == len(response["output_ids"]) == LONG["max_new_tokens"]
    assert meta["num_retractions"] == (mode == "retract")
    assert meta["policy"] == [1.0, 2.0]


def test_an_aborting_pause_ends_what_is_in_flight_and_holds_what_comes(stand_in: StandIn) -> None:
    engine = stand_in.engine
    job = in_flight(engine, {**LONG, "max_new_tokens": 10_000})
    engine.pause("abort")
    (response,) = job.result(timeout=30)
    sample = Sample()
    sample.update_from_meta_info(None, response["meta_info"])
    assert sample.status is Sample.Status.ABORTED
    assert 0 < len(response["output_ids"]) < 10_000
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(engine.generate, [[1]], {"max_new_tokens": 1})
        eventually(lambda: stand_in.calls()[-1]["path"] == "/generate")
        assert not held.done()
        engine.resume()
        assert held.result(timeout=30)[0]["meta_info"]["finish_reason"]["type"] == "length"


def test_the_transfer_engine_writes_what_is_served(checkpoint: Path, tmp_path: Path) -> None:
    from mooncake.engine import TransferEngine

    stand_in = StandIn(checkpoint, tmp_path / "stand_in.log", transfer_engine=True)
    try:
        check_transfer(stand_in, TransferEngine(), checkpoint, tmp_path / "reference")
    finally:
        stand_in.stop()


def check_transfer(stand_in: StandIn, sender: Any, checkpoint: Path, reference: Path) -> None:
    assert sender.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    session, memory = stand_in.engine.registered_memory(0)
    sources = [torch.full((elements,), 3.0, dtype=torch.bfloat16) for _, elements, _ in memory.values()]
    for source in sources:
        assert sender.register_memory(source.data_ptr(), source.nbytes) == 0
    where = [address for address, _, _ in memory.values()]
    half = len(sources) // 2
    for part in (slice(0, half), slice(half, None)):
        mixed = policy(stand_in.engine)
        assert mixed is None or 3.0 not in mixed or len(mixed) > 1
        written = sources[part]
        assert (
            sender.batch_transfer_sync_write(
                session, [source.data_ptr() for source in written], where[part], [source.nbytes for source in written]
            )
            == 0
        )
    assert policy(stand_in.engine) == [3.0]
    reference.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (reference / name).write_bytes((checkpoint / name).read_bytes())
    save_file(dict(constant(checkpoint, 3.0)), reference / "model.safetensors")
    by_transfer = stand_in.engine.checksums()
    httpx.post(f"{stand_in.url}/update_weights_from_disk", json={"model_path": str(reference)}).raise_for_status()
    assert stand_in.engine.checksums() == by_transfer


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("fault", "status"),
    [({"do": "status", "status": 503}, 503), ({"do": "drop"}, None), ({"do": "hang", "seconds": 0.1}, None)],
    ids=["status", "drop", "hang"],
)
def test_a_fault_is_what_the_client_sees_and_the_next_call_is_well(
    stand_in: StandIn, fault: dict[str, Any], status: int | None, when: str
) -> None:
    engine = stand_in.engine
    stand_in.fault("/begin_weight_update", when=when, after=2, **fault)
    engine.begin_update()
    engine.end_update()
    with pytest.raises(EngineError) as caught:
        engine.begin_update()
    assert caught.value.status == status
    if when == "after":  # it took effect
        engine.end_update()
    engine.begin_update()
    engine.end_update()


def test_a_killed_engine_is_gone_and_one_at_its_address_is_new(
    doomed: StandIn, checkpoint: Path, tmp_path: Path
) -> None:
    engine = doomed.engine
    with broadcasting(engine) as broadcaster:
        doomed.fault(BUCKET, "die", after=2, when="during")
        with pytest.raises((EngineError, RuntimeError)):
            send(broadcaster, constant(checkpoint, 2.0), 2)
    eventually(lambda: doomed.process.exit_status() == 128 + signal.SIGKILL)
    assert not engine.ready()
    port = int(doomed.url.rpartition(":")[2])
    again = StandIn(checkpoint, tmp_path / "stand_in.log", port=port)
    try:
        assert engine.weight_version() == "default"
        assert (again.url, again.pid != doomed.pid) == (doomed.url, True)
    finally:
        again.stop()


def test_a_stopped_engine_answers_nobody_until_it_goes_on(stand_in: StandIn) -> None:
    impatient = SGLangEngine(stand_in.url, timeout=1.0)
    stand_in.fault("/flush_cache", "stop")
    with pytest.raises(EngineError, match="no answer"):
        impatient.flush_cache()
    with pytest.raises(EngineError, match="no answer"):
        impatient.model_info()
    os.kill(stand_in.pid, signal.SIGCONT)
    stand_in.engine.model_info()


def test_an_update_that_breaks_off_leaves_weights_that_are_seen_to_be_torn(stand_in: StandIn, checkpoint: Path) -> None:
    engine = stand_in.engine
    with broadcasting(engine) as broadcaster:
        send(broadcaster, constant(checkpoint, 1.0), 1)
        stand_in.fault(BUCKET, "drop", after=2, when="during")
        with pytest.raises(EngineError, match="no answer"):
            send(broadcaster, constant(checkpoint, 2.0), 2)
        engine.resume()
        assert policy(engine) == [1.0, 2.0]
        engine.end_update()
        send(broadcaster, constant(checkpoint, 3.0), 3)
        assert policy(engine) == [3.0]


def test_a_wrong_fault_is_named(stand_in: StandIn) -> None:
    with pytest.raises(ValueError, match="Invalid enum value 'explode'"):
        stand_in.fault("/generate", "explode")
    with pytest.raises(ValueError, match="'/genrate' is none of"):
        stand_in.fault("/genrate", "drop")


def test_hundreds_of_requests_are_served_beside_each_other(stand_in: StandIn) -> None:
    """Together they take about as long as one; one after the other they would take minutes."""
    spans = []
    with ThreadPoolExecutor(64) as pool, httpx.Client(limits=httpx.Limits(max_connections=64)) as client:

        def ask(index: int) -> None:
            answer = client.post(
                f"{stand_in.url}/generate",
                json={"input_ids": [[index, each] for each in range(4)], "sampling_params": LONG},
                timeout=120.0,
            )
            for response in answer.raise_for_status().json():
                meta = response["meta_info"]
                sent = meta["response_sent_to_client_ts"]
                spans.append((sent - meta["e2e_latency"], sent))

        list(pool.map(ask, range(64)))
    assert len(spans) == 256
    assert max(begin for begin, _ in spans) < min(end for _, end in spans) + 60 * TOKEN_SECONDS


def test_the_stand_in_needs_no_sglang() -> None:
    code = (
        "import miles_plugin.engines.stand_in.__main__, sys;"
        "assert not any(name.partition('.')[0] == 'sglang' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What follows compares it with the real thing.

_DEAD_SENDER = """
import sys, time
from datetime import timedelta
from miles_plugin.engines.stand_in.group import WeightsGroup
member = WeightsGroup("127.0.0.1", int(sys.argv[1]), 0, 1, 2, "parity", timedelta(seconds=60))
time.sleep(600)
"""


def shape(value: Any) -> Any:
    """What of an answer must agree: names and types, of a list its first element."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if key not in ("weights_digest", "policy")}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


class Script:
    """The same requests to any engine. `seen`: (label, status, shape of the answer), in order."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine
        self._http = httpx.Client(base_url=engine.url, timeout=60.0, trust_env=False)
        self.seen: list[tuple[str, int, Any]] = []

    def ask(self, path: str, body: Any = None, method: str = "POST", label: str = "") -> Any:
        answer = self._http.request(method, path, json=body)
        try:
            content = answer.json()
        except ValueError:
            content = answer.text
        self.seen.append((label or f"{path} {body}", answer.status_code, shape(content)))
        return content

    def finish(self, label: str, job: "Future[list[dict[str, Any]]]") -> None:
        (response,) = job.result(timeout=120)
        meta = response["meta_info"]
        spans = [span["version"] for span in meta["weight_versions"]]
        what = {"shape": shape(response), "versions": spans, "reason": meta["finish_reason"]["type"]}
        self.seen.append((label, 200, what))

    def run(self, checkpoint: Path) -> None:
        self.information()
        self.refusals(checkpoint)
        self.pauses()
        self.groups(checkpoint)

    def information(self) -> None:
        for path in ("/health", "/flush_cache", "/weights_checker", "/remote_instance_transfer_engine_info?rank=0"):
            self.ask(path, method="GET")
        self.ask("/remote_instance_transfer_engine_info", method="GET")
        self.ask("/nothing", {})
        self.ask("/pause_generation", method="GET")

    def refusals(self, checkpoint: Path) -> None:
        self.ask("/generate", {})
        self.ask("/generate", {"input_ids": [9] * 5000, "sampling_params": {"max_new_tokens": 1}}, label="too long")
        for path in ("/pause_generation", "/continue_generation", "/init_weights_update_group", BUCKET):
            self.ask(path, label=f"{path} without a body")
        self.ask("/pause_generation", {"mode": "sleep"})
        self.ask("/update_weight_version", {"new_version": 8})
        self.ask("/weights_checker", {"action": "look"})
        self.ask("/end_weight_update", {})
        bucket = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "nobody"}
        self.ask(BUCKET, bucket, label="bucket outside an update")
        self.ask("/begin_weight_update", {})
        self.ask("/begin_weight_update", {}, label="second begin")
        self.ask(BUCKET, bucket, label="bucket without a group")
        self.ask("/end_weight_update", {})
        self.ask("/destroy_weights_update_group", {"group_name": "nobody"})
        self.ask("/update_weights_from_disk", {"model_path": "/nonexistent"})
        self.ask("/update_weights_from_disk", {"model_path": str(checkpoint), "weight_version": "disk"}, label="disk")

    def pauses(self) -> None:
        for number, mode in enumerate(("in_place", "retract", "abort")):
            job = in_flight(self._engine, {"max_new_tokens": 150, "temperature": 0.0})
            self.ask("/pause_generation", {"mode": mode})
            self.ask("/pause_generation", {"mode": mode}, label=f"{mode} twice")
            self.ask("/flush_cache", label=f"flush, paused {mode}")
            self.ask("/begin_weight_update", {})
            self.ask("/end_weight_update", {})
            self.ask("/update_weight_version", {"new_version": f"v{number}", "abort_all_requests": False})
            self.ask("/continue_generation", {})
            self.finish(f"in flight, paused {mode}", job)
            self._http.post("/flush_cache", params={"timeout": 10.0}).raise_for_status()
        job = in_flight(self._engine, {"max_new_tokens": 150, "temperature": 0.0})
        self.ask("/update_weight_version", {"new_version": "aborting"})
        self.finish("stamped, with all aborted", job)
        job = in_flight(self._engine, {"max_new_tokens": 150, "temperature": 0.0})
        self.ask("/pause_generation", {"mode": "retract"})
        self.ask("/update_weight_version", {"new_version": "aborting, paused"})
        (response,) = job.result(timeout=60)
        self.seen.append(("aborted while it waited", 200, shape(response)))
        self.ask("/continue_generation", {})
        self.ask("/generate", {"input_ids": [[90], [91]], "sampling_params": {"max_new_tokens": 2, "n": 2}})
        self.ask("/generate", {"input_ids": [93], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True})

    def groups(self, checkpoint: Path) -> None:
        """A sender that dies: the engine, which waits for a bucket, does not wait for ever."""
        (port,) = free_ports(1)
        log = checkpoint / f"sender-{port}.log"
        sender = ManagedProcess("sender", [sys.executable, "-c", _DEAD_SENDER, str(port)], log)
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
                 "group_name": "parity", "backend": "gloo"}  # fmt: skip
        try:
            self.ask("/init_weights_update_group", group, label="join")
            self.ask("/init_weights_update_group", group, label="join again")
            self.ask("/pause_generation", {"mode": "retract"})
            self.ask("/begin_weight_update", {})
            bucket = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "parity",
                      "load_format": "flattened_bucket"}  # fmt: skip
            killer = threading.Timer(1.0, sender.stop)
            killer.start()
            self.ask(BUCKET, bucket, label="the sender dies")
            killer.join()
            self.ask("/end_weight_update", {})
            self.ask("/destroy_weights_update_group", {"group_name": "parity"}, label="leave")
            self.ask("/continue_generation", {})
        finally:
            sender.stop()


@pytest.mark.slow  # starts SGLang
def test_it_answers_as_sglang_does(server: RunningEngine, stand_in: StandIn, checkpoint: Path) -> None:
    real, mine = Script(server.engine), Script(stand_in.engine)
    real.run(checkpoint)
    mine.run(checkpoint)
    for (label, *expected), (_, *answered) in zip(real.seen, mine.seen, strict=True):
        assert answered == expected, label


@pytest.mark.slow  # starts SGLang
def test_it_says_of_itself_what_sglang_says(server: RunningEngine, stand_in: StandIn) -> None:
    real, mine = server.engine.model_info(), stand_in.engine.model_info()
    assert shape(mine) == {key: shape(value) for key, value in real.items() if key in mine}
    assert real["architectures"] == mine["architectures"]
    real, mine = server.engine.server_info(), stand_in.engine.server_info()
    left_out = ("internal_states",)
    assert {key: shape(mine[key]) for key in mine if key not in left_out} == {
        key: shape(real[key]) for key in mine if key not in left_out
    }


@pytest.mark.slow  # starts SGLang
def test_its_checksums_are_those_of_sglang(server: RunningEngine, stand_in: StandIn, checkpoint: Path) -> None:
    for engine in (server.engine, stand_in.engine):
        body = {"model_path": str(checkpoint)}
        httpx.post(f"{engine.url}/update_weights_from_disk", json=body, timeout=60.0).raise_for_status()
    assert stand_in.engine.checksums() == server.engine.checksums()
