"""The frame of a part: any other bytes are refused and say why, and its commit word is written last."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_store import IntegrityError, frame
from mooncake_store.frame import COMMIT, NBYTES, Frame, footprint

FRAME = Frame(bytes(range(16)), 1, 3, 100, 250)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
frames = st.builds(Frame, st.binary(min_size=16, max_size=16), u32, u32, u64, u64)


def stored(said: Frame, payload: int = 200) -> np.ndarray:
    memory = np.full(NBYTES + payload, 0xAA, dtype=np.uint8)
    frame.commit(memory, said)
    return memory


@given(frames)
def test_a_committed_frame_is_found_and_nothing_beside_it_is_touched(said: Frame) -> None:
    memory = stored(said)
    said.check(memory)
    assert memory[:NBYTES].tobytes() == said.pack()
    assert (memory[NBYTES:] == 0xAA).all()


@given(frames, st.integers(0, 8 * NBYTES - 1))
@example(FRAME, 0)
@example(FRAME, 8 * NBYTES - 1)
def test_any_flipped_bit_is_found(said: Frame, bit: int) -> None:
    memory = stored(said)
    memory[bit // 8] ^= 1 << bit % 8
    with pytest.raises(IntegrityError) as caught:
        said.check(memory)
    assert said.id.hex() in str(caught.value)
    in_commit_word = bit < 8 * len(COMMIT)
    assert ("no commit word" if in_commit_word else "does not match its checksum") in str(caught.value)
    assert caught.value.retryable is in_commit_word  # it may be about to be written


@given(st.integers(0, NBYTES - 1))
def test_any_truncation_is_found(size: int) -> None:
    with pytest.raises(IntegrityError, match=f"{size} bytes are fewer than a frame of 64") as caught:
        FRAME.check(stored(FRAME)[:size])
    assert not caught.value.retryable


@given(frames, frames)
@example(FRAME, dataclasses.replace(FRAME, part=2))
@example(FRAME, dataclasses.replace(FRAME, parts=4))
@example(FRAME, dataclasses.replace(FRAME, part_bytes=99))
@example(FRAME, dataclasses.replace(FRAME, object_bytes=251))
@example(FRAME, dataclasses.replace(FRAME, id=bytes(16)))
def test_another_frame_is_told_by_what_differs(wanted: Frame, found: Frame) -> None:
    if wanted == found:
        return
    with pytest.raises(IntegrityError) as caught:
        wanted.check(stored(found))
    message = str(caught.value)
    if found.id != wanted.id:
        assert f"the memory was given to batch {found.id.hex()}" in message
    else:
        assert f"part {found.part} of {found.parts} with {found.part_bytes} of {found.object_bytes} bytes" in message
        assert f"its ref {wanted.part_bytes} of {wanted.object_bytes}" in message
    assert not caught.value.retryable


def test_another_format_is_told_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(frame, "FORMAT", 2)
        memory = stored(FRAME)
    with pytest.raises(IntegrityError, match="format 2, this package reads format 1"):
        FRAME.check(memory)


class Watched(np.ndarray):
    """Looks after each write whether the commit word is there, and whether the rest is."""

    def __setitem__(self, index: object, value: object) -> None:
        super().__setitem__(index, value)
        found, packed = np.asarray(self)[:NBYTES].tobytes(), FRAME.pack()
        self.seen.append((found[: len(COMMIT)] == COMMIT, found[len(COMMIT) :] == packed[len(COMMIT) :]))


def test_the_commit_word_is_written_last() -> None:
    memory = np.zeros(NBYTES + 8, dtype=np.uint8).view(Watched)
    memory.seen = []
    frame.commit(memory, FRAME)
    assert memory.seen == [(False, True), (True, True)]
    FRAME.check(np.asarray(memory))
    frame.clear(memory)
    assert memory.seen[-1] == (False, True)
    with pytest.raises(IntegrityError, match="no commit word"):
        FRAME.check(np.asarray(memory))


@given(st.integers(0, 2**50))
def test_a_footprint_holds_frame_and_payload_and_keeps_alignment(nbytes: int) -> None:
    assert footprint(nbytes) % NBYTES == 0
    assert 0 <= footprint(nbytes) - NBYTES - nbytes < NBYTES
