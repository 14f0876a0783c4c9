"""What each endpoint of a stand-in engine does, with SGLang's status codes, answers and messages."""

import hashlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from miles_plugin.engines.stand_in import messages
from miles_plugin.engines.stand_in.admission import Admission
from miles_plugin.engines.stand_in.group import WeightsGroup
from miles_plugin.engines.stand_in.scheduler import Latency, Request, Scheduler
from miles_plugin.engines.stand_in.tokens import TokenSource
from miles_plugin.engines.stand_in.weights import NamedTensor, Weights, read_checkpoint
from mooncake_store.errors import ConfigError

Answer = tuple[int, Any]
Middle = Callable[[], None]

_HEALTH_SECONDS = 20.0
_RESPONSE_SECONDS = 3600.0
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NO_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or "
    "finish them, then call /flush_cache."
)


@dataclass(frozen=True)
class Settings:
    """What a stand-in engine is started with.

    model: Hugging Face checkpoint directory. host: to listen on, and of the Transfer Engine. tp: tensor-parallel ranks.
    latency: of tokens. transfer_engine: whether others may write into the weights.
    group_timeout: within which a weights group forms and each of its broadcasts arrives; SGLang has 30 minutes.
    """

    model: Path
    host: str
    tp: int
    latency: Latency
    transfer_engine: bool
    group_timeout: timedelta


@dataclass(frozen=True)
class _Asked:
    prompt: list[int]
    seed: int
    request: Request


class Engine:
    """One engine. Methods are called from many threads, one per request; each returns (status, answer).

    Raises:
        ConfigError: the checkpoint cannot be served.
        RuntimeError: the Transfer Engine does not start.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._weights = Weights(settings.model, settings.tp)
        self._tokens = TokenSource(settings.model, self._weights.config)
        self._model_path = str(settings.model)
        self._version = "default"
        self._scheduler = Scheduler(settings.latency, self._version, self._weights.state)
        self._admission = Admission()
        self._groups: dict[str, WeightsGroup] = {}
        self._updating = False
        self._seeds = itertools.count(1)
        self._transfer = _TransferEngines(settings.host, self._weights) if settings.transfer_engine else None

    # What it is

    def model_info(self) -> Answer:
        config = self._weights.config
        return 200, {
            "model_path": self._model_path,
            "served_model_name": self._model_path,
            "tokenizer_path": str(self._settings.model),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self._version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    def server_info(self) -> Answer:
        """The few of SGLang's hundreds of fields that say what a server was started with."""
        with self._scheduler.exclusive():
            return 200, {
                "model_path": str(self._settings.model),
                "tokenizer_path": str(self._settings.model),
                "served_model_name": str(self._settings.model),
                "load_format": "auto",
                "dtype": "auto",
                "quantization": None,
                "device": "cpu",
                "host": self._settings.host,
                "tp_size": self._settings.tp,
                "dp_size": 1,
                "pp_size": 1,
                "ep_size": 1,
                "nnodes": 1,
                "disaggregation_mode": "null",
                "enable_lora": None,
                "lora_paths": None,
                "speculative_algorithm": None,
                "enable_return_routed_experts": False,
                "remote_instance_weight_loader_start_seed_via_transfer_engine": self._transfer is not None,
                "weight_version": "default",
                "status": "ready",
                "internal_states": [{}],
                "version": "0.5.23",
                "frontend": "stand-in",
            }

    def health(self) -> Answer:
        """200 if a token would come; SGLang tries for 20 seconds, and in a pause none comes."""
        return (200 if self._scheduler.wait_until_running(_HEALTH_SECONDS) else 503), ""

    # Responses

    def generate(self, body: messages.Generate) -> Answer:
        prompts, single = self._prompts(body)
        if not prompts:
            return _refused("Either text, input_ids or input_embeds should be provided.")
        if body.stream:
            return _refused("the stand-in does not stream")
        context = int(self._weights.config.max_position_embeddings)
        for prompt in prompts:
            if len(prompt) >= context:
                return _refused(
                    f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
                )
        given = body.sampling_params or {}
        params = given if isinstance(given, list) else [given] * len(prompts)
        asked = [
            _Asked(prompt, self._seed(each), Request(int(each.get("max_new_tokens", 128))))
            for prompt, each in zip(prompts, params, strict=True)
            for _ in range(int(each.get("n") or 1))
        ]
        began = time.monotonic()
        with self._admission.request():
            for each in asked:
                self._scheduler.submit(each.request)
            for each in asked:
                if not each.request.done.wait(_RESPONSE_SECONDS):
                    raise TimeoutError(f"no response within {_RESPONSE_SECONDS:.0f} s")
        answers = [self._response(each, body.return_logprob, began) for each in asked]
        return 200, answers[0] if single and len(answers) == 1 else answers

    def abort_request(self, body: messages.AbortRequest) -> Answer:
        if body.abort_all:
            self._scheduler.abort_all()
        return 200, ""

    def pause_generation(self, body: messages.PauseGeneration) -> Answer:
        with self._admission.pausing(True):
            if body.mode == "abort":
                self._scheduler.abort_all()
                self._admission.wait_until_empty()
            else:
                self._scheduler.pause(body.mode)
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, body: messages.Empty) -> Answer:  # noqa: ARG002
        with self._admission.pausing(False):
            self._scheduler.resume()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def flush_cache(self, timeout: float) -> Answer:
        if timeout > 0.0 and not self._scheduler.wait_until_idle(timeout):
            return 400, "Timed out waiting for idle state."
        return (200, _FLUSHED) if self._scheduler.is_idle() else (400, "Flush cache failed.\n")

    # New weights

    def init_weights_update_group(self, body: messages.InitWeightsGroup) -> Answer:
        with self._scheduler.exclusive():
            try:
                if body.backend != "gloo":
                    raise ValueError(f"backend {body.backend!r}: the stand-in has gloo only")
                if body.group_name in self._groups:
                    raise ValueError(
                        "The specified group name has already been created, please use a different group name"
                    )
                self._groups[body.group_name] = WeightsGroup(
                    body.master_address,
                    body.master_port,
                    body.rank_offset,
                    self._settings.tp,
                    body.world_size,
                    body.group_name,
                    self._settings.group_timeout,
                )
            except (RuntimeError, ValueError) as error:
                return _done(False, f"Failed to initialize custom process group: {error}.")
        return _done(True, "Succeeded to initialize custom process group.")

    def destroy_weights_update_group(self, body: messages.DestroyWeightsGroup) -> Answer:
        with self._scheduler.exclusive():
            if self._groups.pop(body.group_name, None) is None:
                return _done(False, "The group to be destroyed does not exist.")
        return _done(True, "Succeeded to destroy custom process group.")

    def begin_weight_update(self, body: messages.Empty) -> Answer:  # noqa: ARG002
        with self._admission.update(), self._scheduler.exclusive():
            if self._updating:
                return _done(False, "a weight-update session is already open; call end_weight_update() first")
            self._updating = True
        return _done(True, "Success")

    def end_weight_update(self, body: messages.Empty) -> Answer:  # noqa: ARG002
        with self._admission.update(), self._scheduler.exclusive():
            if not self._updating:
                return _done(False, "no weight-update session is open; call begin_weight_update() first")
            self._updating = False
        return _done(True, "Success")

    def update_weights_from_distributed(self, body: messages.UpdateFromDistributed, middle: Middle) -> Answer:
        if body.abort_all_requests:
            self._scheduler.abort_all()
        with self._admission.update():
            with self._scheduler.exclusive():
                if not self._updating:
                    return _done(False, _NO_SESSION)
                try:
                    received = self._receive(body)
                except (RuntimeError, ValueError, AttributeError) as error:
                    return _done(False, f"Failed to receive weights: {error}")
                try:
                    self._weights.load(received, middle)
                except (RuntimeError, ConfigError) as error:
                    return _done(
                        False,
                        f"Failed to update parameter online: {error}. The full weights of the ModelRunner are "
                        "partially updated. Please discard the whole weights.",
                    )
                if not self._loaded(body.weight_version, body.flush_cache):
                    return _done(False, _NOT_FLUSHED)
            return _done(True, "Succeeded to update parameter online." + self._named(body.weight_version))

    def update_weights_from_disk(self, body: messages.UpdateFromDisk, middle: Middle) -> Answer:
        if body.abort_all_requests:
            self._scheduler.abort_all()
        with self._admission.update(hold_pause=False):
            with self._scheduler.exclusive():
                try:
                    tensors = list(read_checkpoint(Path(body.model_path)))
                except OSError as error:
                    return _from_disk(False, f"Failed to get weights iterator: {error}.")
                try:
                    self._weights.load(tensors, middle)
                except (RuntimeError, ConfigError) as error:
                    self._weights.load(read_checkpoint(Path(self._model_path)))
                    return _from_disk(False, f"Failed to update weights: {error}.\nRolling back to original weights.")
                if not self._loaded(body.weight_version, body.flush_cache):
                    return _from_disk(False, _NOT_FLUSHED)
            self._model_path = body.model_path
            return _from_disk(True, "Succeeded to update model weights." + self._named(body.weight_version))

    def update_weight_version(self, body: messages.UpdateWeightVersion) -> Answer:
        if body.abort_all_requests:
            self._scheduler.abort_all()
        self._scheduler.stamp(body.new_version)
        self._version = body.new_version
        message = f"Weight version updated to {body.new_version}"
        return 200, {"success": True, "message": message, "new_version": body.new_version}

    # Proof and memory

    def weights_checker(self, body: messages.CheckWeights) -> Answer:
        """Of SGLang's actions only `checksum`."""
        if body.action != "checksum":
            return _done(False, f"Unsupported action={body.action!r}")
        with self._scheduler.exclusive():
            checksums = self._weights.checksums(body.skip_tensor_list or ())
        tp = self._settings.tp
        ranks: list[dict[str, Any]] = [
            {
                "checksums": of_rank,
                "per_gpu_checksum": _overall(name + of_rank[name] for name in sorted(of_rank)),
                "parallelism_info": [
                    {"role": "target", "tp_rank": rank, "tp_size": tp, "dp_rank": 0, "dp_size": 1, "pp_rank": 0,
                     "pp_size": 1, "rank": rank, "size": tp}
                ],
            }
            for rank, of_rank in enumerate(checksums)
        ]  # fmt: skip
        overall = _overall(each["per_gpu_checksum"] for each in ranks)
        return 200, {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": overall}

    def transfer_engine_info(self, rank: int | None) -> Answer:
        if rank is None or rank < 0:
            return _refused("Missing or invalid rank parameter")
        if self._transfer is None or rank >= self._settings.tp:
            return _refused(f"Failed to get transfer engine info for rank {rank}")
        return 200, {
            "rank": rank,
            "remote_instance_transfer_engine_info": [self._transfer.sessions[rank], self._weights.addresses(rank)],
        }

    # Parts of the above

    def _prompts(self, body: messages.Generate) -> tuple[list[list[int]], bool]:
        """The prompts, and whether there is one that is not in a list."""
        if body.text is not None:
            texts = [body.text] if isinstance(body.text, str) else body.text
            return [self._tokens.encode(text) for text in texts], isinstance(body.text, str)
        given: Sequence[Any] = body.input_ids or []
        single = bool(given) and isinstance(given[0], int)
        return [list(given)] if single else [list(prompt) for prompt in given], single

    def _seed(self, params: Mapping[str, Any]) -> int:
        """As given; else the same for every greedy request and another for each that samples."""
        seed = params.get("sampling_seed")
        if seed is not None:
            return int(seed)
        return 0 if params.get("temperature", 1.0) == 0.0 else next(self._seeds)

    def _response(self, asked: _Asked, log_probs: bool, began: float) -> dict[str, Any]:
        request = asked.request
        length = 0 if request.ended == "aborted waiting" else request.made
        tokens, probabilities = self._tokens.response(asked.prompt, asked.seed, length)
        versions = [
            {"version": version, "start": start, "end": min(end, length)}
            for version, start, end in request.versions
            if start < length or start == 0
        ] or [{"version": self._scheduler.version, "start": 0, "end": 0}]
        meta: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": _reason(request),
            "weight_version": versions[-1]["version"],
            "weight_versions": versions,
            "completion_tokens": length,
            "e2e_latency": request.ended_at - began,
            "response_sent_to_client_ts": time.time(),
        }
        if request.ended != "aborted waiting":
            meta |= {
                "prompt_tokens": len(asked.prompt),
                "num_retractions": request.retractions,
                "reasoning_tokens": 0,
                "cached_tokens": 0,
                "cached_tokens_details": None,
                "dp_rank": None,
            }
        if log_probs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[p, token, None] for p, token in zip(probabilities, tokens, strict=True)]
            meta["output_token_logprobs_length"] = length
        meta["weights_digest"] = [
            {"digest": state.digest, "policy": state.policy, "start": start, "end": end}
            for state, start, end in request.weights
        ]
        policies = [state.policy for state in request.weights.labels]
        meta["policy"] = None if None in policies else sorted({value for policy in policies for value in policy or ()})
        return {"text": self._tokens.decode(tokens), "output_ids": tokens, "meta_info": meta}

    def _receive(self, body: messages.UpdateFromDistributed) -> list[NamedTensor]:
        if body.group_name not in self._groups:
            raise ValueError(
                f"Group {body.group_name} not in {list(self._groups)}. Please call `init_weights_update_group` first."
            )
        group = self._groups[body.group_name]
        dtypes = [getattr(torch, name) for name in body.dtypes]
        tensors: list[NamedTensor] = []
        if body.load_format != "flattened_bucket":
            for name, dtype, shape in zip(body.names, dtypes, body.shapes, strict=True):
                tensor = torch.empty(shape, dtype=dtype)
                group.receive(tensor)
                tensors.append((name, tensor))
            return tensors
        if not body.names:
            raise ValueError("Cannot create empty tensor bucket")
        sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in zip(dtypes, body.shapes, strict=True)]
        offset = 0
        for name, dtype, size in zip(body.names, dtypes, sizes, strict=True):
            if offset % dtype.itemsize:
                raise ValueError(f"Unaligned received tensor {name}: byte offset {offset}, dtype {dtype}")
            offset += size
        flat = torch.empty(offset, dtype=torch.uint8)
        group.receive(flat)
        parts = torch.split(flat, sizes)
        return [
            (name, part.view(dtype).reshape(shape))
            for name, part, dtype, shape in zip(body.names, parts, dtypes, body.shapes, strict=True)
        ]

    def _loaded(self, version: str | None, flush: bool) -> bool:
        """The scheduler's part of what follows a load; False if the cache was to be flushed and could not be."""
        if version is not None:
            self._scheduler.stamp(version)
        return not flush or self._scheduler.is_idle()

    def _named(self, version: str | None) -> str:
        if version is None:
            return ""
        self._version = version
        return f" Weight version updated to {version}."


class _TransferEngines:
    """A Mooncake Transfer Engine per tensor-parallel rank, over TCP, with its memory registered."""

    def __init__(self, host: str, weights: Weights) -> None:
        from mooncake.engine import TransferEngine

        def start(block: torch.Tensor) -> Any:
            engine = TransferEngine()
            if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
                raise RuntimeError(f"the Transfer Engine did not start on {host}")
            if engine.register_memory(block.data_ptr(), block.nbytes) != 0:
                raise RuntimeError(f"the Transfer Engine did not register {block.nbytes} bytes")
            return engine

        self._engines = [start(block) for block in weights.memory]
        self.sessions = [f"{host}:{engine.get_rpc_port()}" for engine in self._engines]


def _done(success: bool, message: str) -> Answer:
    return (200 if success else 400), {"success": success, "message": message}


def _from_disk(success: bool, message: str) -> Answer:
    status, answer = _done(success, message)
    return status, {**answer, "num_paused_requests": 0}


def _refused(message: str) -> Answer:
    return 400, {"error": {"message": message}}


def _reason(request: Request) -> dict[str, Any]:
    match request.ended:
        case "aborted":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "aborted waiting":
            return {"type": "abort", "message": "Abort in waiting queue"}
        case _:
            return {"type": "length", "length": request.made}


def _overall(parts: Iterable[str]) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()
