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
            None if one is None else {key: torch.as_tensor(value).to("cpu") for key, value in one.items()}
            for one in shard["multimodal_train_inputs"]
        ]
    return shard, result
