"""One rollout engine: a stock SGLang server, spoken to over HTTP.

Endpoints and their fields are those of SGLang 0.5.23, each seen working there.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from miles_plugin.engines.http import GENERATE_SECONDS, HTTP, EngineError

__all__ = ["EngineError", "SGLangEngine", "checked_response"]
_READY_SECONDS = 5.0


class SGLangEngine:
    """Client of one engine.

    Args:
        url: e.g. "http://127.0.0.1:30000".
        timeout: seconds that one request may take as a whole, where nothing else is said.
    """

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self.url, self._seconds = url, timeout
        self._http = HTTP(url)

    def ready(self) -> bool:
        """Whether the engine has its model loaded and answers."""
        try:
            self._http.request("GET", "/model_info", None, _READY_SECONDS)
        except EngineError:
            return False
        return True

    def generate(
        self, input_ids: Sequence[Sequence[int]], sampling_params: dict[str, Any], return_routed_experts: bool = False
    ) -> list[dict[str, Any]]:
        """One response per prompt of token ids, in order: `output_ids` and `meta_info` with log-probs and versions.

        With `return_routed_experts`, which the server must be started for, also what `routed_experts.decode` reads.
        """
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        if return_routed_experts:
            body["return_routed_experts"] = True
        responses = self._post("/generate", body, GENERATE_SECONDS)
        if not isinstance(responses, list) or len(responses) != len(input_ids):
            raise EngineError(f"{self.url}/generate: {len(input_ids)} prompts sent, got {str(responses)[:200]}")
        return [checked_response(self.url, response) for response in responses]

    def pause(self, mode: str) -> None:
        """Stop generating; what is in flight is aborted, put back in the queue (retract), or frozen (in_place)."""
        self._post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self._post("/continue_generation", {})

    def flush_cache(self) -> None:
        """Drop the prefix cache: what it holds was computed by the old weights."""
        self._request("POST", "/flush_cache", {})  # it answers in words

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
        self._post("/destroy_weights_update_group", {"group_name": name}, seconds)

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
            seconds,
        )  # fmt: skip

    def load_checkpoint(self, path: str, seconds: float, version: int) -> None:
        """Load the weights of a checkpoint directory on the engine's own host, and name them; one that lacks some is
        refused, and what was served before is loaded again. The prefix cache is left to `flush_cache`."""
        self._post(
            "/update_weights_from_disk",
            {"model_path": path, "flush_cache": False, "weight_version": str(version)},
            seconds,
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
        return self._described("/model_info", seconds)

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

    def _post(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Any:
        answer = self._json("POST", path, body, seconds)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.url}{path}: {answer.get('message')}")
        return answer

    def _described(self, path: str, seconds: float | None = None) -> dict[str, Any]:
        answer = self._json("GET", path, None, seconds)
        with _sensible(f"{self.url}{path}"):
            return dict(answer)

    def _json(self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None) -> Any:
        answer = self._request(method, path, body, seconds)
        with _sensible(f"{self.url}{path}"):
            return json.loads(answer)

    def _request(self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None = None) -> bytes:
        return self._http.request(method, path, body, self._seconds if seconds is None else seconds)


def checked_response(engine: str, response: Any) -> dict[str, Any]:
    """One answer of an engine (its URL) to a prompt; raises EngineError for one that is none."""
    with _sensible(f"{engine}/generate"):
        return {**response, "output_ids": list(response["output_ids"]), "meta_info": dict(response["meta_info"])}


@contextmanager
def _sensible(what: str) -> Iterator[None]:
    """Raise EngineError for an answer that is no JSON, or has not what it should: a proxy's page, another server's."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise EngineError(f"{what}: an answer that makes no sense: {error!r}", HTTPStatus.OK) from error
