from miles_plugin.weight_transfer.disk_delta.kernels import Indices
from mooncake_store.arrays import Bytes

def changes(old: Bytes, new: Bytes, width: int, out: Indices, /) -> int: ...
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
) -> tuple[int, int, int, int, int]: ...
def symbols(gaps: Indices, out: Bytes, lows: Bytes, /) -> int: ...
def positions(symbols: Bytes, lows: Bytes, limit: int, out: Indices, /) -> int: ...
def patch(
    block: Bytes,
    width: int,
    base: int,
    positions: Indices,
    nibbles: Bytes,
    escapes: Bytes,
    changed: int,
    escaped: int,
    touch: bool,
    update: int,
    state: int,
    /,
) -> tuple[int, int]: ...
def spread(old: Bytes, new: Bytes, width: int, planes: Bytes, /) -> None: ...
def unspread(block: Bytes, planes: Bytes, width: int, /) -> None: ...
