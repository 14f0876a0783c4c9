"""What miles does with a batch, by miles's own functions on this project's store. Run by `test_miles.py`."""

import pickle
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from miles.ray.rollout import train_data_conversion as conversion
from miles.utils import data, object_store

from mooncake_store import MasterProcess

ROWS = 8


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    with MasterProcess(Path(tmp_path_factory.mktemp("master"), "master.log")) as running:
        yield running


@pytest.fixture
def store(master: MasterProcess, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    monkeypatch.setattr(object_store, "_INSTANCE", None)
    yield (opened := object_store.init_instance(arguments(master, request.param)))
    opened.close()


def arguments(master: MasterProcess | None = None, share_memory: bool = True, **more: Any) -> Namespace:
    kwargs = master and {
        "master_server_address": master.address, "protocol": "tcp", "local_hostname": "127.0.0.1",
        "global_segment_size": "64mb", "local_buffer_size": "16mb", "share_memory": share_memory,
    }  # fmt: skip
    given = {"balance_data": True, "delay_split_train_data_by_dp": True, "multi_lora_n_adapters": 2, **more}
    return Namespace(
        object_store_backend="mooncake", mooncake_store_init_kwargs=kwargs, mooncake_replica_num=1, **given
    )


def rollout() -> dict[str, Any]:
    """Every column that miles has, with the types that its conversion gives them."""
    random = np.random.default_rng(0)
    lengths = [int(length) for length in random.integers(5, 60, ROWS)]
    floats = [random.random(length, dtype=np.float32) for length in lengths]
    return {
        "tokens": [random.integers(0, 32000, length).tolist() for length in lengths],
        "loss_masks": [[1] * length for length in lengths],
        **{name: [row.tolist() for row in floats] for name in ("rollout_log_probs", "teacher_log_probs")},
        "opd_reverse_kl": [torch.from_numpy(row) for row in floats],
        "rollout_routed_experts": [random.integers(0, 8, (n - 1, 4, 2), dtype=np.int32) for n in lengths],
        "rollout_indexer_topk": [random.integers(-1, n, (n - 1, 2, 4), dtype=np.int32) for n in lengths],
        **{name: list(range(ROWS)) for name in ("response_lengths", "sample_indices", "rollout_ids", "truncated")},
        **{name: [3] * ROWS for name in ("rollout_mask_sums", "round_number")},
        **{name: [0.5 * row for row in range(ROWS)] for name in ("rewards", "raw_reward")},
        "prompt": [[{"role": "user", "content": f"question {row // 2}"}] for row in range(ROWS)],
        "metadata": [{"row": row, "nested": {"tags": ["a", None]}} for row in range(ROWS)],
        "weight_versions": [[str(row), str(row + 1)] for row in range(ROWS)],
        "multimodal_train_inputs": [
            {"pixel_values": torch.full((2, row), 1.5)} if row else None for row in range(ROWS)
        ],
        "adapter_slots": [row % 2 for row in range(ROWS)],
        "step_slots": [0, 1],
        "step_adapter_names": ["a", "b"],
        "step_adapter_batch_sizes": {0: 4, 1: 4},
        "prompt_group_sizes": [2, 2, 2, 2],
        "dynamic_global_batch_size": 8,
    }


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def test_the_store_is_ours() -> None:
    assert object_store.MooncakeObjectStore.__module__.startswith("miles_plugin.")
    assert object_store.RayObjectStore.__module__ == object_store.__name__


@pytest.mark.parametrize("store", [True, False], ids=["mapped", "network"], indirect=True)
@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_gets_what_miles_would_cut_for_it(store: Any, balance: bool, ranks: int) -> None:
    args = arguments(balance_data=balance)
    witness = Namespace(witness_ids=list(range(100, 100 + ROWS)))
    ref = pickle.loads(pickle.dumps(store.put(value=rollout(), value_spec=conversion.ROLLOUT_DATA_VALUE_SPEC)))
    for rank in range(ranks):
        wanted = conversion.split_train_data_by_dp_raw(
            args, {**rollout(), "seq_witness_ids": witness.witness_ids}, dp_size=ranks
        )[rank]
        got, result = data.process_rollout_data(args, ref, rank, ranks, witness)
        with result:
            assert plain(got) == plain(conversion.process_rollout_data_shard(args, wanted))
            assert all(isinstance(row, np.ndarray) for row in got["rollout_routed_experts"])
            assert torch.cat([torch.from_numpy(row) for row in got["rollout_routed_experts"]]).dtype == torch.int32
            assert all(isinstance(row, torch.Tensor) for row in got["rollout_log_probs"])  # for context parallelism
            assert all(torch.tensor(row, dtype=torch.long).ndim == 1 for row in got["tokens"])
    store.remove(ref)


@pytest.mark.parametrize("store", [True], indirect=True)
@pytest.mark.parametrize("name", sorted(set(rollout()) - {"tokens"}))
def test_any_column_may_be_missing(store: Any, name: str) -> None:
    batch = rollout()
    del batch[name]
    ref = store.put(value=batch, value_spec=conversion.ROLLOUT_DATA_VALUE_SPEC)
    with store.get(ref) as got:
        assert plain(got) == plain(batch)
    store.remove(ref)


@pytest.mark.parametrize("store", [True], indirect=True)
def test_shards_that_miles_cuts_itself_come_back(store: Any, master: MasterProcess) -> None:
    args = arguments(delay_split_train_data_by_dp=False)
    wanted = conversion.split_train_data_by_dp_raw(args, rollout(), dp_size=2)
    refs = [store.put(value=shard, value_spec=conversion.ROLLOUT_DATA_VALUE_SPEC) for shard in wanted]
    for rank, shard in enumerate(wanted):
        got, result = data.process_rollout_data(args, refs, rank, 2, None)
        with result:
            assert plain(got) == plain(conversion.process_rollout_data_shard(args, dict(shard)))
    data.remove_rollout_data_refs(args, {"data_ref": refs})
