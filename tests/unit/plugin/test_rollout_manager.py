"""The rollout manager without processes: what it puts, what it remembers, and where it goes on."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.arguments_sources import load_config
from miles_plugin.engines.http import AsyncHTTP
from miles_plugin.engines.sglang import EngineError
from miles_plugin.rollout import manager as manager_module
from miles_plugin.rollout.manager import RolloutManager
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint
from miles_plugin.version import VersionFenced, WriterRefused
from mooncake_store import ConfigError, StoreUnavailable
from tests.unit.plugin.test_rollout_custom import TOKENIZER, FakeEngine

FLAGS = ["--held-out-size", "4", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-num-gpus", "2"]


class MemoryStore:
    """Keeps what is put."""

    def __init__(self) -> None:
        self.batches: dict[str, Any] = {}
        self.puts = 0
        self.answers = True

    def put(self, batch: Any, partitions: Any) -> SimpleNamespace:
        self.puts += 1
        self.batches[f"key-{self.puts}"] = batch
        rows = tuple(map(len, partitions))
        return SimpleNamespace(key=f"key-{self.puts}", nbytes=1, num_rows=sum(rows), partitions=rows, dealt=partitions)

    def remove(self, ref: Any) -> None:
        if not self.answers:
            raise StoreUnavailable("the master was killed")
        del self.batches[ref.key]

    def close(self) -> None:
        pass


def answer(ids: list[int], params: dict[str, Any]) -> tuple[str, str]:
    """Half of the answers right, by the parity of the question's last digit."""
    question = TOKENIZER.decode(ids)
    total = str(sum(map(int, re.findall(r"[-+]?\d+", question.replace("+ ", "+").replace("- ", "-")))))
    return (total if sum(ids) % 2 else "no"), "stop"


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[RolloutManager, MemoryStore]]]:
    save_checkpoint(build_model(32, 1, seed=0), build_tokenizer(), tmp_path / "checkpoint")
    managers = []

    def start(specs: Any) -> list[SimpleNamespace]:
        assert [spec.seed for spec in specs] == [0, 1]
        made = [FakeEngine(f"http://127.0.0.1:{port}", answer, "5") for port in (1, 2)]
        return [SimpleNamespace(engine=engine, ranks=1, stop=lambda: None, ended=lambda _: None) for engine in made]

    def make(*flags: str) -> tuple[RolloutManager, MemoryStore]:
        store = MemoryStore()
        monkeypatch.setattr(manager_module, "open_rollout_store", lambda *_args, **_kwargs: store)
        monkeypatch.setattr(manager_module, "start_engines", start)
        run_dir = tmp_path / str(len(managers))
        run_dir.mkdir()
        managers.append(RolloutManager(load_config([*FLAGS, *flags]), None, "run", run_dir, ranks=2))
        managers[-1].start_engines(tmp_path / "checkpoint", "127.0.0.1", ())
        return managers[-1], store

    yield make
    for made in managers:
        made.close()


def test_a_rollout_is_put_once_with_a_part_per_rank_and_removed_when_all_acknowledged(
    make: Callable[..., tuple[RolloutManager, MemoryStore]],
) -> None:
    manager, store = make("--task", "chain_sum")
    rollout = manager.generate(3)
    assert (rollout.samples, rollout.left_out, rollout.weight_versions) == (8, 0, ["5"])
    assert rollout.tokens == sum(sum(batch["rollout_mask_sums"]) for batch in store.batches.values())
    (batch,) = store.batches.values()
    first, second = rollout.shards
    assert first.ref is second.ref
    dealt: Any = first.ref
    assert [batch["rollout_ids"][row] for row in dealt.dealt[0]] == [12, 12, 14, 14]
    assert [batch["sample_indices"][row] for row in dealt.dealt[1]] == [26, 27, 30, 31]
    assert rollout.reward == pytest.approx(sum(batch["raw_reward"]) / 8)
    assert (first.num_rows, second.num_rows) == (4, 4)
    for shard in rollout.shards:
        assert store.batches
        for _ in range(2):
            manager.acknowledge(shard.ref.key, shard.rank)
    assert not store.batches
    assert manager.settle() == {}


def test_the_manager_knows_a_version_before_it_asks_for_a_rollout_with_it(
    make: Callable[..., tuple[RolloutManager, MemoryStore]],
) -> None:
    manager, _ = make("--task", "chain_sum")
    assert manager.current_version() is None
    assert manager.generate(0).weight_version is None, "no update yet, which is not version 0"
    manager.register_trainer("first")
    assert [manager.allocate_version("first"), manager.newest_version()] == [0, 0]
    assert manager.generate(1).weight_version is None
    manager.announce_version(0, "first")
    assert manager.generate(2).weight_version == 0
    manager.commit_version(0, "first", ["http://127.0.0.1:1", "http://127.0.0.1:2"], [])
    assert manager.continue_versions(4) == 4
    assert manager.generate(3).weight_version == manager.current_version() == 0
    with pytest.raises(WriterRefused):
        manager.register_trainer("second")
    manager.register_trainer("second", True)
    with pytest.raises(VersionFenced):
        manager.allocate_version("first")
    assert manager.allocate_version("second") == 5


def test_a_job_that_was_taken_over_saves_and_updates_no_more(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    first, _ = make("--task", "chain_sum", "--save", saved)
    first.register_trainer("trainer")
    assert first.allocate_version("trainer") == 0
    first.state()
    second, _ = make("--task", "chain_sum", "--save", saved, "--takeover")
    for call in (first.state, lambda: first.allocate_version("trainer"), lambda: first.announce_version(0, "trainer")):
        with pytest.raises(VersionFenced, match=r"run run, process .* took over"):
            call()
    second.register_trainer("trainer")
    assert second.allocate_version("trainer") == 1
    second.state()


def test_engines_of_an_update_that_is_refused_stay_as_they_were(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took over says what is in rotation."""
    manager, _ = make("--task", "chain_sum")
    updated: list[int] = []
    monkeypatch.setattr(manager._fleet, "updated", lambda version, *_: updated.append(version))
    manager.register_trainer("first")
    for version in (0, 1):
        assert manager.allocate_version("first") == version
        manager.announce_version(version, "first")
        if version == 0:
            manager.commit_version(version, "first", [], [])
    manager.register_trainer("second", True)
    with pytest.raises(VersionFenced):
        manager.commit_version(1, "first", [], [])
    assert updated == [0]


def test_what_is_acknowledged_while_the_store_is_away_is_removed_when_it_is_back(
    make: Callable[..., tuple[RolloutManager, MemoryStore]],
) -> None:
    manager, store = make("--task", "chain_sum")
    first, second = manager.generate(0).shards[0], manager.generate(1).shards[0]
    store.answers = False
    for rank in (0, 1):
        manager.acknowledge(first.ref.key, rank)
    manager.acknowledge(second.ref.key, 0)
    assert manager.settle(seconds=0) == {first.ref.key: [], second.ref.key: [1]}
    assert set(store.batches) == {first.ref.key, second.ref.key}
    store.answers = True
    late = threading.Timer(0.1, manager.acknowledge, (second.ref.key, 1))
    late.start()
    assert manager.settle() == {}, "waits for the last one, and frees the first"
    assert not store.batches
    store.answers = False
    (shard, _) = manager.generate(2).shards
    for rank in (0, 1):
        manager.acknowledge(shard.ref.key, rank)
    store.answers = True
    manager.generate(3)
    assert shard.ref.key not in store.batches, "also before the next batch is put"


def test_a_shard_is_removed_once_though_settling_and_an_acknowledgement_meet(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, store = make("--task", "chain_sum")
    shards = manager.generate(0).shards
    removing, go_on = threading.Event(), threading.Event()
    removed: list[str] = []

    def remove(ref: Any) -> None:
        removed.append(ref.key)
        removing.set()
        assert go_on.wait(30)

    monkeypatch.setattr(store, "remove", remove)
    acknowledging = [threading.Thread(target=manager.acknowledge, args=(s.ref.key, s.rank)) for s in shards]
    for thread in acknowledging:
        thread.start()
    assert removing.wait(30)
    threading.Timer(0.2, go_on.set).start()
    assert manager.settle() == {}, "waits for those that are being removed"
    assert removed == [shards[0].ref.key]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_new_manager_goes_on_where_the_state_was_taken(
    shuffled: bool, make: Callable[..., tuple[RolloutManager, MemoryStore]]
) -> None:
    manager, store = make("--task", "chain_sum")
    manager.begin(shuffled)
    for rollout_id in range(2):
        manager.generate(rollout_id)
    state = json.loads(json.dumps(manager.state()))
    manager.generate(2)
    resumed, other_store = make("--task", "chain_sum")
    resumed.begin(shuffled, state)
    assert resumed.state() == state
    resumed.generate(2)
    assert list(other_store.batches.values()) == list(store.batches.values())[2:]
    assert resumed.state() == manager.state() != state
    resumed.begin(shuffled)
    resumed.generate(0)
    assert list(other_store.batches.values())[1:] == list(store.batches.values())[:1], "begins anew"


def test_the_state_of_other_prompts_is_refused(make: Callable[..., tuple[RolloutManager, MemoryStore]]) -> None:
    manager, _ = make("--task", "chain_sum")
    with pytest.raises(ConfigError, match=r"had the prompts 'spell_backward', task=chain_sum gives 'chain_sum'"):
        manager.begin(False, {"cursor": 3, "prompts": "spell_backward"})


# With a buffer of one rollout, which lies on the heap.
ASYNC = (
    *("--task", "chain_sum", "--fully-async", "--async-max-concurrent-samples", "4"),
    *("--async-data-buffer-capacity-factor", "1"),
)
CUSTOM = ("--custom-async-data-buffer-path", "tests.unit.plugin.test_fully_async_custom.NewestFirst")


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Engines over HTTP answer single prompts as `answer` says. version: by which; held: they wait while it is set."""
    state: dict[str, Any] = {"version": "default", "asked": 0}

    async def post(_http: Any, url: str, body: dict[str, Any]) -> Any:
        state["asked"] += 1
        await asyncio.sleep(0)
        engine = FakeEngine(url.removesuffix("/generate"), answer, state["version"])
        return engine.generate([body["input_ids"]], body["sampling_params"])[0]

    monkeypatch.setattr(AsyncHTTP, "post", post)
    return state


def test_fully_asynchronous_rollouts_have_whole_groups_of_every_item_once(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], answered: dict[str, Any]
) -> None:
    manager, store = make(*ASYNC)
    for rollout_id in range(3):
        rollout = manager.generate(rollout_id)
        (batch,) = [batch for batch in store.batches.values() if batch["round_number"] == rollout_id]
        groups = list(range(rollout_id * 4, rollout_id * 4 + 4))
        assert batch["rollout_ids"] == [group for group in groups for _ in range(2)]
        assert batch["sample_indices"] == list(range(rollout_id * 8, rollout_id * 8 + 8))
        assert [shard.num_rows for shard in rollout.shards] == [4, 4]
        assert rollout.buffer["rollout/fully_async/consumed_groups"] == 4
        assert all(len(set(pair)) == 1 for pair in zip(batch["prompt"][::2], batch["prompt"][1::2], strict=True))
    prompts = {prompt for batch in store.batches.values() for prompt in batch["prompt"]}
    assert len(prompts) == 12
    state = json.loads(json.dumps(manager.state()))
    assert state["cursor"] >= 12
    assert sorted(state["unfinished"]) == list(range(12, state["cursor"])), "begun, and no rollout has had them"


def test_a_resumed_job_begins_with_what_was_begun(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], answered: dict[str, Any]
) -> None:
    first, store = make(*ASYNC)
    first.generate(0)
    state = first.state()
    first.close()
    second, resumed = make(*ASYNC)
    second.begin(False, state)
    second.generate(1)
    seen = [set(batch["prompt"]) for each in (store, resumed) for batch in each.batches.values()]
    assert not seen[0] & seen[1]
    reference, there = make("--task", "chain_sum")
    for rollout_id in range(2):
        reference.generate(rollout_id)
    assert set().union(*seen) == {prompt for batch in there.batches.values() for prompt in batch["prompt"]}


def test_what_is_too_stale_is_not_trained_on(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], answered: dict[str, Any]
) -> None:
    manager, _ = make(*ASYNC, "--max-weight-staleness", "0")
    manager.register_trainer("trainer")
    for version in range(3):
        assert manager.allocate_version("trainer") == version
        answered["version"] = str(version)
        manager.announce_version(version, "trainer")
        manager.commit_version(version, "trainer", ["http://127.0.0.1:1", "http://127.0.0.1:2"], [])
        rollout = manager.generate(version)
        assert rollout.weight_versions == [str(version)]
        assert rollout.buffer["rollout/fully_async/consumed_max_staleness"] == 0


def test_a_buffer_of_the_user_s_decides_what_a_rollout_gets(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], answered: dict[str, Any]
) -> None:
    manager, store = make(*ASYNC, *CUSTOM)
    for rollout_id in range(3):
        rollout = manager.generate(rollout_id)
        assert rollout.samples == 8
        assert list(rollout.buffer) == ["mine/groups"]
    prompts = {prompt for batch in store.batches.values() for prompt in batch["prompt"]}
    assert len(prompts) == 12
    state = manager.state()
    assert len(state["unfinished"]) == state["cursor"] - 12, "what it has not handed out is generated by who resumes"


@pytest.mark.parametrize("flags", [(), CUSTOM], ids=["ours", "the user's"])
def test_what_ends_the_generation_is_raised_by_the_rollout(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    async def refuse(_http: Any, url: str, _body: Any) -> Any:
        raise EngineError(f"{url}: HTTP 400: too long", 400)

    monkeypatch.setattr(AsyncHTTP, "post", refuse)
    manager, _ = make(*ASYNC, *flags)
    with pytest.raises(EngineError, match="HTTP 400: too long"):
        manager.generate(0)


def test_accuracy_is_of_the_held_out_items(make: Callable[..., tuple[RolloutManager, MemoryStore]]) -> None:
    manager, store = make("--task", "chain_sum", "--held-out-size", "64")
    before = manager.state()
    assert 0.3 < manager.evaluate() < 0.7
    assert manager.state() == before
    assert not store.batches


def test_the_progress_of_an_update_does_not_outlast_it(
    make: Callable[..., tuple[RolloutManager, MemoryStore]],
) -> None:
    manager, _ = make()
    manager.register_trainer("trainer")
    manager.allocate_version("trainer")
    manager.note_progress(40, 40)
    assert manager.progress() == (40, 40)
    manager.allocate_version("trainer")
    assert manager.progress() == (0, 0)


def test_with_disk_delta_engines_hosts_have_a_checkpoint_from_the_start(
    make: Callable[..., tuple[RolloutManager, MemoryStore]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, _ = make("--update-weight-transfer-mode", "disk-delta")
    local, urls = tmp_path / "0" / "checkpoint", [engine.url for engine in manager.engines()]
    assert (local / "current" / "model.safetensors").is_file()
    brought = manager.bring_weights(None, urls)
    assert (brought.paths, brought.failed) == (dict.fromkeys(urls, str(local / "a")), {})
    assert not caplog.text
    (local / "a.json").write_text("{")
    brought = manager.bring_weights(None, urls)
    assert brought.paths.keys() == set(urls)
    assert "version None: slot a, which engines read, is in doubt" in caplog.text
    assert "there is no weight_v000003" in manager.bring_weights(3, urls).failed[urls[0]]


def test_closing_is_idempotent(make: Callable[..., tuple[RolloutManager, MemoryStore]]) -> None:
    manager, _ = make("--task", "chain_sum")
    manager.generate(0)
    for _ in range(2):
        manager.close()
