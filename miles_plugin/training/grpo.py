"""The GRPO loss: pure functions of tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PaddedBatch:
    """Samples of one forward pass, padded on the right; n samples, t tokens of the longest.

    tokens: [n, t] int64. attention_mask: [n, t] int64, 1 on real tokens.
    response_mask: [n, t - 1] float32, 1 where the *next* token is a response token that counts.
    sampled_log_probs: [n, t - 1] float32, of those next tokens under the policy that sampled them, 0 elsewhere.
    old_log_probs: the same under the policy that is not to be left at once: that one, or the trainer's own before its
        first step on these samples.
    advantages: [n] float32.
    """

    tokens: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    sampled_log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor


def next_token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, t - 1] float32: log-probability of each token after the first, at the temperature it was sampled with.

    logits: [n, t, vocabulary]. tokens: [n, t] int64.
    """
    scaled = logits[:, :-1].float() / temperature
    chosen = scaled.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def truncated_weights(batch: PaddedBatch, most: float) -> torch.Tensor:
    """[n, t - 1]: how much likelier a token is under the old policy than under the one that sampled it, at most `most`.

    Samples of an older policy, each by its weight, are in the mean as if the old policy had sampled them.
    """
    return (batch.old_log_probs - batch.sampled_log_probs).exp().clamp(max=most)


def clipped_policy_loss(
    log_probs: torch.Tensor, batch: PaddedBatch, weights: torch.Tensor | float, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the response tokens of (the weighted clipped surrogate loss, whether the clip bound): both scalars.

    The surrogate is min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r the probability ratio of the current policy
    to the old one. Divide by the global number of response tokens for the token mean.
    """
    ratio = (log_probs - batch.old_log_probs).exp()
    advantage = batch.advantages[:, None]
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage) * weights
    bound = (clipped * advantage < ratio * advantage).float()
    return (loss * batch.response_mask).sum(), (bound * batch.response_mask).sum().detach()
