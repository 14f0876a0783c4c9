"""A policy that shares an addition with a calculator: it writes the first digit, the tool the next, it the rest.

`generate` and `reward` have miles's signatures and use only what miles has too, so that this is also how a function
written for miles looks here: its imports change, the rest stays.
"""

import re
from argparse import Namespace
from typing import Any

from miles_plugin.rollout.custom import GenerateState, Sample, post


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two turns of the policy with one call of the tool between them, unless the policy ends after the first."""
    tokenizer = GenerateState(args).tokenizer
    sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    prompt_length = len(sample.tokens)
    sample.loss_mask, sample.rollout_log_probs = [], []

    await _policy_turn(args, sample, {**sampling_params, "max_new_tokens": 1})
    if sample.status is Sample.Status.TRUNCATED:  # it would go on: it has not ended its answer
        written = tokenizer.decode(sample.tokens[prompt_length:])
        observation = tokenizer.encode(calculator(sample.prompt, len(written)), add_special_tokens=False)
        sample.tokens += observation
        # The policy did not write these: they are context, and nothing is learned from them.
        sample.loss_mask += [0] * len(observation)
        sample.rollout_log_probs += [0.0] * len(observation)
        await _policy_turn(args, sample, sampling_params)

    sample.response_length = len(sample.tokens) - prompt_length
    sample.response = tokenizer.decode(sample.tokens[prompt_length:], skip_special_tokens=True)
    return sample


async def _policy_turn(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> None:
    """Let the policy continue `sample.tokens`; status and weight versions are noted from the engine's answer."""
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
    written = output["meta_info"]["output_token_logprobs"]
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    sample.tokens += [token for _log_prob, token, _text in written]
    sample.loss_mask += [1] * len(written)
    sample.rollout_log_probs += [log_prob for log_prob, _token, _text in written]
    sample.update_from_meta_info(args, output["meta_info"])


def calculator(question: str, position: int) -> str:
    """The tool: one digit of the sum of the numbers in `question`, "" past its end."""
    return str(sum(map(int, re.findall(r"\d+", question))))[position : position + 1]


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:  # noqa: ARG001
    """1.0 for the right sum, whoever wrote which digit."""
    return float(sample.response == sample.label)
