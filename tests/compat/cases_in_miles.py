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


def shown(value: Any) -> Any:
    """A value with the types that miles tells apart: lists, arrays, tensors, and plain numbers by their type."""
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [shown(item) for item in value]
    if isinstance(value, np.ndarray | torch.Tensor):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return kind, str(value.dtype).removeprefix("torch."), value.tolist()
    return type(value).__name__, value


def as_ours(batch: dict[str, Any]) -> dict[str, Any]:
    """What Ray's store would give, but for lists of which the trainer makes tensors first of all."""

    def column(name: str, rows: Any) -> Any:
        if name in ("tokens", "loss_masks"):
            return [np.array(row, np.int32) for row in rows]
        if name in ("rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            return [torch.as_tensor(row, dtype=torch.float32) for row in rows]
        return rows

    return {name: column(name, rows) for name, rows in batch.items()}


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
            assert shown(got) == shown(as_ours(conversion.process_rollout_data_shard(args, wanted)))
    store.remove(ref)


@pytest.mark.parametrize("store", [True], indirect=True)
@pytest.mark.parametrize("name", sorted(set(rollout()) - {"tokens"}))
def test_any_column_may_be_missing(store: Any, name: str) -> None:
    batch = rollout()
    del batch[name]
    ref = store.put(value=batch, value_spec=conversion.ROLLOUT_DATA_VALUE_SPEC)
    with store.get(ref) as got:
        assert shown(got) == shown(as_ours(batch))
    store.remove(ref)


@pytest.mark.parametrize("store", [True], indirect=True)
def test_shards_that_miles_cuts_itself_come_back(store: Any, master: MasterProcess) -> None:
    args = arguments(delay_split_train_data_by_dp=False)
    wanted = conversion.split_train_data_by_dp_raw(args, rollout(), dp_size=2)
    refs = [store.put(value=shard, value_spec=conversion.ROLLOUT_DATA_VALUE_SPEC) for shard in wanted]
    for rank, shard in enumerate(wanted):
        got, result = data.process_rollout_data(args, refs, rank, 2, None)
        with result:
            assert shown(got) == shown(as_ours(conversion.process_rollout_data_shard(args, dict(shard))))
    data.remove_rollout_data_refs(args, {"data_ref": refs})


# --- the trainer ------------------------------------------------------------------------------------------------------


class ByPickle:
    """What Ray's store does to a batch."""

    def put(self, value: Any, value_spec: Any = None) -> Any:
        return object_store.StoreObjectRef(pickle.dumps(value))

    def get(self, ref: Any) -> Any:
        return object_store.ObjectStoreGetResult(pickle.loads(ref.inner), lambda _: None)


LENGTHS = [7, 3, 12, 5, 9, 4, 6, 8]


def responses() -> dict[str, Any]:
    """A batch that miles's trainer takes to its end, without what needs a model."""
    return {
        **rollout(),
        "tokens": [list(range(length + 1)) for length in LENGTHS],
        "response_lengths": LENGTHS,
        "loss_masks": [[1] * length for length in LENGTHS],
        **{name: [[-0.25] * length for length in LENGTHS] for name in ("rollout_log_probs", "teacher_log_probs")},
        "opd_reverse_kl": [torch.full((length,), 0.5) for length in LENGTHS],
        "rollout_routed_experts": [np.ones((length, 4, 2), np.int32) for length in LENGTHS],
        "rollout_indexer_topk": [np.ones((length, 2, 4), np.int32) for length in LENGTHS],
        "adapter_slots": [0] * ROWS,
    }


def odd(name: str) -> dict[str, Any]:
    """The same with rows that Ray's store carries whatever they are, and torch.tensor reads."""
    batch, second = responses(), LENGTHS[2]
    changed: dict[str, Any] = {
        "as ever": {},
        "an int among floats": {"rollout_log_probs": [[0, *row[1:]] for row in batch["rollout_log_probs"]]},
        "a row of ints": {"rollout_log_probs": [[0] * second if n == second else [-0.5] * n for n in LENGTHS]},
        "an array among lists": {
            "rollout_log_probs": [np.full(n, -0.5, np.float32) if n == second else [-0.5] * n for n in LENGTHS],
            "tokens": [np.arange(n + 1, dtype=np.int32) if n == second else list(range(n + 1)) for n in LENGTHS],
        },
        "a tensor among lists": {"teacher_log_probs": [torch.ones(n) if n == second else [-0.5] * n for n in LENGTHS]},
        "tuples": {"tokens": [tuple(range(n + 1)) for n in LENGTHS]},
        "masks of truth and numbers": {"loss_masks": [[True] * n if n == second else [1] * n for n in LENGTHS]},
        "masks of floats": {"loss_masks": [[1.0] * n if n == second else [1] * n for n in LENGTHS]},
        "rewards of ints and floats": {"rewards": [1 if n % 2 else 0.5 for n in LENGTHS]},
        "no number where there may be none": {"sample_indices": [None] * ROWS, "rollout_ids": [None] * ROWS},
        "no response at all": {
            "response_lengths": [0] * ROWS,
            **{name: [[]] * ROWS for name in ("loss_masks", "rollout_log_probs", "teacher_log_probs")},
            "opd_reverse_kl": [torch.zeros(0)] * ROWS,
        },
    }
    return {**batch, **changed[name]}


ODD = (
    "as ever", "an int among floats", "a row of ints", "an array among lists", "a tensor among lists", "tuples",
    "masks of truth and numbers", "masks of floats", "rewards of ints and floats", "no number where there may be none",
    "no response at all",
)  # fmt: skip


@pytest.mark.parametrize("store", [True], indirect=True)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("name", ODD)
def test_the_trainer_gets_and_logs_what_it_would_by_ray(
    store: Any, name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store._splits_late = late
    ours = trained(store, odd(name), late, monkeypatch)
    monkeypatch.setattr(object_store, "_INSTANCE", ByPickle())
    assert ours == trained(ByPickle(), odd(name), late, monkeypatch)


def trained(store: Any, batch: dict[str, Any], late: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each of two ranks has after miles's get_rollout_data, and what it logs. Everything lies on the CPU."""
    from miles.backends.training_utils import cp_utils, log_utils, parallel
    from miles.backends.training_utils import data as training

    args = arguments(
        balance_data=False, delay_split_train_data_by_dp=late, enable_witness=False, qkv_format="thd",
        true_on_policy_mode=False, ci_test=False, log_multi_turn=False, log_correct_samples=False,
        rollout_max_response_len=20,
    )  # fmt: skip
    alone = parallel.GroupInfo(rank=0, size=1, group=None)
    logged: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(log_utils, "gather_log_data", lambda _m, _a, _r, found, *_: logged.update(found))
    ref = (
        store.put(value=batch, value_spec=conversion.ROLLOUT_DATA_VALUE_SPEC)
        if late
        else conversion.split_train_data_by_dp(args, dict(batch), {"dp_size": 2})
    )
    ranks = []
    for rank in range(2):
        group = parallel.GroupInfo(rank=rank, size=2, group=None)
        state = parallel.ParallelState(
            intra_dp=group, intra_dp_cp=alone, cp=alone, tp=alone, pp=alone, ep=alone, etp=alone, indep_dp=alone
        )
        for module in (training, cp_utils, log_utils):
            monkeypatch.setattr(module, "get_parallel_state", lambda state=state: state)
        logged.clear()
        got, result = training.get_rollout_data(args, ref)
        with result:
            log_utils.log_rollout_data(0, args, got)
            ranks.append((shown(got), shown(dict(logged))))
    return ranks
