"""Prompts from JSONL and parquet files, for RL on a data set of your own.

A file is read once in full when it is opened, so that a wrong row ends the job before it starts. What stays in memory
is where each line of a JSONL file begins, and the used columns of a parquet file as an Arrow table.
"""

import difflib
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from miles_plugin.arguments import TrainConfig
from miles_plugin.rollout.prompts import Item, Prompt
from mooncake_store.errors import ConfigError, MissingDependency
from mooncake_store.tree import TreeWriter

Row = Mapping[str, Any]


class PromptData:
    """The items of `prompt_data` in epochs, seeded, without those whose prompts are held out.

    Held out are all items of `eval_prompt_data`, or the first `held_out_size` of `prompt_data`.

    Raises:
        ConfigError: no such file, not JSONL or parquet, a row without prompt or label, or nothing left to train on;
            the message names the file, the row and the setting.
    """

    def __init__(self, config: TrainConfig) -> None:
        assert config.prompt_data is not None
        self._config = config
        self._table = _Table(config.prompt_data, "prompt_data", config)
        files = self._table.paths
        if config.eval_prompt_data is not None:
            held_out = _Table(config.eval_prompt_data, "eval_prompt_data", config)
            files = [*files, *held_out.paths]
            self.held_out: Sequence[Item] = [_item(config, *held_out[row], row) for row in range(len(held_out))]
        else:
            first = range(min(config.held_out_size, len(self._table)))
            self.held_out = [_item(config, *self._table[row], row) for row in first]
        self.name = f"{len(self._table)} items, content {_digest(files)}"
        self._held_out_keys = {item.key for item in self.held_out}
        if not any(self.epoch(0)):
            raise ConfigError(
                f"prompt_data={config.prompt_data}: of its {len(self._table)} items {len(self.held_out)} are held out, "
                "and no other prompt is left to train on; lower held_out_size, or name eval_prompt_data"
            )

    def rollout(self, start: int = 0) -> Iterator[Item]:
        """Endless items for RL; position p is item p % n of epoch p // n, of n items in the files."""
        epoch, offset = divmod(start, len(self._table))
        while True:
            yield from self.epoch(epoch, offset)
            epoch, offset = epoch + 1, 0

    def epoch(self, epoch: int, offset: int = 0) -> Iterator[Item]:
        """The training items of one epoch in its order, without those at its first `offset` positions."""
        size = len(self._table)
        order: Sequence[Any] = range(size)
        if self._config.rollout_shuffle:
            order = np.random.default_rng((self._config.seed, epoch)).permutation(size)  # type: ignore[assignment]
        for position in range(offset, size):
            item = _item(self._config, *self._table[int(order[position])], epoch * size + position)
            if item.key not in self._held_out_keys:
                yield item


def _item(config: TrainConfig, origin: str, row: Row, index: int) -> Item:
    """The item that a row is; raises ConfigError if it is none."""
    prompt = _prompt(config, origin, _value(row, config.input_key, "input_key", origin))
    label = None
    if config.label_key is not None:
        label = _value(row, config.label_key, "label_key", origin)
        if config.rm_type == "math" and config.custom_rm_path is None:
            _check_math_label(label, f"{origin}: label {config.label_key!r}")
    metadata = row.get(config.metadata_key) or {}
    if not isinstance(metadata, Mapping):
        raise ConfigError(
            f"{origin}: metadata {config.metadata_key!r} is a {type(metadata).__name__}; it must be a mapping: name "
            "another column with metadata_key"
        )
    for name, value in ((config.input_key, prompt), (config.label_key, label), (config.metadata_key, metadata)):
        try:
            TreeWriter().pack(value)
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"{origin}: {name!r} cannot travel in a batch: {error}") from None
    return Item(index, prompt, label, metadata, origin)


def _value(row: Row, key: str, setting: str, origin: str) -> Any:
    if row.get(key) is not None:
        return row[key]
    if key in row:
        raise ConfigError(f"{origin}: {key!r} ({setting}) is null; every item needs one")
    raise ConfigError(f"{origin}: no {key!r} ({setting}); {_nearest(key, row)}")


def _nearest(key: str, columns: Sequence[str] | Row) -> str:
    close = difflib.get_close_matches(key, list(columns), n=1)
    return f"it has {', '.join(map(repr, columns)) or 'nothing'}{f'; did you mean {close[0]!r}?' if close else ''}"


def _prompt(config: TrainConfig, origin: str, prompt: Any) -> Prompt:
    where = f"{origin}: prompt {config.input_key!r}"
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(f"{where} is {prompt!r:.80}; it must be text or a list of chat messages, and not empty")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ConfigError(f"{where} holds {message!r:.80}; a chat message has a role and a content")
    if not config.apply_chat_template:
        raise ConfigError(f"{where} is a list of chat messages; add --apply-chat-template to make text of them")
    return prompt


def _check_math_label(label: Any, where: str) -> None:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ConfigError(f"{where} is a {type(label).__name__}; rm_type=math compares text or numbers")


class _File(Protocol):
    """One opened file. `rows` reads it through in order; `row` reads one. Each row comes with where it stands."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> tuple[str, Row]: ...
    def rows(self) -> Iterator[tuple[str, Row]]: ...


class _Table:
    """The rows of a file, or of all files of a directory, as one sequence; every row has been checked."""

    def __init__(self, path: Path, setting: str, config: TrainConfig) -> None:
        self._files: list[_File] = []
        self.paths = _files(path, setting)
        for file in self.paths:
            opened = _Parquet(file, config) if file.suffix == ".parquet" else _JsonLines(file)
            for origin, row in opened.rows():
                _item(config, origin, row, 0)
            self._files.append(opened)
        self._ends = list(accumulate(map(len, self._files)))
        if len(self) == 0:
            raise ConfigError(f"{setting}={path}: there are no items in it")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[str, Row]:
        file = bisect_right(self._ends, index)
        return self._files[file].row(index - (self._ends[file - 1] if file else 0))


def _files(path: Path, setting: str) -> list[Path]:
    if not path.exists():
        raise ConfigError(f"{setting}={path}: no such file or directory")
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
        if not found:
            names = ", ".join(sorted(file.name for file in path.iterdir())[:5])
            raise ConfigError(f"{setting}={path}: no .jsonl or .parquet file in this directory ({names or 'empty'})")
        return found
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{setting}={path}: unknown extension {path.suffix!r}; .jsonl and .parquet can be read")
    return [path]


def _digest(paths: Sequence[Path]) -> str:
    """xxh3-128 of the bytes of all files, one after the other."""
    digest = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


class _JsonLines:
    """One JSON object per line; blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        self._starts, self._numbers = array("q"), array("q")
        start = 0
        for number, line in enumerate(self._file, start=1):
            if not line.isspace():
                self._starts.append(start)
                self._numbers.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> tuple[str, Row]:
        self._file.seek(self._starts[index])
        return self._parse(self._file.readline(), self._numbers[index])

    def rows(self) -> Iterator[tuple[str, Row]]:
        return map(self.row, range(len(self)))

    def _parse(self, line: bytes, number: int) -> tuple[str, Row]:
        origin = f"{self._path}, line {number}"
        try:
            row = json.loads(line.rstrip())  # or the column of a cut-off line would be counted on the next one
        except json.JSONDecodeError as error:
            raise ConfigError(f"{origin}, column {error.colno}: not JSON: {error.msg}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{origin}: not UTF-8: {error}") from None
        except RecursionError:
            raise ConfigError(f"{origin}: nested too deep") from None
        except ValueError as error:  # e.g. a number of thousands of digits
            raise ConfigError(f"{origin}: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{origin}: a {type(row).__name__}; every line must be a JSON object")
        return origin, row


class _Parquet:
    """One row per item; only the columns in use are read."""

    def __init__(self, path: Path, config: TrainConfig) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingDependency(f"{path}: parquet needs pyarrow: pip install miles-mooncake[train]") from error
        self._path = path
        try:
            names = pq.read_schema(path).names
            for setting in ("input_key", "label_key"):
                key = getattr(config, setting)
                if key is not None and key not in names:
                    raise ConfigError(f"{path}: no column {key!r} ({setting}); {_nearest(key, names)}")
            used = (config.input_key, config.label_key, config.metadata_key)
            self._table = pq.read_table(path, columns=[name for name in names if name in used])
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(f"{path}: not a readable parquet file: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> tuple[str, Row]:
        (row,) = self._table.slice(index, 1).to_pylist()
        return f"{self._path}, row {index}", row

    def rows(self) -> Iterator[tuple[str, Row]]:
        index = 0
        for batch in self._table.to_batches(max_chunksize=4096):
            for row in batch.to_pylist():
                yield f"{self._path}, row {index}", row
                index += 1
