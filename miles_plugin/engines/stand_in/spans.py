"""Which part of a response was made under what: one label for each run of its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Label = TypeVar("Label")


@dataclass
class Spans(Generic[Label]):
    """Labels of consecutive tokens. ends[i] is where the run of labels[i] ends."""

    labels: list[Label] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def extend(self, label: Label, end: int) -> None:
        """The tokens up to `end` that have no label yet get this one; without any, nothing happens."""
        if end <= (self.ends[-1] if self.ends else 0):
            return
        if self.labels and self.labels[-1] == label:
            self.ends[-1] = end
        else:
            self.labels.append(label)
            self.ends.append(end)

    def __iter__(self) -> Iterator[tuple[Label, int, int]]:
        """(label, start, end) of each run."""
        return zip(self.labels, [0, *self.ends], self.ends, strict=False)
