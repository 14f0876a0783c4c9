"""Rewards, advantages, the rollout batch and what a rollout is asked for: no process needed."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

from miles_plugin.rollout.advantage import assign_group_advantages, shuffle_rewards
from miles_plugin.rollout.batch import deal_groups, to_columns
from miles_plugin.rollout.inputs import RolloutFnTrainInput
from miles_plugin.rollout.sample import Sample, in_order
from mooncake_store.decode import decode
from mooncake_store.encode import batch_digest, encode


def make_samples(groups: int, size: int) -> list[Sample]:
    return [
        Sample(
            index=index,
            group_index=index // size,
            prompt=f"question {index // size}",
            tokens=[5, 6, 7, *range(10, 10 + index % 4 + 1)],
            response="ab",
            response_length=index % 4 + 1,
            rollout_log_probs=[-0.5] * (index % 4 + 1),
            status=Sample.Status.TRUNCATED if index % 2 == 0 else Sample.Status.COMPLETED,
            weight_versions=["3"],
            reward=float(index % 3 == 0),
        )
        for index in range(groups * size)
    ]


def test_advantages_are_normalised_within_each_group() -> None:
    samples = make_samples(groups=4, size=8)
    for sample in samples[:8]:
        sample.reward = 1.0
    assign_group_advantages(samples)
    assert all(sample.advantage == 0 for sample in samples[:8]), "a group of equal rewards teaches nothing"
    for group in range(1, 4):
        advantages = [sample.advantage for sample in samples if sample.group_index == group]
        assert sum(advantages) == pytest.approx(0, abs=1e-9)
        assert sum(a * a for a in advantages) / 8 == pytest.approx(1, abs=1e-4)
    rewarded = [sample.advantage > 0 for sample in samples[8:]]
    assert rewarded == [sample.reward == 1.0 for sample in samples[8:]]


def test_shuffling_keeps_the_rewards_and_breaks_their_link_to_the_samples() -> None:
    samples = make_samples(groups=16, size=8)
    before = [sample.reward for sample in samples]
    shuffle_rewards(samples, random.Random(0))
    after = [sample.reward for sample in samples]
    assert Counter(before) == Counter(after)
    assert before != after


def test_ranks_get_whole_groups_and_equally_many() -> None:
    samples = make_samples(groups=6, size=4)
    dealt = deal_groups(samples, ranks=3)
    assert [len(rows) for rows in dealt] == [8, 8, 8]
    assert sorted(row for rows in dealt for row in rows) == list(range(24))
    groups = [{samples[row].group_index for row in rows} for rows in dealt]
    assert set.union(*groups) == set(range(6))
    assert sum(map(len, groups)) == 6


def test_a_shard_has_miles_columns_row_for_row() -> None:
    samples = make_samples(groups=2, size=4)
    assign_group_advantages(samples)
    columns = to_columns(samples, round_number=7)
    rows = {name: column for name, column in columns.items() if isinstance(column, list)}
    assert {len(column) for column in rows.values()} == {8}
    for row, sample in enumerate(samples):
        assert rows["tokens"][row] == sample.tokens
        response = rows["response_lengths"][row]
        assert response == len(rows["loss_masks"][row]) == len(rows["rollout_log_probs"][row])
        assert rows["rewards"][row] == sample.advantage
        assert rows["raw_reward"][row] == sample.reward
        assert rows["weight_versions"][row] == ["3"]
    assert (columns["round_number"], columns["dynamic_global_batch_size"], columns["num_rollouts"]) == (7, 8, 2)
    digest = batch_digest(columns)
    assert digest == batch_digest(to_columns(samples, 7))
    assert samples[3].rollout_log_probs is not None
    samples[3].rollout_log_probs[0] -= 1e-3
    assert digest != batch_digest(to_columns(samples, 7))


def test_a_tool_s_tokens_are_in_the_response_and_not_in_the_loss() -> None:
    samples = make_samples(groups=1, size=4)
    for sample in samples:
        sample.tokens, sample.response_length = [5, 6, 20, 21, 22, 23], 4
        sample.loss_mask, sample.rollout_log_probs = [1, 0, 0, 1], [-0.1, -9e9, 0.0, -0.4]
    samples[1].remove_sample = True
    columns = to_columns(samples, 0)
    assert columns["loss_masks"] == [[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 1], [1, 0, 0, 1]]
    assert columns["rollout_mask_sums"] == [2, 0, 2, 2]
    assert columns["response_lengths"] == [4] * 4
    assert columns["rollout_log_probs"] == [[-0.1, 0.0, 0.0, -0.4]] * 4, "what a tool wrote has no probability"
    assert [sample.effective_response_length for sample in samples] == [2] * 4


def test_a_sample_without_a_reward_is_left_out_of_its_group() -> None:
    samples = make_samples(groups=1, size=4)
    for sample, reward in zip(samples, (1.0, None, 0.0, 0.0), strict=True):
        sample.reward = reward
    assign_group_advantages(samples)
    assert samples[1].advantage == 0.0
    assert samples[0].advantage == pytest.approx(2**0.5, abs=1e-4), "mean 1/3 of three, not 1/4 of four"
    shuffle_rewards(samples, random.Random(1))
    assert samples[1].reward is None
    assert to_columns(samples, 0)["raw_reward"][1] == 0.0


def test_routed_experts_are_a_column_when_every_sample_has_them() -> None:
    samples = make_samples(groups=2, size=2)
    assert "rollout_routed_experts" not in to_columns(samples, 0)
    for sample in samples:
        sample.rollout_routed_experts = np.full((len(sample.tokens) - 1, 3, 2), sample.index, np.int32)
    columns = to_columns(samples, 0)
    encoded = encode(columns)
    stored = np.zeros(encoded.nbytes, np.uint8)
    encoded.write_into(stored)
    for row, sample in zip(decode(stored)["rollout_routed_experts"], samples, strict=True):
        assert row.dtype == np.int32
        assert np.array_equal(row, sample.rollout_routed_experts)


def test_versions_of_several_answers_are_merged_in_order() -> None:
    sample = Sample()
    for spans, finish in ((["3"], "length"), (["3", "4"], "stop")):
        meta = {"weight_versions": [{"version": v} for v in spans], "finish_reason": {"type": finish}}
        sample.update_from_meta_info(None, meta)
    assert sample.weight_versions == ["3", "4"]
    assert sample.status is Sample.Status.COMPLETED


def test_a_rollout_is_asked_for_as_in_miles() -> None:
    assert RolloutFnTrainInput(3) == RolloutFnTrainInput(3, None)
    assert RolloutFnTrainInput(3, 0) == RolloutFnTrainInput(rollout_id=3, weight_version=0) != RolloutFnTrainInput(3)
    assert not RolloutFnTrainInput(3).evaluation
    with pytest.raises(dataclasses.FrozenInstanceError):
        RolloutFnTrainInput(3).weight_version = 1  # type: ignore[misc]


def test_versions_come_in_the_order_of_their_numbers() -> None:
    assert in_order({"10", "9", "default", "100"}) == ["default", "9", "10", "100"]
