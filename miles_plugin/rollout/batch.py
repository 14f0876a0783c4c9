"""Samples -> the rollout batch: a dict of per-sample columns under miles's names, with a part for each trainer rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_plugin.rollout.sample import Sample
from mooncake_store import BatchRef


@dataclass(frozen=True)
class Shard:
    """One rank's part of a rollout batch: the partition of its number, and the digest of what was put there."""

    rank: int
    ref: BatchRef
    digest: str

    @property
    def num_rows(self) -> int:
        return self.ref.partitions[self.rank]

    @property
    def nbytes(self) -> int:
        """Its share of the batch's bytes, by rows."""
        return self.ref.nbytes * self.num_rows // self.ref.num_rows


def deal_groups(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """Deal whole prompt groups to the ranks in turn, equally many samples to each; the numbers of their rows."""
    return [[row for row, sample in enumerate(samples) if sample.group_index % ranks == rank] for rank in range(ranks)]


def to_columns(samples: Sequence[Sample], round_number: int, rows: Sequence[int] | None = None) -> dict[str, Any]:
    """A rollout batch, or some rows of it.

    Per-sample columns, n = len(samples): tokens, loss_masks (ragged int32), rollout_log_probs (ragged float32, 0.0 on
    tokens that the policy did not write), rewards (the advantages, as miles names them), raw_reward, response_lengths,
    total_lengths, truncated, sample_indices, rollout_ids (the prompt group), rollout_mask_sums (tokens in the loss),
    prompt, metadata, weight_versions; rollout_routed_experts (ragged int32 [tokens - 1, layers, experts per token])
    when every sample has them.
    Batch values, of all rows: round_number, dynamic_global_batch_size (samples), num_rollouts (groups).
    """
    batch = samples
    if rows is not None:
        samples = [batch[row] for row in rows]
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
        "dynamic_global_batch_size": len(batch),
        "num_rollouts": len({sample.group_index for sample in batch}),
    }
    if all(sample.rollout_routed_experts is not None for sample in batch):
        columns["rollout_routed_experts"] = [sample.rollout_routed_experts for sample in samples]
    return columns


def _masked_log_probs(sample: Sample) -> list[float]:
    """0.0 where a tool wrote: whatever stands there, the trainer's ratio stays finite, and the mask takes it out."""
    assert sample.rollout_log_probs is not None
    if sample.loss_mask is None:
        return sample.rollout_log_probs
    return [log_prob if on else 0.0 for log_prob, on in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)]
