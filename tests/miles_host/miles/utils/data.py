"""What a trainer rank gets, and the end of a batch."""

from miles.ray.rollout.train_data_conversion import split_train_data_by_dp_raw
from miles.utils import object_store


def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size, witness_info):
    from miles.ray.rollout.train_data_conversion import process_rollout_data_shard

    store = object_store.get_instance()
    if args.delay_split_train_data_by_dp:
        result = store.get(rollout_data_ref)
        batch = result.value
        if witness_info is not None:
            batch = {**batch, "seq_witness_ids": witness_info.witness_ids}
        shard = split_train_data_by_dp_raw(args, batch, dp_size=dp_size)[dp_rank]
    else:
        result = store.get(rollout_data_ref[dp_rank])
        shard = dict(result.value)
    return process_rollout_data_shard(args, shard), result


def remove_rollout_data_refs(args, rollout_data_pack):
    refs = rollout_data_pack["data_ref"]
    for ref in refs if isinstance(refs, list) else [refs]:
        object_store.get_instance().remove(ref)
