"""HTTP in front of a stand-in engine: routes, faults, and the record of calls."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from miles_plugin.engines.stand_in import messages
from miles_plugin.engines.stand_in.engine import Answer, Engine, Middle
from miles_plugin.engines.stand_in.faults import Calls, Fault, FaultDrip, FaultDrop, Faults, FaultStatus, striker

# As uvicorn has it under SGLang.
_IDLE_SECONDS = 5.0


class StandInServer(ThreadingHTTPServer):
    """Serves one engine; a thread per connection. Port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 1024  # hundreds of requests may come at once

    def __init__(self, host: str, port: int, engine: Engine) -> None:
        super().__init__((host, port), _Handler)
        self.faults = Faults()
        self.calls = Calls()
        self.bodies: dict[str, tuple[type[messages.Message], Callable[[Any, Middle], Answer]]] = {
            "/generate": (messages.Generate, lambda body, _: engine.generate(body)),
            "/abort_request": (messages.AbortRequest, lambda body, _: engine.abort_request(body)),
            "/pause_generation": (messages.PauseGeneration, lambda body, _: engine.pause_generation(body)),
            "/continue_generation": (messages.Empty, lambda body, _: engine.continue_generation(body)),
            "/init_weights_update_group": (
                messages.InitWeightsGroup,
                lambda body, _: engine.init_weights_update_group(body),
            ),
            "/destroy_weights_update_group": (
                messages.DestroyWeightsGroup,
                lambda body, _: engine.destroy_weights_update_group(body),
            ),
            "/begin_weight_update": (messages.Empty, lambda body, _: engine.begin_weight_update(body)),
            "/end_weight_update": (messages.Empty, lambda body, _: engine.end_weight_update(body)),
            "/update_weights_from_distributed": (
                messages.UpdateFromDistributed,
                engine.update_weights_from_distributed,
            ),
            "/update_weights_from_disk": (messages.UpdateFromDisk, engine.update_weights_from_disk),
            "/update_weight_version": (
                messages.UpdateWeightVersion,
                lambda body, _: engine.update_weight_version(body),
            ),
            "/weights_checker": (messages.CheckWeights, lambda body, _: engine.weights_checker(body)),
        }
        self.queries: dict[str, Callable[[dict[str, str]], Answer]] = {
            "/model_info": lambda _: engine.model_info(),
            "/server_info": lambda _: engine.server_info(),
            "/health": lambda _: engine.health(),
            "/flush_cache": lambda query: engine.flush_cache(float(query.get("timeout", 0.0))),
            "/remote_instance_transfer_engine_info": lambda query: engine.transfer_engine_info(_rank(query)),
            "/weights_checker": lambda _: engine.weights_checker(messages.CheckWeights()),
        }

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer goes out in one piece
    timeout = _IDLE_SECONDS
    server: StandInServer

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: GET /calls has the requests."""

    def _handle(self) -> None:
        split = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw.decode(errors="replace")
        if split.path in ("/faults", "/calls"):
            self._answer(*self._control(split.path, body))
            return
        call = self.server.calls.begin(self.command, split.path, body)
        due = self.server.faults.meet(split.path)
        try:
            striker(due, "before")()
            status, answer = self._engine(split.path, split.query, body, striker(due, "during"))
            striker(due, "after")()
        except FaultStatus as fault:
            status, answer = fault.status, {"success": False, "message": "as a fault has it"}
        except FaultDrop:
            self.close_connection = True
            return
        except FaultDrip as fault:
            self._drip(fault.seconds)
            return
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            status, answer = 500, {"detail": f"{type(error).__name__}: {error}"}
        finally:
            call.end()
        call.status = status
        self._answer(status, answer)

    def _control(self, path: str, body: Any) -> Answer:
        server = self.server
        match self.command, path:
            case "GET", "/calls":
                return 200, server.calls.described()
            case "GET", "/faults":
                return 200, server.faults.described()
            case "DELETE", "/faults":
                server.faults.clear()
                return 200, []
            case "POST", "/faults":
                try:
                    fault = msgspec.convert(body, Fault)
                except msgspec.ValidationError as error:
                    return 400, {"error": f"{error}; the body was {body!r}"}
                known = sorted({*server.bodies, *server.queries})
                if fault.path not in known:
                    return 400, {"error": f"path={fault.path!r} is none of {known}"}
                server.faults.post(fault)
                return 200, server.faults.described()
        return 405, {"detail": "Method Not Allowed"}

    def _engine(self, path: str, query: str, body: Any, middle: Middle) -> Answer:
        server = self.server
        asked = {key: values[-1] for key, values in parse_qs(query).items()}
        if path in server.queries and (self.command == "GET" or path == "/flush_cache"):
            return server.queries[path](asked)
        if path in server.bodies and self.command == "POST":
            message, act = server.bodies[path]
            try:
                parsed = msgspec.convert(body, message)
            except msgspec.ValidationError as error:
                return 400, {
                    "object": "error",
                    "message": str(error),
                    "type": "Bad Request",
                    "param": None,
                    "code": 400,
                }
            return act(parsed, middle)
        if path in server.queries or path in server.bodies:
            return 405, {"detail": "Method Not Allowed"}
        return 404, {"detail": "Not Found"}

    def _drip(self, seconds: float) -> None:
        """Until whoever asked has closed the connection."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 30))
        self.end_headers()
        with suppress(ConnectionError):
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(seconds)

    def _answer(self, status: int, answer: Any) -> None:
        text = isinstance(answer, str)
        data = answer.encode() if text else json.dumps(answer).encode()
        self.send_response(status)
        if not text:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _rank(query: dict[str, str]) -> int | None:
    return int(query["rank"]) if "rank" in query else None
