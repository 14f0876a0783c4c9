"""Samples -> the rollout batch: a dict of per-sample columns under miles's names, one shard per trainer rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_plugin.rollout.sample import Sample
from mooncake_store import BatchRef


@dataclass(frozen=True)
class Shard:
    """One rank's part of a rollout batch: where it is, and the digest of what was put there."""

    rank: int
    ref: BatchRef
    digest: str


def split_groups(samples: Sequence[Sample], ranks: int) -> list[list[Sample]]:
    """Deal whole prompt groups to the ranks in turn, so that every rank holds equally many samples."""
    return [[sample for sample in samples if sample.group_index % ranks == rank] for rank in range(ranks)]


def to_columns(samples: Sequence[Sample], round_number: int, global_batch_size: int) -> dict[str, Any]:
    """One shard of a rollout batch.

    Per-sample columns, n = len(samples): tokens, loss_masks (ragged int32), rollout_log_probs (ragged float32, 0.0 on
    tokens that the policy did not write), rewards (the advantages, as miles names them), raw_reward, response_lengths,
    total_lengths, truncated, sample_indices, rollout_ids (the prompt group), rollout_mask_sums (tokens in the loss),
    prompt, metadata, weight_versions; rollout_routed_experts (ragged int32 [tokens - 1, layers, experts per token])
    when every sample has them.
    Batch values: round_number, dynamic_global_batch_size (samples of all shards), num_rollouts (groups here).
    """
    masks = [sample.effective_loss_mask for sample in samples]
    columns = {
        "partition": [sample.index for sample in samples],
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.advantage for sample in samples],
        "raw_reward": [sample.reward or 0.0 for sample in samples],
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "loss_masks": masks,
        "rollout_log_probs": [_masked_log_probs(sample) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.group_index for sample in samples],
        "rollout_mask_sums": [sum(mask) for mask in masks],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "prompt": [sample.prompt for sample in samples],
        "metadata": [{"label": sample.label, "response": sample.response, **sample.metadata} for sample in samples],
        "weight_versions": [sample.weight_versions for sample in samples],
        "multimodal_train_inputs": [None for _ in samples],
        "round_number": round_number,
        "dynamic_global_batch_size": global_batch_size,
        "num_rollouts": len({sample.group_index for sample in samples}),
    }
    if all(sample.rollout_routed_experts is not None for sample in samples):
        columns["rollout_routed_experts"] = [sample.rollout_routed_experts for sample in samples]
    return columns


def _masked_log_probs(sample: Sample) -> list[float]:
    """0.0 where a tool wrote: whatever stands there, the trainer's ratio stays finite, and the mask takes it out."""
    assert sample.rollout_log_probs is not None
    if sample.loss_mask is None:
        return sample.rollout_log_probs
    return [log_prob if on else 0.0 for log_prob, on in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)]
