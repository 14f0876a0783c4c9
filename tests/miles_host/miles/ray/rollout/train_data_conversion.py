"""Samples become shards: one for each data-parallel rank."""

from miles.utils import object_store
from miles.utils.object_store import ValueSpec

ROLLOUT_DATA_VALUE_SPEC = {
    **dict.fromkeys(("tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts"), ValueSpec("typed_ragged")),
    **dict.fromkeys(("partition", "response_lengths", "sample_indices"), ValueSpec("ndarray", "int64")),
    "rewards": ValueSpec("ndarray", "float32"),
    **dict.fromkeys(("prompt", "metadata", "weight_versions"), ValueSpec("msgpack_ragged")),
    **dict.fromkeys(("raw_reward", "total_lengths", "adapter_slots"), ValueSpec("auto")),
    "multimodal_train_inputs": ValueSpec("ragged_tensor_dict"),
}
SPLIT = [
    "tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts", "response_lengths", "rewards",
    "sample_indices", "prompt", "metadata", "weight_versions", "adapter_slots", "seq_witness_ids",
    "multimodal_train_inputs",
]  # fmt: skip
WHOLE = ["raw_reward", "total_lengths"]


def split_train_data_by_dp(args, data, train_parallel_config):
    shards = split_train_data_by_dp_raw(args, data, dp_size=train_parallel_config["dp_size"])
    return [object_store.get_instance().put(value=shard, value_spec=ROLLOUT_DATA_VALUE_SPEC) for shard in shards]


def split_train_data_by_dp_raw(args, data, *, dp_size):
    lengths = data["total_lengths"] = [len(row) for row in data["tokens"]]
    if args.balance_data:
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        partitions = [sorted(order[rank::dp_size]) for rank in range(dp_size)]
    else:
        partitions = [range(rank, len(lengths), dp_size) for rank in range(dp_size)]
    if "adapter_slots" in data:
        partitions = [sorted(rows, key=lambda row: data["adapter_slots"][row]) for rows in partitions]
    return [
        {"partition": rows}
        | {key: [data[key][row] for row in rows] for key in SPLIT if key in data}
        | {key: data[key] for key in WHOLE if key in data}
        for rows in partitions
    ]


def process_rollout_data_shard(args, rollout_data):
    partition = rollout_data.pop("partition")
    lengths = rollout_data["total_lengths"]
    rollout_data["total_lengths"] = [lengths[row] for row in partition]
    return rollout_data
