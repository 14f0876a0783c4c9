"""A rank's shard as tensors, by the same operations as miles's trainer."""

import torch
from miles.utils.data import process_rollout_data


def get_rollout_data(args, ref, dp_rank, dp_size, witness_info=None):
    shard, result = process_rollout_data(args, ref, dp_rank, dp_size, witness_info)
    shard["tokens"] = [torch.tensor(row, dtype=torch.long) for row in shard["tokens"]]
    shard["loss_masks"] = [torch.tensor(row, dtype=torch.int) for row in shard["loss_masks"]]
    shard["rollout_log_probs"] = [
        # What context parallelism does, with both halves.
        torch.as_tensor(
            row[:2] + row[2:] if isinstance(row, list) else torch.cat([row[:2], row[2:]]), dtype=torch.float32
        )
        for row in shard["rollout_log_probs"]
    ]
    if "rollout_routed_experts" in shard:
        shard["rollout_routed_experts"] = [torch.from_numpy(row) for row in shard["rollout_routed_experts"]]
    if "multimodal_train_inputs" in shard:
        shard["multimodal_train_inputs"] = [
            None if one is None else {key: value.to("cpu") for key, value in one.items()}
            for one in shard["multimodal_train_inputs"]
        ]
    shard["logged"] = logged(shard)
    return shard, result


def logged(shard):
    """Means of what can be logged; as miles's logger, it refuses arrays and leaves out what is no plain number."""
    means = {}
    for key, column in shard.items():
        if isinstance(column, list) and column and isinstance(column[0], int | float):
            means[key] = sum(column) / len(column)
        elif isinstance(column, list) and column and isinstance(column[0], torch.Tensor):
            means[key] = torch.cat([row.float().reshape(-1) for row in column]).mean()
        elif not isinstance(column, list):
            raise ValueError(f"Unsupported type: {type(column)} for key: {key}")
    return means
