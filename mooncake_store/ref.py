"""BatchRef: what a put returns and a get takes. Small, picklable, and, except for Ray's, plain JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import numpy as np

from mooncake_store.arrays import is_array, plain_scalar
from mooncake_store.errors import ConfigError, IntegrityError

FORMAT = 1
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_EQUAL_IS_SAME = {int, str, type(None)}  # of these types; True equals 1
UNSTAMPED = "default"  # the weight version an engine reports before its first update


class CopyOf(NamedTuple):
    """One replica of a batch.

    Attributes:
        sentinel: key of the object that the store has as long as it remembers the memory of this copy.
        part_bytes: payload of each of its parts but the last, which has the rest; in bytes.
    """

    sentinel: str
    part_bytes: int


@dataclass(frozen=True, slots=True)
class BatchRef:
    """Names one stored batch and says what a scheduler needs without reading it.

    Attributes:
        backend: name of the backend that holds it.
        run_id: the run it belongs to.
        key: its key in the backend, never reused.
        num_rows: number of samples.
        nbytes: size of the stored object in bytes.
        digest: xxh3-128 of the object, 32 hex digits; see `format`.
        weight_version_min: oldest weight version among the samples, None when no sample carries one.
        weight_version_max: newest weight version among the samples, None when no sample carries one.
        rollout_id: smallest value of the column `rollout_ids`, None without that column.
        format: version of this record.
        copies: where Mooncake keeps it, one entry per replica, all with distinct owners; empty for other backends.
        handle: what must travel with the ref for the bytes to stay alive (Ray's object reference); None otherwise.
        head_bytes: of the object what comes before its columns' bytes: what a reader of some of it fetches first.
        partitions: rows of each partition that it was put with; empty without.
    """

    backend: str
    run_id: str
    key: str
    num_rows: int
    nbytes: int
    digest: str
    weight_version_min: int | None = None
    weight_version_max: int | None = None
    rollout_id: int | None = None
    copies: tuple[CopyOf, ...] = ()
    format: int = FORMAT
    handle: Any = None
    head_bytes: int = 0
    partitions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_format(self.format)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that a pickle written by another version is refused and not half understood.
        return _restore, ({field.name: getattr(self, field.name) for field in fields(self)},)

    def to_json(self) -> str:
        """Return the ref as a JSON object.

        Raises:
            TypeError: the ref carries a handle. Ray counts references as they pass through Ray; JSON would escape the
                count and the batch could be freed while it is still named. Pass the BatchRef itself through Ray.
        """
        if self.handle is not None:
            raise TypeError(
                f"a {self.backend!r} ref keeps its batch alive by a live handle, which JSON cannot carry; "
                f"pass the BatchRef itself through Ray"
            )
        return json.dumps({name: value for name, value in asdict(self).items() if name != "handle"})

    @classmethod
    def from_json(cls, text: str) -> BatchRef:
        """Read what `to_json` wrote.

        Raises:
            IntegrityError: not a ref, or a ref of another format (both numbers are named).
        """
        try:
            check_format(json.loads(text)["format"])
            record = msgspec.json.decode(text, type=_Record)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise IntegrityError(f"not a BatchRef: {error!r} in {text!r:.200}") from error
        copies = tuple(CopyOf(*copy) for copy in record.copies)
        return cls(**{**msgspec.structs.asdict(record), "copies": copies, "partitions": tuple(record.partitions)})


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a ref, with the type and range of every field."""

    backend: str
    run_id: str
    key: str
    num_rows: _Count
    nbytes: _Size
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    weight_version_min: _Count | None
    weight_version_max: _Count | None
    rollout_id: int | None
    head_bytes: _Count
    partitions: list[_Count]
    copies: list[tuple[str, _Size]]
    format: int


def check_format(version: object) -> None:
    """Refuse a ref whose format is not the one this package knows (IntegrityError, naming both)."""
    if version != FORMAT or isinstance(version, bool):
        raise IntegrityError(f"the BatchRef has format {version}, this package reads format {FORMAT}")


def check_run_id(run_id: object) -> None:
    """Refuse what cannot name a run in the keys of a store (ConfigError)."""
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run_id = {run_id!r}: allowed are 1 to 128 letters, digits, '.', '_' and '-'")


def _restore(record: Mapping[str, Any]) -> BatchRef:
    check_format(record.get("format"))
    return BatchRef(**record)


class Provenance(NamedTuple):
    """Which policy made a batch; the attributes are those of BatchRef."""

    weight_version_min: int | None
    weight_version_max: int | None
    rollout_id: int | None


def provenance(batch: Mapping[str, Any]) -> Provenance:
    """Read the provenance off the columns `weight_versions` and `rollout_ids`.

    Weight versions are ints or decimal strings of at least 0, one or several per sample; "default" is ignored.
    Rollout ids are ints, one per sample. None is ignored in both, and either may be one value for the whole batch.

    Raises:
        TypeError: something else; names the column and the row.
    """
    versions = _numbers(batch, "weight_versions", _version, "ints or decimal strings from 0 to 2**63 - 1")
    rollout_ids = _numbers(batch, "rollout_ids", _integer, "ints of 64 bits")
    return Provenance(min(versions, default=None), max(versions, default=None), min(rollout_ids, default=None))


def _numbers(batch: Mapping[str, Any], column: str, read: Callable[[Any], int | None], allowed: str) -> list[int]:
    values = _listed(batch.get(column))
    kinds = set(map(type, values))
    if kinds <= _EQUAL_IS_SAME:
        items = values
    else:
        items = list(chain.from_iterable(values if kinds == {list} else map(_listed, values)))
        kinds = set(map(type, items))
    if kinds <= _EQUAL_IS_SAME:
        items = list(dict.fromkeys(items))  # a batch has few versions
    numbers = [read(_plain(item)) for item in items if item is not None and not _is_unstamped(item, column)]
    if None not in numbers:
        return cast(list[int], numbers)
    for row, value in enumerate(values):
        for item in map(_plain, _listed(value)):
            if item is not None and not _is_unstamped(item, column) and read(item) is None:
                raise TypeError(f"column {column!r}, row {row}: {item!r:.80} is not allowed; allowed: {allowed}")
    raise AssertionError("unreachable: one of them is not allowed")


def _is_unstamped(item: Any, column: str) -> bool:
    return column == "weight_versions" and type(item) is str and item == UNSTAMPED


def _listed(value: Any) -> list[Any]:
    """What an array, a tensor, a list or a tuple holds; any other value as the only one."""
    value = _plain(value)
    return list(value) if isinstance(value, list | tuple) else [value]


def _plain(value: Any) -> Any:
    """Arrays, tensors and scalars as lists and numbers of Python; the rest as it is."""
    if isinstance(value, np.generic):
        return plain_scalar(value)
    return value.tolist() if is_array(value) else value


def _integer(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return value
    return None


def _version(value: Any) -> int | None:
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdecimal():
        value = int(value)
    number = _integer(value)
    return None if number is None or number < 0 else number
