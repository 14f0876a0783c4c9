"""What a custom generate function returned, checked field by field before it is trained on."""

import math
from enum import Enum
from typing import Any

import numpy as np

from miles_plugin.rollout.functions import CustomFunctionError
from miles_plugin.rollout.sample import Sample

# Without the complex numbers, which `float` cannot hold.
_NUMPY_REAL = np.integer | np.floating
_FIELDS = ("tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "status")


def accept(asked: Sample, returned: Any, versions: list[str], named: str) -> Sample:
    """The returned sample in our own class, its place in the rollout and its prompt being those of the one asked for.

    Args:
        versions: those noted by `custom.post`; they count when the function noted none itself.
        named: the function's setting and path, for messages.

    Raises:
        CustomFunctionError: fields that disagree or have the wrong type; the message names them with their values.
    """
    check = _Checker(f"{named}, sample {asked.index}")
    if isinstance(returned, list | tuple):
        check.fail(f"returned {len(returned)} samples; it must return the one sample that it was given")
    missing = [name for name in _FIELDS if not hasattr(returned, name)]
    if missing:
        check.fail(f"returned {returned!r:.80}, which has no {', '.join(missing)}; return the sample")
    status = check.status(returned.status)
    sample = Sample(
        index=asked.index,
        group_index=asked.group_index,
        prompt=asked.prompt,
        label=asked.label,
        metadata=check.metadata(getattr(returned, "metadata", None)),
        response=str(returned.response),
        weight_versions=list(returned.weight_versions) or list(versions),
        status=status,
        remove_sample=bool(getattr(returned, "remove_sample", False)),
    )
    if status is Sample.Status.ABORTED:  # generated again, so that nothing else in it counts
        return sample
    sample.tokens = check.tokens(returned.tokens)
    sample.response_length = length = check.response_length(returned.response_length, len(sample.tokens))
    if returned.loss_mask is not None:
        sample.loss_mask = check.loss_mask(returned.loss_mask, length)
    sample.rollout_log_probs = check.log_probs(returned.rollout_log_probs, length)
    check.versions(sample.weight_versions)
    reward = getattr(returned, "reward", None)
    sample.reward = None if reward is None else check.reward(reward)
    experts = getattr(returned, "rollout_routed_experts", None)
    sample.rollout_routed_experts = None if experts is None else check.experts(experts, len(sample.tokens))
    return sample


def check_reward(reward: Any, named: str, index: int) -> float:
    """The reward as a float.

    Raises:
        CustomFunctionError: it is not a finite number.
    """
    return _Checker(f"{named}, sample {index}").reward(reward)


class _Checker:
    """Each method returns the plain value of one field, or fails naming it. `where` begins every message."""

    def __init__(self, where: str) -> None:
        self._where = where

    def fail(self, problem: str) -> None:
        raise CustomFunctionError(f"{self._where}: {problem}")

    def status(self, status: Any) -> Sample.Status:
        """A status of miles's own class, or its value as text, will do; one left pending is a completed one."""
        value = status.value if isinstance(status, Enum) else status
        if value not in [known.value for known in Sample.Status]:
            self.fail(
                f"status is {status!r}; allowed are {', '.join(f'Sample.Status.{s.name}' for s in Sample.Status)}"
            )
        return Sample.Status.COMPLETED if Sample.Status(value) is Sample.Status.PENDING else Sample.Status(value)

    def metadata(self, metadata: Any) -> dict[str, Any]:
        if metadata is not None and not isinstance(metadata, dict):
            self.fail(f"metadata is {metadata!r:.80}; it must be a dict")
        return metadata or {}

    def tokens(self, tokens: Any) -> list[int]:
        values = self._list("tokens", tokens, int)
        if not values or not all(0 <= token < 2**31 for token in values):
            self.fail(f"tokens is {tokens!r:.80}; it must hold the token ids of prompt and response")
        return values

    def response_length(self, length: Any, tokens: int) -> int:
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or not 0 <= length < tokens:
            self.fail(
                f"response_length is {length!r} with {tokens} tokens; it counts the tokens after the prompt, of which "
                "there must be at least one"
            )
        return int(length)

    def loss_mask(self, mask: Any, length: int) -> list[int]:
        values = self._list("loss_mask", mask, int)
        if len(values) != length:
            self.fail(f"loss_mask has {len(values)} entries, response_length is {length}; they must agree")
        if not set(values) <= {0, 1}:
            self.fail(f"loss_mask holds {sorted(set(values))[:5]}; 1 marks the policy's tokens, 0 all others")
        return values

    def log_probs(self, log_probs: Any, length: int) -> list[float]:
        if log_probs is None:
            self.fail("rollout_log_probs is None; send return_logprob=True and keep what output_token_logprobs says")
        values = self._list("rollout_log_probs", log_probs, float)
        if len(values) != length:
            self.fail(f"rollout_log_probs has {len(values)} entries, response_length is {length}; they must agree")
        for position, value in enumerate(values):
            if not math.isfinite(value):
                self.fail(f"rollout_log_probs is {value} at response token {position}; it must be finite")
        return values

    def versions(self, versions: list[Any]) -> None:
        if not versions or not all(isinstance(version, str) for version in versions):
            self.fail(
                f"weight_versions is {versions!r:.80}; call sample.update_from_meta_info(args, output['meta_info']), "
                "or send requests with miles_plugin.rollout.custom.post, which notes the versions"
            )

    def reward(self, reward: Any) -> float:
        if not isinstance(reward, int | float | _NUMPY_REAL | np.bool_) or not _is_finite(reward):
            self.fail(f"the reward is {reward!r:.80}; it must be one finite number")
        return float(reward)

    def experts(self, experts: Any, tokens: int) -> Any:
        array = np.asarray(experts)
        if array.ndim != 3 or len(array) != tokens - 1 or array.dtype.kind not in "iu":
            self.fail(
                f"rollout_routed_experts is {array.dtype} {array.shape}; it must be int32 [{tokens - 1}, layers, top-k]"
            )
        return array.astype(np.int32, copy=False)

    def _list(self, name: str, values: Any, kind: type) -> list[Any]:
        plain = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(plain, list | tuple):
            self.fail(f"{name} is {values!r:.80}; it must be a list of {kind.__name__}")
        allowed = (int, np.integer) if kind is int else (int, float, _NUMPY_REAL)
        for position, value in enumerate(plain):
            if isinstance(value, bool) or not isinstance(value, allowed):
                self.fail(f"{name}[{position}] is {value!r:.80}; it must be {'an int' if kind is int else 'a number'}")
        return [kind(value) for value in plain]


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int that no float is large enough for
        return False
