from pathlib import Path

from miles_plugin.arguments import TrainConfig
from miles_plugin.report.observer import Observer
from miles_plugin.report.plot import draw
from miles_plugin.report.record import Arm, Report


class Plain:
    def run_started(self, report: Report, directory: Path) -> None:
        self.directory = directory
        report.write(directory / "report.json")
        print(f"run {report.run_id}: report in {directory}", flush=True)

    def message(self, text: str) -> None:
        print(text, flush=True)

    def arm_started(self, arm: Arm, num_rollout: int) -> None:
        print(f"{arm.reward} reward: held-out accuracy {arm.initial_accuracy:.3f} before training", flush=True)

    def phase_started(self, phase: str) -> None:
        pass

    def step_finished(self, report: Report, arm: Arm) -> None:
        report.write(self.directory / "report.json")
        step = arm.steps[-1]
        print(f"rollout {step.rollout_id:3d}  reward {step.reward:.3f}  {step.held_out_accuracy}", flush=True)

    def run_finished(self, report: Report) -> None:
        report.write(self.directory / "report.json")
        draw(report, self.directory / "report.png")


def open_observers(config: TrainConfig, directory: Path) -> Observer:
    return Plain()
