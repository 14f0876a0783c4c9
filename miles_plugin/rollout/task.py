"""Procedural tasks and their verifiers, from the reasoning-gym library."""

from collections.abc import Iterator, Mapping
from typing import Any

from miles_plugin.rollout.prompts import Item
from mooncake_store.errors import ConfigError

# reasoning-gym seeds item i with `seed + i`: streams this far apart never share an item's seed.
_STREAM_STRIDE = 1 << 28
_WELL_KNOWN = ("basic_arithmetic", "chain_sum", "countdown", "spell_backward", "sudoku")
_HELD_OUT, _VALIDATION, _WARM_START, _ROLLOUT = range(4)


class Task:
    """Items of one reasoning-gym dataset in four streams that share no question with the held-out items.

    Raises:
        ConfigError: unknown dataset or setting of a dataset; the message lists what the library said.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], held_out_size: int, seed: int) -> None:
        self.name = name
        self._streams = [_dataset(name, settings, seed + stream * _STREAM_STRIDE) for stream in range(4)]
        self.held_out = _distinct(self._items(_HELD_OUT), held_out_size, name)
        self._held_out_keys = {item.key for item in self.held_out}

    def validation(self, size: int) -> list[Item]:
        """The first `size` distinct items of the stream by which the warm start decides when to stop."""
        return _distinct(self._training_items(_VALIDATION, 0), size, self.name)

    def warm_start(self) -> Iterator[Item]:
        """Endless items for the supervised phase."""
        return self._training_items(_WARM_START, 0)

    def rollout(self, start: int = 0) -> Iterator[Item]:
        """Endless items for RL, from stream position `start`."""
        return self._training_items(_ROLLOUT, start)

    def score(self, response: str, item: Item) -> float:
        """The verifier's verdict on a response: 1.0 is correct, lower values are partial credit in [0, 1)."""
        return float(self._streams[_HELD_OUT].score_answer(answer=response.strip(), entry=item.entry))

    def _training_items(self, stream: int, start: int) -> Iterator[Item]:
        return (item for item in self._items(stream, start) if item.key not in self._held_out_keys)

    def _items(self, stream: int, start: int = 0) -> Iterator[Item]:
        dataset = self._streams[stream]
        for index in range(start, _STREAM_STRIDE):
            entry = dataset[index]
            origin = f"task {self.name!r}, item {index}"
            metadata = {"task": self.name, "item": index}
            yield Item(index, entry["question"], str(entry["answer"]), metadata, origin, entry)


def _dataset(name: str, settings: Mapping[str, Any], seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        import difflib

        close = difflib.get_close_matches(name, DATASETS, n=3)
        some = f"nearest: {', '.join(close)}" if close else f"some are {', '.join(_WELL_KNOWN)}"
        raise ConfigError(
            f"task={name!r}: not one of the {len(DATASETS)} reasoning-gym datasets; {some}; all: python -c "
            "'from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))'"
        )
    try:
        return reasoning_gym.create_dataset(name, size=_STREAM_STRIDE, seed=seed, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"task_kwargs={dict(settings)!r} for task {name!r}: {error}") from error


def _distinct(items: Iterator[Item], size: int, name: str) -> list[Item]:
    found: dict[str, Item] = {}
    for tried, item in enumerate(items):
        found.setdefault(item.key, item)
        if len(found) == size:
            return list(found.values())
        if tried > 100 * size:
            break
    raise ConfigError(
        f"task {name!r} with these task_kwargs yields only {len(found)} distinct questions, {size} are needed; "
        "make it harder or lower held_out_size"
    )
