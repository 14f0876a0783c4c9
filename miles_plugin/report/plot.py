"""The picture of a run: learning curve with its control, time per phase, bytes."""

from pathlib import Path
from typing import Any

from miles_plugin.report.record import Arm, Report

_COLOURS = {"real": "#0b6e4f", "shuffled": "#9a9a9a"}
_LABELS = {"real": "real reward", "shuffled": "shuffled reward (control)"}
_PHASES = {"generate": "#3b6fb6", "put": "#e08e1b", "get": "#c4452f", "train": "#0b6e4f", "update": "#7a5ba6"}


def draw(report: Report, path: Path) -> None:
    """Write `path` as PNG; a run that has no step yet gives empty axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (learning, time, size) = pyplot.subplots(
        1, 3, figsize=(15, 4.5), gridspec_kw={"width_ratios": [1.5, 1, 1]}, layout="constrained"
    )
    for name, arm in report.arms.items():
        _draw_learning(learning, name, arm)
    learning.set(xlabel="rollout", ylabel="held-out accuracy", ylim=(0, 1), title="Learning")
    if report.arms:
        learning.legend(loc="upper left", frameon=False, fontsize=9)
        main = next(iter(report.arms.values()))
        _draw_phases(time, main)
        _draw_bytes(size, main)
    task = report.config["task"]
    figure.suptitle(
        f"{task}: GRPO, {report.config['object_store_backend']} object store, "
        f"{report.config['update_weight_transfer_mode']} weight update   (run {report.run_id})"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_learning(axes: Any, name: str, arm: Arm) -> None:
    measured = [(s.rollout_id + 1, s.held_out_accuracy) for s in arm.steps if s.held_out_accuracy is not None]
    x, y = [0, *(i for i, _ in measured)], [arm.initial_accuracy, *(a for _, a in measured)]
    axes.plot(x, y, color=_COLOURS[name], linewidth=2, label=_LABELS[name])
    rewards = [step.reward for step in arm.steps]
    axes.plot(range(1, len(rewards) + 1), rewards, color=_COLOURS[name], linewidth=1, alpha=0.4,
              label="  mean reward of its samples")  # fmt: skip
    axes.grid(alpha=0.25)


def _draw_phases(axes: Any, arm: Arm) -> None:
    x = [step.rollout_id + 1 for step in arm.steps]
    phases = {phase: [step.seconds.get(phase, 0.0) for step in arm.steps] for phase in _PHASES}
    if x:
        axes.stackplot(x, phases.values(), labels=phases.keys(), colors=_PHASES.values(), alpha=0.85)
        axes.legend(loc="upper center", ncols=len(phases), frameon=False, fontsize=8, columnspacing=1, handlelength=1)
        axes.set_ylim(0, 1.2 * max(map(sum, zip(*phases.values(), strict=True))))
    axes.set(xlabel="rollout", ylabel="seconds", title="Time per phase")


def _draw_bytes(axes: Any, arm: Arm) -> None:
    x = [step.rollout_id + 1 for step in arm.steps]
    for kind, colour in (("put", _PHASES["put"]), ("get", _PHASES["get"]), ("update", _PHASES["update"])):
        axes.plot(x, [step.nbytes.get(kind, 0) / 1024**2 for step in arm.steps], color=colour, label=kind,
                  linestyle="--" if kind == "get" else "-")  # fmt: skip
    axes.set(xlabel="rollout", ylabel="MiB", title="Bytes moved", ylim=(0, None))
    axes.legend(loc="best", frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
