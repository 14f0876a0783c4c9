"""A tiny checkpoint and a real SGLang engine that serves it, shared by the tests of a module or session."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

from miles_plugin.engines.launch import EngineSpec, RunningEngine, start_engines  # noqa: E402
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402

HIDDEN, LAYERS = 64, 2


def make_checkpoint(directory: Path, seed: int, num_experts: int = 0) -> Path:
    model = build_model(HIDDEN, LAYERS, seed, num_experts)
    with torch.no_grad():  # larger weights give peaked distributions, whose greedy choice survives bfloat16
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    save_checkpoint(model, build_tokenizer(), directory)
    return directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=0)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    log = tmp_path_factory.mktemp("sglang") / "sglang.log"
    (running,) = start_engines([EngineSpec(checkpoint, "127.0.0.1", gpus=(), seed=0, log=log)])
    yield running
    running.stop()
