"""Who watches a running job: the terminal, the report's files, metric loggers. The job tells all of them the same."""

from pathlib import Path

from miles_plugin.report.record import Arm, Report


class Observer:
    """Told of events as they happen, in the driver's main thread.

    An observer must not stop the job: what it raises is logged once and it is told nothing more. A class that derives
    from this one has methods for the events it wants to hear of.
    """

    def run_started(self, report: Report, directory: Path, /) -> None:
        """Once, before anything is started; `report` grows as the job runs. directory: of the report's files."""

    def message(self, text: str, /) -> None:
        """One line of news for a human, e.g. that a part has come up."""

    def arm_started(self, arm: Arm, num_rollout: int, /) -> None:
        """An arm begins, or goes on after a resume (`arm.steps` then has what was done before)."""

    def phase_started(self, phase: str, /) -> None:
        """The job enters a phase of the current step: generate, train, update, evaluate or save."""

    def progress(self, done: int, total: int, /) -> None:
        """Of the phase `update`, now and then: bytes that were sent, and of how many."""

    def step_finished(self, report: Report, arm: Arm, /) -> None:
        """`arm.steps[-1]` is new."""

    def run_finished(self, report: Report, /) -> None:
        """Once, whatever ended the job (`report.status`); release what is held."""
