"""Which experts of a mixture-of-experts model each token was sent to, as SGLang returns them."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.sglang import EngineError
from mooncake_store.errors import ConfigError


@dataclass(frozen=True)
class Routing:
    """The shape of a model's routing: decoder layers (dense ones among them count), and experts per token."""

    num_layers: int
    topk: int


def check_routed_experts(config: TrainConfig) -> None:
    """Raise ConfigError if `return_routed_experts` is set for a policy without experts."""
    if not config.return_routed_experts:
        return
    if config.hf_checkpoint is not None:
        read_routing(config.hf_checkpoint)
    elif config.tiny_num_experts == 0:
        raise ConfigError(
            "return_routed_experts=True: the tiny policy is dense (tiny_num_experts=0); set tiny_num_experts to 2 or "
            "more, or leave return_routed_experts out"
        )


def read_routing(checkpoint: Path) -> Routing:
    """The routing of a Hugging Face checkpoint directory.

    Raises:
        ConfigError: the model has no experts.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint)
    text = config.get_text_config()
    topk = getattr(text, "num_experts_per_tok", None)
    if not topk:
        raise ConfigError(
            f"return_routed_experts=True: hf_checkpoint={checkpoint} is a dense {config.model_type!r} (its config.json "
            "has no num_experts_per_tok); leave the setting out, or name a mixture-of-experts checkpoint"
        )
    return Routing(text.num_hidden_layers, topk)


def decode(meta_info: Mapping[str, Any], num_tokens: int, routing: Routing) -> NDArray[np.int32]:
    """The experts of one response, int32 [num_tokens - 1, layers, topk], read-only.

    Row t holds the ids of the experts that computed token t, in no order of meaning; those of a dense layer stay 0.
    The last token has none: it was sampled, but never fed to the model.

    Args:
        meta_info: of the response.
        num_tokens: of prompt and response together.

    Raises:
        EngineError: they are absent or not of that shape.
    """
    encoded = meta_info.get("routed_experts")
    if encoded is None:
        raise EngineError(
            f"response {meta_info.get('id')} has no routed_experts; the server needs --enable-return-routed-experts, "
            "the request return_routed_experts, and a request aborted before it ran has none"
        )
    shape = (num_tokens - 1, routing.num_layers, routing.topk)
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), np.int32).reshape(shape)
    except (binascii.Error, TypeError, ValueError) as error:
        raise EngineError(
            f"response {meta_info.get('id')}: routed_experts ({len(str(encoded))} characters of base64) are not int32 "
            f"{list(shape)}, [tokens - 1, layers, experts per token]: {error}"
        ) from error
