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
    cpu_ranks: tensor-parallel ranks on a CPU; on GPUs each is one.
    p2p_protocol: "tcp" or "rdma", over which the Transfer Engine may write into its parameters; None if it may not.
    """

    model: Path
    host: str
    gpus: Sequence[int]
    seed: int
    log: Path
    return_routed_experts: bool = False
    cpu_ranks: int = 1
    p2p_protocol: str | None = None

    @property
    def ranks(self) -> int:
        """Its tensor-parallel size."""
        return len(self.gpus) or self.cpu_ranks


@dataclass(frozen=True)
class RunningEngine:
    engine: SGLangEngine
    process: ManagedProcess
    ranks: int

    def ended(self, patience: float = 0.0) -> str | None:
        """How the server has ended, and where its log is; None while it runs.

        Args:
            patience: seconds to wait for the end of a server that does not answer: its processes end one by one.
        """
        deadline = time.monotonic() + patience
        while (status := self.process.exit_status()) is None and time.monotonic() < deadline:
            if self.engine.ready():
                return None
            time.sleep(0.1)
        if status is None:
            return None
        return f"SGLang at {self.engine.url} ended with status {status}; its log {self.process.log}"

    def check(self, patience: float = 0.0) -> None:
        """Raise EngineError, with the log's last lines, if the server has `ended`."""
        if ended := self.ended(patience):
            raise EngineError(f"{ended} ends:\n{self.process.log_tail()}")

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


def command(spec: EngineSpec, ports: tuple[int, int, int]) -> list[str]:
    """The server's command line.

    Args:
        ports: of HTTP; and, of a target of p2p, where its ranks meet, and where they tell of their memory.
    """
    port, rendezvous_port, bootstrap_port = ports
    module = "sglang.launch_server" if spec.gpus else "miles_plugin.engines.sglang_cpu.server"
    flags = [
        *("--model-path", str(spec.model), "--host", spec.host, "--port", str(port)),
        *("--random-seed", str(spec.seed), "--log-level", "warning", "--tp", str(spec.ranks)),
        # What trainers send; "auto" would serve a float32 checkpoint as float16.
        *("--dtype", "bfloat16"),
    ]
    if not spec.gpus:
        # The share of the free memory that the model and its cache may take. Tokens bound the cache; but what other
        # processes take while the model is loaded counts as the model's, and a server whose share is used up ends.
        flags += ["--max-total-tokens", str(CPU_CACHE_TOKENS), "--mem-fraction-static", "0.9"]
    if spec.return_routed_experts:
        flags.append("--enable-return-routed-experts")
    if spec.p2p_protocol:
        flags.append("--remote-instance-weight-loader-start-seed-via-transfer-engine")
        flags += ["--engine-info-bootstrap-port", str(bootstrap_port)]
        # Its ranks look for that port on the host of this address, or else on 127.0.0.1, where nothing may listen.
        flags += ["--dist-init-addr", f"{spec.host}:{rendezvous_port}"]
        if spec.gpus:
            # The one layout of experts that `weight_transfer.layout` knows, which "auto" means on some GPUs only.
            flags += ["--moe-runner-backend", "triton"]
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
    elif spec.ranks > 1:
        added["SGLANG_CPU_OMP_THREADS_BIND"] = _cores_by_rank(spec.ranks)
    if spec.p2p_protocol:
        added["MOONCAKE_PROTOCOL"] = spec.p2p_protocol
        if spec.p2p_protocol == "tcp":
            added["MC_FORCE_TCP"] = "1"  # Mooncake prefers RDMA wherever it sees a device
    return {**os.environ, **added}


def _cores_by_rank(ranks: int) -> str:
    """Cores of each rank, as "0,2|1,3": without it SGLang wants a NUMA node for each. Fewer cores are shared."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[rank::ranks] or [cores[rank % len(cores)]])) for rank in range(ranks))


def _start(spec: EngineSpec) -> RunningEngine:
    http, rendezvous, bootstrap = free_ports(3, spec.host)
    started_with, environ = command(spec, (http, rendezvous, bootstrap)), environment(spec)
    # Told to end, its server looks every five seconds whether requests are left, of which none is wanted any more.
    process = ManagedProcess("sglang", started_with, spec.log, environ, grace=0.0)
    return RunningEngine(SGLangEngine(f"http://{spec.host}:{http}"), process, spec.ranks)
