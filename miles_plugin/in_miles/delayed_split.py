"""`--delay-split-train-data-by-dp`: one batch for all ranks, of which each reads its own rows.

Which rows those are is for miles to say. It is asked with a stand-in for the batch, whose rows are only names with a
length; what it hands out for this rank is then read.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from miles.ray.rollout.train_data_conversion import process_rollout_data_shard, split_train_data_by_dp_raw
from miles.utils import object_store
from miles.utils.object_store import ObjectStoreGetResult, StoreObjectRef

from miles_plugin.in_miles.object_store import MooncakeObjectStore
from miles_plugin.in_miles.ref import MilesRef
from mooncake_store import GetResult


class _Row:
    """A row that was not read."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Tokens(_Row):
    """One of the tokens, whose lengths are known."""

    def __init__(self, number: int, length: int) -> None:
        super().__init__(number)
        self._length = length

    def __len__(self) -> int:
        return self._length


def rows_by_rank(original: Callable[..., Any]) -> Callable[..., tuple[dict[str, Any], ObjectStoreGetResult]]:
    """miles's `process_rollout_data`, reading only the rank's rows where this project's store holds a batch for all."""

    @wraps(original)
    def process_rollout_data(
        args: Namespace, rollout_data_ref: StoreObjectRef, dp_rank: int, dp_size: int, witness_info: Any
    ) -> tuple[dict[str, Any], ObjectStoreGetResult]:
        store = object_store.get_instance()
        if not args.delay_split_train_data_by_dp or not isinstance(store, MooncakeObjectStore):
            result: tuple[dict[str, Any], ObjectStoreGetResult]
            result = original(args, rollout_data_ref, dp_rank, dp_size, witness_info)
            return result
        extra = {} if witness_info is None else {"seq_witness_ids": witness_info.witness_ids}
        shard, results = _shard(args, store, rollout_data_ref.inner, dp_rank, dp_size, extra)
        return process_rollout_data_shard(args, shard), ObjectStoreGetResult(shard, lambda _: _release(results))

    return process_rollout_data


def _shard(
    args: Namespace, store: MooncakeObjectStore, ref: MilesRef, dp_rank: int, dp_size: int, extra: dict[str, Any]
) -> tuple[dict[str, Any], list[GetResult]]:
    whole, result = store.get_some(ref, ref.whole, None)
    results = [result]
    try:
        asked = {**whole, **{name: _rows(name, ref) for name in ref.rows}, **extra}
        shard: dict[str, Any] = split_train_data_by_dp_raw(args, asked, dp_size=dp_size)[dp_rank]
        by_rows: dict[tuple[int, ...], list[str]] = {}
        for name, column in shard.items():
            if name in ref.rows:
                by_rows.setdefault(tuple(row.number for row in column), []).append(name)
        for rows, fields in by_rows.items():
            read, result = store.get_some(ref, fields, rows)
            results.append(result)
            shard.update(read)
        return shard, results
    except BaseException:
        _release(results)
        raise


def _rows(name: str, ref: MilesRef) -> Sequence[_Row]:
    if name == "tokens":
        return [_Tokens(number, length) for number, length in enumerate(ref.lengths)]
    return list(map(_Row, range(ref.batch.num_rows)))


def _release(results: Sequence[GetResult]) -> None:
    for result in results:
        result.release()
