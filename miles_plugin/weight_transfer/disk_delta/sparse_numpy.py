"""What `_sparse.c` does, by numpy, where there was no compiler; see `kernels.py` for what each function is."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_plugin.weight_transfer.disk_delta.kernels import DENSE_SHARE, ESCAPE, MORE, SLACK, Indices
from mooncake_store.arrays import Bytes

_Unsigned = npt.NDArray[np.unsignedinteger[Any]]


def changes(old: Bytes, new: Bytes, width: int, out: Indices, /) -> int:
    before, after = _values(old, width), _values(new, width)
    _check(before.size == after.size and out.size >= before.size + SLACK)
    found = np.flatnonzero(before != after)
    out[: found.size] = found
    return found.size


def scan(
    old: Bytes,
    new: Bytes,
    width: int,
    block: int,
    positions: Indices,
    since: int,
    gaps: Indices,
    nibbles: Bytes,
    escapes: Bytes,
    changed: int,
    escaped: int,
    enough: int,
    update: int,
    state: int,
    /,
) -> tuple[int, int, int, int, int]:
    _check(old.size == new.size and since >= 0 and enough >= 0 and block > 0 and block % width == 0)
    done = skipped = 0
    while done < old.size and changed < enough:
        before, after = old[done : done + block], new[done : done + block]
        count = changes(before, after, width, positions)
        values = before.size // width
        if count > values * DENSE_SHARE:
            break
        if count and not changed:
            skipped, since = done, 0
        changed, escaped, since = _collect(
            before, after, width, positions[:count], since, gaps, nibbles, escapes, changed, escaped
        )
        _add(after, update, state)
        done += before.size
    return done, skipped, changed, escaped, since


def _collect(
    old: Bytes,
    new: Bytes,
    width: int,
    positions: Indices,
    since: int,
    gaps: Indices,
    nibbles: Bytes,
    escapes: Bytes,
    changed: int,
    escaped: int,
) -> tuple[int, int, int]:
    values = _values(old, width)
    end = changed + positions.size
    _check(changed >= 0 and end <= gaps.size and nibbles.size >= (gaps.size + 1) // 2 and old.size == new.size)
    if not positions.size:
        return changed, escaped, since + values.size
    _check(int(positions.max()) < values.size and escaped >= 0 and int(positions[0]) + since < 1 << 32)
    after = _values(new, width)[positions]
    gaps[changed] = positions[0] + np.int64(since)
    gaps[changed + 1 : end] = np.diff(positions) - 1
    coded = _zigzag(values[positions], after) - after.dtype.type(1)
    kept = after[coded >= ESCAPE]
    _check(escaped + kept.size <= escapes.size // width)
    escapes[escaped * width : (escaped + kept.size) * width] = kept.view(np.uint8)
    _pack(np.minimum(coded, ESCAPE).astype(np.uint8), nibbles, changed)
    values[positions] = after
    return end, escaped + kept.size, values.size - 1 - int(positions[-1])


def symbols(gaps: Indices, out: Bytes, lows: Bytes, /) -> int:
    _check(lows.size in (0, gaps.size))
    rest = gaps.astype(np.int64)
    if lows.size:
        lows[:] = rest & 255
        rest >>= 8
    ends = np.cumsum(rest // MORE + 1)
    used = int(ends[-1]) if ends.size else 0
    _check(used <= out.size)
    out[:used] = MORE
    out[ends - 1] = rest % MORE
    return used


def positions(symbols: Bytes, lows: Bytes, limit: int, out: Indices, /) -> int:
    last = np.flatnonzero(symbols != MORE)
    whole = last.size == out.size and (last[-1] + 1 if last.size else 0) == symbols.size
    _check(whole and lows.size in (0, out.size) and 0 <= limit < 1 << 32)
    sums = np.cumsum(symbols, dtype=np.int64)[last]
    steps = np.diff(sums, prepend=0)
    if lows.size:
        steps = (steps << 8) + lows
    found = np.cumsum(steps + 1) - 1
    # A sum too large for int64 would take more symbols than memory has.
    _check(not found.size or int(found[-1]) < limit)
    out[:] = found
    return int(found[-1]) + 1 if found.size else 0


def patch(
    block: Bytes,
    width: int,
    base: int,
    positions: Indices,
    nibbles: Bytes,
    escapes: Bytes,
    changed: int,
    escaped: int,
    touch: bool,  # noqa: ARG001  (of no use here)
    update: int,
    state: int,
    /,
) -> tuple[int, int]:
    values = _values(block, width)
    _check(base >= 0 and changed >= 0 and escaped >= 0 and nibbles.size >= (positions.size + 1) // 2)
    first = positions[changed] if changed < positions.size else base
    _check(int(first) >= base)
    end = max(changed, int(np.searchsorted(positions, base + values.size)))
    where = positions[changed:end].astype(np.int64) - base
    coded = _unpack(nibbles, changed, end)
    is_kept = coded == ESCAPE
    kept = escapes[escaped * width :].view(values.dtype)[: int(is_kept.sum())]
    _check(kept.size == int(is_kept.sum()))
    after = values[where] + _unzigzag(coded.astype(values.dtype) + values.dtype.type(1))
    after[is_kept] = kept
    values[where] = after
    _add(block, update, state)
    return end, escaped + kept.size


def spread(old: Bytes, new: Bytes, width: int, planes: Bytes, /) -> None:
    _check(old.size == new.size == planes.size)
    coded = _zigzag(_values(old, width), _values(new, width))
    planes.reshape(width, -1)[:] = coded.view(np.uint8).reshape(-1, width).T
    old[:] = new


def unspread(block: Bytes, planes: Bytes, width: int, /) -> None:
    _check(block.size == planes.size)
    values = _values(block, width)
    coded = np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(values.dtype)
    values += _unzigzag(coded)


def _check(agreed: bool) -> None:
    if not agreed:
        raise ValueError("sizes, indices and the bytes between them do not agree")


def _add(block: Bytes, update: int, state: int) -> None:
    if update:
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(update)
        function(state, block.ctypes.data, block.size)


def _values(block: Bytes, width: int) -> _Unsigned:
    _check(width in (1, 2, 4, 8) and block.size % width == 0)
    return block.view(f"<u{width}")


def _zigzag(before: _Unsigned, after: _Unsigned) -> _Unsigned:
    difference = (after - before).view(f"<i{before.itemsize}")
    return ((difference << 1) ^ (difference >> (8 * before.itemsize - 1))).view(before.dtype)


def _unzigzag(coded: _Unsigned) -> _Unsigned:
    one = coded.dtype.type(1)
    return (coded >> one) ^ (~(coded & one) + one)


def _pack(added: Bytes, nibbles: Bytes, at: int) -> None:
    """Write nibbles, one a byte in `added`, from nibble `at` on."""
    if at % 2 and added.size:
        nibbles[at // 2] |= added[0] << 4
        added, at = added[1:], at + 1
    pairs = nibbles[at // 2 : (at + added.size + 1) // 2]
    pairs[:] = added[::2]
    pairs[: added.size // 2] |= added[1::2] << 4


def _unpack(nibbles: Bytes, first: int, last: int) -> Bytes:
    pairs = nibbles[first // 2 : (last + 1) // 2]
    both = np.empty(2 * pairs.size, dtype=np.uint8)
    both[::2] = pairs & 15
    both[1::2] = pairs >> 4
    return both[first % 2 : first % 2 + last - first]
