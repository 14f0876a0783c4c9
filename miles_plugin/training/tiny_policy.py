"""A policy small enough to train and serve on two CPU cores: a tiny Qwen3 or Qwen3-MoE that reads characters."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mooncake_store.errors import ConfigError

END, PAD = "<|endoftext|>", "<|pad|>"
_END_ID, _PAD_ID = 0, 1
_HEAD_DIM = 16
# SGLang pads vocabularies to multiples of 64; 258 bytes and special tokens fit in 320.
_VOCABULARY = 320
_EXPERTS_PER_TOKEN = 2


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, so per character of ASCII text; any text encodes, and decodes back."""
    vocabulary = {END: _END_ID, PAD: _PAD_ID}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def build_model(hidden_size: int, num_layers: int, seed: int, num_experts: int = 0) -> PreTrainedModel:
    """A randomly initialised float32 model with heads of 16 channels, two query heads per key-value head.

    With `num_experts` every layer is a mixture of so many experts, two of which see each token; each is half as wide
    as the dense MLP, so that a token costs the same.

    Raises:
        ConfigError: fewer experts than a token is sent to.
    """
    config = build_config(hidden_size, num_layers, num_experts)
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config) if num_experts else Qwen3ForCausalLM(config)


def build_config(hidden_size: int, num_layers: int, num_experts: int = 0) -> Qwen3Config | Qwen3MoeConfig:
    """What `build_model` makes a model of; raises what it does."""
    heads = max(1, hidden_size // _HEAD_DIM)
    shape: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 4,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": _END_ID,
        "pad_token_id": _PAD_ID,
        "bos_token_id": None,
    }
    if num_experts == 0:
        return Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"])
    if num_experts < _EXPERTS_PER_TOKEN:
        raise ConfigError(
            f"tiny_num_experts={num_experts}: each token is sent to {_EXPERTS_PER_TOKEN} experts; set it to "
            f"{_EXPERTS_PER_TOKEN} or more, or to 0 for a dense policy"
        )
    experts = {
        "num_experts": num_experts,
        "num_experts_per_tok": _EXPERTS_PER_TOKEN,
        "moe_intermediate_size": hidden_size * 4 // _EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**shape, **experts, architectures=["Qwen3MoeForCausalLM"])


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """A Hugging Face checkpoint in bfloat16, as engines load it."""
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
