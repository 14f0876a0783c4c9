"""How far a benchmark is: one line that is redrawn on a terminal, a line per part elsewhere. On standard error."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Steps:
    """Counts to `total`. Nothing is drawn between calls, since what is measured then should not share its cores."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)
        self._begun = 0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._progress.console.print(text, markup=False)

    def next(self, text: str) -> None:
        """The next step begins, and `text` says which."""
        self._progress.update(self._task, completed=self._begun, description=text, refresh=True)
        self._begun += 1

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
