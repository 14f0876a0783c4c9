"""Start SGLang servers on this node: the ordinary server where there is a GPU, the CPU recipe where there is none."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_plugin.engines.sglang import EngineError, SGLangEngine
from mooncake_store.process import ManagedProcess, free_ports

START_SECONDS = 300.0
# Bounds the KV cache of a CPU engine; a batch of 512 short samples needs about 40,000 tokens.
CPU_CACHE_TOKENS = 131072


@dataclass(frozen=True)
class EngineSpec:
    """What to serve.

    model: Hugging Face checkpoint directory.
    host: address to listen on. gpus: CUDA device ids, empty on a CPU. seed: of sampling.
    return_routed_experts: record which experts each token was sent to; the model must have experts.
    """

    model: Path
    host: str
    gpus: Sequence[int]
    seed: int
    log: Path
    return_routed_experts: bool = False


@dataclass(frozen=True)
class RunningEngine:
    engine: SGLangEngine
    process: ManagedProcess
    ranks: int

    def check(self, patience: float = 0.0) -> None:
        """Raise EngineError, with the log's last lines, if the server has ended.

        Args:
            patience: seconds to wait for the end of a server that does not answer: its processes end one by one.
        """
        deadline = time.monotonic() + patience
        while (status := self.process.exit_status()) is None and time.monotonic() < deadline:
            if self.engine.ready():
                return
            time.sleep(0.1)
        if status is not None:
            raise EngineError(
                f"SGLang at {self.engine.url} ended with status {status}; its log {self.process.log} ends:\n"
                f"{self.process.log_tail()}"
            )

    def stop(self) -> None:
        self.engine.close()
        self.process.stop()


def start_engines(specs: Sequence[EngineSpec]) -> list[RunningEngine]:
    """Start every engine, then wait until all are ready.

    Raises:
        EngineError: one ended or was not ready after `START_SECONDS`; those already started are stopped.
    """
    running = [_start(spec) for spec in specs]
    try:
        deadline = time.monotonic() + START_SECONDS
        for server in running:
            while not server.engine.ready():
                server.check()
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"SGLang at {server.engine.url} was not ready after {START_SECONDS:.0f} s; its log "
                        f"{server.process.log} ends:\n{server.process.log_tail()}"
                    )
                time.sleep(0.25)
    except BaseException:
        for server in running:
            server.stop()
        raise
    return running


def command(spec: EngineSpec, port: int) -> list[str]:
    """The server's command line."""
    module = "sglang.launch_server" if spec.gpus else "miles_plugin.engines.sglang_cpu.server"
    flags = [
        *("--model-path", str(spec.model), "--host", spec.host, "--port", str(port)),
        *("--random-seed", str(spec.seed), "--log-level", "warning"),
    ]
    if spec.gpus:
        flags += ["--tp", str(len(spec.gpus))]
    else:
        flags += ["--max-total-tokens", str(CPU_CACHE_TOKENS)]
    if spec.return_routed_experts:
        flags.append("--enable-return-routed-experts")
    return [sys.executable, "-m", module, *flags]


def environment(spec: EngineSpec) -> dict[str, str]:
    """The server's environment: offline, on the given address, on its own GPUs."""
    added = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Without it Mooncake, which SGLang imports, may bind an address other than `host`.
        "SGLANG_HOST_IP": spec.host,
    }
    if spec.gpus:
        added["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpus))
    return {**os.environ, **added}


def _start(spec: EngineSpec) -> RunningEngine:
    (port,) = free_ports(1, spec.host)
    process = ManagedProcess("sglang", command(spec, port), spec.log, environment(spec))
    return RunningEngine(SGLangEngine(f"http://{spec.host}:{port}"), process, max(1, len(spec.gpus)))
