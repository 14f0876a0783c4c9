"""What a custom generate or reward function, or buffer, may import. The names and fields are miles's.

from miles_plugin.rollout.custom import GenerateState, Sample, post

async def generate(args, sample, sampling_params):
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": ..., "sampling_params": sampling_params, "return_logprob": True})
"""

from argparse import Namespace
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.http import AsyncHTTP
from miles_plugin.fully_async.contract import DataBuffer, DataBufferConstructorInput
from miles_plugin.fully_async.groups import DataBufferInput
from miles_plugin.rollout.prompts import load_tokenizer
from miles_plugin.rollout.sample import Sample, merge_versions

__all__ = ["DataBuffer", "DataBufferConstructorInput", "DataBufferInput", "GenerateState", "Sample", "post"]

# Requests in flight to one engine at most; miles's --sglang-server-concurrency.
CONCURRENCY_PER_ENGINE = 512

# Settings of miles that its generation functions and buffers read, and that are none here: the values that mean "off".
_MILES_DEFAULTS: Mapping[str, Any] = {
    "chat_template_path": None,
    "ci_test": False,
    "dynamic_sampling_filter_path": None,
    "group_rm": False,
    "partial_rollout": False,
    "reward_key": None,
    "rollout_max_context_len": None,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "sglang_server_concurrency": CONCURRENCY_PER_ENGINE,
    "sglang_speculative_algorithm": None,
}


class GenerateState:
    """args and the policy's tokenizer; miles's functions make one from their args."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(Path(args.hf_checkpoint))


@dataclass
class Call:
    """What one call of a custom function has at hand: an HTTP client, and the versions its answers were made by."""

    http: AsyncHTTP
    weight_versions: list[str] = field(default_factory=list)


current_call: ContextVar[Call] = ContextVar("current_call")


async def post(url: str, payload: Mapping[str, Any]) -> Any:
    """POST JSON and return the JSON answer.

    Raises:
        EngineError: no answer, or an error; names the URL.
    """
    call = current_call.get()
    output = await call.http.post(url, payload)
    if isinstance(output, dict) and "weight_versions" in output.get("meta_info", {}):
        merge_versions(call.weight_versions, output["meta_info"])
    return output


def arguments(config: TrainConfig, checkpoint: Path) -> dict[str, Any]:
    """The flat settings that custom functions get as `args`, but for the engine's address."""
    settings = config.model_dump(mode="json")
    return {**_MILES_DEFAULTS, **settings, "hf_checkpoint": str(checkpoint), "rollout_seed": config.seed}


def for_engine(settings: Mapping[str, Any], url: str) -> Namespace:
    """`args` of one call: a copy of the settings, with the address of the engine that its sample goes to."""
    address = urlsplit(url)
    return Namespace(**settings, sglang_router_ip=address.hostname, sglang_router_port=address.port)
