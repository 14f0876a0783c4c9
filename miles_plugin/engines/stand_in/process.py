"""A stand-in engine as a child process that ends with this one."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from miles_plugin.engines.launch import RunningEngine
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from mooncake_store.process import ManagedProcess

START_SECONDS = 60.0


class StandIn:
    """A running stand-in engine.

    Args:
        model: Hugging Face checkpoint directory. log: gets its output, appended.
        host, port: to listen on; port 0 takes a free one. tp: tensor-parallel ranks.
        prefill_seconds, token_seconds: until a response's first token, and between two.
        transfer_engine: let others write into its weights.
        group_timeout: seconds within which a weights group forms and each broadcast arrives; SGLang has 30 minutes.

    Attributes:
        url: of the server. pid: of its process. engine: a client.
        running: the same as `engines.launch.start_engines` gives.

    Raises:
        EngineError: it ended, or was not ready after `START_SECONDS`.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tp: int = 1,
        prefill_seconds: float = 0.0,
        token_seconds: float = 0.0,
        transfer_engine: bool = False,
        group_timeout: float = 1800.0,
    ) -> None:
        command = [sys.executable, "-m", "miles_plugin.engines.stand_in", "--model", str(model), "--host", host]
        command += ["--port", str(port), "--tp", str(tp), "--group-timeout", str(group_timeout)]
        command += ["--prefill-seconds", str(prefill_seconds), "--token-seconds", str(token_seconds)]
        if transfer_engine:
            command.append("--remote-instance-weight-loader-start-seed-via-transfer-engine")
        log_start = log.stat().st_size if log.exists() else 0
        self.process = ManagedProcess("stand-in engine", command, log, {**os.environ, "MC_FORCE_TCP": "1"})
        try:
            told = self._wait_for_address(log_start)
        except BaseException:
            self.process.stop()
            raise
        self.url, self.pid = str(told["url"]), int(told["pid"])
        self.engine = SGLangEngine(self.url)
        self.running = RunningEngine(self.engine, self.process, tp)
        self._control = httpx.Client(base_url=self.url, timeout=10.0, trust_env=False)

    def fault(self, path: str, do: str, **more: Any) -> None:
        """Post a fault; its fields are those of `faults.Fault`."""
        answer = self._control.post("/faults", json={"path": path, "do": do, **more})
        if answer.is_error:
            raise ValueError(f"{self.url}/faults: {answer.text}")

    def clear_faults(self) -> None:
        self._control.delete("/faults").raise_for_status()

    def calls(self) -> list[dict[str, Any]]:
        """The requests it got, in order; the fields are those of `faults.Call`."""
        return list(self._control.get("/calls").raise_for_status().json())

    def stop(self) -> None:
        """End it; idempotent."""
        self._control.close()
        self.running.stop()

    def _wait_for_address(self, log_start: int) -> dict[str, Any]:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            ended = self.process.exit_status()
            with self.process.log.open("rb") as log:
                log.seek(log_start)
                lines = log.read().splitlines(keepends=True)
            for line in lines:
                if line.startswith(b'{"url"') and line.endswith(b"\n"):
                    return dict(json.loads(line))
            if ended is not None:
                raise EngineError(f"the stand-in engine ended with status {ended}:\n{self.process.log_tail()}")
            time.sleep(0.05)
        raise EngineError(f"the stand-in engine was not ready after {START_SECONDS:.0f} s:\n{self.process.log_tail()}")
