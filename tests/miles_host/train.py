"""The main job's shape: a driver, a rollout manager and trainer ranks in Ray, and a batch a step between them.

Prints one JSON object a step: what every rank got, as plain values, and what the processes' stores are.
"""

import argparse
import json
import sys

import numpy as np
import ray
import torch
from miles.utils import object_store
from miles.utils.data import remove_rollout_data_refs

ROWS = 6


def rollout(step, longest):
    random = np.random.default_rng(step)
    lengths = [int(length) for length in random.integers(longest // 2, longest, ROWS)]
    return {
        "tokens": [random.integers(0, 1000, length).tolist() for length in lengths],
        "loss_masks": [[1] * length for length in lengths],
        "rollout_log_probs": [(-random.random(length).astype(np.float32)).tolist() for length in lengths],
        "rollout_routed_experts": [random.integers(0, 8, (length - 1, 2, 2), dtype=np.int32) for length in lengths],
        "response_lengths": lengths,
        "rewards": [0.5 * row for row in range(ROWS)],
        "raw_reward": [row % 2 for row in range(ROWS)],
        "sample_indices": [ROWS * step + row for row in range(ROWS)],
        "prompt": [f"prompt {row // 2}" for row in range(ROWS)],
        "metadata": [{"row": row, "tags": ["a", "b"]} for row in range(ROWS)],
        "weight_versions": [[str(step)] for _ in range(ROWS)],
        "adapter_slots": [row % 2 for row in range(ROWS)],
        "multimodal_train_inputs": [None if row % 2 else {"pixels": torch.full((2, 3), row)} for row in range(ROWS)],
    }


class Manager:
    def __init__(self, args):
        self.args = args
        object_store.init_instance(args, contribute_segment=False)

    def generate(self, step):
        from miles.ray.rollout import train_data_conversion as conversion

        batch = rollout(step, self.args.longest)
        if self.args.delay_split_train_data_by_dp:
            spec = conversion.ROLLOUT_DATA_VALUE_SPEC
            return {"data_ref": object_store.get_instance().put(value=batch, value_spec=spec)}
        return {"data_ref": conversion.split_train_data_by_dp(self.args, batch, {"dp_size": self.args.dp_size})}

    def store(self):
        return described(object_store.get_instance())


class Trainer:
    def __init__(self, args, rank):
        self.args, self.rank = args, rank
        object_store.init_instance(args, contribute_segment=rank == 0)

    def train(self, pack):
        from miles.backends.training_utils.data import get_rollout_data

        shard, result = get_rollout_data(self.args, pack["data_ref"], self.rank, self.args.dp_size)
        with result:
            shard.pop("rewards")  # as trainers pop and add columns
            shard["advantages"] = [0.0] * len(shard["tokens"])
            return plain(shard)

    def store(self):
        return described(object_store.get_instance())


def described(store):
    stats = store.stats() if hasattr(store, "stats") else None
    imported = sorted(name for name in sys.modules if name.startswith("mooncake."))
    return {
        "class": type(store).__module__,
        "stats": stats,
        "host": ray.util.get_node_ip_address(),
        "mooncake": imported,
    }


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--object-store-backend", choices=[each.value for each in object_store.ObjectStoreBackend])
    parser.add_argument("--mooncake-store-init-kwargs", type=json.loads)
    parser.add_argument("--mooncake-replica-num", type=int, default=1)
    parser.add_argument("--delay-split-train-data-by-dp", action="store_true")
    parser.add_argument("--balance-data", action="store_true")
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--num-rollout", type=int, default=2)
    parser.add_argument("--longest", type=int, default=8, help="tokens of a sample")
    parser.add_argument("--trainer-resource", help="that the trainers' node offers")
    args, _ = parser.parse_known_args()  # of miles's flags those that matter here
    there = {args.trainer_resource: 0.01} if args.trainer_resource else {}
    manager = ray.remote(Manager).options(num_cpus=0).remote(args)
    trainers = [
        ray.remote(Trainer).options(num_cpus=0, resources=there).remote(args, rank) for rank in range(args.dp_size)
    ]
    object_store.init_instance(args, contribute_segment=False)
    for step in range(args.num_rollout):
        pack = ray.get(manager.generate.remote(step))
        print(json.dumps({"step": step, "shards": ray.get([each.train.remote(pack) for each in trainers])}))
        remove_rollout_data_refs(args, pack)
    stores = ray.get([manager.store.remote(), *(each.store.remote() for each in trainers)])
    print(json.dumps({"driver": type(object_store.get_instance()).__module__, "workers": stores}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
