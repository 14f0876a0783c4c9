"""What a stand-in engine says: tokens that follow from prompt and seed alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer


class TokenSource:
    """Tokens of a checkpoint's vocabulary, any but those that end a response.

    Args:
        directory: of the checkpoint; its tokenizer.json, if there is one, makes text of tokens.
        config: the checkpoint's `PreTrainedConfig`.
    """

    def __init__(self, directory: Path, config: Any) -> None:
        ends = config.eos_token_id
        excluded = set(ends) if isinstance(ends, list) else {ends}
        self._allowed = np.array([token for token in range(int(config.vocab_size)) if token not in excluded])
        path = directory / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None

    def response(self, prompt: Sequence[int], seed: int, length: int) -> tuple[list[int], list[float]]:
        """Token ids and log-probs; a longer response begins like a shorter one."""
        key = xxhash.xxh3_64_intdigest(np.array([*prompt, seed], np.int64).tobytes())
        tokens = self._allowed[np.random.default_rng(key).integers(len(self._allowed), size=length)]
        log_probs = -np.random.default_rng([key, 1]).random(length)
        return tokens.tolist(), log_probs.tolist()

    def encode(self, text: str) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(list(tokens)))
