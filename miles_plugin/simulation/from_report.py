"""Seconds that a job's report holds: of its training steps and of its weight updates.

Of single samples it holds none: its seconds of generation are of whole rollouts.
"""

from __future__ import annotations

from pathlib import Path

from miles_plugin.report.record import Report
from miles_plugin.simulation.distributions import Empirical
from mooncake_store.errors import ConfigError


def steps(path: Path) -> Empirical:
    """What trainers did between two batches that they waited for: get and train.

    Raises:
        ConfigError: no report, or one without a step.
    """
    report = _read(path)
    every = [step.seconds for arm in report.arms.values() for step in arm.steps]
    return Empirical(tuple(each.get("get", 0.0) + each["train"] for each in every if "train" in each), str(path))


def preparations(path: Path) -> Empirical:
    """Updates until the pause, while engines generated. Raises ConfigError as `steps` does."""
    return Empirical(tuple(prepared for prepared, _ in _updates(path)), str(path))


def pauses(path: Path) -> Empirical:
    """Updates from the pause on. Raises ConfigError as `steps` does."""
    return Empirical(tuple(paused for _, paused in _updates(path)), str(path))


def samples(path: Path) -> Empirical:
    """Raises ConfigError."""
    raise ConfigError(
        f"{path} is a report, which has the seconds of whole rollouts, not of their samples; name a file with the "
        "seconds of a sample in each line"
    )


def _updates(path: Path) -> list[tuple[float, float]]:
    report = _read(path)
    # With disk-delta engines load when all is there, and generate until then.
    delta = report.config.get("update_weight_transfer_mode") == "disk-delta"
    serving = {"prepare", "transfer"} if delta else {"prepare"}
    found = []
    for update in (update for arm in report.arms.values() for step in arm.steps for update in step.updates):
        prepared = sum(seconds for phase, seconds in update.seconds.items() if phase in serving)
        parts = sum(seconds for phase, seconds in update.seconds.items() if phase != "converge")
        found.append((prepared, max(0.0, update.seconds.get("converge", parts) - prepared)))
    return found


def _read(path: Path) -> Report:
    return Report.read(path / "report.json" if path.is_dir() else path)
