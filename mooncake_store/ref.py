"""BatchRef: what a put returns and a get takes. Small, picklable, and, except for Ray's, plain JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from mooncake_store.errors import IntegrityError

FORMAT = 1
UNSTAMPED = "default"  # the weight version an engine reports before its first update


@dataclass(frozen=True, slots=True)
class BatchRef:
    """Names one stored batch and says what a scheduler needs without reading it.

    Attributes:
        backend: name of the backend that holds it.
        run_id: the run it belongs to.
        key: its key in the backend, never reused.
        num_rows: number of samples.
        nbytes: size of the stored object in bytes.
        digest: xxh3-128 of the object, 32 hex digits; see `layout`.
        weight_version_min: oldest weight version among the samples, None when no sample carries one.
        weight_version_max: newest weight version among the samples, None when no sample carries one.
        rollout_id: smallest value of the column `rollout_ids`, None without that column.
        format: version of this record.
        handle: what must travel with the ref for the bytes to stay alive (Ray's object reference); None otherwise.
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
    format: int = FORMAT
    handle: Any = None

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
        except (ValueError, TypeError, KeyError) as error:
            raise IntegrityError(f"not a BatchRef: {error!r} in {text!r:.200}") from error
        return cls(**msgspec.structs.asdict(record))


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a ref, with the type and range of every field."""

    backend: str
    run_id: str
    key: str
    num_rows: _Count
    nbytes: Annotated[int, msgspec.Meta(gt=0)]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    weight_version_min: _Count | None
    weight_version_max: _Count | None
    rollout_id: int | None
    format: int


def check_format(version: object) -> None:
    """Refuse a ref whose format is not the one this package knows (IntegrityError, naming both)."""
    if version != FORMAT or isinstance(version, bool):
        raise IntegrityError(f"the BatchRef has format {version}, this package reads format {FORMAT}")


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

    Weight versions are decimal strings or ints, one or a list of them per sample; "default" and None are ignored.

    Raises:
        TypeError: a version that is neither; names the row.
    """
    versions = list(_versions(batch.get("weight_versions")))
    rollout_ids = batch.get("rollout_ids")
    ids: list[int] = [] if rollout_ids is None else np.asarray(rollout_ids).reshape(-1).tolist()
    return Provenance(min(versions, default=None), max(versions, default=None), min(ids, default=None))


def _versions(column: Iterable[Any] | None) -> Iterator[int]:
    for row, sample in enumerate(() if column is None else column):
        for version in [sample] if sample is None or isinstance(sample, str | int | np.integer) else sample:
            if version is None or version == UNSTAMPED:
                continue
            if isinstance(version, bool) or not str(version).isdecimal():
                raise TypeError(
                    f"column 'weight_versions', row {row}: {version!r} is not a decimal weight version or {UNSTAMPED!r}"
                )
            yield int(version)
