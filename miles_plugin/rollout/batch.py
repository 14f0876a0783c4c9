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
    return [[sample for sample in samples if sample.group % ranks == rank] for rank in range(ranks)]


def to_columns(samples: Sequence[Sample], round_number: int, global_batch_size: int) -> dict[str, Any]:
    """One shard of a rollout batch.

    Per-sample columns, n = len(samples): tokens, loss_masks (ragged int32), rollout_log_probs (ragged float32),
    rewards (the advantages, as miles names them), raw_reward, response_lengths, total_lengths, truncated,
    sample_indices, rollout_ids (the prompt group), rollout_mask_sums, prompt, metadata, weight_versions.
    Batch values: round_number, dynamic_global_batch_size (samples of all shards), num_rollouts (groups here).
    """
    return {
        "partition": [sample.index for sample in samples],
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.advantage for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.truncated) for sample in samples],
        "loss_masks": [[1] * sample.response_length for sample in samples],
        "rollout_log_probs": [sample.log_probs for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.group for sample in samples],
        "rollout_mask_sums": [sample.response_length for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "prompt": [sample.prompt for sample in samples],
        "metadata": [sample.metadata for sample in samples],
        "weight_versions": [sample.weight_versions for sample in samples],
        "multimodal_train_inputs": [None for _ in samples],
        "round_number": round_number,
        "dynamic_global_batch_size": global_batch_size,
        "num_rollouts": len({sample.group for sample in samples}),
    }
