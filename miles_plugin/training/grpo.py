"""The GRPO loss: pure functions of tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PaddedBatch:
    """Samples of one forward pass, padded on the right; n samples, t tokens of the longest.

    tokens: [n, t] int64. attention_mask: [n, t] int64, 1 on real tokens.
    response_mask: [n, t - 1] float32, 1 where the *next* token is a response token that counts.
    old_log_probs: [n, t - 1] float32, of those next tokens under the policy that sampled them, 0 elsewhere.
    advantages: [n] float32.
    """

    tokens: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor


def next_token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, t - 1] float32: log-probability of each token after the first, at the temperature it was sampled with.

    logits: [n, t, vocabulary]. tokens: [n, t] int64.
    """
    scaled = logits[:, :-1].float() / temperature
    chosen = scaled.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def truncated_importance_loss(
    log_probs: torch.Tensor, batch: PaddedBatch, most: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the response tokens of (the importance-weighted loss, whether its weight was truncated): both scalars.

    The loss is -min(r, most) A log p, r the probability ratio of the current policy to the one that sampled the token,
    which is a weight only: no gradient goes through it. Unlike with the clipped surrogate, a token that has grown
    unlikely since still teaches, by as much less. Every sample is learned from once, so no policy lies between the two.
    """
    ratio = (log_probs.detach() - batch.old_log_probs).exp()
    loss = -ratio.clamp(max=most) * batch.advantages[:, None] * log_probs
    return (loss * batch.response_mask).sum(), ((ratio > most).float() * batch.response_mask).sum()


def clipped_policy_loss(
    log_probs: torch.Tensor, batch: PaddedBatch, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the response tokens of (the clipped surrogate loss, whether the clip bound): both scalars.

    The surrogate is min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r the probability ratio of the current policy
    to the one that sampled the token. Divide by the global number of response tokens for the token mean.
    """
    ratio = (log_probs - batch.old_log_probs).exp()
    advantage = batch.advantages[:, None]
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    bound = (clipped * advantage < ratio * advantage).float()
    return (loss * batch.response_mask).sum(), (bound * batch.response_mask).sum().detach()
