"""The journal: what a restart knows, wherever the file was cut off, the disk was full or a record was noted twice."""

import errno
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_plugin import durable
from miles_plugin.fully_async import journal as journal_module
from miles_plugin.fully_async.journal import Journal, JournalUnavailable
from miles_plugin.fully_async.journal_records import (
    Again,
    Dropped,
    Events,
    Finished,
    Learned,
    Progress,
    Prompts,
    Returned,
    State,
    Stored,
    Taken,
    Trained,
    prompts_of,
)
from miles_plugin.fully_async.ranges import Ranges
from miles_plugin.rollout.sample import Sample
from mooncake_store.errors import ConfigError, IntegrityError, StoreClosed
from tests.unit.plugin.fully_async_groups import finished

numbers = st.integers(0, 6)
many = st.lists(numbers, max_size=3)


def done(group: int) -> Finished:
    return Finished(group, 5, 7, False, prompts_of(finished(group).prompt_group))


events = st.one_of(
    numbers.map(done),
    st.builds(Stored, numbers, st.sampled_from([None, "ref"])),
    st.builds(Taken, numbers, st.one_of(st.none(), st.integers(0, 3))),
    many.map(Returned),
    st.builds(Again, numbers, st.sampled_from([None, Prompts([], [])])),
    numbers.map(Dropped),
    many.map(Trained),
)


def what_is_known(state: State) -> Any:
    """A state as plain values. (In which order groups were finished counts, too.)"""
    live = [(group, known.progress, known.ref, known.batch, known.finished) for group, known in state.live.items()]
    return live, state.settled.pairs(), state.next, state.first


def test_what_was_flushed_is_there_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", first=3)
    journal.note(done(3), done(4), Taken(3, 0), Stored(4, '{"key": "é"}'))
    assert journal.flush() == []
    journal.note(done(5), done(6), Dropped(6))
    assert journal.trained([3]) == [6, 3]
    known = what_is_known(journal.state)
    for _ in range(2):
        journal = Journal(tmp_path / "journal")
        assert what_is_known(journal.state) == known
        assert journal.state.never_finished() == []
        assert not any(map(journal.state.expects, (3, 4, 5, 6)))
        assert journal.state.expects(7)
    first, second = Journal(tmp_path / "journal").state.live.values()
    assert (first.finished.group, first.ref, second.ref) == (4, '{"key": "é"}', None)
    assert first.finished.prompts is not None
    assert first.finished.prompts.group() == finished(4).prompt_group


def test_each_line_is_json_and_one_flush_is_one_line_and_one_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal")
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    before = (tmp_path / "journal").read_bytes()
    journal.note(*map(done, range(50)))
    assert journal.has_pending()
    assert (tmp_path / "journal").read_bytes() == before
    journal.flush()
    assert not journal.has_pending()
    journal.flush()
    assert len(synced) == 1
    lines = (tmp_path / "journal").read_text().splitlines()
    assert len(lines) == 3
    records = [json.loads(line)["records"] for line in lines]
    assert [record["event"] for record in records[2]] == ["finished"] * 50
    assert records[0] == [{"format": 1, "lines": 2, "first": 0}]


@given(st.lists(events, max_size=40))
def test_a_state_is_what_its_own_records_lead_to(noted: list[Events]) -> None:
    state = State()
    ever_settled: set[int] = set()
    for event in noted:
        assert not any(map(state.expects, ever_settled))
        state.apply(event)
        ever_settled |= set(event.groups) if isinstance(event, Trained) else set()
        ever_settled |= {event.group} if isinstance(event, Dropped) else set()
        assert not ever_settled & state.live.keys(), "trained twice"
        assert all(group in state.settled for group in ever_settled)
        # Every number is in one place: unknown, live or settled.
        unknown = {number for numbers in state.never_finished() for number in numbers}
        assert sorted([*unknown, *state.live, *ever_settled]) == list(range(state.next))
    again = State()
    for event in state.records():
        again.apply(event)
    assert what_is_known(again) == what_is_known(state)


@given(st.lists(events, max_size=40), st.integers(0, 9), st.sets(numbers), st.sampled_from([None, 6, 7]))
def test_what_a_checkpoint_has_learned_from_is_what_counts(
    noted: list[Events], following: int, unfinished: set[int], version: int | None
) -> None:
    """All groups of `done` were made by versions 5 to 7."""
    state = State()
    for event in noted:
        state.apply(event)
    unfinished = {number for number in unfinished if number < following}
    learned = {*range(following)} - unfinished
    gone_on, refs = state.as_of(Learned(following, sorted(unfinished), version))
    stored = {number for number, known in state.live.items() if known.ref is not None}
    kept = stored - learned if version == 7 else set()
    assert list(gone_on.live) == [number for number in state.live if number in kept]
    assert {(known.progress, known.ref, known.batch) for known in gone_on.live.values()} <= {
        (Progress.FINISHED, "ref", None)
    }
    assert len(refs) == len(stored - kept)
    assert all((number in gone_on.settled) == (number in learned) for number in range(10))
    assert gone_on.next == max([following, *(number + 1 for number in kept)])


def test_a_journal_is_set_back_to_a_checkpoint_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.note(*map(done, range(6)), *(Stored(group, f"ref {group}") for group in (1, 2, 4)))
    journal.note(Taken(1, 0), Taken(2, 0), Trained([0, 3]))
    journal.close()
    journal = Journal(path, learned=Learned(4, [2, 3], 7))
    assert journal.orphans == ["ref 1"]
    assert restarted(path) == what_is_known(journal.state)
    assert journal.state.settled.pairs() == [(0, 2)]
    assert journal.state.expects(3), "that was undone"
    assert [(group, known.ref) for group, known in journal.state.live.items()] == [(2, "ref 2"), (4, "ref 4")]


@given(st.sets(st.integers(0, 40)), st.integers(0, 40), st.integers(0, 45), st.randoms(use_true_random=False))
def test_ranges_are_a_set(numbers: set[int], start: int, stop: int, chance: random.Random) -> None:
    ranges = Ranges()
    for number in chance.sample(sorted(numbers), len(numbers)):
        ranges.add(number)
        ranges.add(number)
    assert [number for number in range(45) if number in ranges] == sorted(numbers)
    assert len(ranges.pairs()) == sum(number - 1 not in numbers for number in numbers)
    assert [number for gap in ranges.gaps(start, stop) for number in gap] == sorted(set(range(start, stop)) - numbers)
    assert Ranges(chance.sample(ranges.pairs(), len(ranges.pairs()))).pairs() == ranges.pairs()
    overlapping = [(number, number + length) for number in numbers for length in (1, 2)]
    assert Ranges(overlapping).pairs() == Ranges((n, n + 1) for n in numbers | {n + 1 for n in numbers}).pairs()


def restarted(path: Path) -> Any:
    """What a process knows that goes on with a file."""
    journal = Journal(path)
    known = what_is_known(journal.state)
    journal.close()
    return known


def history(path: Path, seed: int) -> tuple[bytes, list[tuple[int, Any]]]:
    """A journal's file, and after each flush how long it was and what was known."""
    chance = random.Random(seed)
    journal = Journal(path)
    after = [(path.stat().st_size, what_is_known(journal.state))]
    unfinished = 0
    for _ in range(7):
        for _ in range(chance.randrange(1, 4)):
            group = chance.randrange(unfinished + 1)
            unfinished = max(unfinished, group + 1)
            journal.note(
                chance.choice(
                    [done(group), done(group), Taken(group, chance.randrange(3)), Stored(group, "{}"), Trained([group]),
                     Again(group, None), Dropped(group), Returned([group])]
                )
            )  # fmt: skip
        journal.flush()
        after.append((path.stat().st_size, what_is_known(journal.state)))
    return path.read_bytes(), after


@pytest.mark.parametrize("seed", range(3))
def test_a_restart_after_any_byte_knows_what_was_flushed_whole(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of restarts
    content, after = history(tmp_path / "whole", seed)
    start = after[0][0]
    for length in range(start, len(content) + 1):
        path = tmp_path / "cut"
        path.write_bytes(content[:length])
        assert restarted(path) == [known for size, known in after if size <= length][-1]
        # And it goes on from there, with nothing left of what was cut off.
        journal = Journal(path)
        journal.trained([99])
        journal.close()
        assert restarted(path)[1][-1] == (99, 100)


@pytest.mark.parametrize("tail", [b"\x00" * 700, b"\n", b"\x00\n\x00", b'{"sum":"', b"\xff" * 30 + b"\n"])
def test_rubbish_at_the_end_is_what_a_crash_may_leave(tail: bytes, tmp_path: Path) -> None:
    content, after = history(tmp_path / "journal", 1)
    (tmp_path / "journal").write_bytes(content + tail)
    assert restarted(tmp_path / "journal") == after[-1][1]


def test_a_last_line_with_one_wrong_byte_was_not_written_whole(tmp_path: Path) -> None:
    content, after = history(tmp_path / "journal", 2)
    for at in range(after[-2][0], after[-1][0] - 1):
        (tmp_path / "journal").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert restarted(tmp_path / "journal") == after[-2][1]


def test_damage_elsewhere_is_named_and_nothing_is_forgotten(tmp_path: Path) -> None:
    """What was trained on must not be taken for new: no start is better than that one."""
    content, after = history(tmp_path / "journal", 2)
    path = tmp_path / "journal"
    for at in range(0, after[-2][0] - 1, 3):
        damaged = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes(damaged)
        with pytest.raises((IntegrityError, ConfigError), match=rf"{path}.*(line \d+ is|format)"):
            Journal(path)
        assert path.read_bytes() == damaged
    for length in range(0, after[0][0]):
        path.write_bytes(content[:length])
        with pytest.raises(IntegrityError, match=r"line [12] is"):
            Journal(path)


def test_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(journal_module._line([journal_module._Header(2, 1, 0)]))
    with pytest.raises(ConfigError, match="has format 2, this package reads format 1"):
        Journal(path)


def test_what_is_noted_twice_changes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note(done(0), Stored(0, "a"), Taken(0, 1))
    assert journal.trained([0]) == [0]
    assert journal.trained([0]) == []
    for late in (done(0), Stored(0, "b"), Taken(0, 2), Again(0, None), Dropped(0), Returned([0])):
        journal.note(late)
    journal.flush()
    assert restarted(tmp_path / "journal") == ([], [(0, 1)], 1, 0)


def test_a_group_that_was_asked_for_again_waits_behind_the_others() -> None:
    state = State()
    for event in (done(0), done(1), Again(0, None)):
        state.apply(event)
    assert state.freed == [0]
    assert state.expects(0)
    state.apply(Stored(0, "of the first attempt, late"))
    assert state.live[0].ref is None
    state.apply(done(0))
    assert list(state.live) == [1, 0]
    assert not state.expects(0)


def test_batches_before_a_checkpoint_are_settled_by_their_number(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for group in range(6):
        journal.note(done(group), Taken(group, group // 2))
    assert journal.trained_before(2) == [0, 1, 2, 3]
    assert journal.trained_before(2) == []
    journal.give_back_taken()
    assert [known.progress for known in journal.state.live.values()] == [Progress.FINISHED] * 2
    assert journal.trained_before(9) == [], "what came back is of no batch any more"
    assert list(journal.state.live) == [4, 5]


def test_history_is_left_out_when_it_is_most_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "KEPT", 50)
    monkeypatch.setattr(journal_module, "KEPT_PER_GROUP", 2)
    path = tmp_path / "journal"
    journal = Journal(path)
    largest = 0
    for group in range(1000):
        journal.note(done(group), Taken(group, group))
        if group >= 5:
            journal.note(Trained([group - 5]))
        journal.flush()
        largest = max(largest, path.stat().st_size)
        if group % 97 == 0:
            assert restarted(_copy(path)) == what_is_known(journal.state)
    assert largest < 30_000
    assert list(journal.state.live) == list(range(995, 1000))
    assert journal.state.settled.pairs() == [(0, 995)]
    assert [each.name for each in tmp_path.iterdir() if "copy" not in each.name] == ["journal"]


def _copy(path: Path) -> Path:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    return copy


class Failing:
    """Lets the calls that reach the file system fail from the `survives`-th on, when armed; a write gets halfway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for owner, name in ((os, "open"), (os, "fsync"), (os, "replace"), (os, "write"), (durable, "sync_directory")):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.left == 0:
                if name == "write":
                    original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left -= self.left > 0
            return original(*arguments, **options)

        return call


@pytest.mark.parametrize("compacts", [False, True])
def test_a_full_disk_promises_nothing_and_loses_nothing(
    compacts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call fails: the file never says what was not flushed, and the next flush says all."""
    if compacts:
        monkeypatch.setattr(journal_module, "KEPT", 0)
        monkeypatch.setattr(journal_module, "KEPT_PER_GROUP", 0)
    failing = Failing(monkeypatch)
    path = tmp_path / "journal"
    journal = Journal(path)
    refused: list[JournalUnavailable] = []
    for survives in range(20):
        before = what_is_known(journal.state)
        journal.note(done(survives), Taken(survives, 0), Trained([survives]))
        failing.left = survives
        try:
            freed = journal.flush()
        except JournalUnavailable as error:
            failing.left = -1
            refused.append(error)
            assert restarted(_copy(path)) in (before, what_is_known(journal.state))
            freed = journal.flush()
        failing.left = -1
        assert freed == [survives]
        assert restarted(_copy(path)) == what_is_known(journal.state)
    assert len(refused) >= 2
    for error in refused:
        assert error.retryable
        assert f"journal {path}: No space left on device; what was noted waits" in str(error)
    assert journal.state.settled.pairs() == [(0, 20)]


def test_a_name_that_is_not_synced_is_synced_before_anything_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "KEPT", 0)
    monkeypatch.setattr(journal_module, "KEPT_PER_GROUP", 0)
    journal = Journal(tmp_path / "journal")
    works, synced = False, []

    def sync(directory: Path) -> None:
        if not works:
            raise OSError(errno.EIO, "Input/output error")
        synced.append(directory)

    monkeypatch.setattr(durable, "sync_directory", sync)
    assert journal.trained([0]) == []  # of the file of before that was promised
    with pytest.raises(JournalUnavailable):
        journal.trained([1])
    works = True
    journal.flush()
    assert tmp_path in synced


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_noted_while_the_file_is_written_anew_is_in_it_or_in_the_next_line(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "KEPT", 0)
    monkeypatch.setattr(journal_module, "KEPT_PER_GROUP", 0)
    journal = Journal(tmp_path / "journal")
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        monkeypatch.setattr(os, "fsync", real_sync)
        journal.note(done(1), Taken(1, 0))  # after the line was written, before the file is written anew

    def replace(*paths: Path) -> None:
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        real_replace(*paths)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    journal.note(done(0))
    journal.flush()
    monkeypatch.undo()
    assert journal.has_pending() == fails
    journal.flush()
    assert restarted(_copy(tmp_path / "journal")) == what_is_known(journal.state)
    assert list(journal.state.live) == [0, 1]


def test_a_file_that_cannot_be_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no directory" / "journal", tmp_path):
        with pytest.raises(ConfigError, match=rf"journal {path}: .*; name a file in a directory"):
            Journal(path)


def test_closing_flushes_and_says_so_to_who_notes_later(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.note(Trained([0]))
    for _ in range(2):
        journal.close()
    with pytest.raises(StoreClosed, match="is closed"):
        journal.note(Trained([1]))
    assert Journal(tmp_path / "journal").state.settled.pairs() == [(0, 1)]


def test_who_was_taken_over_writes_into_the_void(tmp_path: Path) -> None:
    old = Journal(tmp_path / "journal")
    old.trained([0])
    new = Journal(tmp_path / "journal")
    old.trained([1])
    new.trained([2])
    assert Journal(tmp_path / "journal").state.settled.pairs() == [(0, 1), (2, 3)]


def test_threads_that_note_and_flush_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "KEPT", 64)
    journal = Journal(tmp_path / "journal")
    freed: list[int] = []

    def work(first: int) -> None:
        for group in range(first, first + 100):
            journal.note(done(group), Taken(group, 0))
            freed.extend(journal.trained([group]))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.flush()
    assert Journal(_copy(tmp_path / "journal")).state.settled.pairs() == [(0, 400)]
    assert sorted(freed) == list(range(400))


@pytest.mark.parametrize("label", [None, "4", 4, 4.5, True, [1, {"a": [None]}], "é\x00"])
def test_prompts_come_back_as_they_were(label: Any) -> None:
    group = finished(3).prompt_group
    for sample in group:
        sample.label = label
    prompts = prompts_of(group)
    assert prompts is not None
    assert len(prompts.distinct) == 1
    assert prompts.group() == group
    group[1].metadata["n"] = 8
    prompts = prompts_of(group)
    assert prompts is not None
    assert prompts.group() == group
    assert prompts.group()[0].metadata is not prompts.group()[0].metadata


@pytest.mark.parametrize("label", [(1, 2), {1: "a"}, float("nan"), b"x", {1}, object(), 2**70, "\ud800"])
def test_prompts_that_json_would_change_are_left_to_their_source(label: Any, tmp_path: Path) -> None:
    group = finished(0).prompt_group
    group[1].label = [label]
    assert prompts_of(group) is None
    journal = Journal(tmp_path / "journal")
    journal.note(Finished(0, 1, 1, False, prompts_of(group)))
    journal.flush()
    assert Journal(tmp_path / "journal").state.live[0].finished.prompts is None


def test_the_samples_of_prompts_hold_nothing_that_was_generated() -> None:
    given_ = finished(4, "7")
    prompts = prompts_of([sample for sample in given_.group if isinstance(sample, Sample)])
    assert prompts is not None
    assert prompts.group() == given_.prompt_group
