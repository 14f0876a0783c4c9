"""Engines that run already: which are taken, and that every wrong one is named with what is wrong and what to do.

The servers here are stand-ins that repeat what a real SGLang 0.5.23 answered, with one thing changed.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin import plan, preflight
from miles_plugin.arguments_sources import load_config
from miles_plugin.cluster import NodeSpec
from miles_plugin.engines import attach as attaching
from miles_plugin.engines.attach import attach, attached_engines
from miles_plugin.engines.differences import Expected
from miles_plugin.training.tiny_policy import build_tokenizer
from mooncake_store.errors import ConfigError

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 1024, "dtype": "bfloat16",
}  # fmt: skip
# Of a real server's answers, what is read, and some of what is not.
MODEL_INFO = {
    "model_path": "", "is_generation": True, "weight_version": "default", "load_format": "auto",
    "disaggregation_mode": "null", "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
SERVER_INFO = {
    "dtype": "auto", "quantization": None, "tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1, "device": "cpu",
    "enable_lora": None, "json_model_override_args": "{}", "enable_return_routed_experts": False,
    "remote_instance_weight_loader_start_seed_via_transfer_engine": False, "port": 30000, "version": "0.5.23",
    "startup_time": {"load_weight": 0.0265, "scheduler_e2e": 1.4888}, "internal_states": [{"dtype": "auto"}],
}  # fmt: skip
SEEDED = {"remote_instance_weight_loader_start_seed_via_transfer_engine": True}
Answer = Callable[[BaseHTTPRequestHandler], None]


def made(directory: Path, **changes: Any) -> Path:
    """A checkpoint directory without weights to read."""
    build_tokenizer().save_pretrained(directory)
    (directory / "model.safetensors").touch()
    (directory / "config.json").write_text(json.dumps(QWEN3 | changes))
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return made(tmp_path / "checkpoint")


@contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """An HTTP server on a free port; its host:port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def say(request: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(text)))
    request.end_headers()
    request.wfile.write(text)


def sglang(model: Mapping[str, Any], server: Mapping[str, Any], registered: int = 0) -> Answer:
    """The answers of a SGLang server with `registered` ranks that the Transfer Engine may write."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        path, _, rank = request.path.partition("?rank=")
        if path == "/model_info":
            say(request, MODEL_INFO | model)
        elif path == "/server_info":
            port = request.server.server_address[1]  # type: ignore[index]
            say(request, SERVER_INFO | {"port": port} | server)
        elif rank and int(rank) < registered:
            say(request, {"remote_instance_transfer_engine_info": ["127.0.0.1:1", {"a": [1, 2, 2]}]})
        else:
            say(request, {"error": {"message": f"Failed to get transfer engine info for rank {rank}"}}, 400)

    return answer


def refusal(addresses: list[str], expected: Expected) -> str:
    with pytest.raises(ConfigError) as caught:
        attach(addresses, expected)
    return str(caught.value)


def test_engines_as_expected_are_taken_in_order(checkpoint: Path) -> None:
    served = {"model_path": str(checkpoint)}
    with listening(sglang(served, {})) as first, listening(sglang(served, {"dtype": "bfloat16"})) as second:
        config = load_config(["--rollout-external", "--rollout-external-engine-addrs", second, first])
        assert attached_engines(config, checkpoint) == [(f"http://{second}", 1), (f"http://{first}", 1)]
        (engine,) = attach([first], Expected(checkpoint, 1))
        assert str(engine) == f"http://{first} (SGLang 0.5.23, Qwen3ForCausalLM, tensor-parallel size 1)"


def test_a_model_that_cannot_be_read_here_is_compared_by_its_architecture(checkpoint: Path) -> None:
    with listening(sglang({"model_path": "Qwen/somewhere-else"}, {})) as address:
        (engine,) = attach([address], Expected(checkpoint, 1))
        assert not engine.compared
        assert "its config.json is not readable here" in str(engine)


@pytest.mark.parametrize(
    ("model", "server", "expected", "words"),
    [
        ({"disaggregation_mode": "prefill"}, {}, {}, "disaggregation_mode=prefill, expected null: .*restart it w"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, {}, {},
         r"architectures=\['LlamaForCausalLM'\], model_type=llama, expected architectures=\['Qwen3ForCausalLM'\], "
         "model_type=qwen3 .hf_checkpoint=.*--model-path"),
        ({}, {"dtype": "float16"}, {}, "dtype=float16, expected bfloat16, .*--dtype bfloat16"),
        ({}, {"dtype": "half"}, {}, "dtype=half, expected bfloat16"),
        ({}, {"quantization": "fp8"}, {}, "quantization=fp8, expected none: .*without --quantization"),
        ({}, {"tp_size": 2}, {},
         r"tp_size=2, expected 1 \(rollout_num_gpus_per_engine=1\); .*--rollout-num-gpus-per-engine"),
        ({}, {}, {"ranks": 4}, r"tp_size=1, expected 4 .*--tp-size 4"),
        ({}, {"dp_size": 2}, {}, "dp_size=2, expected 1: .*without --dp-size"),
        ({}, {"pp_size": 2}, {}, "pp_size=2, expected 1"),
        ({}, SEEDED | {"ep_size": 2}, {"mode": "p2p"}, "ep_size=2, expected 1: update_weight_transfer_mode=p2p"),
        ({}, {}, {"routed_experts": True}, "expected True .return_routed_experts=True.; .*--enable-return-routed-exp"),
        ({}, {}, {"device": "cuda"}, "device=cpu, expected cuda: .*NCCL"),
        ({}, {}, {"mode": "p2p"}, "start_seed_via_transfer_engine=False, expected True .*-mode broadcast"),
        ({}, SEEDED | {"enable_lora": True}, {"mode": "p2p"}, "enable_lora=True, expected False .*-mode broadcast"),
        ({}, SEEDED | {"tp_size": 2}, {"mode": "p2p", "ranks": 2}, "rank 1 says no registered memory"),
        ({}, {"enable_lora": True}, {"mode": "disk-delta"},
         r"enable_lora=True, expected False \(update_weight_transfer_mode=disk-delta\): .*-mode broadcast"),
    ],
)  # fmt: skip
def test_an_engine_that_differs_is_refused(
    model: dict[str, Any], server: dict[str, Any], expected: dict[str, Any], words: str, checkpoint: Path
) -> None:
    served = {"model_path": str(checkpoint)} | model
    with listening(sglang(served, server, registered=1)) as address:
        message = refusal([address], replace(Expected(checkpoint, 1), **expected))
    assert message.startswith(f"rollout_external_engine_addrs={address}: the engine cannot be used: {address}: ")
    assert len(message.splitlines()) == 1
    assert "; restart" in message or "run both" in message or "look in its log" in message
    assert re.search(words, message), message


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_p2p_engine_with_all_its_memory_registered_is_taken(ranks: int, checkpoint: Path) -> None:
    server = SEEDED | {"tp_size": ranks, "device": "cuda"}
    with listening(sglang({"model_path": str(checkpoint)}, server, registered=ranks)) as address:
        (engine,) = attach([address], Expected(checkpoint, ranks, mode="p2p", device="cpu"))
        assert engine.ranks == ranks


def test_a_disk_delta_engine_needs_nothing_registered_and_may_be_of_another_kind(checkpoint: Path) -> None:
    with listening(sglang({"model_path": str(checkpoint)}, {"ep_size": 2, "device": "cuda"})) as address:
        assert attach([address], Expected(checkpoint, 1, mode="disk-delta", device="cpu"))


def test_lora_and_experts_over_ranks_are_fine_for_broadcast(checkpoint: Path) -> None:
    with listening(sglang({"model_path": str(checkpoint)}, {"enable_lora": True, "ep_size": 2})) as address:
        assert attach([address], Expected(checkpoint, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 128}, {"num_hidden_layers": 3}, {"num_key_value_heads": 4}, {"vocab_size": 512},
        {"tie_word_embeddings": True}, {"rms_norm_eps": 0.5}, {"rope_theta": 5.0},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)  # fmt: skip
def test_another_shape_of_the_same_architecture_is_refused(
    change: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    other = made(tmp_path / "other", **change)
    with listening(sglang({"model_path": str(other)}, {})) as address:
        message = refusal([address], Expected(checkpoint, 1))
    (name,) = change
    assert f"model {other} has " in message
    assert f"{'rope_parameters' if name == 'rope_theta' else name}=" in message
    assert f"hf_checkpoint={checkpoint}" in message


def test_a_shape_changed_on_the_command_line_is_seen(checkpoint: Path) -> None:
    server = {"json_model_override_args": '{"num_hidden_layers": 1}'}
    with listening(sglang({"model_path": str(checkpoint)}, server)) as address:
        message = refusal([address], Expected(checkpoint, 1))
    assert "has num_hidden_layers=1, expected num_hidden_layers=2" in message


def test_auto_is_the_checkpoint_s_dtype_and_float16_for_float32(tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "float32", dtype="float32")
    with listening(sglang({"model_path": str(checkpoint)}, {})) as address:
        assert "dtype=auto (float16), expected bfloat16" in refusal([address], Expected(checkpoint, 1))


def test_every_wrong_engine_is_in_one_error_with_all_that_is_wrong(checkpoint: Path) -> None:
    served = {"model_path": str(checkpoint)}
    with ExitStack() as stack:
        good = stack.enter_context(listening(sglang(served, {})))
        lean = stack.enter_context(listening(sglang(served, {"tp_size": 2, "dtype": "float32"})))
        split = stack.enter_context(listening(sglang(served | {"disaggregation_mode": "decode"}, {})))
        dead = "127.0.0.1:9"
        message = refusal([good, lean, dead, split, "nonsense"], Expected(checkpoint, 1))
    first, *lines = message.splitlines()
    assert "4 of 5 engines cannot be used" in first
    assert [line.split(": ")[0].strip() for line in sorted(lines)] == sorted([lean, dead, split, "nonsense"])
    (of_lean,) = [line for line in lines if lean in line]
    assert "dtype=float32" in of_lean
    assert "tp_size=2" in of_lean
    (of_dead,) = [line for line in lines if dead in line]
    assert "Connection refused" in of_dead
    assert "start the engine, or correct the address" in of_dead


def closes(request: BaseHTTPRequestHandler) -> None:
    request.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda request: say(request, {"error": "no"}, 404), "HTTP 404: .*no SGLang server, or one that failed"),
        (lambda request: say(request, b"<html>"), "what answers there is no SGLang server.*correct the address"),
        (lambda request: say(request, [1, 2]), "no SGLang server"),
        (lambda request: say(request, b"\xff"), "no SGLang server"),
        (lambda request: say(request, {"status": "ok"}), "no SGLang server .its answers lack tp_size, dtype, version"),
        (lambda request: say(request, {"error": "Unauthorized"}, 401), "HTTP 401: .*without --api-key"),
        (closes, "no answer: .*start the engine"),
    ],
)
def test_what_is_no_sglang_server_is_said_to_be_none(answer: Answer, words: str, checkpoint: Path) -> None:
    with listening(answer) as address:
        message = refusal([address], Expected(checkpoint, 1))
    assert re.search(words, message), message


def test_a_port_that_speaks_no_http(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"SSH-2.0-x\r\n")
            connection.close()

        threading.Thread(target=greet, daemon=True).start()
        assert "no answer" in refusal([f"127.0.0.1:{listener.getsockname()[1]}"], Expected(checkpoint, 1))


def test_a_server_that_answers_drop_by_drop_holds_nobody(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "ANSWER_SECONDS", 0.5)
    ended = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000000")
        request.end_headers()
        while not ended.wait(0.05):
            request.wfile.write(b" ")

    with listening(drip) as address:
        try:
            assert "within 0.5 s; see" in refusal([address], Expected(checkpoint, 1))
        finally:
            ended.set()


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.0.0.1:", ":30000", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:a", "127.0.0.1:-1",
     "127.0.0.1:\u0663", "http://127.0.0.1:30000", "[::1]", "::1", "[::1:3", "a b:1", "h:1;h:2", ""],
)  # fmt: skip
def test_an_address_of_another_form_is_refused(address: str, checkpoint: Path) -> None:
    assert "is not host:port with a port of 1 to 65535" in refusal([address], Expected(checkpoint, 1))


def test_an_ipv6_address_stands_in_brackets(checkpoint: Path) -> None:
    assert "http://[::1]:9/server_info: no answer" in refusal(["[::1]:9"], Expected(checkpoint, 1))


def test_an_engine_named_twice_is_refused_under_whatever_name(checkpoint: Path) -> None:
    with listening(sglang({"model_path": str(checkpoint)}, {})) as address:
        assert f"{address}: is named 2 times" in refusal([address, address], Expected(checkpoint, 1))
        other = address.replace("127.0.0.1", "localhost")
        assert f"{other}: is the same engine as {address}" in refusal([address, other], Expected(checkpoint, 1))


def test_an_engine_that_a_run_has_already_is_known_under_whatever_name(checkpoint: Path) -> None:
    served = {"model_path": str(checkpoint)}
    with listening(sglang(served, {})) as address, listening(sglang(served, {"startup_time": 2.5})) as another:
        other = f"http://{address.replace('127.0.0.1', 'localhost')}"
        run = [f"http://{another}", "http://127.0.0.1:9", f"http://{address}"]  # of which one is gone
        assert attaching.twin(other, run, Expected(checkpoint, 1)) == f"http://{address}"
        assert attaching.twin(other, run[:2], Expected(checkpoint, 1)) is None


FLAGS = ["--rollout-external", "--rollout-external-engine-addrs"]


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_visible_gpus", lambda: [])


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rollout-external"], "rollout_external=True: no engine is named; add --rollout-external-engine-addrs"),
        ([FLAGS[1], "a:1"], "rollout_external_engine_addrs=a:1 is set without rollout_external; add --rollout-ext"),
        ([*FLAGS, "a:1"], "rollout_external=True: .*tiny policy.*--hf-checkpoint"),
        ([*FLAGS, "a:1", "b:1", "--hf-checkpoint", "HERE", "--rollout-num-gpus", "3"],
         "rollout_num_gpus=3: .*make 2; leave rollout_num_gpus out"),
        (["--colocate", "--update-weight-transfer-mode", "p2p"], "colocate=True: .*transfer_mode=p2p, .*leave --colo"),
        (["--update-weight-transfer-mode", "p2p", "--hf-checkpoint", "Qwen/Qwen3-0.6B"],
         "hf_checkpoint=Qwen/Qwen3-0.6B: no config.json .*give a complete local Hugging Face checkpoint directory"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(argv: list[str], words: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        preflight.check(load_config([str(checkpoint) if word == "HERE" else word for word in argv]))


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize(
    "needed_by", ["update_weight_transfer_mode=p2p", "check_weight_update_equal=True"], ids=["p2p", "checksums"]
)
def test_an_architecture_of_which_the_place_of_weights_is_not_known_is_refused_where_it_is_needed(
    needed_by: str, tmp_path: Path
) -> None:
    policy = made(tmp_path / "policy", architectures=["Gemma2ForCausalLM"], model_type="gemma2")
    engine = ["--rollout-num-gpus-per-engine", "3", "--rollout-num-gpus", "3"]  # of it nothing is known of ranks, too
    job = [*engine, "--hf-checkpoint", str(policy)]
    wants = ["--check-weight-update-equal"] if "equal" in needed_by else ["--update-weight-transfer-mode", "p2p"]
    words = "architecture Gemma2.* is not known; .*use --update-weight-transfer-mode broadcast"
    with pytest.raises(ConfigError, match=f"{needed_by} with hf_checkpoint={policy}: .*{words}"):
        preflight.check(load_config([*job, *wants]))
    assert preflight.check(load_config(job))


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_job_with_engines_that_run_already_reserves_nothing_for_any(
    gpus: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_visible_gpus", lambda: list(range(gpus)))
    answers = sglang({"model_path": str(checkpoint)}, {"tp_size": 2, "device": "cuda" if gpus else "cpu"})
    with listening(answers) as first, listening(answers) as second:
        job = [*FLAGS, first, second, "--hf-checkpoint", str(checkpoint), "--rollout-num-gpus-per-engine", "2"]
        config = load_config(job)
        found = preflight.check(config)
        assert preflight.check(load_config([*job, "--rollout-num-gpus", "4"])) == found
        with pytest.raises(ConfigError, match="rollout_num_gpus=1: "):
            preflight.check(load_config([*job, "--rollout-num-gpus", "1"]))
    assert config.rollout_num_gpus == 4
    assert not found.rollout_node.gpus
    assert len(found.trainer_nodes[0].gpus) == gpus
    assert [engine.url for engine in found.engines] == [f"http://{first}", f"http://{second}"]
    assert "SGLang engine" not in [item.process for item in plan.processes(config, found)]
    text = plan.describe(config, found)
    assert f"http://{first} (SGLang 0.5.23, Qwen3ForCausalLM, tensor-parallel size 2)" in text
    as_json = json.loads(plan.describe(load_config([*job, "--log-format", "json"]), found))
    assert len(as_json["engines"]) == 2


@pytest.mark.usefixtures("on_a_cpu")
def test_a_loopback_address_means_nothing_to_other_hosts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = NodeSpec(1, host="10.0.0.1"), [NodeSpec(2, host="10.0.0.2")]
    asked: list[int] = []

    def find_nodes(
        _address: str, _world: list[int], engine_gpus: int, _on_head: bool
    ) -> tuple[NodeSpec, list[NodeSpec]]:
        asked.append(engine_gpus)
        return nodes

    monkeypatch.setattr(preflight, "find_nodes", find_nodes)
    with listening(sglang({"model_path": str(checkpoint)}, {})) as address:
        job = [*FLAGS, address, "--hf-checkpoint", str(checkpoint), "--ray-address", "10.0.0.1:6379"]
        with pytest.raises(ConfigError, match=rf"{address} is another engine for each of 10\.0\.0\.1, 10\.0\.0\.2"):
            preflight.check(load_config(job))
        nodes[1][0] = NodeSpec(2, host="10.0.0.1")
        assert preflight.check(load_config(job)).engines
    assert asked == [0, 0], "no GPU is needed on the rollout node"


def test_which_addresses_mean_another_engine_on_each_host() -> None:
    for address in ("localhost:1", "127.0.0.2:1", "[::1]:1"):
        attaching.check_loopback([address], {"10.0.0.1"})
        with pytest.raises(ConfigError, match=r"the flag.* is another engine for each of 10\.0\.0\.1, 10"):
            attaching.check_loopback([address, "10.0.0.1:1"], {"10.0.0.2", "10.0.0.1"}, "the flag")
    attaching.check_loopback(["10.0.0.1:1", "[fd00::1]:1", "engine-0:1"], {"10.0.0.2", "10.0.0.1"})


def test_the_engines_are_asked_all_at_once(checkpoint: Path) -> None:
    """Each server answers only when all have been asked."""
    everyone = threading.Barrier(8)

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/server_info":
            everyone.wait(timeout=attaching.ANSWER_SECONDS)
        sglang({"model_path": str(checkpoint)}, {"startup_time": time.monotonic_ns()})(request)

    with ExitStack() as stack:
        addresses = [stack.enter_context(listening(answer)) for _ in range(everyone.parties)]
        assert len(attach(addresses, Expected(checkpoint, 1))) == everyone.parties
