"""A policy small enough to train and serve on two CPU cores: a tiny Qwen3 that reads characters."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, PAD = "<|endoftext|>", "<|pad|>"
_END_ID, _PAD_ID = 0, 1
_HEAD_DIM = 16
# SGLang pads vocabularies to multiples of 64; 258 bytes and special tokens fit in 320.
_VOCABULARY = 320


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, so per character of ASCII text; any text encodes, and decodes back."""
    vocabulary = {END: _END_ID, PAD: _PAD_ID}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def build_model(hidden_size: int, num_layers: int, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised float32 model with heads of 16 channels, two query heads per key-value head."""
    torch.manual_seed(seed)
    heads = max(1, hidden_size // _HEAD_DIM)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 4,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=_HEAD_DIM,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=_END_ID,
        pad_token_id=_PAD_ID,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """A Hugging Face checkpoint in bfloat16, as engines load it."""
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
