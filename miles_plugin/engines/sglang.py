"""One rollout engine: a stock SGLang server, spoken to over HTTP.

Endpoints and their fields are those of SGLang 0.5.23, each seen working there.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import httpx


class EngineError(RuntimeError):
    """An engine answered with an error, not at all, or with nonsense; the message names engine and request.

    Attributes:
        status: HTTP status of the answer; None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


# A request for responses may be a whole rollout batch; an engine that ends closes its connections at once.
_CONNECT_SECONDS = 15.0  # the link may be down for a few; who is not there refuses at once
_GENERATE_TIMEOUT = httpx.Timeout(3600.0, connect=_CONNECT_SECONDS)
# SGLang closes a connection that was idle for 5 seconds.
_IDLE_SECONDS = 1.0
_ATTEMPTS = 3


class SGLangEngine:
    """Client of one engine.

    Args:
        url: e.g. "http://127.0.0.1:30000".
        timeout: seconds that one request may take, other than for responses.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            timeout=_within(timeout),
            # A connection for each request: between two hosts one that was closed while idle may not be known as such,
            # and a request on it, unlike a connection that cannot be made, may not be sent again.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def ready(self) -> bool:
        """Whether the engine has its model loaded and answers."""
        try:
            return self._http.get("/model_info", timeout=5.0).is_success
        except httpx.TransportError:
            return False

    def generate(
        self, input_ids: Sequence[Sequence[int]], sampling_params: dict[str, Any], return_routed_experts: bool = False
    ) -> list[dict[str, Any]]:
        """One response per prompt of token ids, in order: `output_ids` and `meta_info` with log-probs and versions.

        With `return_routed_experts`, which the server must be started for, also what `routed_experts.decode` reads.
        """
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        if return_routed_experts:
            body["return_routed_experts"] = True
        responses = self._post("/generate", body, timeout=_GENERATE_TIMEOUT)
        if not isinstance(responses, list) or len(responses) != len(input_ids):
            raise EngineError(f"{self.url}/generate: {len(input_ids)} prompts sent, got {str(responses)[:200]}")
        return responses

    def pause(self, mode: str) -> None:
        """Stop generating; what is in flight is aborted, put back in the queue (retract), or frozen (in_place)."""
        self._post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self._post("/continue_generation", {})

    def flush_cache(self) -> None:
        """Drop the prefix cache: what it holds was computed by the old weights."""
        self._post("/flush_cache", {}, is_json=False)

    def init_weights_group(
        self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join the process group over which weights arrive; blocks until every member has joined."""
        self._post(
            "/init_weights_update_group",
            {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size,
             "group_name": name, "backend": backend},
        )  # fmt: skip

    def destroy_weights_group(self, name: str, seconds: float) -> None:
        """Leave a group, within `seconds`."""
        self._post("/destroy_weights_update_group", {"group_name": name}, timeout=_within(seconds))

    def begin_update(self) -> None:
        self._post("/begin_weight_update", {})

    def receive_bucket(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str, seconds: float
    ) -> None:
        """Receive one flattened bucket of the group's next broadcast and load it; blocks until it is loaded."""
        self._post(
            "/update_weights_from_distributed",
            {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group, "flush_cache": False,
             "load_format": "flattened_bucket"},
            timeout=_within(seconds),
        )  # fmt: skip

    def load_checkpoint(self, path: str, seconds: float, version: int) -> None:
        """Load the weights of a checkpoint directory on the engine's own host, and name them; one that lacks some is
        refused, and what was served before is loaded again. The prefix cache is left to `flush_cache`."""
        self._post(
            "/update_weights_from_disk",
            {"model_path": path, "flush_cache": False, "weight_version": str(version)},
            timeout=_within(seconds),
        )

    def end_update(self) -> None:
        self._post("/end_weight_update", {})

    def stamp(self, version: int) -> None:
        """Name the weights now loaded. Requests are kept: the endpoint aborts them unless told not to."""
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def weight_version(self, seconds: float | None = None) -> str:
        """The version the engine says it serves, within `seconds`; "default" before the first stamp."""
        with _sensible(f"{self.url}/model_info"):
            return str(self.model_info(seconds)["weight_version"])

    def model_info(self, seconds: float | None = None) -> dict[str, Any]:
        """The model as it is now: model_path, weight_version, architectures, disaggregation_mode, ..."""
        timeout = None if seconds is None else _within(seconds)
        return self._described("/model_info", timeout)

    def server_info(self) -> dict[str, Any]:
        """What the server was started with: tp_size, dtype, enable_lora, ...; flat, by SGLang's names."""
        return self._described("/server_info")

    def checksums(self) -> list[dict[str, str]]:
        """By tensor-parallel rank: the checksum of every tensor it holds, under SGLang's own names.

        On a CPU the first 8 bytes of the SHA-256 of its bytes, in hex.
        """
        answer = self._post("/weights_checker", {"action": "checksum"})
        with _sensible(f"{self.url}/weights_checker"):
            # One entry for each model that a rank runs, all of which say the same rank.
            ranks = sorted(answer["ranks"], key=lambda each: int(each["parallelism_info"][0]["tp_rank"]))
            return [dict(each["checksums"]) for each in ranks]

    def registered_memory(self, rank: int) -> tuple[str, dict[str, tuple[int, int, int]]]:
        """Where the Transfer Engine may write on one tensor-parallel rank.

        Returns the session and, under SGLang's own names, (address, elements, bytes per element) of every parameter.
        The server must be started with --remote-instance-weight-loader-start-seed-via-transfer-engine.
        """
        path = f"/remote_instance_transfer_engine_info?rank={rank}"
        with _sensible(f"{self.url}{path}"):
            session, memory = self._described(path)["remote_instance_transfer_engine_info"]
            return session, {
                name: (int(address), int(elements), int(width)) for name, (address, elements, width) in memory.items()
            }

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: dict[str, Any], is_json: bool = True, timeout: httpx.Timeout | None = None) -> Any:
        response = self._request("POST", path, body, timeout)
        if not is_json:
            return response.text
        with _sensible(f"{self.url}{path}"):
            answer = response.json()
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.url}{path}: {answer.get('message')}")
        return answer

    def _described(self, path: str, timeout: httpx.Timeout | None = None) -> dict[str, Any]:
        response = self._request("GET", path, timeout=timeout)
        with _sensible(f"{self.url}{path}"):
            return dict(response.json())

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: httpx.Timeout | None = None
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout or self._http.timeout)
        except httpx.TransportError as error:
            raise _no_answer(f"{self.url}{path}", error) from error
        return _checked(response)


class AsyncHTTP:
    """Posts JSON to any engine, many requests at once. Bound to the event loop that first uses it.

    Args:
        connections: requests in flight at most; more wait.
    """

    def __init__(self, connections: int) -> None:
        self._http = httpx.AsyncClient(
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_IDLE_SECONDS
            ),
            timeout=httpx.Timeout(3600.0, pool=None),
            trust_env=False,
        )
        self._waiting: set[tuple[str, asyncio.Task[Any]]] = set()  # for answers, with the URLs asked

    async def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer; raises EngineError for an error, for none, and when the server was given up meanwhile.

        Sent again when its connection ends without an answer: the server may close an idle one just as it is used.
        """
        asking = asyncio.get_running_loop().create_task(self._post(url, body))
        self._waiting.add((url, asking))
        try:
            await asyncio.wait({asking})
        finally:
            asking.cancel()
            self._waiting.remove((url, asking))
        if asking.cancelled():
            raise EngineError(f"{url}: given up, its server takes no part any more")
        return asking.result()

    async def give_up(self, server: str) -> None:
        """Wait no more for what a server (its URL) was asked."""
        for url, asking in self._waiting:
            if url.startswith(f"{server}/"):
                asking.cancel()

    async def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        for attempt in range(_ATTEMPTS):
            try:
                return _checked(await self._http.post(url, json=body)).json()
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
                if attempt + 1 == _ATTEMPTS:
                    raise _no_answer(url, error) from error
            except httpx.TransportError as error:
                raise _no_answer(url, error) from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._http.aclose()


@contextmanager
def _sensible(what: str) -> Iterator[None]:
    """Raise EngineError for an answer that is no JSON, or has not what it should: a proxy's page, another server's."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise EngineError(f"{what}: an answer that makes no sense: {error!r}", HTTPStatus.OK) from error


def _within(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))


def _no_answer(url: str, error: httpx.TransportError) -> EngineError:
    return EngineError(f"{url}: no answer: {str(error) or type(error).__name__}")


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        raise EngineError(f"{response.url}: HTTP {response.status_code}: {response.text[:500]}", response.status_code)
    return response
